"""Ring attention and Ulysses as custom operators: autograd and torch.compile see three opaque operators and their mirrors.

The three are Ulysses' all-to-all from tokens to heads (where heads are split), the attention itself with its exchange of
keys and values, and the all-to-all back from heads to tokens. Each has a mirror for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshkit.core.attention_kernels import accumulator_dtype, sinks_gradient, with_sinks
from meshkit.core.custom_op import custom_op
from meshkit.core.double_backward import once_differentiable
from meshkit.parallel.context._kv_exchange import attend, attend_backward
from meshkit.parallel.context._layout import layout_of
from meshkit.parallel.context._ring_group import ring_group_of
from meshkit.parallel.context._ulysses import to_heads, to_tokens

# [Note: why operators]
# An exchange waits for messages, and the mask decides how many kernels it launches. Traced, the waits would break the graph
# and the kernels would be unrolled into it. As one operator it is one node of the graph, and selective recompute keeps or
# repeats it as one thing. The layout comes as a host tensor (`table`), so it is an input of the node like q, k and v.

# -------------------------------------------------------------------------------------- the attention of one group


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    group: str,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:-1], dtype=accumulator_dtype(q.dtype)
    )


@custom_op("context_attention", fake=_fake_attention)
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    group: str,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    layout = layout_of(table)
    out, lse = attend(q, k, v, layout, ring_group_of(layout, group), scale, softcap)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def _fake_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    group: str,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), k.new_empty((2, *k.shape))


@custom_op("context_attention_backward", fake=_fake_attention_backward)
def context_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    group: str,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(dq, d(k, v)); the latter as one tensor [2, ...], since outputs of an operator may not share memory."""
    layout = layout_of(table)
    # Kernels and messages take contiguous memory, and autograd may hand us an expanded or transposed gradient.
    dq, dkv = attend_backward(
        dout.contiguous(), q, k, v, out, lse, layout, ring_group_of(layout, group), scale, softcap
    )
    return dq.to(q.dtype), dkv.to(k.dtype)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table, ctx.group, ctx.scale, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, table, sinks)


@once_differentiable("the backward of attention over cp is a kernel with messages.", "Use a mesh without cp")
def _attention_gradient(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """dlse is ignored: lse is an output only so that autograd saves it for backward."""
    # out is saved rounded to the compute dtype and lse in the accumulator's: backward takes exp(score - lse), where an error
    # of lse would be one of every probability.
    q, k, v, out, lse, table, sinks = ctx.saved_tensors
    dq, dkv = context_attention_backward(dout, q, k, v, out, lse, table, ctx.group, ctx.scale, ctx.softcap)
    dsinks = sinks_gradient(dout, out, lse, sinks) if sinks is not None else None
    return dq, dkv[0], dkv[1], None, None, None, None, dsinks


context_attention.register_autograd(_attention_gradient, setup_context=_save_attention)

# -------------------------------------------------------------------------- Ulysses: tokens for heads, and back again


def _fake_all_to_all(
    x: Tensor, table: Tensor, group: str, heads: int, kv_heads: int, tokens_out: int, heads_out: int
) -> Tensor:
    return x.new_empty((x.shape[0], tokens_out, heads_out, x.shape[3]))


@custom_op("ulysses_to_heads", fake=_fake_all_to_all)
def ulysses_to_heads(
    x: Tensor, table: Tensor, group: str, heads: int, kv_heads: int, tokens_out: int, heads_out: int
) -> Tensor:
    layout = layout_of(table)
    return to_heads(x, layout, ring_group_of(layout, group), heads, kv_heads)


@custom_op("ulysses_to_tokens", fake=_fake_all_to_all)
def ulysses_to_tokens(
    x: Tensor, table: Tensor, group: str, heads: int, kv_heads: int, tokens_out: int, heads_out: int
) -> Tensor:
    layout = layout_of(table)
    return to_tokens(x, layout, ring_group_of(layout, group), heads, kv_heads)


def _save_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, ctx.group, ctx.heads, ctx.kv_heads, _, _ = inputs
    ctx.tokens, ctx.local_heads = x.shape[1], x.shape[2]
    ctx.save_for_backward(table)


def _to_heads_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (table,) = ctx.saved_tensors
    dx = ulysses_to_tokens(grad, table, ctx.group, ctx.heads, ctx.kv_heads, ctx.tokens, ctx.local_heads)
    return dx, None, None, None, None, None, None


def _to_tokens_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (table,) = ctx.saved_tensors
    dx = ulysses_to_heads(grad, table, ctx.group, ctx.heads, ctx.kv_heads, ctx.tokens, ctx.local_heads)
    return dx, None, None, None, None, None, None


ulysses_to_heads.register_autograd(_to_heads_gradient, setup_context=_save_all_to_all)
ulysses_to_tokens.register_autograd(_to_tokens_gradient, setup_context=_save_all_to_all)
