"""Dropout before adapters, with a mask that is a function of seed, step, text so far, layer and feature, and of nothing else.

Source: Hu et al. 2021, as PEFT's `lora_dropout`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshkit.counter import random_bits
from meshkit.errors import PlanError
from meshkit.token_keys import keys_in_use, token_keys

LANES, LANE_BITS = 4, 15  # of one 63-bit draw, for so many features


def dropout_keys(batch: dict[str, Tensor], *, seed: int, step: int | None) -> Tensor:
    """Keys [B, T] of the tokens of one step's batch."""
    if step is None:
        raise PlanError(
            "forward_backward: the adapters have dropout, whose masks depend on the number of the step. Give it as step=..., "
            "so that a run that continues draws what it would have drawn."
        )
    if "input_ids" not in batch:
        raise PlanError(
            "forward_backward: dropout on adapters needs input_ids [B, T] in the batch, from which masks come."
        )
    return token_keys(batch["input_ids"], batch.get("position_ids"), "lora_dropout", seed, step)


def drop(x: Tensor, *, probability: float, stream: int, own_columns: Tensor | None) -> Tensor:
    """x [..., C] with features zeroed at random and the others scaled up to keep the mean; C of this rank, see own_columns.

    Keeps nothing for backward but the tokens' keys: it draws the mask again.
    Raises: PlanError outside of `Run.forward_backward`, and where x is not of the batch's tokens.
    """
    keys = keys_in_use()
    if keys is None:
        raise PlanError(
            "lora(dropout=...): a forward in training mode outside of Run.forward_backward has no step to draw masks of. "
            "Call model.eval() first, or Run.evaluate."
        )
    if keys.numel() != x.shape[:-1].numel():
        raise PlanError(
            f"lora(dropout=...): a layer was called on tokens {tuple(x.shape[:-1])}, but the batch has {tuple(keys.shape)}. "
            "Let the loss call the model once on input_ids as they are, or leave dropout away."
        )
    out: Tensor = _Drop.apply(x, keys.reshape(x.shape[:-1]), probability, stream, own_columns)
    return out


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, probability: float, stream: int, own: Tensor | None) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.arguments = probability, stream, own
        return _masked(x, keys, probability, stream, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (keys,) = ctx.saved_tensors
        return _masked(grad, keys, *ctx.arguments), None, None, None, None


def _masked(x: Tensor, keys: Tensor, probability: float, stream: int, own: Tensor | None) -> Tensor:
    threshold = round(probability * 2**LANE_BITS)
    dropped = _lanes(x, keys, stream, own) < threshold
    out: Tensor = x.masked_fill(dropped, 0.0) * (1 / (1 - threshold / 2**LANE_BITS))
    return out


def _lanes(x: Tensor, keys: Tensor, stream: int, own: Tensor | None) -> Tensor:
    """[..., C] int16, uniform in [0, 2^15): of each token and each feature of x."""
    columns = x.shape[-1]
    first, last = (0, columns) if own is None or not columns else (int(own.min()), int(own.max()) + 1)
    groups = x.new_zeros((), dtype=torch.int64)  # of a tensor without values the draws have none either
    groups = groups + torch.arange(first // LANES, -(-last // LANES), device=x.device)
    drawn = random_bits(groups, random_bits(keys, stream, 63).unsqueeze(-1), 63)
    lanes: Tensor = drawn.view(torch.int16) & (2**LANE_BITS - 1)
    if own is None or not columns:
        return lanes[..., :columns]
    return lanes.index_select(-1, (own - first // LANES * LANES).to(keys.device))
