"""Mamba-2, a state space model (SSD). Single-device code that knows no mesh.

Dims: B batch, T tokens, G groups, H heads, N state_size, P head_size, I = H * P.
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
from meshkit.plan import Init, Style, column, enter, row


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of a mixer. heads is a multiple of groups, whose heads share B and C and are normalised together; width: tokens
    that the short convolution reads.

    Raises: PlanError for sizes that do not fit together.
    """

    heads: int
    head_size: int
    state_size: int
    groups: int = 1
    width: int = 4

    def __post_init__(self) -> None:
        if min(self.heads, self.head_size, self.state_size, self.groups, self.width) < 1 or self.heads % self.groups:
            raise PlanError(
                f"Mamba2Config: sizes are at least 1, and heads={self.heads} a multiple of groups={self.groups}."
            )


class Mamba2(nn.Module):
    """x, B and C through a short convolution, the scan S = exp(-exp(A_log) dt) S + dt B x', its readout by C, a gated norm.

    dt is softplus(dt_proj u + dt_bias) of each head.
    Source: Dao and Gu 2024; as in transformers' Mamba-2, whose joined projection is apart here.
    """

    def __init__(self, config: Mamba2Config, *, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.head_size, self.state_size, self.eps = config.head_size, config.state_size, eps
        inner, states = config.heads * config.head_size, config.groups * config.state_size
        self.group_size = inner // config.groups
        self.x_proj, self.z_proj = (nn.Linear(hidden_size, inner, bias=False) for _ in range(2))
        self.B_proj, self.C_proj = (nn.Linear(hidden_size, states, bias=False) for _ in range(2))
        self.dt_proj = nn.Linear(hidden_size, config.heads, bias=False)
        self.x_conv = nn.Parameter(torch.randn(inner, config.width) * 0.02)
        self.B_conv, self.C_conv = (nn.Parameter(torch.randn(states, config.width) * 0.02) for _ in range(2))
        self.x_conv_bias = nn.Parameter(torch.zeros(inner))
        self.B_conv_bias, self.C_conv_bias = (nn.Parameter(torch.zeros(states)) for _ in range(2))
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(-2, 2))
        self.D = nn.Parameter(torch.ones(config.heads))
        self.dt_bias = nn.Parameter(torch.full((config.heads,), FIRST_DT_BIAS))
        self.norm_weight = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        # Rates between 0.14 and 7.4 and steps of 0.01, for `init_weights`.
        zeros = {f"{each}_conv_bias": Init("constant", 0.0) for each in "xBC"}
        self.first_value = {**zeros, "A_log": Init("uniform", 2.0), "dt_bias": Init("constant", FIRST_DT_BIAS)}
        self.scan_flops = scan_flops(config.heads, config.state_size, config.head_size, delta=False)

    def forward(self, u_BTC: Tensor, mask: KernelMask) -> Tensor:
        x, b, c = self.x_proj(u_BTC), self.B_proj(u_BTC), self.C_proj(u_BTC)
        # In one call, which over ranks is one message.
        weight = torch.cat((self.x_conv, self.B_conv, self.C_conv))
        bias = torch.cat((self.x_conv_bias, self.B_conv_bias, self.C_conv_bias))
        mixed = F.silu(short_convolution(torch.cat((x, b, c), -1), weight, mask) + bias)
        x, b, c = mixed.split((x.shape[-1], b.shape[-1], c.shape[-1]), -1)
        x_BTHP = x.unflatten(-1, (-1, self.head_size))
        b_BTGN, c_BTGN = (each.unflatten(-1, (-1, self.state_size)) for each in (b, c))
        precise = torch.promote_types(u_BTC.dtype, torch.float32)
        dt_BTH = F.softplus(self.dt_proj(u_BTC).to(precise) + self.dt_bias)
        log_decay_BTH = -self.A_log.to(precise).exp() * dt_BTH
        added_BTHP = x_BTHP * dt_BTH.unsqueeze(-1).to(x.dtype)
        out_BTHP = linear_attention(c_BTGN, b_BTGN, added_BTHP, log_decay_BTH, None, mask)
        out_BTI = (out_BTHP + x_BTHP * self.D.unsqueeze(-1)).flatten(-2)
        gated = (out_BTI * F.silu(self.z_proj(u_BTC))).unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(gated, (self.group_size,), eps=self.eps).flatten(-2)
        out: Tensor = self.out_proj(normed * self.norm_weight)
        return out


FIRST_DT_BIAS = -4.6
"""softplus of it is 0.01, the middle of the steps that Mamba-2 begins with"""


def mamba2_styles(name: str, config: Mamba2Config) -> dict[str, Style]:
    """Its tensor plan: whole groups with their heads; tp divides groups."""
    convolutions = tuple(f"{each}_conv{kind}" for each in "xBC" for kind in ("", "_bias"))
    return {
        name: enter(split=(*convolutions, "A_log", "D", "dt_bias", "norm_weight")),
        f"{name}.{{x,z}}_proj": column(group=config.heads // config.groups * config.head_size),
        f"{name}.{{B,C}}_proj": column(group=config.state_size),
        f"{name}.dt_proj": column(group=config.heads // config.groups),
        f"{name}.out_proj": row(group=config.heads // config.groups * config.head_size),
    }
