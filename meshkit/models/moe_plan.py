"""What happens to each part of a model with experts on each axis."""

from __future__ import annotations

from collections.abc import Iterable

from meshkit.models.deepseek import DeepseekV3Config
from meshkit.models.llama import LlamaConfig
from meshkit.models.llama_plan import LLAMA_PLAN
from meshkit.models.moe import MixtralConfig, Qwen3MoeConfig
from meshkit.plan import Plan, Style, column, enter, experts, per_head, row, sequence, vocab


def moe_plan(config: MixtralConfig | Qwen3MoeConfig | DeepseekV3Config) -> Plan:
    """The plan of a `Mixtral`, `Qwen3Moe` or `DeepseekV3`."""
    layers = range(config.num_hidden_layers)
    if isinstance(config, DeepseekV3Config):
        return _deepseek_plan(config)
    dense = [layer for layer in layers if isinstance(config, Qwen3MoeConfig) and not config.has_experts(layer)]
    return decoder_plan(len(layers), dense=dense)


def model_plan(config: LlamaConfig | MixtralConfig | Qwen3MoeConfig | DeepseekV3Config) -> Plan:
    """The plan of the model that `build_model` makes of the config."""
    return moe_plan(config) if isinstance(config, MixtralConfig | Qwen3MoeConfig | DeepseekV3Config) else LLAMA_PLAN


def decoder_plan(layers: int, *, dense: Iterable[int] = (), shared: bool = False) -> Plan:
    """The plan of a decoder as `Llama` whose layers have experts, but for those in `dense`.

    shared: every token visits shared experts too.
    """
    kept = {name: style for name, style in LLAMA_PLAN.tensor.items() if not name.startswith("layers.*.mlp")}
    tensor = {**kept, **_feed_forwards(layers, set(dense), shared)}
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
        tensor["mtp.*.{enorm,hnorm,eh_proj,norm}"] = sequence()
        blocks = ("layers.*", "mtp.*")
    return Plan(tensor=tensor, blocks=blocks, units=LLAMA_PLAN.units, mlps=_dense_feed_forwards(tensor))


def _latent_layer(layer: str, config: DeepseekV3Config) -> dict[str, Style]:
    """What makes latents is whole on every rank; what spreads them out has this rank's heads."""
    kv_size = config.qk_nope_head_dim + config.v_head_dim
    query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    return {
        f"{layer}.input_layernorm": sequence(),
        f"{layer}.self_attn": enter(query=query),
        f"{layer}.self_attn.{{q_a_proj,q_a_layernorm}}": per_head(optional=True),
        f"{layer}.self_attn.{{kv_a_proj_with_mqa,kv_a_layernorm}}": per_head(),
        f"{layer}.self_attn.{query}": column(group=config.head_dim),
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
    """Those without routed experts: of dense layers, and the experts that every token visits."""
    return tuple(pattern for pattern in tensor if pattern.endswith((".mlp", ".shared_experts")))


def _choice(numbers: set[int]) -> str:
    return "{" + ",".join(map(str, sorted(numbers))) + "}"


def _dense(mlp: str) -> dict[str, Style]:
    return {mlp: enter(), f"{mlp}.{{gate,up}}_proj": column(), f"{mlp}.down_proj": row()}


def _experts(mlp: str, shared: bool) -> dict[str, Style]:
    routed = {f"{mlp}.gate": sequence(), f"{mlp}.experts": experts()}
    return routed | (_dense(f"{mlp}.shared_experts") if shared else {})
