"""Attention kernels (flash attention) on tiles: the one place that calls a kernel. A better kernel is one entry here.

Dims: B batch, T queries, S keys, H query heads, K key/value heads, D head_dim. Tensors come as [B, T, H, D] and keep that
order in memory; kernels see them transposed. A tile's softmax is merged into a running fp32 (out, lse):

    lse' = log(exp(lse) + exp(l)),  out' = out + sigmoid(l - lse) (o - out)

with lse = -inf where no key has been seen yet. No exponential of a difference can overflow (Zhu 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from meshkit.core.attention_tiles import ANTI, FULL, HeadTiles, Tile
from meshkit.errors import PlanError

_aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """forward(q, k, v, causal, scale) -> (out, lse); backward(dout, q, k, v, out, lse, causal, scale) -> (dq, dk, dv).

    All tensors are [B, heads, tokens, D], lse is [B, H, T]; causal tiles are square. `backward` takes out and lse of the
    whole row, over all keys, and not of the tile: only then is its softmax the one of the forward, and gradients add up.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(device_type: str, dtype: torch.dtype, head_dim: int, softcap: float = 0.0) -> Kernel:
    """The kernel for tensors of this device and dtype. Raises: PlanError if there is none for the head_dim.

    softcap: scores are softcap * tanh(score / softcap), as Gemma 2 has it; 0 leaves them.
    """
    if softcap:  # no flash kernel of torch caps scores
        return Kernel("math", partial(_math_forward, softcap=softcap), partial(_math_backward, softcap=softcap))
    if device_type == "cpu":
        return CPU_FLASH
    # CUDA's flash kernel takes half precision alone; fp32 and fp64 are computed by plain operators.
    if dtype in (torch.bfloat16, torch.float16):
        if head_dim % 8 or head_dim > 256:
            raise PlanError(
                f"attention: the flash kernel on {device_type} needs a head_dim that 8 divides, up to 256, but it "
                f"is {head_dim}. Use such a head_dim, or fp32."
            )
        return CUDA_FLASH
    return MATH


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel wants the random state of its forward's dropout. Dropout is 0, so any state of that shape and dtype will do.
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        *(dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, no_seed, no_seed),
        scale=scale,
    )
    return dq, dk, dv


MATH_ROWS = 512  # queries at a time: their scores are written out, [B, H, 512, S]


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (repeat(x, "b k s d -> b (k group) s d", group=groups) for x in (k, v))
    outs, lses = [], []
    for first in range(0, q.shape[2], MATH_ROWS):
        scores = _masked(_scores(q, k, first, scale, softcap), first, causal)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1].unsqueeze(-1)).exp().to(v.dtype) @ v)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _math_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (repeat(x, "b k s d -> b (k group) s d", group=groups) for x in (k, v))
    dtype = accumulator_dtype(q.dtype)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for first in range(0, q.shape[2], MATH_ROWS):
        rows = slice(first, first + MATH_ROWS)
        # The softmax of the whole row, since lse is: see `Kernel`. delta = sum(dout * out) stands for the sum of p * dp over
        # all keys, of which the tile has only some (Dao et al. 2022, section 3.1).
        scores = _scores(q, k, first, scale, softcap)
        p = (_masked(scores, first, causal) - lse[:, :, rows].unsqueeze(-1)).exp()
        delta = (dout[:, :, rows].to(dtype) * out[:, :, rows]).sum(-1, keepdim=True)
        ds = p * (dout[:, :, rows] @ v.mT - delta) * scale
        if softcap:
            ds = ds * (1 - (scores / softcap).square())  # of tanh
        ds, p = ds.to(q.dtype), p.to(q.dtype)
        dqs.append(ds @ k)
        dk += ds.mT @ q[:, :, rows]
        dv += p.mT @ dout[:, :, rows]
    # The query heads of a group read one key/value head, whose gradient is the sum over them.
    dk, dv = (reduce(grad, "b (k group) s d -> b k s d", "sum", group=groups) for grad in (dk, dv))
    return torch.cat(dqs, 2), dk, dv


def _scores(q: Tensor, k: Tensor, first: int, scale: float, softcap: float) -> Tensor:
    # Products in the tensors' dtype, softmax in the accumulator's, as transformers' eager attention has it.
    scores = (q[:, :, first : first + MATH_ROWS] @ k.mT).to(accumulator_dtype(q.dtype)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(scores: Tensor, first: int, causal: bool) -> Tensor:
    if causal:
        row = torch.arange(first, first + scores.shape[2], device=scores.device).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(scores.shape[3], device=scores.device) > row, float("-inf"))
    return scores


