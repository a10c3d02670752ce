"""FSDP's gathers are queued before the host waits for the counts of routed experts: those of the next block too. Copies of
busy experts are under way while attention runs, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode
from meshkit.parallel.expert import AllToAll
from meshkit.parallel.expert._copies import Copies
from meshkit.strategy import ExpertPolicy
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

    def watched(self: AllToAll, *args: Any) -> Any:
        waits.append(gathers.count)
        return plan(self, *args)

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


class Copied(TorchDispatchMode):
    """Notes each message of copies of experts, which are wider than rows, among other events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("c10d::alltoall_base_") and args[0].shape[-1] > 500:
            self.events.append("issued")
        return func(*args, **(kwargs or {}))


def order_of_copies(cell: Cell) -> list[str]:
    """What happens in a forward and in its backward: messages of copies and of their gradients, attention, and where copies
    are waited for."""
    policy = ExpertPolicy(copies=2, expected=(9, 9, 1, 1, 1, 1, 1, 1), target=1.0)
    run = start(cell, experts=policy)
    events: list[str] = []
    for number in range(1, LAYERS):
        attention = run.model.get_submodule(f"layers.{number}.self_attn")
        attention.register_forward_hook(partial(_attended, number, events))
    wait, summed = Copies.wait, Copies.summed

    def waited(self: Copies, arriving: Any) -> Any:
        events.append("needed")
        return wait(self, arriving)

    def added(self: Copies, arriving: Any, shapes: Any) -> Any:
        events.append("gradients needed")
        return summed(self, arriving, shapes)

    batch = own_rows(batches(cell)[0], run.mesh)
    with mock.patch.object(Copies, "wait", waited), mock.patch.object(Copies, "summed", added), Copied(events):
        run.forward_backward(batch)
    return events


def _attended(number: int, events: list[str], module: Any, args: Any, out: Any) -> None:
    events.append(f"attention {number}")
    out.register_hook(lambda grad: events.append(f"attention backward {number}"))


@pytest.mark.parametrize("mesh", ["dp_shard=4 ep=4", "dp_shard=4 ep=2", "dp_shard=4 ep=2 etp=2"])
def test_copies_of_experts_are_under_way_while_attention_runs(mesh: str) -> None:
    cell = Cell(mesh=mesh, layers=LAYERS, moe=Moe(experts=8))
    for events in pool(4).run(order_of_copies, cell):
        forward = [event for number in (1, 2, 3) for event in ("issued", f"attention {number}", "needed")]
        assert events[:9] == forward
        # The last block's are issued when its backward begins. Of each block the gradients travel while its own experts go
        # backward; then the copies of the block before are under way while attention goes backward.
        backward = ["issued"]
        for number in (3, 2, 1):
            more = ["issued"] if number > 1 else []
            backward += ["needed", "issued", "gradients needed", *more, f"attention backward {number}"]
        assert events[9:] == backward
