"""The weighted mean of tensors over the replicas, in two hops that may travel beside computing, whole or in quantized blocks.

An all-to-all brings each replica its chunk of everybody's values; it sums them in the order of the replicas, and an
all-gather brings the means to all.

[Note: why no all-reduce] The order in which an all-reduce sums an element depends on where in the buffer it lies, and ranks
of one replica that hold the same parameter, as a norm on tp, may have it at different places: with three replicas or more its
copies would drift apart. Here the order is that of the replicas, whatever the place; blocks begin with each tensor, so that
also their scales are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from meshkit.core.block_quantization import BLOCK, dequantize_blocks, quantize_blocks, quantized_bytes
from meshkit.optim.outer._policy import Wire

TRAILER_BYTES = 16
"""of each message: the replica's weight and its step, fp64"""


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in the buffer of an exchange.

    sizes: elements of this rank's tensors. dtype: in which they are summed.
    """

    sizes: tuple[int, ...]
    replicas: int
    wire: Wire
    dtype: torch.dtype

    @property
    def multiple(self) -> int:
        return 1 if self.wire == "full" else BLOCK

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins, and where the last ends."""
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + -(-size // self.multiple) * self.multiple)
        return offsets

    @property
    def chunk(self) -> int:
        """Elements that each replica sums."""
        units = -(-self.offsets[-1] // self.multiple)
        return -(-units // self.replicas) * self.multiple

    @property
    def chunk_bytes(self) -> int:
        if self.wire == "full":
            return self.chunk * self.dtype.itemsize
        return quantized_bytes(self.chunk, self.wire)

    @property
    def all_to_all_bytes(self) -> int:
        """What leaves this rank in the first hop."""
        return (self.replicas - 1) * (self.chunk_bytes + TRAILER_BYTES)

    @property
    def all_gather_bytes(self) -> int:
        """The result of the second hop, of which this rank sends its part to each other replica."""
        return self.replicas * self.chunk_bytes

    @property
    def flight_bytes(self) -> int:
        """Held at the most while it travels: what is sent and what comes in the first hop."""
        return 2 * self.replicas * (self.chunk_bytes + TRAILER_BYTES)

    def encode(self, values: Tensor) -> Tensor:
        """values: [N]. Returns uint8 [bytes]."""
        if self.wire == "full":
            return values.view(torch.uint8)
        return quantize_blocks(rearrange(values, "(n block) -> n block", block=BLOCK), self.wire).view(-1)

    def decode(self, message: Tensor) -> Tensor:
        """message: uint8 [bytes], contiguous. Returns [N]."""
        if self.wire == "full":
            return message.view(self.dtype)
        packed = message.view(-1, quantized_bytes(BLOCK, self.wire))
        return dequantize_blocks(packed, self.wire, self.dtype).view(-1)


class Exchange:
    """One exchange under way: `turn` after the first hop, then `finish`. Each waits for what it needs.

    group: of the replicas, each with the same layout. payloads: this replica's tensors, [size] each. weight: of this replica
    in the mean, fp64 scalar on the device. step: the replica's, which all must have alike. errors: what rounding took the
    last time, [size] each: added now, and written anew; None keeps none. Who sums a chunk keeps the error of its mean too.
    steps, finite: of each replica, after `turn`: its step, and whether what it sent here is finite, bool [replicas].
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Layout,
        payloads: Sequence[Tensor],
        *,
        weight: Tensor,
        step: int,
        errors: Sequence[Tensor] | None,
    ) -> None:
        self._group, self._layout, self._errors = group, layout, errors
        self.steps: list[int] = []
        self.finite = torch.ones(layout.replicas, dtype=torch.bool, device=weight.device)
        flat = weight.new_zeros(layout.replicas * layout.chunk, dtype=layout.dtype)
        for index, payload in enumerate(payloads):
            part = self._part(flat, index)
            part.copy_(payload)
            if errors is not None:
                part.add_(errors[index])
        message = layout.encode(flat)
        if errors is not None:
            flat -= layout.decode(message)
            for index, error in enumerate(errors):
                error.copy_(self._part(flat, index))
        trailer = torch.stack([weight.double(), torch.full_like(weight, step, dtype=torch.float64)]).view(torch.uint8)
        rows = message.view(layout.replicas, layout.chunk_bytes)
        self._sent = torch.cat([rows, trailer.expand(layout.replicas, TRAILER_BYTES)], dim=1)
        self._coming = torch.empty_like(self._sent)
        self._work: dist.Work | None = dist.all_to_all_single(self._coming, self._sent, group=group, async_op=True)
        self._turned = False

    def turn(self) -> None:
        """Sum this rank's chunk, and send the mean to all. The same on every rank, or the next calls do not match."""
        if self._turned:
            return
        self._turned = True
        self._wait()
        layout, received = self._layout, self._coming
        trailers = received[:, layout.chunk_bytes :].contiguous().view(torch.float64)
        weights, total = trailers[:, 0], trailers[:, 0].sum()
        # Replicas without a token among them all are alike.
        weights = torch.where(total > 0, weights / total.clamp(min=1e-30), 1 / layout.replicas).to(layout.dtype)
        self.steps = [int(step) for step in trailers[:, 1].tolist()]
        mean = weights.new_zeros(layout.chunk)
        for replica in range(layout.replicas):
            values = layout.decode(received[replica, : layout.chunk_bytes].contiguous())
            self.finite[replica] = values.isfinite().all()
            mean += values * weights[replica]
        message = layout.encode(mean)
        if self._errors is not None:
            self._keep_error_of(mean - layout.decode(message))
        self._sent = message
        self._coming = message.new_empty(layout.replicas * layout.chunk_bytes)
        self._work = dist.all_gather_into_tensor(self._coming, message, group=self._group, async_op=True)

    def finish(self) -> list[Tensor]:
        """The means, [size] each, the same bits on every replica."""
        self.turn()
        self._wait()
        flat = self._layout.decode(self._coming)
        return [self._part(flat, index) for index in range(len(self._layout.sizes))]

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _part(self, flat: Tensor, index: int) -> Tensor:
        begin = self._layout.offsets[index]
        return flat[begin : begin + self._layout.sizes[index]]

    def _keep_error_of(self, error: Tensor) -> None:
        """error: of this rank's chunk of the mean. It is one of `replicas` in the next mean, so it counts so many times."""
        assert self._errors is not None
        layout = self._layout
        flat = error.new_zeros(layout.replicas * layout.chunk)
        begin = self._group.rank() * layout.chunk
        flat[begin : begin + layout.chunk] = error * layout.replicas
        for index, kept in enumerate(self._errors):
            kept.add_(self._part(flat, index))
