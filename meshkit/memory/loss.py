"""Cross-entropy over logits that may be sharded over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshkit.collectives import all_reduce
from meshkit.errors import PlanError
from meshkit.sharding import local_slices

IGNORED = -100


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy **summed** over the labels that are not -100, in fp32 at least; a scalar.

    logits: [..., V], plain, or a DTensor sharded on its last dim over one axis (what a `vocab()` head returns).
    labels: [...] int64.
    Wire, sharded logits only: forward, all-reduces of one maximum and two sums per label, in fp32.
    Raises: PlanError for logits sharded in another way, or shapes that do not fit.
    Source: Shoeybi et al. 2019, section 3.
    """
    if logits.shape[:-1] != labels.shape:
        raise PlanError(
            f"cross_entropy: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit. "
            "Labels are the logits' shape without the vocabulary."
        )
    if not isinstance(logits, DTensor):
        wide = logits.flatten(0, -2)
        wide = wide if wide.dtype == torch.float64 else wide.float()
        return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    if logits.device_mesh.ndim != 1 or logits.placements[0] != Shard(logits.ndim - 1):
        raise PlanError(
            f"cross_entropy: logits placed as {logits.placements}; only the last dim may be sharded, on one axis."
        )
    first = local_slices(logits)[-1].start
    local = logits.to_local().flatten(0, -2)
    loss: Tensor = _VocabParallelCrossEntropy.apply(local, labels.flatten(), first, logits.device_mesh)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, axis: DeviceMesh) -> Tensor:
        # N tokens, this rank's vocabulary [first, first + V/tp); a rank may hold none of it.
        wide = logits if logits.dtype == torch.float64 else logits.float()
        peak = wide.amax(-1) if wide.shape[-1] else wide.new_full(wide.shape[:1], -torch.inf)
        peak = _max_over(peak, axis)
        probabilities = (wide - peak.unsqueeze(-1)).exp_()
        here = (labels >= first) & (labels < first + wide.shape[-1])
        index = (labels - first).masked_fill(~here, 0)
        label_logit = torch.zeros_like(peak)
        if wide.shape[-1]:
            label_logit = (wide.gather(-1, index.unsqueeze(-1)).squeeze(-1) - peak).masked_fill_(~here, 0)
        total, label_logit = all_reduce(torch.stack([probabilities.sum(-1), label_logit]), axis).unbind()
        valid = labels != IGNORED
        loss = (total.log() - label_logit).masked_fill(~valid, 0).sum()
        probabilities.div_(total.unsqueeze(-1)).masked_fill_(~valid.unsqueeze(-1), 0)
        ctx.save_for_backward(probabilities, index, here & valid)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, here = ctx.saved_tensors
        grads = probabilities * grad
        if grads.shape[-1]:
            grads.scatter_add_(-1, index.unsqueeze(-1), torch.where(here, -grad, 0).unsqueeze(-1))
        return grads.to(ctx.dtype), None, None, None


def _max_over(tensor: Tensor, axis: DeviceMesh) -> Tensor:
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=axis.get_group())
    return tensor
