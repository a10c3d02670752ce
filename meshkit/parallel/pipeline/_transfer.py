"""Messages between ranks of a pipeline, in an order on which both ends agree.

What a rank sends to another follows from its table: outputs of F to the next stage's rank, gradients of B or I to the one
before. A receiver posts its receives in the sender's order, so that messages match whatever the backend; messages to
higher and to lower ranks have groups of their own, so that two ranks that send to each other never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.parallel.pipeline._table import Schedule


class Message(NamedTuple):
    """`kind` F: the hidden state that enters `stage`; B: its gradient with respect to what entered `stage + 1`."""

    kind: str
    stage: int
    microbatch: int


def sent_by(schedule: Schedule, rank: int) -> Iterator[tuple[int, Message]]:
    """(receiver, message) in the order in which the rank sends. Between stages of one rank nothing is sent."""
    for row in schedule.ranks[rank]:
        for task in row.tasks:
            if task.op == "F" and task.stage + 1 < schedule.stages:
                receiver, message = schedule.placement[task.stage + 1], Message("F", task.stage + 1, task.microbatch)
            elif task.op in ("B", "I") and task.stage > 0:
                receiver, message = schedule.placement[task.stage - 1], Message("B", task.stage - 1, task.microbatch)
            else:
                continue
            if receiver != rank:
                yield receiver, message


class Mail:
    """Sends without waiting, and receives in the sender's order.

    shapes: the hidden state's shape by microbatch. up, down: process groups of the pp axis, for messages to higher and to
    lower ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        shapes: dict[int, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
    ) -> None:
        self.schedule, self.rank, self.shapes, self.dtype, self.device = schedule, rank, shapes, dtype, device
        self.up, self.down = up, down
        self._expected = {
            peer: [message for receiver, message in sent_by(schedule, peer) if receiver == rank]
            for peer in range(schedule.world)
            if peer != rank
        }
        self._posted: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._kept: dict[Message, Tensor] = {}  # for ourselves
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, to: int, message: Message, value: Tensor) -> None:
        if to == self.rank:
            self._kept[message] = value
            return
        value = value.contiguous()
        group = self.up if to > self.rank else self.down
        work = dist.isend(value, group=group, group_dst=to)
        assert work is not None
        self._sending = [pair for pair in self._sending if not pair[0].is_completed()]
        self._sending.append((work, value))

    def receive(self, source: int, message: Message) -> Tensor:
        if source == self.rank:
            return self._kept.pop(message)
        group = self.up if source < self.rank else self.down
        while message not in self._posted:
            following = self._expected[source].pop(0)
            buffer = torch.empty(self.shapes[following.microbatch], dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, group=group, group_src=source)
            assert work is not None
            self._posted[following] = (buffer, work)
        buffer, work = self._posted.pop(message)
        work.wait()
        return buffer

    def finish(self) -> None:
        for work, _ in self._sending:
            work.wait()
