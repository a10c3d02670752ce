"""Messages between ranks of a pipeline, in an order on which both ends agree.

What a rank sends to another follows from its table. A receiver posts its receives in the sender's order, so that messages
match whatever the backend; messages to higher and to lower ranks have groups of their own, so that two ranks that send to
each other never wait for each other. Receives are posted a row ahead: what the next row needs travels while this one
computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.waiting import waiting
from meshkit.errors import StepError
from meshkit.parallel.pipeline._table import Message, Task

# [Note: receives are posted in the sender's order]
# Two ranks match messages by order alone: NCCL has no tags, and runs what a communicator was given first, first. So a
# receiver that needs the third message of a sender posts all three. Up and down have communicators of their own, for on one
# the send of each of two ranks would stand before the receive that the other's send waits for. A row ahead is enough: more
# would hold buffers that no task reads yet, less would leave the wire idle while this row computes.


class P2P:
    """Hands on what tasks make: sends without waiting, and receives in the sender's order.

    messages: of the whole table. shapes: the hidden state's shape by microbatch. up, down: process groups of the pp axis, for
    messages to higher and to lower ranks.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        rank: int,
        shapes: Mapping[int, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
    ) -> None:
        self.rank, self.shapes, self.dtype, self.device = rank, shapes, dtype, device
        self.up, self.down = up, down
        self._targets = {message.made: message.target for message in messages if message.source == rank}
        self._sources = {message.made: message.source for message in messages if message.target == rank}
        self._by_row: dict[int, list[Task]] = {}
        self._following: dict[int, deque[Task]] = {}
        for message in messages:
            if message.target == rank:
                self._by_row.setdefault(message.needed_by, []).append(message.made)
                self._following.setdefault(message.source, deque()).append(message.made)
        self._posted: dict[Task, tuple[Tensor, dist.Work]] = {}
        self._kept: dict[Task, Tensor] = {}  # for ourselves
        # A sent tensor belongs to the wire until its work is done: with its last reference the allocator may give the memory
        # to the next kernel. So it is held here and looked through at each send; nobody waits for it before `finish`.
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, made: Task, value: Tensor) -> None:
        target = self._targets.get(made)
        if target is None:
            self._kept[made] = value
            return
        value = value.contiguous()
        work = dist.isend(value, group=self.up if target > self.rank else self.down, group_dst=target)
        assert work is not None
        self._sending = [pair for pair in self._sending if not pair[0].is_completed()]
        self._sending.append((work, value))

    def expect(self, row: int) -> None:
        """Post the receives of what that row of this rank needs, and of what comes before it from the same ranks."""
        for made in self._by_row.get(row, ()):
            self._post(made)

    def receive(self, made: Task) -> Tensor:
        """What the task made. Raises: StepError if it does not come within the timeout of the group."""
        if made not in self._sources:
            return self._kept.pop(made)
        self._post(made)
        buffer, work = self._posted.pop(made)  # from here on the buffer is the caller's alone
        try:
            with waiting(f"{made} from pp rank {self._sources[made]}"):
                work.wait()  # gloo: the host waits. NCCL: the current stream does, and the host goes on.
        except RuntimeError as error:
            source = self._sources[made]
            raise StepError(
                f"pp rank {self.rank} waited for {made} (stage {made.stage}, microbatch {made.microbatch}) from pp rank "
                f"{source}, which did not send it: that rank has ended, or stalls before it. Look at its screen; more time "
                f"is init_mesh(timeout=...)."
            ) from error
        return buffer

    def finish(self) -> None:
        with waiting("what pp ranks receive"):
            for work, _ in self._sending:
                work.wait()

    def _post(self, made: Task) -> None:
        source = self._sources[made]
        group = self.up if source < self.rank else self.down
        while self._following[source] and made not in self._posted:
            following = self._following[source].popleft()
            buffer = torch.empty(self.shapes[following.microbatch], dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, group=group, group_src=source)
            assert work is not None
            self._posted[following] = (buffer, work)
