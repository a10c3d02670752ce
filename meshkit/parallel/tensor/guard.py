"""Guards of a split model: a call that may run another program than the one that was proved is read before it runs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.asked_once import AskedOnce, shapes
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.parallel.tensor.proof import closed_of, prove_layout
from meshkit.program import (
    Covered,
    Example,
    Program,
    ReadingError,
    follow_mode,
    kind_of_call,
    mode_of,
    outline,
    sizes_of,
)

_TRIED: ContextVar[bool] = ContextVar("tried", default=False)


@contextmanager
def tried_by_values() -> Iterator[None]:
    """Calls inside are not read: whoever makes them holds what they return against a call that was.

    So a call may take a cache, of which a rank has its heads alone, while the program that is read has all.
    """
    token = _TRIED.set(True)
    try:
        yield
    finally:
        _TRIED.reset(token)


class Guard:
    """Of a layout that was proved on `example`, of which `seen` is the outline. Calls with other arguments, or in another
    mode (train, eval), are proved before they run. Those with a size, or a number among the arguments, beyond all that were
    seen are read, and proved if the operations are others; so what depends on a size is found where it parts the sizes in
    two, but not where it holds in a middle, or for odd ones.

    A `mask` is left away: attention follows it head by head.
    Wire: nothing. One rank reads for those that ask the same, see `AskedOnce`.
    """

    def __init__(
        self,
        program: Program,
        layout: TensorLayout,
        example: Example | None,
        seen: str | None,
        *,
        blocks: Sequence[str],
        asked: AskedOnce | None = None,
    ) -> None:
        self.program, self.layout, self.blocks = program, layout, tuple(blocks)
        self._asked = asked or AskedOnce(None)
        self._seen: dict[Hashable, Covered] = {}
        if example is not None and seen is not None:
            self._note(kind_of_call(program.model, example), example, seen)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a call of the model. Raises: Unproved where its program is not shown to be right on parts."""
        if _TRIED.get():
            return
        given = args, {name: value for name, value in kwargs.items() if name != "mask"}
        if any(map(_torch.is_fake, _torch.tree_leaves(given))):
            return
        example = Example(*_torch.tree_map(_not_empty, given))
        signature, sizes = kind_of_call(model, example), sizes_of(example)
        seen = self._seen.get(signature)
        if seen is not None and seen.covers(sizes):
            return
        follow_mode(self.program.model, model)
        # What is proved without gradients is not proved with them.
        with torch.inference_mode(False), torch.enable_grad():
            self._read(example, signature, seen)

    def _read(self, example: Example, signature: Hashable, seen: Covered | None) -> None:
        if seen is None:
            read = self._proved(example, ())
            assert read is not None
            self._note(signature, example, read)
            return
        rounded = seen.rounded_up(example)
        for each in (example, rounded) if sizes_of(rounded) != sizes_of(example) else (example,):
            read = self._proved(each, seen.proved, may_misfit=each is not example)
            if read is not None:
                seen.proved.add(read)
                seen.cover(sizes_of(each))

    def _proved(self, example: Example, known: Collection[str], *, may_misfit: bool = False) -> str | None:
        """The outline of the program, which is right on parts. known: of programs that are. may_misfit: None of sizes that do
        not fit together."""

        def answer() -> str | None:
            try:
                read = outline(self.program.read(example, closed_of(self.layout)))
            except ReadingError:
                if may_misfit:
                    return None
                raise
            if read not in known:
                prove_layout(self.program, self.layout, example, blocks=self.blocks)
            return read

        question = "layout", mode_of(self.program.model), shapes((example.args, example.kwargs)), may_misfit
        return self._asked.ask(question, answer)

    def _note(self, signature: Hashable, example: Example, read: str) -> None:
        sizes = sizes_of(example)
        self._seen[signature] = Covered(sizes, sizes, {read})


def _not_empty(leaf: Any) -> Any:
    """Of no elements nothing shows which a rank has: rows without images are read as if they had two."""
    if not isinstance(leaf, Tensor) or leaf.numel():
        return leaf
    return torch.empty([size or 2 for size in leaf.shape], dtype=leaf.dtype, device="meta")
