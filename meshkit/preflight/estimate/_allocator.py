"""Allocator replay (CUDA caching allocator, reserved memory, fragmentation): what allocations make it ask the driver for.

Sizes are rounded up to 512 B. What is at most 1 MiB is cut out of segments of 2 MiB; what is below 10 MiB out of segments of
20 MiB; more gets a segment of its own, rounded up to 2 MiB. The smallest free block that fits is taken, the first by address
among equals, and split if what is left is at least 512 B of a small segment, or more than 1 MiB of a large one. A freed block
joins its free neighbours. Segments are never given back: reserved memory only grows.
Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.11 and 2.15, with its default settings. A stream's free blocks
serve no other stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from meshkit.preflight.estimate._tracker import HOST, Change

MIB = 2**20
GRANULE, SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, LARGE_GRANULE = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    address: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """Counts what is reserved. Blocks are known by their addresses."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by whether it is small, sorted by size
        self._blocks: dict[int, _Block] = {}

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, at least 1."""
        size = max(GRANULE, -(-size // GRANULE) * GRANULE)
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        block = self._blocks[free.pop(at)[1]] if at < len(free) else self._segment(size, small=small)
        block.free = False
        left = block.size - size
        if left >= GRANULE if small else left > SMALL:
            rest = _Block(left, block.address + size, small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._blocks[rest.address] = rest
            insort(free, rest.key)
        self.allocated_bytes += block.size
        return block.address

    def free(self, address: int) -> None:
        block = self._blocks[address]
        self.allocated_bytes -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block, known=block.before)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after, known=block.after)
        insort(self._free[block.small], block.key)

    def _joined(self, one: _Block, other: _Block, *, known: _Block) -> _Block:
        """Two neighbours as one block. known: which of them is in the list of free ones."""
        free = self._free[one.small]
        del free[bisect_left(free, known.key)]
        one.size += other.size
        one.after = other.after
        if other.after is not None:
            other.after.before = one
        del self._blocks[other.address]
        return one

    def _segment(self, size: int, *, small: bool) -> _Block:
        rounded = -(-size // LARGE_GRANULE) * LARGE_GRANULE
        size = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else rounded
        # Far from other segments: blocks of two never meet.
        block = _Block(size, self.reserved_bytes, small)
        self._blocks[block.address] = block
        self.reserved_bytes += size
        return block


def reserved_bytes(changes: Iterable[Change]) -> int:
    """What the allocator has asked the driver for after these changes of storages on the device: for each stream its own."""
    streams: defaultdict[int, CachingAllocator] = defaultdict(CachingAllocator)
    addresses: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for change in _without_regroups(changes):
        allocator = streams[change.stream]
        size = sizes.get(change.storage, 0) + change.bytes
        sizes[change.storage] = size
        if change.storage in addresses:
            allocator.free(addresses.pop(change.storage))
        if size:
            addresses[change.storage] = allocator.allocate(size)
    return sum(allocator.reserved_bytes for allocator in streams.values())


def _without_regroups(changes: Iterable[Change]) -> Iterable[Change]:
    """A storage that is counted as another kind is where it was."""
    before: Change | None = None
    for change in changes:
        if change.group == HOST:
            continue
        if before is not None and before.storage == change.storage and before.bytes == -change.bytes < 0:
            before = None
            continue
        if before is not None:
            yield before
        before = change
    if before is not None:
        yield before
