"""Layers of decoders: rotary position embedding (RoPE), attention masks, attention, the gated feed-forward (SwiGLU MLP).

Dims: B batch, T query tokens, S key tokens, H query heads, K key/value heads, D head_dim, R = D/2 rotated pairs.
RMSNorm is torch's: `nn.RMSNorm` computes its statistics in fp32 for lower precisions and is one kernel on CUDA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.masked_attention import document_ends, mask_table, masked_attention
from meshkit.core.noting import being_read
from meshkit.core.to_device import on_host
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
    cos, sin = angles.cos(), angles.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


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


class MaskedRows:
    """A `Mask` of known values, as the operator takes it: one launch for packed documents on CUDA, tiles for others.

    table, ends: see `meshkit.core.masked_attention`. joined: whether the mask is of all rows end to end, or of each row.
    """

    def __init__(self, mask: Mask, rows: int, tokens: int, device: torch.device) -> None:
        self.joined = mask.tokens != tokens
        self.table = mask_table(mask)
        _torch.any_length(self.table)  # of a compiled block: other documents, the same graph
        self.ends = document_ends(mask, 1 if self.joined else rows, device)

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """[B, T, H, D of v]"""
        rows, (size, of_v) = len(q_BTHD), (q_BTHD.shape[-1], v_BTKD.shape[-1])
        # Kernels take one size of heads, on CUDA a multiple of 8. Zeros add nothing to scores, and are cut off again.
        width = max(size, of_v)
        width += -width % 8 if q_BTHD.is_cuda else 0
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q_BTHD, k_BTKD, v_BTKD))
        if self.joined:
            q, k, v = (rearrange(x, "b t h d -> 1 (b t) h d") for x in (q, k, v))
        out: Tensor = masked_attention(q, k, v, self.table, self.ends, size**-0.5)[0]
        if self.joined:
            out = rearrange(out, "1 (b t) h d -> b t h d", b=rows)
        return out[..., :of_v]


# None is plain causal; a bool tensor [B, 1, T, S] is dense.
KernelMask = Tensor | MaskedRows | SplitAttention | None


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
    Returns None where that is plain causal attention, which has the fastest kernels; else `MaskedRows`. Where documents begin
    is read on the host: from the host's copy of position_ids if they came by `meshkit.core.to_device`, as `forward_backward`
    brings them, and else the host waits for the device, once. A model compiled as a whole has a break of its graph here.
    """
    rows, tokens = input_ids.shape
    if being_read():
        # Where documents begin is a matter of values, and attention is the same head by head.
        return _to_be_read(input_ids, window, mask)
    if mask is None and position_ids is None and (window is None or window >= tokens):
        return None
    if isinstance(mask, Mask | None):
        shown: MaskedRows | None = _masked_rows(rows, tokens, input_ids.device, position_ids, window, mask)
        return shown
    return mask.windowed(window)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]  # torch types no such decorators
def _masked_rows(
    rows: int, tokens: int, device: torch.device, position_ids: Tensor | None, window: int | None, mask: Mask | None
) -> MaskedRows | None:
    if mask is None and position_ids is not None and rows * tokens:
        positions = on_host(position_ids).expand(rows, tokens)
        if bool((positions.diff(dim=1) != 1).any()):
            mask = Mask.from_positions(positions)
    mask = (Mask.causal(tokens) if mask is None else mask).windowed(window)
    mask.refuse_misfit(rows, tokens)
    return None if _is_plain(mask, tokens) or not rows * tokens else MaskedRows(mask, rows, tokens, device)


def _is_plain(mask: Mask, tokens: int) -> bool:
    """Whether each row is plain causal attention."""
    # A window of all tokens cuts nothing, and what shows the same pairs is equal afterwards.
    return mask.tokens == tokens and mask.windowed(tokens or None) == Mask.causal(tokens, window=tokens or None)


def _to_be_read(
    input_ids: Tensor, window: int | None, mask: Mask | SplitAttention | None
) -> Tensor | SplitAttention | None:
    """The mask of a program without values: a dense one, of operators whose rules are known."""
    rows, tokens = input_ids.shape
    if not isinstance(mask, Mask | None):
        return mask.windowed(window)
    mask = (Mask.causal(tokens) if mask is None else mask).windowed(window)
    mask.refuse_misfit(rows, tokens)
    if _is_plain(mask, tokens) or not input_ids.numel():
        return None
    token = torch.arange(tokens, device=input_ids.device)
    if mask.tokens == tokens:
        return mask.shows(rearrange(token, "t -> t 1"), token).expand(rows, 1, tokens, tokens)
    first_B111 = rearrange(torch.arange(rows, device=input_ids.device) * tokens, "b -> b 1 1 1")
    return mask.shows(first_B111 + rearrange(token, "t -> t 1"), first_B111 + token)


def attention(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: KernelMask) -> Tensor:
    """softmax(q k' / sqrt(D)) v over the keys that `mask` shows; query head h reads key/value head h // (H/K).

    Returns [B, T, H, D]. Numbers of heads are those of the arguments, so a rank may hold any of them. Heads of v may be
    smaller than D, and those that are returned are then as small.
    """
    if isinstance(mask, MaskedRows):
        return mask.attend(q_BTHD, k_BSKD, v_BSKD)
    if mask is not None and not isinstance(mask, Tensor):
        # A split attention sends k and v in one message: v is padded to the size of k, and the zeros are cut off again.
        size, of_k = v_BSKD.shape[-1], k_BSKD.shape[-1]
        if size == of_k:
            return mask.attend(q_BTHD, k_BSKD, v_BSKD)
        return mask.attend(q_BTHD, k_BSKD, F.pad(v_BSKD, (0, of_k - size)))[..., :size]
    # [Note: views where a token is drawn]
    # A pattern takes 2 us longer than the view that it names (benchmarks/einops_cost.py). That is nothing in a training step,
    # and 2 % of a forward of one token a row, of which generation runs thousands: attention has views.
    # SDPA takes heads before tokens, and reads strides.
    q, k, v = q_BTHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
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
