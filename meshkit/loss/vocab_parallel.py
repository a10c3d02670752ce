"""Vocabulary-parallel softmax: over logits whose vocabulary may be sharded over an axis.

Dims: N tokens, V the vocabulary of this rank, which may be empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.collectives import all_reduce

IGNORED = -100


class Labels(NamedTuple):
    """Labels in terms of this rank's vocabulary, each [N]."""

    valid: Tensor  # not ignored
    unknown: Tensor  # not ignored, but outside of the vocabulary of all ranks
    local: Tensor  # in this rank's vocabulary
    position: Tensor  # in this rank's vocabulary; 0 where it is not

    def of(self, wide_NV: Tensor) -> Tensor:
        """Each label's entry [N]; zero where another rank has it, NaN where the label is outside of the vocabulary."""
        # NaN and no error: to raise, the host would have to wait for the device. It reaches every rank with the sum.
        if wide_NV.shape[-1]:
            entries = wide_NV.gather(-1, self.position.unsqueeze(-1)).squeeze(-1).masked_fill_(~self.local, 0)
        else:
            entries = wide_NV.new_zeros(wide_NV.shape[:1])
        return entries.masked_fill_(self.unknown, torch.nan)

    def add_to_(self, wide_NV: Tensor, summand_N: Tensor | float) -> None:
        """Add a number to each label's entry, in place, where this rank has it and the label is not ignored."""
        if wide_NV.shape[-1]:
            summand = torch.where(self.local & self.valid, summand_N, 0).to(wide_NV.dtype)
            wide_NV.scatter_add_(-1, self.position.unsqueeze(-1), summand.unsqueeze(-1))


def find_labels(labels_N: Tensor, first: int, size: int, vocabulary: int) -> Labels:
    """The labels in a rank's vocabulary [first, first + size), out of `vocabulary` tokens over all ranks."""
    valid = labels_N != IGNORED
    unknown = valid & ((labels_N < 0) | (labels_N >= vocabulary))
    local = (labels_N >= first) & (labels_N < first + size)
    return Labels(valid, unknown, local, (labels_N - first).masked_fill(~local, 0))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the vocabulary: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def subtract_peak_(wide_NV: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Subtract each token's largest logit in place; returns it [N]. Wire: an all-reduce of a maximum per token."""
    peak_N = wide_NV.amax(-1) if wide_NV.shape[-1] else wide_NV.new_full(wide_NV.shape[:1], -torch.inf)
    if axis is not None:
        torch.distributed.all_reduce(peak_N, torch.distributed.ReduceOp.MAX, group=axis.get_group())
    wide_NV.sub_(peak_N.unsqueeze(-1))
    return peak_N


def sum_over(axis: DeviceMesh | None, *sums_N: Tensor) -> tuple[Tensor, ...]:
    """Sums over this rank's vocabulary to sums over the vocabulary of all ranks. Wire: one all-reduce of all sums."""
    return sums_N if axis is None else all_reduce(torch.stack(sums_N), axis).unbind()


def softmax_(wide_NV: Tensor, labels: Labels, axis: DeviceMesh | None) -> Tensor:
    """Turn logits into probabilities in place; returns the cross-entropies [N], of ignored labels too.

    Wire: all-reduces of a maximum and of two sums per token.
    """
    subtract_peak_(wide_NV, axis)
    label_logit = labels.of(wide_NV)
    total, label_logit = sum_over(axis, wide_NV.exp_().sum(-1), label_logit)
    wide_NV.div_(total.unsqueeze(-1))
    return total.log() - label_logit
