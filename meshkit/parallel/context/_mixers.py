"""Recurrent mixers over cp as custom operators: linear attention with passed states, short convolution with a halo.

See [Note: why operators]. Dims as in `meshkit.core.linear_attention` and `meshkit.core.short_convolution`; T are this rank's
tokens, padding included, whose results are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshkit.core import _torch
from meshkit.core.custom_op import custom_op
from meshkit.core.double_backward import once_differentiable
from meshkit.core.linear_attention import ChunkedScan, contiguous, leaves, of_leaves, scan_flops
from meshkit.core.short_convolution import convolved
from meshkit.core.to_device import tensor_on
from meshkit.parallel.context._carry import needs_products, pass_states, ranks_of
from meshkit.parallel.context._layout import Layout, layout_of
from meshkit.parallel.context._pieces import Halo, halo_of, pieces_of
from meshkit.parallel.context._ring_group import RingGroup

# ---------------------------------------------------------------------------------------------- linear attention


def _scan_of_rank(layout: Layout, rank: int, *inputs: Tensor | None) -> ChunkedScan | None:
    q, k, v, log_decay, beta = inputs
    own = tuple(piece.local for piece in pieces_of(layout) if piece.rank == rank)
    assert q is not None and k is not None and v is not None and log_decay is not None
    return ChunkedScan(q, k, v, log_decay, beta, own) if own else None


def _fake_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, table: Tensor, group: str, pieces: int
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    starts = q.new_empty((len(q), pieces, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype)
    return torch.empty_like(v, memory_format=torch.contiguous_format), starts


@custom_op("context_linear_attention", fake=_fake_scan)
def context_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, table: Tensor, group: str, pieces: int
) -> tuple[Tensor, Tensor]:
    """(output [B, T, H, V], the state before each of the rank's `pieces` [B, P, H, K, V]). Wire: as `pass_states`."""
    layout, ring = layout_of(table), ranks_of(group)
    scan = _scan_of_rank(layout, ring.rank, q, k, v, log_decay, beta)
    if scan is None:
        return torch.zeros_like(v, memory_format=torch.contiguous_format), _fake_scan(
            q, k, v, log_decay, beta, table, group, 0
        )[1]
    products = scan.products() if needs_products(layout, ring.rank) else None
    starts = pass_states(products, scan.states(scan.zeros())[1], layout, ring)
    return scan.output(scan.states(starts)[0]).contiguous(), starts


def _fake_scan_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    starts: Tensor,
    table: Tensor,
    group: str,
) -> list[Tensor]:
    inputs = (q, k, v, log_decay) if beta is None else (q, k, v, log_decay, beta)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


@custom_op("context_linear_attention_backward", fake=_fake_scan_backward)
def context_linear_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    starts: Tensor,
    table: Tensor,
    group: str,
) -> list[Tensor]:
    """The mirror. The states before the pieces were kept, so that only their gradients travel."""
    layout, ring = layout_of(table), ranks_of(group)
    with _torch.graph_inside():
        inputs, before = leaves(q, k, v, log_decay, beta), starts.detach().requires_grad_()
        q, k, v, log_decay, beta = of_leaves(inputs)
        scan = _scan_of_rank(layout, ring.rank, q, k, v, log_decay, beta)
        if scan is None:
            return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
        states, after = scan.states(before)
        out = scan.output(states)
    # What this rank's own tokens say of the states that they began with; what later ranks say comes by messages.
    (dbefore,) = torch.autograd.grad(out, before, dout, retain_graph=True)
    products = scan.products().detach() if needs_products(layout, ring.rank) else None
    dafter = pass_states(products, dbefore, layout, ring, backward=True)
    return contiguous(torch.autograd.grad((out, after), inputs, (dout, dafter)))


def _save_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, log_decay, beta, table, ctx.group, _ = inputs
    ctx.save_for_backward(q, k, v, log_decay, beta, output[1], table)


@once_differentiable("the backward of linear attention over cp passes states.", "Use a mesh without cp")
def _scan_gradient(ctx: Any, dout: Tensor, dstarts: Tensor) -> tuple[Tensor | None, ...]:
    """dstarts is ignored: the states are an output only so that autograd saves them for backward."""
    grads = context_linear_attention_backward(dout, *ctx.saved_tensors, ctx.group)
    return (*grads, *(None,) * (8 - len(grads)))


context_linear_attention.register_autograd(_scan_gradient, setup_context=_save_scan)


