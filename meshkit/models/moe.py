"""Mixtral and Qwen3-MoE: the decoder of llama.py with mixtures of experts (MoE) as feed-forwards. It knows no mesh.

Names are those of transformers without the leading `model.`, except that an expert has its gate and up projections apart:
`layers.0.mlp.experts.{gate,up,down}_proj`, stacked over the experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshkit.errors import PlanError
from meshkit.models.deepseek import DeepseekV3Config
from meshkit.models.experts import MoE
from meshkit.models.llama import LLAMA_PLAN, Attention, Decoder, DecoderLayer, LlamaConfig, dense_layer
from meshkit.models.router import RouterConfig
from meshkit.moe.aux_loss import AuxiliaryLosses
from meshkit.plan import Plan, Style, column, enter, experts, per_head, row, sequence, vocab


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
        # A dataclass's own __post_init__ replaces its base's, whose checks hold here too.
        LlamaConfig.__post_init__(self)
        self.router()

    def router(self) -> RouterConfig:
        """Raises: PlanError for numbers of experts that do not fit."""
        return RouterConfig(
            experts=self.num_local_experts,
            chosen=self.num_experts_per_tok,
            # softmax of all and division by the sum of the chosen is the softmax of the chosen logits, as Mixtral's
            # paper has it.
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
        # Counted from 1, as in transformers: with a step of 2 layers 1, 3, 5 have experts.
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


# Plans: the tensor-parallel style of each module of a model with experts.


def moe_plan(config: MixtralConfig | Qwen3MoeConfig | DeepseekV3Config) -> Plan:
    """The plan of a `Mixtral`, `Qwen3Moe` or `DeepseekV3`."""
    layers = range(config.num_hidden_layers)
    if isinstance(config, DeepseekV3Config):
        return _deepseek_plan(config)
    # By number, since a pattern of a plan names a layer and cannot ask what it holds.
    dense = [layer for layer in layers if isinstance(config, Qwen3MoeConfig) and not config.has_experts(layer)]
    return decoder_plan(len(layers), dense=dense)


def model_plan(config: LlamaConfig | MixtralConfig | Qwen3MoeConfig | DeepseekV3Config) -> Plan:
    """The plan of the model that `build_model` makes of the config."""
    return moe_plan(config) if isinstance(config, MixtralConfig | Qwen3MoeConfig | DeepseekV3Config) else LLAMA_PLAN


def decoder_plan(layers: int, *, dense: Iterable[int] = (), shared: bool = False) -> Plan:
    """The plan of a decoder as `Llama` whose layers have experts, but for those in `dense`.

    shared: every token visits shared experts too.
    """
    without_mlps = {name: style for name, style in LLAMA_PLAN.tensor.items() if not name.startswith("layers.*.mlp")}
    tensor = {**without_mlps, **_feed_forwards(layers, set(dense), shared)}
    return Plan(tensor=tensor, blocks=LLAMA_PLAN.blocks, units=LLAMA_PLAN.units, mlps=_dense_feed_forwards(tensor))


def _deepseek_plan(config: DeepseekV3Config) -> Plan:
    layers, shared = config.num_hidden_layers, config.n_shared_experts > 0
    tensor: dict[str, Style] = {
        "embed_tokens": vocab(),
        **_latent_layer("layers.*", config),
        **_feed_forwards(layers, set(range(config.first_k_dense_replace)), shared),
        "norm": sequence(),
        "lm_head": vocab(),
    }
    blocks: tuple[str, ...] = ("layers.*",)
    if config.num_nextn_predict_layers:
        tensor |= _latent_layer("mtp.*.layer", config) | _experts("mtp.*.layer.mlp", shared)
        # They see each token alone, so they are whole on every rank of tp and run on its part of the tokens.
        tensor["mtp.*.{enorm,hnorm,eh_proj,norm}"] = sequence()
        blocks = ("layers.*", "mtp.*")
    return Plan(tensor=tensor, blocks=blocks, units=LLAMA_PLAN.units, mlps=_dense_feed_forwards(tensor))


def _latent_layer(layer: str, config: DeepseekV3Config) -> dict[str, Style]:
    """Projections to latents are replicated; projections from latents to heads are split by heads."""
    kv_size = config.qk_nope_head_dim + config.v_head_dim
    query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    return {
        f"{layer}.input_layernorm": sequence(),
        # The region is entered before the projections to latents, which are small and computed whole on every rank;
        # their gradients come from a rank's heads alone and are summed, as per_head() says.
        f"{layer}.self_attn": enter(query=query),
        f"{layer}.self_attn.{{q_a_proj,q_a_layernorm}}": per_head(optional=True),
        f"{layer}.self_attn.{{kv_a_proj_with_mqa,kv_a_layernorm}}": per_head(),
        f"{layer}.self_attn.{query}": column(group=config.head_dim),
        # A head's keys and values lie side by side in the output: a cut elsewhere would part them.
        f"{layer}.self_attn.kv_b_proj": column(group=kv_size),
        f"{layer}.self_attn.o_proj": row(group=config.v_head_dim),
        f"{layer}.post_attention_layernorm": sequence(),
    }


def _feed_forwards(layers: int, dense: set[int], shared: bool) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    if dense:
        styles |= _dense(f"layers.{_choice(dense)}.mlp")
    if sparse := set(range(layers)) - dense:
        styles |= _experts(f"layers.{_choice(sparse)}.mlp", shared)
    return styles


def _dense_feed_forwards(tensor: dict[str, Style]) -> tuple[str, ...]:
    """Patterns of dense feed-forwards: those of dense layers, and shared experts."""
    return tuple(pattern for pattern in tensor if pattern.endswith((".mlp", ".shared_experts")))


def _choice(numbers: set[int]) -> str:
    return "{" + ",".join(map(str, sorted(numbers))) + "}"


def _dense(mlp: str) -> dict[str, Style]:
    return {mlp: enter(), f"{mlp}.{{gate,up}}_proj": column(), f"{mlp}.down_proj": row()}


def _experts(mlp: str, shared: bool) -> dict[str, Style]:
    # The router is whole on every rank: each token's choice needs the scores of all experts.
    routed = {f"{mlp}.gate": sequence(), f"{mlp}.experts": experts()}
    return routed | (_dense(f"{mlp}.shared_experts") if shared else {})
