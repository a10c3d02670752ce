"""Gated DeltaNet, the linear attention of Qwen3-Next. Single-device code that knows no mesh.

Dims: B batch, T tokens, G key heads, H value heads, K and V their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.core.linear_attention import scan_flops
from meshkit.errors import PlanError
from meshkit.models.layers import KernelMask
from meshkit.models.mixers.over_tokens import linear_attention, short_convolution
from meshkit.plan import Init, Style, column, enter, per_head, row


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Sizes of a mixer. value_heads is a multiple of key_heads; width: tokens that the short convolution reads.

    Raises: PlanError for sizes that do not fit together.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int = 4

    def __post_init__(self) -> None:
        sizes = (self.key_heads, self.value_heads, self.key_size, self.value_size, self.width)
        if min(sizes) < 1 or self.value_heads % self.key_heads:
            raise PlanError(
                f"GatedDeltaConfig: sizes are at least 1, and value_heads={self.value_heads} a multiple of "
                f"key_heads={self.key_heads}."
            )


class GatedDeltaNet(nn.Module):
    """Queries, keys and values through a short convolution, the gated delta rule, a gated norm of each head.

    The decay of a head is exp(-exp(A_log) softplus(a_proj x + dt_bias)), beta is sigmoid(b_proj x).
    Source: Yang et al. 2024, "Gated Delta Networks"; as in transformers' Qwen3-Next, whose joined projections are apart here.
    """

    def __init__(self, config: GatedDeltaConfig, *, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.key_size, self.value_size = config.key_size, config.value_size
        keys, values = config.key_heads * config.key_size, config.value_heads * config.value_size
        self.q_proj, self.k_proj = (nn.Linear(hidden_size, keys, bias=False) for _ in range(2))
        self.v_proj, self.z_proj = (nn.Linear(hidden_size, values, bias=False) for _ in range(2))
        self.a_proj, self.b_proj = (nn.Linear(hidden_size, config.value_heads, bias=False) for _ in range(2))
        self.q_conv, self.k_conv = (nn.Parameter(torch.randn(keys, config.width) * 0.02) for _ in range(2))
        self.v_conv = nn.Parameter(torch.randn(values, config.width) * 0.02)
        self.A_log = nn.Parameter(torch.empty(config.value_heads).uniform_(-2, 2))
        self.dt_bias = nn.Parameter(torch.ones(config.value_heads))
        self.norm = nn.RMSNorm(config.value_size, eps=eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        # Rates between 0.14 and 7.4, for `init_weights`.
        self.first_value = {"A_log": Init("uniform", 2.0), "dt_bias": Init("constant", 1.0)}
        self.scan_flops = scan_flops(config.value_heads, config.key_size, config.value_size, delta=True)

    def forward(self, x_BTC: Tensor, mask: KernelMask) -> Tensor:
        q, k, v = self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        # In one call, which over ranks is one message.
        weight = torch.cat((self.q_conv, self.k_conv, self.v_conv))
        mixed = F.silu(short_convolution(torch.cat((q, k, v), -1), weight, mask))
        q, k, v = mixed.split((q.shape[-1], k.shape[-1], v.shape[-1]), -1)
        q_BTGK = _unit(q.unflatten(-1, (-1, self.key_size))) * self.key_size**-0.5
        k_BTGK = _unit(k.unflatten(-1, (-1, self.key_size)))
        v_BTHV = v.unflatten(-1, (-1, self.value_size))
        precise = torch.promote_types(x_BTC.dtype, torch.float32)
        rate_H = self.A_log.to(precise).exp()
        log_decay_BTH = -rate_H * F.softplus(self.a_proj(x_BTC).to(precise) + self.dt_bias)
        out_BTHV = linear_attention(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, self.b_proj(x_BTC).sigmoid(), mask)
        gate_BTHV = self.z_proj(x_BTC).unflatten(-1, (-1, self.value_size))
        out: Tensor = self.o_proj((self.norm(out_BTHV) * F.silu(gate_BTHV)).flatten(-2))
        return out


def _unit(x: Tensor) -> Tensor:
    # As in flash-linear-attention: eps is under the root.
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def gated_delta_styles(name: str, config: GatedDeltaConfig) -> dict[str, Style]:
    """Its tensor plan: whole key heads with the value heads that read them; tp divides key_heads."""
    return {
        name: enter(split=("q_conv", "k_conv", "v_conv", "A_log", "dt_bias")),
        f"{name}.{{q,k}}_proj": column(group=config.key_size),
        f"{name}.{{v,z}}_proj": column(group=config.value_size),
        f"{name}.{{a,b}}_proj": column(),
        f"{name}.norm": per_head(),
        f"{name}.o_proj": row(group=config.value_size),
    }
