"""Proofs at the first forward: what a rank's model is called with may be another program than the one that was proved."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.parallel.context._reading import Call, Doors, Reader
from meshkit.parallel.context._split import SplitMask


class Proofs:
    """A hook before a split model's forward: proves it once for each kind of call, and reads it again on more tokens, or
    fewer, than it was read on. Every rank proves for itself, and all come to the same end, for they have the same batch.

    Wire: nothing.
    """

    def __init__(self, reader: Reader, doors: Doors, proved: Call | None) -> None:
        self.reader, self.doors = reader, doors
        self._known: set[Hashable] = set()
        # Fewest and most tokens that each kind of call was looked at with.
        self._sizes: dict[Hashable, tuple[int, int]] = {}
        if proved is not None:
            self._known.add(_kind(reader.program.model, proved))

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("mask")
        if not isinstance(mask, SplitMask) or any(map(_torch.is_fake, _torch.tree_leaves((args, kwargs)))):
            return
        rest = {name: value for name, value in kwargs.items() if name != "mask"}
        call = Call(args, rest, mask.tokens, mask.given, mask.batch_rows)
        kind = _kind(model, call)
        if kind not in self._known:
            self.reader.program.model.train(model.training)
            self.reader.prove(self.doors, call)
            self._known.add(kind)
        counts = {mask.row_tokens, *mask.layout.lengths}
        least, most = self._sizes.get(kind, (min(counts) + 1, 0))
        if min(counts) < least or max(counts) > most:
            self.reader.refuse_other_programs(
                self.doors, call, tokens=mask.row_tokens, lengths=sorted(set(mask.layout.lengths))
            )
            self._sizes[kind] = min(least, *counts), max(most, *counts)


def _kind(model: nn.Module, call: Call) -> Hashable:
    """What the program may depend on, but for sizes: names, numbers of dims, dtypes, and the mode."""
    leaves, tree = _torch.tree_flatten((call.args, dict(call.kwargs)))
    kinds = tuple(
        (leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, bool | str) else type(leaf)
        for leaf in leaves
    )
    return str(tree), kinds, call.given & {"position_ids", "attention_mask"}, model.training