@register_flop_formula(torch.ops.meshkit.context_linear_attention)  # type: ignore[untyped-decorator, unused-ignore]  # torch's
def _flops(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(v[0] * v[1] * scan_flops(v[2], q[3], v[3], delta=beta is not None))


@register_flop_formula(torch.ops.meshkit.context_linear_attention_backward)  # type: ignore[untyped-decorator, unused-ignore]  # same
def _flops_of_backward(
    dout: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, *rest: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(3 * v[0] * v[1] * scan_flops(v[2], q[3], v[3], delta=beta is not None))


# --------------------------------------------------------------------------------------------- short convolution


def _fake_convolution(x: Tensor, weight: Tensor, table: Tensor, group: str, received: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((len(x), received, x.shape[2]))


@custom_op("context_short_convolution", fake=_fake_convolution)
def context_short_convolution(
    x: Tensor, weight: Tensor, table: Tensor, group: str, received: int
) -> tuple[Tensor, Tensor]:
    """(output [B, T, C], the `received` tokens of other ranks that lie before this one's pieces [B, R, C]).

    Wire: at most W - 1 tokens for each piece whose document goes on from another rank; their gradients go back.
    """
    ring = ranks_of(group)
    halo = halo_of(layout_of(table), ring.rank, weight.shape[1])
    blocks = [x.new_empty((len(x), count, x.shape[2])) for _, count in halo.receives]
    sends = [(x.index_select(1, tensor_on(tokens, x.device)), to) for to, tokens in halo.sends]
    receives = [(block, sender) for block, (sender, _) in zip(blocks, halo.receives, strict=True)]
    ring.exchange(sends, receives).wait("tokens of another cp rank")
    joined = torch.cat((x, *blocks), 1)
    out = convolved(joined, weight, halo.index.on(x.device), halo.places.on(x.device))
    return out.contiguous(), joined[:, x.shape[1] :].clone(memory_format=torch.contiguous_format)


def _fake_convolution_backward(
    dout: Tensor, x: Tensor, weight: Tensor, received: Tensor, table: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


@custom_op("context_short_convolution_backward", fake=_fake_convolution_backward)
def context_short_convolution_backward(
    dout: Tensor, x: Tensor, weight: Tensor, received: Tensor, table: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """The mirror: (dx, dweight). Wire: the gradient of each received token goes back to its rank."""
    ring = ranks_of(group)
    halo = halo_of(layout_of(table), ring.rank, weight.shape[1])
    with _torch.graph_inside():
        joined, kernel = torch.cat((x, received), 1).detach().requires_grad_(), weight.detach().requires_grad_()
        out = convolved(joined, kernel, halo.index.on(x.device), halo.places.on(x.device))
    djoined, dweight = torch.autograd.grad(out, (joined, kernel), dout)
    return _returned(djoined, x.shape[1], halo, ring), dweight.clone(memory_format=torch.contiguous_format)


def _returned(djoined: Tensor, tokens: int, halo: Halo, ring: RingGroup) -> Tensor:
    dx, *parts = djoined.split((tokens, *(count for _, count in halo.receives)), 1)
    blocks = [djoined.new_empty((len(djoined), len(own), djoined.shape[2])) for _, own in halo.sends]
    sends = [(part.contiguous(), sender) for part, (sender, _) in zip(parts, halo.receives, strict=True)]
    receives = [(block, to) for block, (to, _) in zip(blocks, halo.sends, strict=True)]
    ring.exchange(sends, receives).wait("gradients of tokens that another cp rank read")
    dx_BTC: Tensor = dx.clone(memory_format=torch.contiguous_format)
    for block, (_, own) in zip(blocks, halo.sends, strict=True):
        dx_BTC.index_add_(1, tensor_on(own, dx.device), block)
    return dx_BTC


def _save_convolution(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, table, ctx.group, _ = inputs
    ctx.save_for_backward(x, weight, output[1], table)


@once_differentiable("the backward of a short convolution over cp sends messages.", "Use a mesh without cp")
def _convolution_gradient(ctx: Any, dout: Tensor, dreceived: Tensor) -> tuple[Tensor | None, ...]:
    """dreceived is ignored: what was received is an output only so that autograd saves it for backward."""
    return *context_short_convolution_backward(dout, *ctx.saved_tensors, ctx.group), None, None, None


context_short_convolution.register_autograd(_convolution_gradient, setup_context=_save_convolution)
