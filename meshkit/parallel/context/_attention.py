"""Attention whose tokens lie on several ranks, as operators that autograd and torch.compile see from outside only.

`split_attention` is Ulysses' all-to-all (where heads are split), the attention itself with its exchange of keys and values,
and the all-to-all back. Each of the three is an operator with its mirror for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshkit.core.custom_op import custom_op
from meshkit.parallel.context._kernels import accumulator_dtype
from meshkit.parallel.context._kv_exchange import attend, attend_backward
from meshkit.parallel.context._layout import layout_of
from meshkit.parallel.context._ring_group import ring_group_of
from meshkit.parallel.context._ulysses import to_heads, to_tokens

# -------------------------------------------------------------------------------------- the attention of one group


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, group: str, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:-1], dtype=accumulator_dtype(q.dtype)
    )


@custom_op("context_attention", fake=_fake_attention)
def context_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, group: str, scale: float
) -> tuple[Tensor, Tensor]:
    layout = layout_of(table)
    out, lse = attend(q, k, v, layout, ring_group_of(layout, group), scale)
    return out.to(q.dtype), lse


def _fake_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, group: str, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), k.new_empty((2, *k.shape))


@custom_op("context_attention_backward", fake=_fake_attention_backward)
def context_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, group: str, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, d(k, v)); the latter as one tensor [2, ...], since results may not share memory with each other."""
    layout = layout_of(table)
    dq, dkv = attend_backward(dout.contiguous(), q, k, v, out, lse, layout, ring_group_of(layout, group), scale)
    return dq.to(q.dtype), dkv.to(k.dtype)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table, ctx.group, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, table)


def _attention_gradient(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """lse is for backward and not for users: its gradient is nothing."""
    q, k, v, out, lse, table = ctx.saved_tensors
    dq, dkv = context_attention_backward(dout, q, k, v, out, lse, table, ctx.group, ctx.scale)
    return dq, dkv[0], dkv[1], None, None, None


context_attention.register_autograd(_attention_gradient, setup_context=_save_attention)

# -------------------------------------------------------------------------- Ulysses: tokens for heads, and back again


def _fake_trade(
    x: Tensor, table: Tensor, group: str, heads: int, kv_heads: int, tokens_out: int, heads_out: int
) -> Tensor:
    return x.new_empty((x.shape[0], tokens_out, heads_out, x.shape[3]))


@custom_op("ulysses_to_heads", fake=_fake_trade)
def ulysses_to_heads(
    x: Tensor, table: Tensor, group: str, heads: int, kv_heads: int, tokens_out: int, heads_out: int
) -> Tensor:
    layout = layout_of(table)
    return to_heads(x, layout, ring_group_of(layout, group), heads, kv_heads)


@custom_op("ulysses_to_tokens", fake=_fake_trade)
def ulysses_to_tokens(
    x: Tensor, table: Tensor, group: str, heads: int, kv_heads: int, tokens_out: int, heads_out: int
) -> Tensor:
    layout = layout_of(table)
    return to_tokens(x, layout, ring_group_of(layout, group), heads, kv_heads)


def _save_trade(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, ctx.group, ctx.heads, ctx.kv_heads, _, _ = inputs
    ctx.tokens, ctx.held = x.shape[1], x.shape[2]
    ctx.save_for_backward(table)


def _to_heads_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (table,) = ctx.saved_tensors
    back = ulysses_to_tokens(grad, table, ctx.group, ctx.heads, ctx.kv_heads, ctx.tokens, ctx.held)
    return back, None, None, None, None, None, None


def _to_tokens_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (table,) = ctx.saved_tensors
    back = ulysses_to_heads(grad, table, ctx.group, ctx.heads, ctx.kv_heads, ctx.tokens, ctx.held)
    return back, None, None, None, None, None, None


ulysses_to_heads.register_autograd(_to_heads_gradient, setup_context=_save_trade)
ulysses_to_tokens.register_autograd(_to_tokens_gradient, setup_context=_save_trade)
