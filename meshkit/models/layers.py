"""Layers of decoders: rotary position embedding (RoPE), attention masks, attention, the gated feed-forward (SwiGLU MLP).

Dims: B batch, T query tokens, S key tokens, H query heads, K key/value heads, D head_dim, R = D/2 rotated pairs.
RMSNorm is torch's: `nn.RMSNorm` computes its statistics in fp32 for lower precisions and is one kernel on CUDA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from meshkit.core.noting import being_read
from meshkit.core.to_device import HOST
from meshkit.errors import PlanError
from meshkit.mask import Mask

# ---------------------------------------------------------------------------------------------- rotary positions


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        _refuse_shrinking(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp in between (Llama 3.1).

    A frequency is high when it turns more than `high_freq_factor` times in `original_max_position_embeddings` tokens,
    and low when it turns less than `low_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _refuse_shrinking(self.factor)
        if not self.low_freq_factor < self.high_freq_factor:
            raise PlanError(
                f"Llama3Scaling needs low_freq_factor < high_freq_factor, but got {self.low_freq_factor} and "
                f"{self.high_freq_factor}."
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): like Llama3Scaling with a ramp over the index of the frequency, and cos and sin scaled.

    attention_factor: what cos and sin are multiplied by; None means 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _refuse_shrinking(self.factor)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: base wavelength and how its frequencies are scaled for longer texts."""

    theta: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise PlanError(f"Rope needs theta > 1, but got {self.theta}.")


def _refuse_shrinking(factor: float) -> None:
    if factor < 1:
        raise PlanError(f"rope scaling needs factor >= 1, but got {factor}.")


