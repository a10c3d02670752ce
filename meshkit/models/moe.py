"""Mixtral and Qwen3-MoE: the decoder of llama.py with mixtures of experts for feed-forwards. It knows no mesh.

Names are those of transformers without the leading `model.`, except that an expert has its gate and up projections apart:
`layers.0.mlp.experts.{gate,up,down}_proj`, stacked over the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshkit.auxiliary import AuxiliaryLosses
from meshkit.errors import PlanError
from meshkit.models.experts import MoE
from meshkit.models.llama import Attention, Decoder, DecoderLayer, LlamaConfig, dense_layer
from meshkit.models.router import RouterConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """The shape of a Mixtral, under the field names of config.json; intermediate_size is that of an expert.

    router_bias: choices are balanced by a bias, which no Mixtral of transformers has. router_losses: what training adds.
    config.json says neither.
    """

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_bias: bool = False
    router_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        self.router()

    def router(self) -> RouterConfig:
        """Raises: PlanError for numbers of experts that do not fit."""
        return RouterConfig(
            experts=self.num_local_experts,
            chosen=self.num_experts_per_tok,
            normalise=True,
            bias=self.router_bias,
            losses=self.router_losses,
        )


class Mixtral(Decoder):
    """Every layer's feed-forward is a mixture of experts (Jiang et al. 2024)."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config, (moe_layer(config, config.intermediate_size) for _ in range(config.num_hidden_layers)))


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(LlamaConfig):
    """The shape of a Qwen3-MoE, under the field names of config.json; intermediate_size is that of dense layers.

    Layer i has experts if i + 1 is a multiple of decoder_sparse_step and i is not one of mlp_only_layers.
    norm_topk_prob: the weights of a token's experts are divided by their sum. router_bias, router_losses: as in
    `MixtralConfig`.
    """

    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    qk_norm: bool = True
    router_bias: bool = False
    router_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        beyond = [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]
        if beyond:
            raise PlanError(
                f"Qwen3MoeConfig: mlp_only_layers has {beyond[0]}, but layers are 0 to {self.num_hidden_layers - 1}."
            )
        self.router()

    def router(self) -> RouterConfig:
        """Raises: PlanError for numbers of experts that do not fit."""
        return RouterConfig(
            experts=self.num_experts,
            chosen=self.num_experts_per_tok,
            normalise=self.norm_topk_prob,
            bias=self.router_bias,
            losses=self.router_losses,
        )

    def has_experts(self, layer: int) -> bool:
        return (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers


class Qwen3Moe(Decoder):
    """Norms of q and k, and mixtures of many small experts (Qwen3 2025), in all layers or some."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        layers = range(config.num_hidden_layers)
        size = config.moe_intermediate_size
        super().__init__(
            config, (moe_layer(config, size) if config.has_experts(layer) else dense_layer(config) for layer in layers)
        )


def moe_layer(config: MixtralConfig | Qwen3MoeConfig, expert_size: int) -> DecoderLayer:
    attention, mlp = Attention(config), MoE(config.hidden_size, expert_size, config.router())
    return DecoderLayer(attention, mlp, hidden_size=config.hidden_size, eps=config.rms_norm_eps)
