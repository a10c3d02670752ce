"""Quantized wires of FSDP (ZeRO++'s qwZ and qgZ): gathers of parameters and reductions of gradients in blocks of a few bits.

A message is made of the tensors of a unit, each padded to whole blocks: so a tensor that several ranks of tp hold alike gets
the same scales on each, whatever lies beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from meshkit.core import _torch
from meshkit.core.block_quantization import (
    BLOCK,
    BlockWire,
    dequantize_blocks,
    quantize_blocks,
    quantized_bytes,
    whole_blocks,
)
from meshkit.core.sharding import local_tensor
from meshkit.parallel.hops import UnitCollective, UnitReduction, gather_in_hops
from meshkit.parallel.shardings import Hops
from meshkit.strategy import DataPolicy

ERROR_DTYPE = torch.bfloat16
"""of what rounding took: itself an eighth of a step of int4 at the most, of which bf16 loses a 256th"""

_ERRORS = "_meshkit_rounding_errors"


def gathered_bytes(parts: Sequence[tuple[int, torch.dtype]], wire: BlockWire | None) -> int:
    """What each rank sends to a gather. parts: (elements, dtype) of its part of each parameter, as FSDP pads it."""
    return sum(
        quantized_bytes(whole_blocks(size), wire)
        if wire is not None and dtype.is_floating_point
        else size * dtype.itemsize
        for size, dtype in parts
    )


def reduced_bytes(parts: Sequence[int], wire: BlockWire) -> int:
    """What each rank sends to one other in a reduction. parts: elements of its part of each gradient, as FSDP pads it."""
    return sum(quantized_bytes(whole_blocks(size), wire) for size in parts)


def replica_bytes(parts: Sequence[int], replicas: int, wire: BlockWire) -> int:
    """What each replica sends to one other, in each of the two hops. parts: as `reduced_bytes` takes them."""
    return sum(quantized_bytes(replica_chunk(size, replicas), wire) for size in parts)


def quantize_wires(
    unit: nn.Module, mesh: DeviceMesh, policy: DataPolicy, hops: Hops | None = None, *, frees: bool = True
) -> None:
    """Let an FSDP unit gather and reduce by the policy, in place.

    mesh: over which it is sharded. hops, frees: of its gathers, as `gather_in_hops` takes them; each hop rounds.
    """
    if not isinstance(unit, FSDPModule) or mesh.size() == 1:
        return
    if mesh.shape[-1] > 1:
        gather = None if policy.gather is None else _Gather(unit, policy.gather)
        if hops is not None:
            gather_in_hops(unit, hops, gather=gather, frees=frees)
        elif gather is not None:
            unit.set_custom_all_gather(gather)  # type: ignore[arg-type]  # its base class is private
    if policy.reduce is not None:
        reduction = _Reduction(unit, mesh, policy.reduce, feedback=policy.feedback)
        unit.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]  # same
        _torch.note_reductions(
            unit, reduction.note, reduction.sum_replicas if mesh.ndim > 1 and mesh.shape[0] > 1 else None
        )
        if policy.feedback:
            unit.__dict__[_ERRORS] = reduction


def rounding_errors(module: nn.Module) -> dict[str, DTensor]:
    """By the names of parameters, what rounding took of the gradients that each data rank has sent: [data ranks, *shape].

    Empty without error feedback. A rank has its own, sharing memory; tp splits it as it splits the parameter.
    """
    found = {}
    for unit in _with_errors(module):
        for parameter in unit.parameters:
            if parameter.param.requires_grad:
                found[parameter.name] = unit.stacked(parameter, unit.ranks, local=unit.error_of(parameter))
    return found


def rounding_errors_of(module: nn.Module, ranks: Mapping[str, int]) -> dict[str, DTensor]:
    """Zeros to read errors into that so many data ranks had, by parameter; `set_rounding_errors` takes them."""
    return {
        parameter.name: unit.stacked(parameter, ranks[parameter.name])
        for unit in _with_errors(module)
        for parameter in unit.parameters
        if parameter.name in ranks
    }


def set_rounding_errors(module: nn.Module, errors: Mapping[str, Tensor]) -> None:
    """Go on from errors of other data ranks: each takes the sum of some, so that all of them together are what they were.

    Errors that were not given become 0.
    """
    for unit in _with_errors(module):
        for parameter in unit.parameters:
            if not parameter.param.requires_grad:
                continue
            unit.error_of(parameter).zero_()
            if parameter.name in errors:
                summed = local_tensor(errors[parameter.name]).sum(0, keepdim=True, dtype=torch.float32)
                unit.error_of(parameter).copy_(summed)


def _with_errors(module: nn.Module) -> list[_Reduction]:
    return [unit.__dict__[_ERRORS] for unit in module.modules() if _ERRORS in unit.__dict__]


class _Gather(UnitCollective):
    """An all-gather of quantized blocks. This rank's own part is rounded too: all ranks compute with the same values."""

    def __init__(self, unit: FSDPModule, wire: BlockWire) -> None:
        super().__init__(unit)
        self._wire = wire

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """input_tensor: [elements of a rank's parts], which may be a part of output_tensor: [ranks x elements]; or the
        parts of several ranks, one after the other."""
        parts = [(prod(each.part), each.dtype) for each in self.parameters]
        dtype = input_tensor.dtype
        mixed = any(each != dtype for _, each in parts)  # then FSDP's buffers are bytes
        sizes = [size * (each.itemsize if mixed else 1) for size, each in parts]
        floats = [each.is_floating_point for _, each in parts]
        if not any(floats):  # integer codes alone, which are not rounded
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        working = max((_working(each) for _, each in parts if each.is_floating_point), key=lambda kind: kind.itemsize)
        pieces = input_tensor.view(-1, sum(sizes)).split(sizes, dim=1)
        values = [
            piece.clone(memory_format=torch.contiguous_format).view(each) if mixed else piece
            for piece, (_, each), real in zip(pieces, parts, floats, strict=True)
            if real
        ]
        padded = rearrange(_padded(values, working), "ranks (n block) -> (ranks n) block", block=BLOCK)
        message = quantize_blocks(padded, self._wire).view(len(pieces[0]), -1)
        others = [piece for piece, real in zip(pieces, floats, strict=True) if not real]
        sent = torch.cat([message, *others], dim=1) if others else message
        received = sent.new_empty(group.size() * len(sent), sent.shape[1])
        dist.all_gather_into_tensor(received.view(-1), sent.view(-1), group=group)
        codes = received[:, : message.shape[1]].reshape(-1, quantized_bytes(BLOCK, self._wire))
        decoded = dequantize_blocks(codes, self._wire, working).view(len(received), -1)
        real_parts = iter(_unpadded(decoded, [value.shape[1] for value in values]))
        other_parts = iter(received[:, message.shape[1] :].split([each.shape[1] for each in others], dim=1))
        for out, (_, each), real in zip(
            output_tensor.view(len(received), -1).split(sizes, dim=1), parts, floats, strict=True
        ):
            if not real:
                out.copy_(next(other_parts))
            elif mixed:
                out.copy_(next(real_parts).to(each).contiguous().view(torch.uint8))
            else:
                out.copy_(next(real_parts))


