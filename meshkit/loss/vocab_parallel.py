"""Softmax over logits of which each rank may hold a part of the vocabulary.

Dims: N tokens, V the vocabulary of this rank, which may be none of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.collectives import all_reduce

IGNORED = -100


class Labels(NamedTuple):
    """Labels as this rank of the vocabulary sees them, each [N]: where they are not ignored, where they are no tokens at all,
    where they are among its own tokens, and their place among those (0 elsewhere).
    """

    valid: Tensor
    unknown: Tensor
    here: Tensor
    place: Tensor

    def of(self, wide_NV: Tensor) -> Tensor:
        """What the labels pick [N], zero where they are another rank's, NaN where they are no tokens: no rank may wait for
        the device to say so, and none may miss it.
        """
        if wide_NV.shape[-1]:
            picked = wide_NV.gather(-1, self.place.unsqueeze(-1)).squeeze(-1).masked_fill_(~self.here, 0)
        else:
            picked = wide_NV.new_zeros(wide_NV.shape[:1])
        return picked.masked_fill_(self.unknown, torch.nan)

    def add_to_(self, wide_NV: Tensor, summand_N: Tensor | float) -> None:
        """Add a number to what each label picks."""
        if wide_NV.shape[-1]:
            summand = torch.where(self.here & self.valid, summand_N, 0).to(wide_NV.dtype)
            wide_NV.scatter_add_(-1, self.place.unsqueeze(-1), summand.unsqueeze(-1))


def find_labels(labels_N: Tensor, first: int, own: int, vocabulary: int) -> Labels:
    """first: this rank's first token; own: how many of the vocabulary it has."""
    valid = labels_N != IGNORED
    unknown = valid & ((labels_N < 0) | (labels_N >= vocabulary))
    here = (labels_N >= first) & (labels_N < first + own)
    return Labels(valid, unknown, here, (labels_N - first).masked_fill(~here, 0))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over the vocabulary are made in: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def subtract_peak_(wide_NV: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Subtract each token's largest logit in place; returns it [N]. Wire: an all-reduce of a maximum per token."""
    peak_N = wide_NV.amax(-1) if wide_NV.shape[-1] else wide_NV.new_full(wide_NV.shape[:1], -torch.inf)
    if axis is not None:
        torch.distributed.all_reduce(peak_N, torch.distributed.ReduceOp.MAX, group=axis.get_group())
    wide_NV.sub_(peak_N.unsqueeze(-1))
    return peak_N


def sum_over(axis: DeviceMesh | None, *sums_N: Tensor) -> tuple[Tensor, ...]:
    """Sums over the vocabulary of all ranks. Wire: one all-reduce of them."""
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