CPU_FLASH = Kernel("CPU flash", _cpu_forward, _cpu_backward)
CUDA_FLASH = Kernel("CUDA flash", _cuda_forward, _cuda_backward)
MATH = Kernel("math", _math_forward, _math_backward)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of running sums over ranks: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class Forward:
    """Attention of q [B, T, H, D] over keys that arrive in pieces: the running out [B, T, H, D] and lse [B, T, H]."""

    def __init__(self, q: Tensor, scale: float, softcap: float = 0.0) -> None:
        self.q, self.scale = q, scale
        self.kernel = kernel_for(q.device.type, q.dtype, q.shape[-1], softcap)
        dtype = accumulator_dtype(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)

    def add(self, k: Tensor, v: Tensor, tiles: Iterable[Tile]) -> None:
        """k, v: [B, S, K, D], one piece. tiles: their key places count from the first key of the piece."""
        if not self.q.numel():  # a rank may have no heads, and kernels refuse empty tensors
            return
        # Transposed once and not for each tile: a row of many documents has many, and small ones.
        q_BHTD, k_BKSD, v_BKSD, out_BHTD = _heads_first(self.q, k, v, self.out)
        lse_BHT = rearrange(self.lse, "b t h -> b h t")
        for tile in tiles:
            q_rows, k_rows = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            q_T, k_S, v_S = q_BHTD[:, :, q_rows], k_BKSD[:, :, k_rows], v_BKSD[:, :, k_rows]
            if tile.kind == ANTI:
                q_T, k_S, v_S = q_T.flip(2), k_S.flip(2), v_S.flip(2)
            out, lse = self.kernel.forward(q_T, k_S, v_S, tile.kind != FULL, self.scale)
            if tile.kind == ANTI:
                out, lse = out.flip(2), lse.flip(2)
            _merge(out_BHTD[:, :, q_rows], lse_BHT[:, :, q_rows], out, lse)

    def add_heads(self, k: Tensor, v: Tensor, batches: Iterable[HeadTiles]) -> None:
        """As `add`, of tiles that differ from head to head (block-sparse attention)."""
        for batch in parts_of(batches, self.q):
            queries, keys = _places(batch, self.q, k)
            q_T, k_S, v_S = (each.unsqueeze(1) for each in (self.q[queries], k[keys], v[keys]))
            if batch.kind == ANTI:
                q_T, k_S, v_S = q_T.flip(2), k_S.flip(2), v_S.flip(2)
            out, lse = self.kernel.forward(q_T, k_S, v_S, batch.kind != FULL, self.scale)
            if batch.kind == ANTI:
                out, lse = out.flip(2), lse.flip(2)
            running, running_lse = self.out[queries], self.lse[queries]  # copies: the places are no view
            _merge(running, running_lse, out.squeeze(1), lse.squeeze(1))
            self.out[queries], self.lse[queries] = running, running_lse


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge one tile into (out, lse), in place: afterwards they are of the softmax over both sets of keys."""
    # A row that has seen nothing has lse = -inf: its weight is sigmoid(inf) = 1, and the tile's output is taken as it is.
    weight = torch.sigmoid(new_lse - lse)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


class Backward:
    """The mirror of `Forward`: dq is summed here, (dk, dv) of each piece into tensors that the caller gives."""

    def __init__(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float = 0.0) -> None:
        self.dout, self.q, self.out, self.lse, self.scale = dout, q, out, lse, scale
        self.kernel = kernel_for(q.device.type, q.dtype, q.shape[-1], softcap)
        self.dq = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)

    def add(self, k: Tensor, v: Tensor, tiles: Iterable[Tile], dk: Tensor, dv: Tensor) -> None:
        """dk, dv: [B, S, K, D] in the accumulator's dtype; the piece's gradients are added to them, in place."""
        if not self.q.numel():
            return
        rows = _heads_first(self.dout, self.q, self.out)
        lse_BHT = rearrange(self.lse, "b t h -> b h t")
        keys = _heads_first(k, v)
        totals = _heads_first(self.dq, dk, dv)
        for tile in tiles:
            q_rows, k_rows = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            # Rows and keys reversed make an ANTI tile causal; sums over them do not mind, and the gradients are turned back.
            tile_rows = [tensor[:, :, q_rows] for tensor in (*rows, lse_BHT)]
            tile_keys = [tensor[:, :, k_rows] for tensor in keys]
            if tile.kind == ANTI:
                tile_rows, tile_keys = ([tensor.flip(2) for tensor in each] for each in (tile_rows, tile_keys))
            dout_T, q_T, out_T, lse_T = tile_rows
            grads = list(self.kernel.backward(dout_T, q_T, *tile_keys, out_T, lse_T, tile.kind != FULL, self.scale))
            if tile.kind == ANTI:
                grads = [grad.flip(2) for grad in grads]
            # In place into the caller's sums: a tile touches only its own rows and keys.
            for total, grad, place in zip(totals, grads, (q_rows, k_rows, k_rows), strict=True):
                total[:, :, place] += grad

    def add_heads(self, k: Tensor, v: Tensor, batches: Iterable[HeadTiles], dk: Tensor, dv: Tensor) -> None:
        """As `add`, of tiles that differ from head to head. dk, dv: contiguous."""
        for batch in parts_of(batches, self.q):
            queries, keys = _places(batch, self.q, k)
            tile_rows = [each[queries].unsqueeze(1) for each in (self.dout, self.q, self.out, self.lse)]
            tile_keys = [each[keys].unsqueeze(1) for each in (k, v)]
            if batch.kind == ANTI:
                tile_rows, tile_keys = ([tensor.flip(2) for tensor in each] for each in (tile_rows, tile_keys))
            dout_T, q_T, out_T, lse_T = tile_rows
            grads = self.kernel.backward(dout_T, q_T, *tile_keys, out_T, lse_T, batch.kind != FULL, self.scale)
            dq, *dkv = ((grad.flip(2) if batch.kind == ANTI else grad).squeeze(1) for grad in grads)
            self.dq[queries] += dq
            for total, grad in zip((dk, dv), dkv, strict=True):
                _add_to_rows(total, keys, grad.to(total.dtype))


HEAD_TILE_NUMBERS = 1 << 25  # of keys that are copied for one launch
HEAD_TILES = 1 << 15  # a launch of CUDA has fewer than 2**16 rows


def parts_of(batches: Iterable[HeadTiles], q: Tensor) -> Iterator[HeadTiles]:
    """The same in launches of bounded memory."""
    for batch in batches:
        most = max(1, min(HEAD_TILES, HEAD_TILE_NUMBERS // (batch.k0.shape[1] * batch.keys * q.shape[-1])))
        if len(batch.rows) <= most:
            yield batch
            continue
        for first in range(0, len(batch.rows), most):
            part = slice(first, first + most)
            yield batch._replace(rows=batch.rows[part], heads=batch.heads[part], q0=batch.q0[part], k0=batch.k0[part])


def _places(batch: HeadTiles, q: Tensor, k: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Indices of the tiles' queries in q [B, T, H, D], and of their keys in k [B, S, K, D]."""
    rows, heads = batch.rows.unsqueeze(1), batch.heads.unsqueeze(1)
    queries = batch.q0.unsqueeze(1) + torch.arange(batch.queries, device=q.device)
    keys = (batch.k0.unsqueeze(2) + torch.arange(batch.keys, device=q.device)).flatten(1)
    return (rows, queries, heads), (rows, keys, heads // (q.shape[2] // k.shape[2]))


def _add_to_rows(total: Tensor, places: tuple[Tensor, ...], added: Tensor) -> None:
    """Adds to total [B, S, K, D] in place, in an order that does not change from run to run: tiles may share keys."""
    rows, keys, heads = places
    flat = ((rows * total.shape[1] + keys) * total.shape[2] + heads).flatten()
    view, added = total.view(-1, total.shape[3]), added.reshape(-1, total.shape[3])
    # On CUDA index_add_ adds by atomics, and index_put_ sorts; on CPU it is the other way round.
    if total.device.type == "cpu":
        view.index_add_(0, flat, added)
    else:
        view.index_put_((flat,), added, accumulate=True)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a softmax that has one more score in each row, the head's sink, whose value is zero (gpt-oss).

    out: [B, T, H, D]; lse: [B, T, H]; sinks: [H]. With this lse and out, kernels' backward is right as it is: a sink adds
    nothing to sum(dout * out).
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - total).exp().unsqueeze(-1), total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The mirror of `with_sinks`: -sum over rows of p sum(dout * out), where p is the sink's share of the row."""
    delta = (dout.to(lse.dtype) * out).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum((0, 1)).to(sinks.dtype)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [rearrange(tensor, "b t h d -> b h t d") for tensor in tensors]
