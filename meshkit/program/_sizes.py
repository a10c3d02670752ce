"""What calls of one kind may differ in: sizes of tensors, and numbers that a forward is given."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.program._example import Example

Sizes = tuple[float, ...]


@dataclass
class Covered:
    """Calls that differ in sizes and numbers alone: fewest and most of each, and the outlines that are proved."""

    least: Sizes
    most: Sizes
    proved: set[str] = field(default_factory=set)

    def covers(self, sizes: Sizes) -> bool:
        return all(low <= size <= high for low, size, high in zip(self.least, sizes, self.most, strict=True))

    def cover(self, sizes: Sizes) -> None:
        self.least = tuple(map(min, self.least, sizes))
        self.most = tuple(map(max, self.most, sizes))

    def rounded_up(self, example: Example) -> Example:
        """With what is larger than any that was seen rounded up to powers of two, so that what grows step by step, as a cache
        of keys or the number of a step, is not read in each."""
        most = iter(self.most)

        def larger(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                shape = [_power(size) if size > next(most) else size for size in leaf.shape]
                return torch.empty(shape, dtype=leaf.dtype, device="meta")
            if is_number(leaf):
                return type(leaf)(_power(leaf)) if leaf > next(most) else leaf
            return leaf

        return Example(*_torch.tree_map(larger, (example.args, dict(example.kwargs))))


def sizes_of(example: Example) -> Sizes:
    sizes: list[float] = []
    for leaf in _torch.tree_leaves((example.args, dict(example.kwargs))):
        sizes += leaf.shape if isinstance(leaf, Tensor) else [leaf] if is_number(leaf) else []
    return tuple(sizes)


def kind_of_call(model: nn.Module, example: Example) -> Hashable:
    """What calls have alike that differ in sizes and numbers alone: names, numbers of dims, dtypes, and the mode."""
    leaves, tree = _torch.tree_flatten((example.args, dict(example.kwargs)))
    kinds = tuple(
        (leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, bool | str) else type(leaf)
        for leaf in leaves
    )
    return str(tree), kinds, model.training


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _power(number: float) -> int:
    """The next power of two."""
    return 1 << (max(1, int(-(-number // 1))) - 1).bit_length()
