"""The replayed allocator against a plain one that searches all of its memory, and against its documented sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import meshkit as mk
from meshkit.mesh import fake_world
from meshkit.models import LLAMA_PLAN, Llama, meta_parameters
from meshkit.preflight.estimate._allocator import CachingAllocator, reserved_bytes
from meshkit.preflight.estimate._tracker import GROUPS, HOST, Change, Tracker
from tests.tiny import tiny_config

KIB, MIB = 2**10, 2**20


@dataclass
class Plain:
    """Segments as lists of [size, used]; every search goes through all of them."""

    segments: list[tuple[bool, list[list[int]]]] = field(default_factory=list)

    def allocate(self, size: int) -> list[int]:
        size = (size + 511) // 512 * 512
        small = size <= MIB
        fits = [
            (block[0], number, at)
            for number, (kind, blocks) in enumerate(self.segments)
            for at, block in enumerate(blocks)
            if kind == small and not block[1] and block[0] >= size
        ]
        if not fits:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((small, [[whole, 0]]))
            fits = [(whole, len(self.segments) - 1, 0)]
        _, number, at = min(fits)
        blocks = self.segments[number][1]
        block, left = blocks[at], blocks[at][0] - size
        block[1] = 1
        if left >= 512 if small else left > MIB:
            block[0] = size
            blocks.insert(at + 1, [left, 0])
        return block

    def free(self, block: list[int]) -> None:
        block[1] = 0
        for _, blocks in self.segments:
            for at in reversed(range(len(blocks) - 1)):
                if not blocks[at][1] and not blocks[at + 1][1]:
                    blocks[at][0] += blocks.pop(at + 1)[0]

    @property
    def reserved(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks)

    @property
    def allocated(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks if block[1])


sizes = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 48 * MIB))


@example(steps=[(False, 900, 0)] * 4 + [(True, 1, 0), (True, 1, 1), (True, 1, 0), (False, 2000, 0), (False, 512, 0)])
@given(steps=st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 10**6)), max_size=80))
def test_what_is_reserved_and_allocated_is_that_of_a_plain_search(steps: list[tuple[bool, int, int]]) -> None:
    plain, fast = Plain(), CachingAllocator()
    live: list[tuple[list[int], int]] = []
    for frees, size, which in steps:
        if frees and live:
            block, address = live.pop(which % len(live))
            plain.free(block)
            fast.free(address)
        else:
            live.append((plain.allocate(size), fast.allocate(size)))
        assert (fast.reserved_bytes, fast.allocated_bytes) == (plain.reserved, plain.allocated)


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        ([MIB + 1, 9 * MIB], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([19 * MIB + 1, MIB // 2], 22 * MIB),
    ],
)
def test_segments_have_the_documented_sizes(asked: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in asked:
        allocator.allocate(size)
    assert allocator.reserved_bytes == reserved


def test_freed_memory_is_used_again_and_kinds_cost_nothing() -> None:
    work, grads = GROUPS.index("work of backward"), GROUPS.index("gradients")
    rows = [(0, work, 30), (0, work, -30), (0, grads, 30), (1, work, 30), (1, work, -30), (2, HOST, 90), (3, work, 30)]
    assert reserved_bytes(Change(storage, group, size * MIB, "") for storage, group, size in rows) == 60 * MIB


def test_what_is_freed_on_one_stream_serves_no_other() -> None:
    work = GROUPS.index("work of backward")
    freed = [Change(0, work, 30 * MIB, "", 0), Change(0, work, -30 * MIB, "", 0)]
    assert reserved_bytes([*freed, Change(1, work, 30 * MIB, "", 0)]) == 30 * MIB
    assert reserved_bytes([*freed, Change(1, work, 30 * MIB, "", 1)]) == 60 * MIB


def test_fsdp_gathers_and_reduces_on_streams_of_its_own() -> None:
    """Gradients lie where they were reduced, so that nothing else gets their memory once they are gone."""
    model = Llama(tiny_config())
    with fake_world(2):
        run = mk.parallelize(model, mk.init_mesh("dp_shard=2"), plan=LLAMA_PLAN)
        with Tracker(run.model, [], head="", device=run.mesh.device) as tracker:
            ids = torch.zeros(2, 9, dtype=torch.int64)
            run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    streams = {GROUPS[change.group]: change.stream for change in tracker.changes if change.bytes > 0}
    assert streams["activations"] == 0
    assert streams["gradients"] > 0
    assert len({change.stream for change in tracker.changes}) >= 3


def test_an_estimate_says_what_is_reserved_beside_what_is_allocated() -> None:
    config = tiny_config(vocab_size=4096, hidden_size=256, intermediate_size=896, head_dim=64)
    with meta_parameters():
        model = Llama(config)
    found = mk.estimate(model, "dp_shard=2", plan=LLAMA_PLAN, rows=2, seq_len=256)
    assert found.reserved_bytes is not None
    assert found.peak_bytes <= found.reserved_bytes <= found.peak_bytes + 64 * MIB
    assert "reserved by the allocator" in str(found)
    assert mk.estimate(model, "dp_shard=2", plan=LLAMA_PLAN, rows=2, seq_len=256, kernels="cpu").reserved_bytes is None
