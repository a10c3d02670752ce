"""The logits of some tokens of a vocabulary, and of all others together, also where the vocabulary is split over ranks.

Dims: N tokens, V the vocabulary of this rank, K tokens that are told of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshkit.core.collectives import all_gather, all_reduce
from meshkit.loss._token_log_probs import Settings


def split_told(wide_NV: Tensor, ids_NK: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """(logits [N, K] of these tokens, NaN outside of the vocabulary; the logarithm [N] of the sum of exp of all others').

    In `wide_NV` the told tokens are -inf afterwards. Wire: an all-reduce of K numbers and an all-gather of one, per token.
    """
    local, position = _local(wide_NV, ids_NK, settings)
    entries = wide_NV.gather(-1, position) if wide_NV.shape[-1] else wide_NV.new_zeros(ids_NK.shape)
    unknown = (ids_NK < 0) | (ids_NK >= settings.vocabulary)
    entries = entries.masked_fill_(~local, 0).masked_fill_(unknown, torch.nan)
    hide_told_(wide_NV, ids_NK, settings)
    # Not the whole sum less the told ones': of a peaked distribution nothing would be left in fp32.
    others = wide_NV.logsumexp(-1)
    if settings.axis is None:
        return entries, others
    gathered = all_gather(others.unsqueeze(-1), -1, settings.axis)
    return all_reduce(entries, settings.axis), gathered.logsumexp(-1)


def hide_told_(wide_NV: Tensor, ids_NK: Tensor, settings: Settings) -> None:
    """Set them to -inf where this rank has them."""
    local, position = _local(wide_NV, ids_NK, settings)
    if wide_NV.shape[-1]:
        floor = torch.full_like(ids_NK, torch.inf, dtype=wide_NV.dtype).masked_fill_(local, -torch.inf)
        wide_NV.scatter_reduce_(-1, position, floor, "amin")


def add_told_(wide_NV: Tensor, ids_NK: Tensor, summands_NK: Tensor, settings: Settings) -> None:
    """To the entries of these tokens, where this rank has them."""
    local, position = _local(wide_NV, ids_NK, settings)
    if wide_NV.shape[-1]:
        wide_NV.scatter_add_(-1, position, summands_NK.masked_fill(~local, 0).to(wide_NV.dtype))


def _local(wide_NV: Tensor, ids_NK: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """(whether this rank has the token, its place there, 0 where it has not)."""
    local = (ids_NK >= settings.first) & (ids_NK < settings.first + wide_NV.shape[-1])
    return local, (ids_NK - settings.first).masked_fill(~local, 0)
