"""The weighted mean of tensors over the replicas, in two hops that may travel beside computing, whole or in quantized blocks.

An all-to-all brings each replica its chunk of everybody's values; it sums them in the order of the replicas, and an
all-gather brings the means to all.

[Note: why no all-reduce] The order in which an all-reduce sums an element depends on where in the buffer it lies, and ranks
of one replica that hold the same parameter, as a norm on tp, may have it at different places: with three replicas or more its
copies would drift apart. Here the order is that of the replicas, whatever the place; blocks begin with each tensor, so that
also their scales are the same; and each tensor is cut up over the replicas by itself, so that the same one sums an element,
and keeps what rounding its mean took, wherever its copies lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Which part of each tensor which replica sums: rows [replicas, chunk], in each of which all tensors have a part.

    sizes: elements of this rank's tensors. dtype: in which they are summed. whole: how many of the tensors, the last ones,
    travel in it whatever the wire, as buffers, which are no changes.
    """

    sizes: tuple[int, ...]
    replicas: int
    wire: Wire
    dtype: torch.dtype
    whole: int = 0

    @property
    def _rounded(self) -> int:
        """Tensors that travel in blocks: the first ones."""
        return 0 if self.wire == "full" else len(self.sizes) - self.whole

    @cached_property
    def parts(self) -> list[int]:
        """Elements of each tensor that a replica sums."""
        units = [BLOCK if index < self._rounded else 1 for index in range(len(self.sizes))]
        return [-(-size // (unit * self.replicas)) * unit for size, unit in zip(self.sizes, units, strict=True)]

    @property
    def chunk(self) -> int:
        """Elements that each replica sums."""
        return sum(self.parts)

    @property
    def _rounded_chunk(self) -> int:
        return sum(self.parts[: self._rounded])

    @property
    def chunk_bytes(self) -> int:
        rounded = 0 if self.wire == "full" else quantized_bytes(self._rounded_chunk, self.wire)
        return rounded + (self.chunk - self._rounded_chunk) * self.dtype.itemsize

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

    def columns(self, rows: Tensor) -> list[Tensor]:
        """rows: [replicas, chunk]. Returns a view of [replicas, part] for each tensor."""
        return list(rows.split(self.parts, dim=1))

    def spread(self, tensors: Sequence[Tensor]) -> Tensor:
        """tensors: [size] each. Returns [replicas, chunk], with zeros behind the end of each."""
        rows = tensors[0].new_zeros(self.replicas, self.chunk, dtype=self.dtype)
        for column, tensor in zip(self.columns(rows), tensors, strict=True):
            full = tensor.numel() // max(1, column.shape[1])  # rows that it fills
            column[:full] = tensor[: full * column.shape[1]].view(full, column.shape[1])
            if rest := tensor.numel() - full * column.shape[1]:
                column[full, :rest] = tensor[-rest:]
        return rows

    def tensor(self, rows: Tensor, index: int) -> Tensor:
        """One of the tensors, [size], out of [replicas, chunk]."""
        return self.columns(rows)[index].reshape(-1)[: self.sizes[index]]

    def encode(self, rows: Tensor) -> Tensor:
        """rows: [N, chunk]. Returns uint8 [N, bytes]."""
        if self.wire == "full":
            return rows.view(torch.uint8)
        rounded, whole = rows.split([self._rounded_chunk, self.chunk - self._rounded_chunk], dim=1)
        blocks = quantize_blocks(rearrange(rounded, "n (b block) -> (n b) block", block=BLOCK), self.wire)
        return torch.cat([blocks.view(rows.shape[0], -1), whole.contiguous().view(torch.uint8)], dim=1)

    def decode(self, message: Tensor) -> Tensor:
        """message: uint8 [N, bytes]. Returns [N, chunk]."""
        if self.wire == "full":
            return message.contiguous().view(self.dtype)
        rounded_bytes = quantized_bytes(self._rounded_chunk, self.wire)
        blocks = message[:, :rounded_bytes].reshape(-1, quantized_bytes(BLOCK, self.wire))
        rounded = dequantize_blocks(blocks.contiguous(), self.wire, self.dtype).view(message.shape[0], -1)
        if rounded_bytes == message.shape[1]:
            return rounded
        # A copy, since a view in another dtype begins at a multiple of its size.
        whole = message[:, rounded_bytes:].clone(memory_format=torch.contiguous_format).view(self.dtype)
        return torch.cat([rounded, whole], dim=1)


class Exchange:
    """One exchange under way: `turn` after the first hop, then `finish`. Each waits for what it needs.

    group: of the replicas, each with the same layout. payloads: this replica's tensors, [size] each. weight: of this replica
    in the mean, fp64 scalar on the device. step: the replica's, which all must have alike. errors: what rounding took the
    last time, [size] each, of the tensors that travel in blocks: added now, and written anew; None keeps none. Who sums a
    chunk keeps the error of its mean too.
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
        if errors is not None:
            wanted = [payload + error for payload, error in zip(payloads, errors, strict=False)]
            payloads = [*wanted, *payloads[len(errors) :]]
        rows = layout.spread(payloads)
        message = layout.encode(rows)
        if errors is not None:
            rows -= layout.decode(message)
            for index, error in enumerate(errors):
                error.copy_(layout.tensor(rows, index))
        trailer = torch.stack([weight.double(), torch.full_like(weight, step, dtype=torch.float64)]).view(torch.uint8)
        self._sent = torch.cat([message, trailer.expand(layout.replicas, TRAILER_BYTES)], dim=1)
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
        # A copy, since a view in another dtype begins at a multiple of its size.
        trailers = received[:, layout.chunk_bytes :].clone(memory_format=torch.contiguous_format).view(torch.float64)
        weights, total = trailers[:, 0], trailers[:, 0].sum()
        # Replicas without a token among them all are alike.
        weights = torch.where(total > 0, weights / total.clamp(min=1e-30), 1 / layout.replicas).to(layout.dtype)
        self.steps = [int(step) for step in trailers[:, 1].tolist()]
        mean = weights.new_zeros(1, layout.chunk)
        for replica in range(layout.replicas):
            values = layout.decode(received[replica : replica + 1, : layout.chunk_bytes])
            self.finite[replica] = values.isfinite().all()
            mean += values * weights[replica]
        message = layout.encode(mean)
        if self._errors is not None:
            self._keep_error_of(mean - layout.decode(message))
        self._sent = message.view(-1)
        self._coming = message.new_empty(layout.replicas * layout.chunk_bytes)
        self._work = dist.all_gather_into_tensor(self._coming, self._sent, group=self._group, async_op=True)

    def finish(self) -> list[Tensor]:
        """The means, [size] each, the same bits on every replica."""
        self.turn()
        self._wait()
        rows = self._layout.decode(self._coming.view(self._layout.replicas, -1))
        return [self._layout.tensor(rows, index) for index in range(len(self._layout.sizes))]

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _keep_error_of(self, error: Tensor) -> None:
        """error: of this rank's chunk of the mean. It is one of `replicas` in the next mean, so it counts so many times."""
        assert self._errors is not None
        layout = self._layout
        rows = error.new_zeros(layout.replicas, layout.chunk)
        rows[self._group.rank()] = error.view(-1) * layout.replicas
        for index, kept in enumerate(self._errors):
            kept.add_(layout.tensor(rows, index))
