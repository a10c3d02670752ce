"""Attention under a mask on one rank as one custom operator: packed documents, sliding windows, prefixes (varlen attention).

| mask on                               | launches a layer                                                            |
|---------------------------------------|-----------------------------------------------------------------------------|
| CUDA, 16 bits, packed causal documents | one of variable length, however many documents there are, window or not    |
| anything else                         | one a tile of the mask (`attention_tiles`), merged in the accumulator's dtype |

No tensor has an element for each pair of tokens. Dims: B batch, T tokens, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshkit.core import _torch
from meshkit.core.attention_kernels import CUDA_FLASH, Backward, Forward, accumulator_dtype, kernel_for
from meshkit.core.attention_tiles import Tile, tiles
from meshkit.core.custom_op import custom_op
from meshkit.mask import FAR, Band, Mask

_aten = torch.ops.aten

# [Note: why one operator]
# Selective recompute, `observe` and the modes by which a `Budget` measures are dispatch modes, in which torch.compile does
# not compile: FlexAttention would write out all pairs of tokens there, and is not on the list of what recompute keeps. An
# operator is kept or run again as one thing, under every mode, and in a compiled block it is one node. The mask comes as
# tensors, so other documents are no other graph. Its fake function never looks at them.


class Packed(NamedTuple):
    """Causal documents end to end, all within one window. ends: where each begins, and the last ends."""

    ends: tuple[int, ...]
    window: int | None

    @property
    def longest(self) -> int:
        return max(after - first for first, after in pairwise(self.ends))


def mask_table(mask: Mask) -> Tensor:
    """The mask as an int64 tensor [bands, 6] on the host, also where new tensors are made without values."""
    with _torch.without_modes():
        return torch.tensor(mask.bands, dtype=torch.int64).view(-1, len(Band._fields))


def packed_documents(mask: Mask) -> Packed | None:
    """The documents of a mask that is no more than packed causal documents; None for another."""
    if not mask.bands or any(band.low > 0 for band in mask.bands):
        return None
    lengths = [band.q1 - band.q0 for band in mask.bands]
    windows = [1 - band.low for band in mask.bands if band.low != -FAR]
    window = min(windows, default=None)
    # A window of all tokens cuts nothing, and what shows the same pairs is equal afterwards.
    same = Mask.documents(lengths, window=window).windowed(mask.tokens) == mask.windowed(mask.tokens)
    return Packed((0, *accumulate(lengths)), window) if same else None


def document_ends(mask: Mask, rows: int, device: torch.device) -> Tensor:
    """int32 [documents + 1] of `rows` rows of packed documents end to end, on the device; [0] for another mask."""
    packed = packed_documents(mask)
    if packed is None or device.type == "cpu":
        return torch.zeros(0, dtype=torch.int32, device=device)
    ends = [0, *(row * mask.tokens + end for row in range(rows) for end in packed.ends[1:])]
    host = torch.tensor(ends, dtype=torch.int32, pin_memory=device.type == "cuda" and torch.cuda.is_available())
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=128)
def _decoded(content: bytes) -> tuple[list[Tile], Packed | None]:
    values = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, len(Band._fields)).tolist()
    bands = tuple(Band(*row) for row in values)
    return tiles(bands), packed_documents(Mask(max((band.q1 for band in bands), default=0), bands))


def _read(table: Tensor) -> tuple[list[Tile], Packed | None]:
    # By content and not by identity: recompute and torch.compile may copy the table. On the host, so nothing waits.
    with _torch.without_modes():  # it has values also where other tensors have none
        return _decoded(table.numpy().tobytes()) if table.numel() else ([], None)


def _varlen(q: Tensor, ends: Tensor) -> bool:
    """Whether one launch of variable length computes it."""
    return bool(ends.numel() and q.numel()) and kernel_for(q.device.type, q.dtype, q.shape[-1]) is CUDA_FLASH


def _fake(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ends: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@custom_op("masked_attention", fake=_fake)
def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, ends: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D] under the mask of T tokens -> (out [B, T, H, D], lse [B, T, H]).

    table: `mask_table`; ends: `document_ends` of the B rows. A query that sees nothing has zeros.
    Source of the launch of variable length: torch.nn.attention.varlen, which calls the same operators of aten.
    """
    shown, packed = _read(table)
    if packed is not None and _varlen(q, ends):
        rows = (rearrange(x, "b t h d -> (b t) h d") for x in (q, k, v))
        out, lse, *_ = _aten._flash_attention_forward(
            *rows, ends, ends, packed.longest, packed.longest, 0.0, True, False, scale=scale, **_window(packed)
        )
        return rearrange(out, "(b t) h d -> b t h d", b=len(q)), rearrange(
            lse, "h (b t) -> b t h", b=len(q)
        ).contiguous()
    running = Forward(q, scale)
    running.add(k, v, shown)
    return running.out.to(q.dtype), running.lse


def _window(packed: Packed) -> dict[str, int]:
    # The kernel counts keys before the query. Without a window the causal flag alone says it, as torch's own varlen does.
    return {} if packed.window is None else {"window_size_left": packed.window - 1, "window_size_right": 0}


def _fake_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    ends: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


@custom_op("masked_attention_backward", fake=_fake_backward)
def masked_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    ends: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mirror: (dq, dk, dv)."""
    shown, packed = _read(table)
    if packed is not None and _varlen(q, ends):
        rows = (rearrange(x, "b t h d -> (b t) h d").contiguous() for x in (dout, q, k, v, out))
        lse_HN = rearrange(lse, "b t h -> h (b t)").contiguous()
        # The kernel wants the random state of its forward's dropout. Dropout is 0, so any state of that shape will do.
        no_seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        grads = _aten._flash_attention_backward(
            *rows,
            *(lse_HN, ends, ends, packed.longest, packed.longest, 0.0, True, no_seed, unused),
            scale=scale,
            **_window(packed),
        )
        dq, dk, dv = (rearrange(grad, "(b t) h d -> b t h d", b=len(q)) for grad in grads)
        return dq, dk, dv
    running = Backward(dout, q, out, lse, scale)
    sums = [torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device) for x in (k, v)]
    running.add(k, v, shown, *sums)
    return running.dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table, ends, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, table, ends)


def _gradient(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """dlse is ignored: lse is an output only so that autograd saves it for backward."""
    return *masked_attention_backward(dout, *ctx.saved_tensors, ctx.scale), None, None, None


masked_attention.register_autograd(_gradient, setup_context=_save)

# ---------------------------------------------------------------------------------------- work, as torch counts attention


@register_flop_formula(torch.ops.meshkit.masked_attention)  # type: ignore[untyped-decorator, unused-ignore]  # torch's
def _flops(q: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products of all pairs of tokens, as torch counts causal attention too: the mask may have no values yet."""
    batch, tokens, heads, head_dim = q
    return int(2 * 2 * batch * heads * tokens * tokens * head_dim)


@register_flop_formula(torch.ops.meshkit.masked_attention_backward)  # type: ignore[untyped-decorator, unused-ignore]  # torch's
def _flops_of_backward(dout: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Five: the scores again, and the gradients of q, k, v and of the scores."""
    batch, tokens, heads, head_dim = dout
    return int(5 * 2 * batch * heads * tokens * tokens * head_dim)
