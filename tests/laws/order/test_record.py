"""What real ranks do on gloo, recorded, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist

from meshkit.mesh import host_ranks
from meshkit.preflight.order import EAGER, LAZY, Call, Event, HostWait, Wait, deadlock, gathered, mismatches, recording
from tests.laws.parity.cases import mesh_for
from tests.world import pool

Body = Callable[[int, dist.ProcessGroup, dist.ProcessGroup], None]


@cache
def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    return tuple(dist.new_group([0, 1], timeout=timedelta(seconds=2)) for _ in range(2))  # type: ignore[return-value]


def recorded(body: Body) -> tuple[list[list[Event]], bool]:
    """(the events of both ranks, whether gloo stopped on this one)"""
    mesh, (a, b), stopped = mesh_for("dp_shard=2"), groups(), False
    with recording(mesh) as events:
        try:
            body(dist.get_rank(), a, b)
        except RuntimeError:
            stopped = True
    groups.cache_clear()  # after a timeout a group is of no use
    return gathered(events, mesh), stopped


def in_one_order(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    for group in (a, b):
        dist.all_reduce(torch.ones(3), group=group)


def in_another_order(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    for group in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(torch.ones(3), group=group)


def in_another_order_without_waiting(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in ((a, b) if rank == 0 else (b, a))]
    for work in works:
        assert work is not None
        work.wait()


def left_out(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=a)


def receives_before_it_sends(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    dist.recv(torch.ones(3), group=a, group_src=1 - rank)
    dist.send(torch.ones(3), group=a, group_dst=1 - rank)


def in_a_batch(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    ops = [
        dist.P2POp(op, torch.ones(3), group=a, group_peer=1 - rank)  # type: ignore[arg-type]  # any callable
        for op in (dist.irecv, dist.isend)
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


@pytest.mark.parametrize(
    ("body", "gloo", "lazy", "eager"),
    [
        (in_one_order, False, False, False),
        (in_another_order, True, True, True),
        (in_another_order_without_waiting, False, True, False),  # what gloo forgives
        (left_out, True, True, True),
        (receives_before_it_sends, True, True, True),
        (in_a_batch, False, False, False),
    ],
)
def test_the_verdict_agrees_with_gloo_where_gloo_stops(body: Body, gloo: bool, lazy: bool, eager: bool) -> None:
    for events, stopped in pool(2).run(recorded, body, timeout_s=60):
        assert (bool(deadlock(events, LAZY)), bool(deadlock(events, EAGER))) == (lazy, eager)
        assert not stopped or gloo
    assert any(stopped for _, stopped in pool(2).run(recorded, body, timeout_s=60)) == gloo


def values_and_works(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    first = dist.all_reduce(torch.ones(3), group=a, async_op=True)
    second = dist.all_reduce(torch.ones(4), group=b, async_op=True)
    assert first is not None and second is not None
    second.wait()
    first.wait()
    torch.ones(2).sum().item()
    torch.ones(2).tolist()
    found = [None, None]
    dist.all_gather_object(found, "object", group=a)
    host_ranks(a).all_gather("object")


def test_events_are_in_the_order_of_the_host() -> None:
    for ranks, _ in pool(2).run(recorded, values_and_works):
        assert not mismatches(ranks)
        for events in ranks:
            every = [event for event in events if isinstance(event, Call) and not event.on_host]
            made = len([call for call in every if call.where == "init_mesh"])  # the first uses of the mesh's groups
            calls = every[made:]
            assert [(call.op, call.size) for call in calls[:2]] == [("all_reduce", 3), ("all_reduce", 4)]
            objects = ["all_gather"] * 2 + ["broadcast"] * 2  # of an object its size first; a group's name
            assert [call.op for call in calls[2:]] == objects
            assert [event.of - made for event in events if isinstance(event, Wait)][:2] == [1, 0]
            assert sum(isinstance(event, HostWait) for event in events) >= 2 + 2
            between = [event.op for event in events if isinstance(event, Call) and event.on_host]
            assert between == ["make the group", "reduce between hosts", "broadcast between hosts"]
            assert all("test_record.py" in call.where for call in calls[:4])


def other_sizes(rank: int, a: dist.ProcessGroup, b: dist.ProcessGroup) -> None:
    mine = torch.ones(3 + rank)
    if rank == 0:
        dist.send(mine, group=a, group_dst=1)
    else:
        dist.recv(mine[:3], group=a, group_src=0)
    dist.broadcast(torch.ones(3), group=b, group_src=0)


def test_what_is_sent_and_received_is_compared_by_bytes() -> None:
    for ranks, _ in pool(2).run(recorded, other_sizes):
        assert not mismatches(ranks)
