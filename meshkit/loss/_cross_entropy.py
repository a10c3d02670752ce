"""Cross-entropy over logits that are plain, sharded over the vocabulary (vocabulary-parallel), or computed in chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshkit.core.double_backward import once_differentiable
from meshkit.core.sharding import local_slices
from meshkit.errors import PlanError
from meshkit.loss.chunked import chunked_cross_entropy
from meshkit.loss.linear_logits import LinearLogits
from meshkit.loss.vocab_parallel import IGNORED as IGNORED
from meshkit.loss.vocab_parallel import Labels, find_labels, softmax_, wide_dtype


def cross_entropy(logits: Tensor | LinearLogits, labels: Tensor) -> Tensor:
    """The cross-entropy **summed** over the labels that are not -100, in fp32 at least; a scalar.

    logits: [..., V], plain; a DTensor sharded on its last dim over one axis, as a `vocab()` head returns; or `LinearLogits`,
    as a head with `MemoryPolicy(loss=ChunkedLoss())` returns, whose logits never exist at once: see `chunked_cross_entropy`.
    labels: [...] int64. With sharded or chunked logits a label outside of the vocabulary makes the loss NaN.
    Wire, sharded logits only: forward, all-reduces of one maximum and two sums per label, in fp32.
    Raises: PlanError for logits sharded in another way, or shapes that do not fit.
    Source: Shoeybi et al. 2019, section 3.
    """
    refuse_other_labels("cross_entropy", logits, labels)
    if isinstance(logits, LinearLogits):
        return chunked_cross_entropy(logits, labels)
    if not isinstance(logits, DTensor):
        wide = rearrange(logits, "... v -> (...) v")
        wide = wide if wide.dtype == torch.float64 else wide.float()
        return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    local, first, axis = vocabulary_part("cross_entropy", logits)
    local_NV = rearrange(local, "... v -> (...) v")
    loss: Tensor = _VocabParallelCrossEntropy.apply(local_NV, labels.flatten(), first, logits.shape[-1], axis)
    return loss


def refuse_other_labels(caller: str, logits: Tensor | LinearLogits, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape:
        raise PlanError(
            f"{caller}: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit. "
            "Labels are the logits' shape without the vocabulary."
        )


def vocabulary_part(caller: str, logits: DTensor) -> tuple[Tensor, int, DeviceMesh]:
    """(this rank's logits, its first token, the axis) of logits sharded over their vocabulary."""
    if logits.device_mesh.ndim != 1 or logits.placements[0] != Shard(logits.ndim - 1):
        raise PlanError(
            f"{caller}: logits placed as {logits.placements}; only the last dim may be sharded, on one axis."
        )
    return logits.to_local(), local_slices(logits)[-1].start, logits.device_mesh


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, vocabulary: int, axis: DeviceMesh) -> Tensor:
        # N tokens, this rank's vocabulary [first, first + V/tp); a rank may hold none of it.
        probabilities = logits.to(wide_dtype(logits.dtype), copy=True)
        local_labels = find_labels(labels, first, logits.shape[-1], vocabulary)
        losses = softmax_(probabilities, local_labels, axis)
        probabilities.masked_fill_(~local_labels.valid.unsqueeze(-1), 0)
        ctx.save_for_backward(probabilities, *local_labels)
        ctx.dtype = logits.dtype
        return losses.masked_fill(~local_labels.valid, 0).sum()

    @staticmethod
    @once_differentiable(
        "cross-entropy of logits that are split over the vocabulary keeps probabilities without their graph.",
        "Use labels and F.cross_entropy on logits.full_tensor()",
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, *local_labels = ctx.saved_tensors
        grads = probabilities * grad
        Labels(*local_labels).add_to_(grads, -grad)
        return grads.to(ctx.dtype), None, None, None, None
