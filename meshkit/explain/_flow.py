"""Where gradients flow: autograd goes back to the first parameter that trains, and what lies before sends nothing then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from meshkit.plan import Plan, match_table


class Flow:
    """Which modules' inputs and outputs have gradients.

    blocks: of the whole model. stage_of: a module's stage of a pipeline; what a stage receives always has a gradient.
    Modules are taken to run in the order in which they are defined, but the norms of a block, its sequence() children, before
    the rest of it: models define them last, and run them first.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        blocks: Sequence[str],
        stage_of: Callable[[str], int | None] | None = None,
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        styles = match_table(plan.tensor, modules, what="module")
        around = set(blocks)
        self._place = {name: place for place, name in enumerate(modules)}
        for name, style in styles.items():
            parent = name.rpartition(".")[0]
            if style.kind == "sequence" and parent in around:
                self._place[name] = self._place[parent]
        self._trained = [name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad]
        places = [self._place[name.rpartition(".")[0]] for name in self._trained]
        self._first = min(places, default=len(modules))
        self._rows = {name for name, style in styles.items() if style.kind == "row"}
        self._stage_of = stage_of

    def enters(self, module: str) -> bool:
        """Has the module's input a gradient?"""
        received = self._stage_of is not None and bool(self._stage_of(module))
        return received or self._first < self._place[module]

    def leaves(self, module: str) -> bool:
        """Has the module's output a gradient? That of a row() is looked at before its bias is added."""
        bias = f"{module}.bias" if module in self._rows else None
        return self.enters(module) or any(name != bias for name in self._inside(module))

    def last_without_gradient(self, modules: Sequence[str]) -> str | None:
        """The last to run of those whose output has no gradient."""
        silent = [name for name in modules if not self.leaves(name)]
        return max(silent, key=self._place.__getitem__, default=None)

    def attends(self, module: str) -> bool:
        """Has what goes into an attention, before the row() that ends its module, a gradient?"""
        if self.enters(module):
            return True
        after = tuple(f"{row}." for row in self._rows if row.startswith(f"{module}."))
        return any(not name.startswith(after) for name in self._inside(module))

    def _inside(self, module: str) -> Iterator[str]:
        """The parameters in it that train."""
        return (name for name in self._trained if not module or name.startswith(f"{module}."))
