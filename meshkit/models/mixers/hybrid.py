"""Hybrid decoders: recurrent mixers in most layers, attention in every n-th (Qwen3-Next, Jamba, Nemotron-H).

The rest is `Decoder`. Dims as in `meshkit.models.llama`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.models.layers import GatedMLP, KernelMask
from meshkit.models.llama import LLAMA_PLAN, Decoder, LlamaConfig, dense_layer
from meshkit.models.mixers.gated_delta import GatedDeltaConfig, GatedDeltaNet, gated_delta_styles
from meshkit.models.mixers.mamba2 import Mamba2, Mamba2Config, mamba2_styles
from meshkit.plan import Plan

_MIXERS = "layers.*.mixer"


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """decoder: sizes of all but the mixers, and of the layers with attention. mixer: sizes of the others' mixers.

    attention_every: layer n (from 1 on) has attention if it is a multiple of this; with 0 none has.
    Raises: PlanError for a sliding window, which the state of a mixer does not follow.
    """

    decoder: LlamaConfig
    mixer: GatedDeltaConfig | Mamba2Config
    attention_every: int = 4

    def __post_init__(self) -> None:
        if self.attention_every < 0:
            raise PlanError(f"HybridConfig: attention_every is a number of layers, but is {self.attention_every}.")
        if self.decoder.sliding_window is not None:
            raise PlanError("HybridConfig: the state of a mixer follows no sliding window. Use sliding_window=None.")

    def has_attention(self, layer: int) -> bool:
        """Of a layer counted from 0."""
        return self.attention_every > 0 and (layer + 1) % self.attention_every == 0


class Hybrid(Decoder):
    """A decoder whose layers have a mixer or attention, and a SwiGLU each. `config` is that of the decoder."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config.decoder, _layers(config))


def _layers(config: HybridConfig) -> Iterator[nn.Module]:
    for layer in range(config.decoder.num_hidden_layers):
        yield dense_layer(config.decoder) if config.has_attention(layer) else MixerLayer(config)


class MixerLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        hidden, eps = config.decoder.hidden_size, config.decoder.rms_norm_eps
        self.mixer: nn.Module = (
            GatedDeltaNet(config.mixer, hidden_size=hidden, eps=eps)
            if isinstance(config.mixer, GatedDeltaConfig)
            else Mamba2(config.mixer, hidden_size=hidden, eps=eps)
        )
        self.mlp = GatedMLP(hidden, config.decoder.intermediate_size)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, x_BTC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, mask: KernelMask) -> Tensor:
        """cos and sin are not read: a state knows the order of its tokens."""
        x_BTC = x_BTC + self.mixer(self.input_layernorm(x_BTC), mask)
        out: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out


def hybrid_plan(config: HybridConfig) -> Plan:
    """The plan of a `Hybrid`: as `LLAMA_PLAN`, and whole heads of mixers on tp, which divides their key heads or groups."""
    kinds = {config.has_attention(layer) for layer in range(config.decoder.num_hidden_layers)}
    tensor = {
        name: style for name, style in LLAMA_PLAN.tensor.items() if True in kinds or "layers.*.self_attn" not in name
    }
    if False in kinds:
        tensor |= (
            gated_delta_styles(_MIXERS, config.mixer)
            if isinstance(config.mixer, GatedDeltaConfig)
            else mamba2_styles(_MIXERS, config.mixer)
        )
    return Plan(tensor=tensor, blocks=LLAMA_PLAN.blocks, units=LLAMA_PLAN.units, mlps=LLAMA_PLAN.mlps)