def rope_frequencies(
    rope: Rope, head_dim: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """(radians per token [R], what cos and sin are multiplied by), rounded as transformers rounds them.

    Source: transformers `modeling_rope_utils`; the papers named at the scalings.
    """
    # transformers' order of operations: 1 / theta^x and not theta^-x, which rounds differently.
    powers_R = rope.theta ** (torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim)
    plain_R = 1.0 / powers_R
    match rope.scaling:
        case None:
            return plain_R, 1.0
        case LinearScaling(factor=factor):
            return plain_R / factor, 1.0
        case Llama3Scaling() as llama3:
            # 2 pi / frequency is the wavelength in tokens.
            turns_R = llama3.original_max_position_embeddings / (2 * math.pi / plain_R)
            ramp = (turns_R - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor)
            keep_R, factor, scale = ramp.clamp(0, 1), llama3.factor, 1.0
        case YarnScaling() as yarn:
            low = _yarn_index(yarn, rope.theta, head_dim, yarn.beta_fast)
            high = _yarn_index(yarn, rope.theta, head_dim, yarn.beta_slow)
            if yarn.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            # transformers' guard against a ramp of no width.
            width = high - low if high != low else 0.001
            index_R = torch.arange(head_dim // 2, device=device).to(dtype)
            keep_R, factor = 1 - ((index_R - low) / width).clamp(0, 1), yarn.factor
            # YaRN's temperature 1/sqrt(t) = 0.1 ln(s) + 1 (Peng et al. 2023, section 3.4), on cos and sin: on both q
            # and k, so that scores are multiplied by its square.
            scale = yarn.attention_factor if yarn.attention_factor is not None else 0.1 * math.log(factor) + 1.0
    return plain_R / factor * (1 - keep_R) + plain_R * keep_R, scale


def _yarn_index(yarn: YarnScaling, theta: float, head_dim: int, turns: float) -> float:
    """The (real-valued) index of the frequency that turns `turns` times in the original length."""
    return head_dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rope_tables(rope: Rope, position_ids: Tensor, head_dim: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [..., T, R] of `dtype`, of positions [..., T].

    Angles are computed in fp32, or fp64 for an fp64 model, never lower: bf16 does not hold the integers above 256.
    """
    precision = torch.promote_types(dtype, torch.float32)
    frequencies_R, scale = rope_frequencies(rope, head_dim, device=position_ids.device, dtype=precision)
    angles = position_ids.unsqueeze(-1).to(precision) * frequencies_R
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def apply_rope(x_BTHD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pair r = (x[r], x[r + D/2]) of every head by its angle: the halved layout of Hugging Face weights.

    interleaved: pair r is (x[2r], x[2r + 1]), DeepSeek's layout. It comes out halved, which q and k being alike cancels.
    """
    halves = rearrange(x_BTHD, "... (r two) -> ... r two", two=2).unbind(-1) if interleaved else x_BTHD.chunk(2, dim=-1)
    first, second = halves
    # Over the heads, of which a tensor-parallel rank may hold any number.
    cos, sin = cos_BTR.unsqueeze(-2), sin_BTR.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# --------------------------------------------------------------------------------------------- attention masks


class SplitAttention(Protocol):
    """A mask that computes attention itself, because not all keys are on this rank (context parallelism, KV cache)."""

    def windowed(self, window: int | None) -> SplitAttention: ...

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor: ...


class Documents:
    """Document mask: causal attention inside of packed documents. Each is computed alone, so no pairs across them are.

    documents_BT: the document number of each token. Inside a compiled block it is a dense mask, since other lengths would be
    another graph.
    """

    def __init__(self, documents_BT: Tensor, window: int | None) -> None:
        self.documents_BT, self.window = documents_BT, window

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Lengths of the documents, rows end to end."""
        batch, tokens = self.documents_BT.shape
        rows = torch.arange(batch, device=self.documents_BT.device) * (
            tokens + 1
        )  # no document goes on into the next row
        numbers = rearrange(self.documents_BT + rearrange(rows, "b -> b 1"), "b t -> (b t)")
        _, counts = numbers.unique_consecutive(return_counts=True)
        lengths: list[int] = counts.tolist()
        return lengths

    def dense(self) -> Tensor:
        """Who sees whom as a bool tensor [B, 1, T, T]."""
        batch, tokens = self.documents_BT.shape
        return _dense_mask(_visibility(self.documents_BT, self.window), batch, tokens, self.documents_BT.device)

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """[B, T, H, D of v]"""
        if torch.compiler.is_compiling():
            return attention(q_BTHD, k_BTKD, v_BTKD, self.dense())
        q, k, v = (
            rearrange(heads, "b t h d -> 1 (b t) h d").split(self.lengths, dim=1) for heads in (q_BTHD, k_BTKD, v_BTKD)
        )
        # Lengths are read back to the host, which a CPU run does not feel; on CUDA a BlockMask is used instead.
        outs = [attention(*document, self._within(document[0].shape[1])) for document in zip(q, k, v, strict=True)]
        return rearrange(torch.cat(outs, dim=1), "1 (b t) h d -> b t h d", b=len(q_BTHD))

    def _within(self, length: int) -> Tensor | None:
        """The dense window mask of a document of this length; None where plain causal attention is the same."""
        if self.window is None or self.window >= length:
            return None
        return _dense_mask(_visibility(None, self.window), 1, length, self.documents_BT.device)


# None is plain causal; a bool tensor [B, 1, T, S] is dense; a BlockMask is FlexAttention's.
KernelMask = Tensor | BlockMask | Documents | SplitAttention | None


def attention_mask(
    input_ids: Tensor,
    position_ids: Tensor | None,
    *,
    window: int | None,
    mask: Mask | SplitAttention | None = None,
) -> KernelMask:
    """Which keys each query sees, as kernels take it, once per forward for every layer.

    input_ids: [B, T]. mask: a `meshkit.Mask` of T tokens for every row, or of B*T, rows end to end; `window` cuts it. None:
    a query sees the keys of its own document that are not after it and, with `window`, less than `window` tokens before it;
    a document starts wherever a position of position_ids [B, T] is not the last one plus 1.
    Returns None where that is plain causal attention, which has the fastest kernels; else a BlockMask on CUDA, and elsewhere
    `Documents` or, of a description or a window alone, a dense bool tensor. On CUDA nothing is read back, so position_ids
    always lead to a BlockMask there.
    """
    batch, tokens = input_ids.shape
    if position_ids is not None and being_read():
        position_ids = None  # where documents begin is a matter of values, and attention is the same head by head
    if mask is not None:
        windowed = mask.windowed(window)
        return _of_description(windowed, batch, tokens, input_ids.device) if isinstance(windowed, Mask) else windowed
    # A window that no query reaches the end of is plain causal attention, for which kernels need no mask.
    if window is not None and window >= tokens:
        window = None
    documents_BT = None
    if position_ids is not None and input_ids.numel():
        starts = F.pad(position_ids.expand_as(input_ids).diff(dim=1) != 1, (1, 0))
        # Reading the answer would stall CUDA and cannot be traced by torch.compile.
        if input_ids.device != HOST or torch.compiler.is_compiling() or bool(starts.any()):
            documents_BT = starts.cumsum(dim=1)
    if not input_ids.numel() or (documents_BT is None and window is None):
        return None
    if documents_BT is not None and not input_ids.is_cuda:
        return Documents(documents_BT, window)
    sees = _visibility(documents_BT, window)
    if input_ids.is_cuda:
        blocks: BlockMask = _fused(create_block_mask)(
            # Without documents one mask serves all rows: FlexAttention broadcasts it over a batch of None.
            sees,
            batch if documents_BT is not None else None,
            None,
            tokens,
            tokens,
            device=input_ids.device,
        )
        return blocks
    return _dense_mask(sees, batch, tokens, input_ids.device)


def _of_description(mask: Mask, batch: int, tokens: int, device: torch.device) -> KernelMask:
    """The mask of a description (`Mask`) as kernels take it: one sequence for every row, or all rows end to end."""
    mask.refuse_misfit(batch, tokens)
    if mask.is_causal and mask.tokens == tokens:
        return None
    row_tokens = 0 if mask.tokens == tokens else tokens

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.shows(query + batch * row_tokens, key + batch * row_tokens)

    if device.type == "cuda":
        blocks: BlockMask = _fused(create_block_mask)(sees, batch, None, tokens, tokens, device=device)
        return blocks
    return _dense_mask(sees, batch, tokens, device)


Visibility = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _visibility(documents_BT: Tensor | None, window: int | None) -> Visibility:
    """The visibility rule as FlexAttention's mask_mod: (batch, head, query, key) -> visible."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        if documents_BT is not None:
            visible = visible & (documents_BT[batch, query] == documents_BT[batch, key])
        return visible

    return sees


def _dense_mask(sees: Visibility, batch: int, tokens: int, device: torch.device) -> Tensor:
    """The rule as a bool tensor [B, 1, T, T]."""
    token = torch.arange(tokens, device=device)
    batch_B111 = rearrange(torch.arange(batch, device=device), "b -> b 1 1 1")
    visible = sees(batch_B111, batch_B111, rearrange(token, "t -> t 1"), token)
    return visible.expand(batch, 1, tokens, tokens)


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FlexAttention, compiled: in eager mode it would materialise all pairs of tokens."""
    return function if torch.compiler.is_compiling() else _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def attention(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: KernelMask) -> Tensor:
    """softmax(q k' / sqrt(D)) v over the keys that `mask` shows; query head h reads key/value head h // (H/K).

    Returns [B, T, H, D]. Numbers of heads are those of the arguments, so a rank may hold any of them. Heads of v may be
    smaller than D, and those that are returned are then as small.
    """
    if isinstance(mask, Documents):
        return mask.attend(q_BTHD, k_BSKD, v_BSKD)
    if mask is not None and not isinstance(mask, Tensor | BlockMask):
        # A split attention sends k and v in one message: v is padded to the size of k, and the zeros are cut off again.
        size = v_BSKD.shape[-1]
        return mask.attend(q_BTHD, k_BSKD, F.pad(v_BSKD, (0, k_BSKD.shape[-1] - size)))[..., :size]
    # [Note: views where a token is drawn]
    # A pattern takes 2 us longer than the view that it names (benchmarks/einops_cost.py). That is nothing in a training step,
    # and 2 % of a forward of one token a row, of which generation runs thousands: attention has views.
    # SDPA and FlexAttention take heads before tokens, and read strides.
    q, k, v = q_BTHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        shown: Tensor = _fused(flex_attention)(q, k, v, block_mask=mask, enable_gqa=grouped)
        return shown.transpose(1, 2)
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # CUDA's fp32 kernel takes no grouped heads (GQA): without this, SDPA would fall back to materialising all scores.
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
        grouped = False
    # is_causal and not a dense causal mask: with a mask SDPA has no flash kernel.
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


# ------------------------------------------------------------------------------------------------ feed-forward


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.gate_proj(x), self.up_proj(x))

    # Steps of their own, so that recompute can run these cheap ones again: see meshkit/memory/_recompute.py.

    def finish(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.product(gate, up))
        return out

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up
