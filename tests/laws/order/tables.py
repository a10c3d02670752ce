"""What pipelines ask of their communicators, from their tables alone: the runtime's own order, without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.parallel.pipeline._channels import Channels
from meshkit.parallel.pipeline._p2p import P2P
from meshkit.parallel.pipeline._table import Schedule, messages, need_of, output_of
from meshkit.preflight.order import Call, Event, Group, HostWait, Part, Wait

STEPS = 2


@dataclass(eq=False)
class _Work:
    events: list[Event]
    of: int

    def wait(self) -> None:
        self.events.append(Wait(self.of))

    def is_completed(self) -> bool:
        return False


@dataclass(eq=False)
class WayChannels:
    """As `GroupChannels`: a group for each way, one batch for each message, all opened before."""

    rank: int
    events: list[Event]

    def send(self, values: Sequence[Tensor], target: int) -> list[dist.Work]:
        return self._batch("send", (self.rank, target), target, len(values))

    def receive(self, buffers: Sequence[Tensor], source: int) -> list[dist.Work]:
        return self._batch("recv", (source, self.rank), source, len(buffers))

    def open(self, ways: Sequence[tuple[int, int]]) -> None:
        for source, target in ways:
            if self.rank in (source, target):
                works = self.send([BYTE], target) if self.rank == source else self.receive([BYTE], source)
                for work in works:
                    work.wait()

    def _batch(self, op: str, way: tuple[int, int], peer: int, count: int) -> list[dist.Work]:
        group = Group(f"{way[0]} to {way[1]}", tuple(sorted(way)))
        parts = (Part(op, peer, 1),) * count  # type: ignore[arg-type]  # one of the two
        self.events.append(Call("p2p", group, parts=parts))
        return cast("list[dist.Work]", [_Work(self.events, len(self.events) - 1)])


@dataclass(eq=False)
class Directions:
    """As meshkit had it first: one group up and one down, and each tensor alone. Stops on lazy communicators."""

    rank: int
    world: int
    events: list[Event]

    def send(self, values: Sequence[Tensor], target: int) -> list[dist.Work]:
        return [self._alone("send", target, up=target > self.rank) for _ in values]

    def receive(self, buffers: Sequence[Tensor], source: int) -> list[dist.Work]:
        return [self._alone("recv", source, up=source < self.rank) for _ in buffers]

    def _alone(self, op: str, peer: int, *, up: bool) -> dist.Work:
        group = Group("up" if up else "down", tuple(range(self.world)))
        self.events.append(Call("p2p", group, parts=(Part(op, peer, 1),), batched=False))  # type: ignore[arg-type]
        return cast("dist.Work", _Work(self.events, len(self.events) - 1))


BYTE = torch.zeros(1, dtype=torch.uint8)


def events_of(
    table: Schedule, channels: Callable[[int, list[Event]], Channels], *, tied: bool = False, host_waits: bool = False
) -> list[list[Event]]:
    """Of each rank, in some steps. host_waits: each forward reads a value back, as routed experts do."""
    every, recorded = list(messages(table)), []
    for rank in range(table.world):
        events: list[Event] = []
        way = channels(rank, events)
        for _ in range(STEPS):
            _step(table, rank, P2P(every, rank, lambda _: [((1,), torch.uint8)], BYTE.device, way), events, host_waits)
            if tied:
                _add_tied(table, rank, way)
        recorded.append(events)
    return recorded


def _step(table: Schedule, rank: int, p2p: P2P, events: list[Event], host_waits: bool) -> None:
    """As `execute` does it."""
    for index, row in enumerate(table.ranks[rank]):
        p2p.expect(index)
        p2p.expect(index + 1)
        for task in row.tasks:
            need = need_of(task, table)
            if need is not None:
                p2p.receive(need)
            if host_waits and task.op == "F":
                events.append(HostWait(f"counts of {task}"))
            if task.op == "F" and table.after(task.stage, task.microbatch) is not None:
                p2p.send(task, [BYTE])
            elif task.op in ("B", "I") and table.before(task.stage, task.microbatch) is not None:
                p2p.send(output_of(task), [BYTE])
    p2p.finish()


def _add_tied(table: Schedule, rank: int, channels: Channels) -> None:
    """As `_add_tied_gradients` does it."""
    ends = table.placement[0], table.placement[-1]
    if ends[0] == ends[1] or rank not in ends:
        return
    peer = ends[1] if rank == ends[0] else ends[0]
    for work in channels.send([BYTE], peer) + channels.receive([BYTE], peer):
        work.wait()
