"""Point-to-point messages (P2P) between pipeline ranks, in an order on which both ends agree.

The schedule fixes what each rank sends to each other one. A receiver posts its receives in the sender's order, so that
messages match on every backend. Each way from a rank to another has a channel of its own: see [Note: a channel for each way].
Receives are posted one row ahead: the inputs of the next row travel while this row computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.waiting import waiting
from meshkit.errors import StepError
from meshkit.parallel.pipeline._channels import Channels
from meshkit.parallel.pipeline._table import Message, Task

# [Note: receives are posted in the sender's order]
# Two ranks match messages by order alone: NCCL has no tags, and a communicator runs its operations in the order in which
# they were issued. So a receiver that needs the third message of a sender posts all three. One row ahead is
# enough: more would hold buffers that no task reads yet, less would leave the wire idle while this row computes.


class P2P:
    """Sends outputs of tasks without waiting, and receives inputs in the sender's order.

    messages: of the whole table. layout: (shape, dtype) of each tensor of a task's output.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        rank: int,
        layout: Callable[[Task], Sequence[tuple[tuple[int, ...], torch.dtype]]],
        device: torch.device,
        channels: Channels,
    ) -> None:
        self.rank, self.layout, self.device, self.channels = rank, layout, device, channels
        self._targets = {message.output: message.target for message in messages if message.source == rank}
        self._sources = {message.output: message.source for message in messages if message.target == rank}
        self._by_row: dict[int, list[Task]] = {}
        self._following: dict[int, deque[Task]] = {}
        for message in messages:
            if message.target == rank:
                self._by_row.setdefault(message.needed_by, []).append(message.output)
                self._following.setdefault(message.source, deque()).append(message.output)
        self._posted: dict[Task, tuple[list[Tensor], list[dist.Work]]] = {}
        self._local: dict[Task, list[Tensor]] = {}  # outputs for another stage of this rank
        # The communicator reads a sent tensor until its work is done, but does not keep it alive: without a reference the
        # allocator could give its memory to the next kernel. So it is kept here until its work is done; each send drops those
        # to the same rank that are, which are done in order, and the host waits for the rest only in `finish`.
        self._sending: dict[int, deque[tuple[list[dist.Work], list[Tensor]]]] = {}

    def send(self, output: Task, values: list[Tensor]) -> None:
        target = self._targets.get(output)
        if target is None:
            self._local[output] = values
            return
        sending = self._sending.setdefault(target, deque())
        while sending and all(work.is_completed() for work in sending[0][0]):
            sending.popleft()
        values = [value.contiguous() for value in values]  # a gradient may be a strided view
        sending.append((self.channels.send(values, target), values))

    def expect(self, row: int) -> None:
        """Post the receives for that row of this rank, and for all messages that the same senders send before."""
        for output in self._by_row.get(row, ()):
            self._post(output)

    def receive(self, output: Task) -> list[Tensor]:
        """The output of that task. Raises: StepError if it does not arrive within the timeout of the group."""
        if output not in self._sources:
            return self._local.pop(output)
        self._post(output)
        buffers, works = self._posted.pop(output)  # from here on the buffers are the caller's alone
        try:
            with waiting(f"{output} from pp rank {self._sources[output]}"):
                for work in works:
                    work.wait()  # gloo: the host waits. NCCL: the current stream does, and the host goes on.
        except RuntimeError as error:
            source = self._sources[output]
            raise StepError(
                f"pp rank {self.rank} waited for {output} (stage {output.stage}, microbatch {output.microbatch}) from pp "
                f"rank {source}, which did not send it: that rank has ended, or stalls before it. Look at its screen; more "
                f"time is init_mesh(timeout=...)."
            ) from error
        return buffers

    def finish(self) -> None:
        with waiting("what pp ranks receive"):
            for works, _ in chain.from_iterable(self._sending.values()):
                for work in works:
                    work.wait()

    def _post(self, output: Task) -> None:
        source = self._sources[output]
        while self._following[source] and output not in self._posted:
            following = self._following[source].popleft()
            layout = self.layout(following)
            buffers = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in layout]
            self._posted[following] = buffers, self.channels.receive(buffers, source)
