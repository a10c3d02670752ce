"""Gathers and reductions of FSDP in two hops (hierarchical ZeRO: hpZ, PaRO, three levels), each at its own pace.

Parameters: shards are gathered over the outer group once a step into a secondary copy, spread over the inner group, and whole
parameters over the inner one, as often as FSDP asks. Gradients: each microbatch is reduced over the inner group and added up
there, and the sums are reduced over the outer one once a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshkit.core import _torch
from meshkit.parallel import hierarchical
from meshkit.parallel.shardings import Hops

_GATHER, _REDUCTION = "_meshkit_gather", "_meshkit_reduction"


class Gather(Protocol):
    """An all-gather: input_tensor [elements] of each rank become output_tensor [ranks x elements]."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> Any: ...


def gather_in_hops(unit: nn.Module, hops: Hops, *, gather: Gather | None, frees: bool) -> None:
    """Let an FSDP unit gather in two hops, in place. gather: of each hop; None sends what there is. frees: whether FSDP frees
    the unit after forward.

    Memory: inside of a step, see `begin_step`, of each unit a part of 1/inner in the dtype that is gathered.
    """
    assert isinstance(unit, FSDPModule)
    found = unit.__dict__[_GATHER] = _Gather(unit, hops, gather or dist.all_gather_into_tensor, frees=frees)
    unit.set_custom_all_gather(found)  # type: ignore[arg-type]  # its base class is private
    _torch.after_unit_backwards(unit, found.backward_is_over)


def reduce_in_hops(unit: nn.Module, hops: Hops) -> None:
    """Let an FSDP unit reduce gradients in two hops, in place.

    Memory: with several microbatches, of each unit a part of 1/inner of the gradients in the dtype of reduction.
    """
    assert isinstance(unit, FSDPModule)
    found = unit.__dict__[_REDUCTION] = _Reduction(unit, hops)
    unit.set_custom_reduce_scatter(found)  # type: ignore[arg-type]  # its base class is private
    _torch.note_reductions(unit, found.note, None)
    _torch.before_reductions(unit, found.missing)


def go_by_nodes(unit: nn.Module, hops: Hops, *, gathers: bool, reduces: bool, chunk_bytes: int) -> None:
    """Let an FSDP unit gather and reduce by hierarchical collectives, in place, whatever of it takes one hop."""
    assert isinstance(unit, FSDPModule)
    if gathers:
        unit.set_custom_all_gather(_HierarchicalGather(unit, hops, chunk_bytes))  # type: ignore[arg-type]  # as above
    if reduces:
        unit.set_custom_reduce_scatter(_HierarchicalReduction(unit, hops, chunk_bytes))  # type: ignore[arg-type]  # same


def before_microbatch_in_hops(module: nn.Module, *, first: bool, last: bool) -> None:
    """Begin a microbatch of a step: the first gathers anew, the last reduces over the outer groups too."""
    for each in module.modules():
        gather, reduction = each.__dict__.get(_GATHER), each.__dict__.get(_REDUCTION)
        if gather is not None:
            gather.begin(first=first, last=last)
        if reduction is not None:
            reduction.begin(first=first, last=last)


def gathers_again(unit: nn.Module) -> None:
    """Keep the secondary copy of a unit from forward to backward, though FSDP does not free the unit: somebody else does."""
    if (gather := unit.__dict__.get(_GATHER)) is not None:
        gather.is_freed()


def forget_copies(module: nn.Module) -> None:
    """Free the secondary copies: what is gathered next is of the shards as they are."""
    for each in module.modules():
        if (gather := each.__dict__.get(_GATHER)) is not None:
            gather.end()


