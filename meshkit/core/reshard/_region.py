"""Regions (boxes of indices) of tensors: what a rank holds, what two ranks have in common."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import Tensor

from meshkit.core.sharding import local_slices

Region = tuple[tuple[int, int], ...]
"""(start, stop) on each dim of the full tensor"""


def region_of(tensor: Tensor) -> Region:
    """What this rank holds of the full tensor."""
    return tuple((part.start, part.stop) for part in local_slices(tensor))


def volume(region: Region) -> int:
    return prod(stop - start for start, stop in region)


def intersect(one: Region, other: Region) -> Region | None:
    """The common region, or None."""
    both = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        both.append((start, stop))
    return tuple(both)


def within(region: Region, shard: Region) -> tuple[slice, ...]:
    """The region as slices of the local tensor of a rank that holds `shard`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, shard, strict=True))


def split(region: Region, most: int) -> Iterator[Region]:
    """Split the region into parts of at most `most` elements, along the outermost dims, so that parts are contiguous runs."""
    if volume(region) <= most:
        yield region
        return
    # The outermost dim with more than one row: what follows it stays whole, so each part is one run of memory.
    dim = next(index for index, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[dim]
    rows = max(1, most * (stop - start) // volume(region))
    for first in range(start, stop, rows):
        yield from split((*region[:dim], (first, min(first + rows, stop)), *region[dim + 1 :]), most)