class _Reduction(UnitReduction):
    """A reduce-scatter of quantized blocks: an all-to-all, and a sum in fp32 at least, in the order of the ranks.

    Each gradient is rounded once, however many ranks there are, where a ring would round once a hop. Replicas sum what came
    out of it in two hops more, an all-to-all and an all-gather, each of which rounds; what they took is added to this rank's
    own gradient of its shard.
    """

    def __init__(self, unit: FSDPModule, mesh: DeviceMesh, wire: BlockWire, *, feedback: bool) -> None:
        super().__init__(unit)
        self._mesh, self._wire, self._feedback = mesh, wire, feedback
        self._shards = mesh.shape[-1]
        self._places: list[int] = []
        self._errors: dict[str, Tensor] = {}

    @property
    def ranks(self) -> int:
        """Data ranks, each with errors of its own."""
        return self._mesh.size()

    def note(self, places: list[int]) -> None:
        """Whose gradients the next call gets."""
        self._places = places

    def error_of(self, parameter: _torch.UnitParameter) -> Tensor:
        """[1, *shape of the parameter on this rank], sharing memory."""
        rows, *rest = parameter.part
        whole = self._errors_of(parameter).view(self._shards * rows, *rest)
        return whole[: parameter.shape[0]].unsqueeze(0)

    def stacked(self, parameter: _torch.UnitParameter, ranks: int, local: Tensor | None = None) -> DTensor:
        """Errors of so many data ranks: [ranks, *shape of the full parameter]. local: of this one; None makes zeros."""
        param, data_axes = parameter.param, self._mesh.ndim
        inner = [Shard(each.dim + 1) if isinstance(each, Shard) else each for each in param.placements[data_axes:]]
        return _torch.dtensor_of(
            param.device_mesh,
            [*[Shard(0)] * data_axes, *inner],
            (ranks, *param.shape),
            local=local,
            like=torch.empty(0, dtype=ERROR_DTYPE, device=param.device),
        )

    def _errors_of(self, parameter: _torch.UnitParameter) -> Tensor:
        """[shards, elements of a part]: of what goes to each of them."""
        if parameter.name not in self._errors:
            shape = self._shards, prod(parameter.part)
            self._errors[parameter.name] = torch.zeros(shape, dtype=ERROR_DTYPE, device=parameter.param.device)
        return self._errors[parameter.name]

    def reduce(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        parameters = [self.parameters[place] for place in self._places]
        sizes = [prod(each.part) for each in parameters]
        working = _working(whole.dtype)
        sent = _padded(whole.view(self._shards, -1).split(sizes, dim=1), working)
        errors = [self._errors_of(each) for each in parameters] if self._feedback else []
        for error, part in zip(errors, _unpadded(sent, sizes), strict=False):  # none without feedback
            part.add_(error)
        message = self._encoded(sent)
        if errors:
            sent -= self._decoded(message, working)
            # What is not finite would be added for ever.
            for error, part in zip(errors, _unpadded(sent, sizes), strict=True):
                error.copy_(part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
        del sent
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        total = self._decoded(received[:1], working)
        for rank in range(1, self._shards):
            total += self._decoded(received[rank : rank + 1], working)
        for own, part in zip(out.split(sizes), _unpadded(total[0], sizes), strict=True):
            own.copy_(part)

    def sum_replicas(self, reduced: Tensor) -> None:
        """reduced: [elements of a part], summed over the shards; becomes the sum over the replicas, the same bits on each."""
        group = self._mesh.get_group(0)
        replicas, replica = group.size(), group.rank()
        parameters = [self.parameters[place] for place in self._places]
        parts = reduced.split([prod(each.part) for each in parameters])
        # A chunk of each tensor for each replica: so a tensor that ranks of tp hold alike has its error at the same one.
        sizes = [replica_chunk(part.numel(), replicas) for part in parts]
        working, own = _working(reduced.dtype), dist.get_rank(self._mesh.get_group(-1))
        sent = reduced.new_zeros((replicas, sum(sizes)), dtype=working)
        errors = [self._errors_of(each)[own] for each in parameters] if self._feedback else []
        for index, (place, part) in enumerate(zip(sent.split(sizes, dim=1), parts, strict=True)):
            value = part.to(working)
            if errors and self._shards == 1:  # else it was in what was sent to this shard
                value = value + errors[index]
            place.copy_(_chunks(value, replicas))
        message = self._encoded(sent)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        total = self._decoded(received[:1], working)
        for other in range(1, replicas):
            total += self._decoded(received[other : other + 1], working)
        result = self._encoded(total)
        gathered = result.new_empty(replicas, result.shape[1])
        dist.all_gather_into_tensor(gathered.view(-1), result.view(-1), group=group)
        if errors:
            sent -= self._decoded(message, working)
            sent[replica] += (total - self._decoded(result, working))[0]
            for error, left in zip(errors, sent.split(sizes, dim=1), strict=True):
                left = left.reshape(-1)[: error.numel()].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                error.copy_(left if self._shards == 1 else left + error)
        for part, value in zip(parts, self._decoded(gathered, working).split(sizes, dim=1), strict=True):
            part.copy_(value.reshape(-1)[: part.numel()])

    def _encoded(self, values: Tensor) -> Tensor:
        """values: [N, elements]. Returns uint8 [N, bytes]."""
        return quantize_blocks(values.view(-1, BLOCK), self._wire).view(len(values), -1)

    def _decoded(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        packed = message.view(-1, quantized_bytes(BLOCK, self._wire))
        return dequantize_blocks(packed, self._wire, dtype).view(len(message), -1)


def _working(dtype: torch.dtype) -> torch.dtype:
    """In which blocks are scaled and summed."""
    return torch.promote_types(dtype, torch.float32)


def replica_chunk(elements: int, replicas: int) -> int:
    """Of a tensor of so many elements, those of each replica: whole blocks."""
    return whole_blocks(-(-elements // replicas))


def _chunks(values: Tensor, count: int) -> Tensor:
    """values: [N]. Returns [count, elements], padded with zeros."""
    size = replica_chunk(values.numel(), count)
    return F.pad(values, (0, count * size - values.numel())).view(count, size)


def _padded(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors of [..., size] side by side, each followed by zeros up to whole blocks."""
    sizes = [part.shape[-1] for part in parts]
    padded = parts[0].new_zeros((*parts[0].shape[:-1], sum(map(whole_blocks, sizes))), dtype=dtype)
    for place, part in zip(_unpadded(padded, sizes), parts, strict=True):
        place.copy_(part)
    return padded


def _unpadded(padded: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts, sharing memory."""
    parts = padded.split([whole_blocks(size) for size in sizes], dim=-1)
    return [part[..., :size] for part, size in zip(parts, sizes, strict=True)]
