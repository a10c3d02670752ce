"""Leaving whole what is unproved of a user's plan: `Strategy(unproved="replicate")`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from meshkit.parallel.tensor.layout import TensorLayout, tensor_layout
from meshkit.parallel.tensor.splits import Names, enclosing, likeness
from meshkit.plan import Plan, Style, match_table, replicate
from meshkit.plan.auto import by_patterns
from meshkit.plan.match import match_blocks
from meshkit.program import Program, Unproved

Prove = Callable[[TensorLayout], None]


def replicate_unproved(program: Program, plan: Plan, prove: Prove, *, size: int, sequence: bool) -> Plan:
    """The user's plan less the regions that are not proved, which every rank of an axis of `size` computes whole.

    A region is the innermost module with split layers around the operation that was not proved, and those alike in other
    layers; if that does not help, what is around it. `notes` say which they are, and why.
    Raises: Unproved where the model is not proved with all of it whole.
    """
    modules = dict(program.model.named_modules(remove_duplicate=False))
    styles = match_table(plan.tensor, modules, what="module")
    regions = _Regions(modules, styles, set(match_blocks(plan.blocks, modules)))
    while True:
        # Under the user's own patterns, as long as nothing is whole.
        narrowed = replace(plan, tensor=by_patterns(regions.styles(), modules)) if regions.whole else plan
        layout = tensor_layout(program.model, narrowed.tensor, size=size, sequence=sequence)
        try:
            prove(layout)
        except Unproved as error:
            if not regions.add(error):
                raise
        else:
            return replace(narrowed, notes=(*plan.notes, *regions.notes()))


@dataclass
class _Regions:
    """whole: region -> why it is."""

    modules: Mapping[str, nn.Module]
    named: Mapping[str, Style]
    blocks: set[str]
    whole: dict[str, str] = field(default_factory=dict)

    def styles(self) -> Names:
        styles = {name: style for name, style in self.named.items() if not self._is_whole(name)}
        for region in self.whole:
            for name in self._inside(region):
                if name == region or any(True for _ in self.modules[name].parameters(recurse=False)):
                    styles[name] = replicate()
        return styles

    def add(self, error: Unproved) -> bool:
        """Give up a region that an error is about; False where everything is whole."""
        for name in (error.module, error.before):
            for region in sorted(enclosing(name), key=lambda each: (each in self.blocks, -len(each))):
                if self._splits(region):
                    self._give_up(region, error)
                    return True
        left = [name for name in self.named if self._splits(name)]
        for name in left:
            self._give_up(name, error)
        return bool(left)

    def notes(self) -> Iterator[str]:
        said: set[Hashable] = set()
        for region, why in self.whole.items():
            kind = likeness(region, self.modules[region])
            if kind not in said:
                said.add(kind)
                yield f"{region} is whole on every rank: {why}"

    def _give_up(self, region: str, error: Unproved) -> None:
        kind = likeness(region, self.modules[region])
        for name, module in self.modules.items():
            if likeness(name, module) == kind and self._splits(name):
                self.whole[name] = str(error)

    def _splits(self, region: str) -> bool:
        return any(
            self.named[name].kind not in ("replicate", "experts")
            for name in self._inside(region)
            if name in self.named and not self._is_whole(name)
        )

    def _is_whole(self, name: str) -> bool:
        return any(each in self.whole for each in enclosing(name))

    def _inside(self, region: str) -> list[str]:
        return [name for name in self.modules if name == region or name.startswith(f"{region}.")]