class UnitCollective:
    """A gather or a reduction of an FSDP unit, whose parameters are known when FSDP has found its units."""

    def __init__(self, unit: FSDPModule) -> None:
        self._unit = unit
        self._parameters: list[_torch.UnitParameter] | None = None

    @property
    def parameters(self) -> list[_torch.UnitParameter]:
        if self._parameters is None:
            self._parameters = _torch.unit_parameters(self._unit)
        return self._parameters

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP's buffers, as it makes them itself."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitReduction(UnitCollective, ABC):
    """As FSDP calls one."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.reduce(output_tensor, input_tensor, group, op)

    @abstractmethod
    def reduce(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """whole: [ranks x elements of a part]; out: [elements of a part], their sum."""


class _Gather(UnitCollective):
    # [Note: the secondary copy]
    # It is a copy of shards, so it must not outlive them: it is made in a step's first gather of the unit and freed after
    # the last backward, before an optimizer can write. Outside of a step, as in an evaluation, nothing is kept, and each
    # gather takes both hops. FSDP gathers on a stream of its own where its hooks do, on the current one where a module is
    # gathered by a call: so who reads the copy waits for who wrote it (DeepSpeed's had no such wait: issue 5059, losses
    # of zero). Events of FSDP's own order them too in all that tests run; they are not promised.
    def __init__(self, unit: FSDPModule, hops: Hops, gather: Gather, *, frees: bool) -> None:
        super().__init__(unit)
        self._hops, self._gather, self._frees = hops, gather, frees
        self._in_step = self._last = False
        self._copy: Tensor | None = None
        self._written: torch.Event | None = None

    def is_freed(self) -> None:
        self._frees = True

    def begin(self, *, first: bool, last: bool) -> None:
        if first:
            self.end()
        self._in_step, self._last = True, last

    def backward_is_over(self) -> None:
        if self._last:
            self.end()

    def end(self) -> None:
        self._in_step = self._last = False
        self._copy = self._written = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """input_tensor: [elements of this rank's parts], which is a part of output_tensor: [ranks x elements]."""
        outer, inner = self._hops.outer.size(), self._hops.inner.size()
        copy = self._copy
        if copy is None:
            copy = input_tensor.new_empty(outer * input_tensor.numel())
            self._gather(copy, input_tensor, group=self._hops.outer)
            if self._in_step and (self._frees or not self._last):  # else nothing gathers the unit again
                self._copy = copy
                self._written = None if copy.device.type == "cpu" else torch.accelerator.current_stream().record_event()
        elif self._written is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(self._written)
            copy.record_stream(stream)
        parts = copy
        if inner > 1:
            parts = copy.new_empty(inner * copy.numel())
            self._gather(parts, copy, group=self._hops.inner)
        # A rank's index is outer x inner, and the inner hop comes last.
        ordered = rearrange(parts, "(inner outer n) -> outer inner n", inner=inner, outer=outer)
        output_tensor.view(outer, inner, -1).copy_(ordered)


class _HierarchicalGather(UnitCollective):
    """Nothing is kept: each gather takes both hops."""

    def __init__(self, unit: FSDPModule, hops: Hops, chunk_bytes: int) -> None:
        super().__init__(unit)
        self._hops, self._chunk_bytes = hops, chunk_bytes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """input_tensor: [elements of this rank's parts], which is a part of output_tensor: [ranks x elements]."""
        hierarchical.all_gather(output_tensor, input_tensor, self._hops, chunk_bytes=self._chunk_bytes)


class _HierarchicalReduction(UnitReduction):
    def __init__(self, unit: FSDPModule, hops: Hops, chunk_bytes: int) -> None:
        super().__init__(unit)
        self._hops, self._chunk_bytes = hops, chunk_bytes

    def reduce(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        hierarchical.reduce_scatter(out, whole, self._hops, op=op, chunk_bytes=self._chunk_bytes)


class _Reduction(UnitReduction):
    """The sums of a unit's gradients over the inner group, by the place of the parameter in the unit."""

    def __init__(self, unit: FSDPModule, hops: Hops) -> None:
        super().__init__(unit)
        self._hops = hops
        self._last, self._places = True, list[int]()
        self._sums: dict[int, Tensor] = {}  # [outer x elements of a part]

    def begin(self, *, first: bool, last: bool) -> None:
        if first:
            self._sums.clear()
        self._last = last

    def note(self, places: list[int]) -> None:
        """Whose gradients the next call gets."""
        self._places = places

    def missing(self, params: list[_torch.BeforeReduction]) -> list[bool]:
        """Parameters that earlier microbatches used and the last one did not: zeros carry their sums on."""
        waiting = {self.parameters[place].name for place in self._sums} if self._last else set[str]()
        return [param.lacks and param.name in waiting for param in params]

    def reduce(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """out: zeros before the step's last microbatch."""
        outer, inner = self._hops.outer.size(), self._hops.inner.size()
        summed = rearrange(whole, "(outer inner n) -> inner outer n", inner=inner, outer=outer)
        if inner > 1:
            sent = summed.reshape(-1)
            summed = sent.new_empty(outer, out.numel())
            dist.reduce_scatter_tensor(summed.view(-1), sent, op=op, group=self._hops.inner)
        summed = summed.reshape(outer, -1)
        sizes = [prod(self.parameters[place].part) for place in self._places]
        for place, part in zip(self._places, summed.split(sizes, dim=1), strict=True):
            if self._last and place in self._sums:
                part += self._sums.pop(place)
            elif not self._last and place in self._sums:
                self._sums[place] += part
            elif not self._last:
                self._sums[place] = part.clone()
        if self._last:
            dist.reduce_scatter_tensor(out, summed.reshape(-1), op=op, group=self._hops.outer)
        else:
            out.zero_()
