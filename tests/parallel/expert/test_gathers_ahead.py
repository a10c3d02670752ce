"""FSDP's gathers are queued before the host waits for the counts of routed experts: those of the next block too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode
from meshkit.parallel.expert import AllToAll
from tests.laws.parity.cases import Cell, Moe, batches, own_rows, start
from tests.world import pool

LAYERS = 4


class Gathers(TorchDispatchMode):
    """How many parameters' gathers were issued so far."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("c10d::_allgather_base_") and args[0].is_floating_point():
            self.count += 1
        return func(*args, **(kwargs or {}))


def gathers_before_each_wait(cell: Cell) -> tuple[list[int], list[int]]:
    """(gathers issued when the host begins to wait for counts, for each wait of a forward; and of a backward that runs
    blocks again).
    """
    run = start(cell)
    batch = own_rows(batches(cell)[0], run.mesh)
    run.forward_backward(batch)  # FSDP makes its groups in the first one
    waits: list[int] = []
    plan = AllToAll.plan

    def watched(self: AllToAll, counts_E: Any) -> Any:
        waits.append(gathers.count)
        return plan(self, counts_E)

    dist.barrier(group=run.mesh.group)
    with mock.patch.object(AllToAll, "plan", watched), Gathers() as gathers:
        run.forward_backward(batch)
    return waits[: LAYERS - 1], waits[LAYERS - 1 :]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_gathers_of_the_next_block_are_issued_before_the_host_waits_in_this_one(recompute: Any) -> None:
    memory = mk.MemoryPolicy(recompute=recompute)
    cell = Cell(mesh="dp_shard=4 ep=2", layers=LAYERS, moe=Moe(), memory=memory)
    for forward, backward in pool(4).run(gathers_before_each_wait, cell):
        # Layer 0 is dense, one unit; each other block is two, its experts and the rest. At the wait of layer n those of layer
        # n + 1 are issued, beside the root's and the embedding's. The host's wait in front of them would make it 5, 7, 9.
        assert forward == [2 + 1 + 2 * 2, 2 + 1 + 2 * 3, 2 + 1 + 2 * 3]
        if recompute == "full":
            # The head's; the last block stays gathered. Backward goes down, and waits in layer n when n - 1 is asked for.
            assert [count - forward[-1] for count in backward] == [1 + 2, 1 + 2 * 2, 1 + 2 * 2 + 1]


def test_gathers_ahead_change_no_number() -> None:
    cell = Cell(mesh="dp_shard=4 ep=2", layers=LAYERS, moe=Moe())
    with_prefetch = pool(4).run(losses, cell)
    assert with_prefetch == pool(4).run(losses, replace(cell, mesh="dp_shard=4 ep=2"), True)


def losses(cell: Cell, without: bool = False) -> list[float]:
    with mock.patch("meshkit._units.prefetch_gathers", (lambda units: None)) if without else mock.MagicMock():
        run = start(cell)
    optimizer = mk.adamw(run, lr=1e-2)
    found = []
    for batch in batches(cell):
        found.append(float(run.forward_backward(own_rows(batch, run.mesh))))
        optimizer.step()
        optimizer.zero_grad()
    return found
