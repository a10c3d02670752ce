"""A tiny config of any kind that transformers has: fields are shrunk by their names, so that new models need no line here.

Widths differ from each other and from the vocabulary, so that a dim that is taken for another one shows.
"""

from __future__ import annotations

import re
from inspect import signature
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN = 92, 32, 4, 2, 8, 4, 2
DATA_IDS = (4, 80)  # of tokens in batches: those below and above stand for padding, images, ...
WINDOW = 4  # of sliding windows and chunks: shorter than a row

# The first pattern that finds something in a field's name says its value, if it was a whole number. A function gets the
# number that it was.
SIZES: list[tuple[str, Any]] = [
    (r"^(pad)_token_(id|index)$", 0),
    (r"^(bos|cls|decoder_start)_token_(id|index)$", 1),
    (r"^(eos|sep|forced_eos)_token_(id|index)$", 2),
    (r"_(token_id|token_index|index)$", lambda was: was if was < 4 else DATA_IDS[1] + was % (VOCABULARY - DATA_IDS[1])),
    (r"^type_vocab_size$|task_type_vocab", lambda was: was),
    (r"vocab(_size)?$|vocab_size_per_layer_input", VOCABULARY),
    (r"layers_per_stack", 2),
    (r"(^|_)(n_layers?|num_(hidden_|decoder_|encoder_)?layers|(de|en)coder_layers|num_blocks)$", 2),  # or 4: see `layers`
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index", 3),
    (r"(sparse_step|layer_interval|_period|every_n_layers|window_pattern|layer_group_size)$", lambda was: min(was, 2)),
    (r"layer_offset$", lambda was: min(was, 1)),
    (r"num_nextn_predict_layers|num_kv_shared_layers", 0),
    (r"max_window_layers", 1),
    (r"experts_per_tok|top_?k$|moe_k$", lambda was: min(was, CHOSEN)),
    (r"topk_group", 1),
    (r"^n_group$|num_expert_group$", lambda was: min(was, 2)),
    (r"shared_experts$", lambda was: min(was, 1)),
    (r"(experts|moe_num_experts)$", EXPERTS),
    (r"zero_expert_num", 2),
    (r"(num_key_value_heads|num_kv_heads|num_query_groups)$", lambda was: min(was, KV_HEADS)),
    (r"num_key_heads$", KV_HEADS),
    (r"num_value_heads$", HEADS),
    (r"mamba_d_head$|mamba_headdim$", 2 * HEAD_DIM),  # times the heads it is twice the width
    (r"dim_head$|d_head$|attention_head_size$|kv_channels$|headdim$", HEAD_DIM),
    (r"heads?$", HEADS),
    (r"qk_nope_head_dim|v_head_dim", HEAD_DIM),
    (r"qk_rope_head_dim|^rotary_dim$", 4),
    (r"qk_head_dim", HEAD_DIM + 4),
    (r"head_dim$", HEAD_DIM),
    (r"q_lora_rank|o_lora_rank", 12),
    (r"kv_lora_rank", 10),
    (r"laurel_rank|adapter_rank|gated_norm_rank|time_step_rank|dt_rank|d_rel$", 6),
    (r"index_topk", 5),
    (r"shared_(expert_)?intermediate_size|shared_expert", lambda was: 40 if was else 0),
    (r"(moe|expert).*(intermediate|ffn|hidden)", 24),
    (r"intermediate_size|ffn|d_inner|dff|dim_ff|feed_forward_size", 48),
    (r"embedding_size|embed_proj_dim", 20),
    (r"attention_hidden_size|mamba_d_ssm", 2 * WIDTH),
    (r"router_hidden_size|hidden_size_per_layer_input", 14),
    (r"hidden_size|d_model|n_embd|emb(edding)?_dim|lru_width|backbone_hidden", WIDTH),
    (r"state_size|d_state", 6),
    (r"n_?groups$", lambda was: min(was, 2)),
    (r"max_.*positions?|max_position|n_positions|n_ctx|max_seq_len|context_length|model_max_length|rel_extent", 64),
    (r"sliding_window|window_size|local_attention|chunk_(size|len|length)$|index_block_size", lambda was: was and WINDOW),
    (r"query_pre_attn_scalar|dim_model_base|multiple_of$", HEAD_DIM),
    (r"hc_sinkhorn_iters", 3),
    (r"(^|_)image_size$", 16),
    (r"num_buckets|num_centroids|prompt_length|prompt_types|segment_types|prompt_mid_dim", 8),
]  # fmt: skip
UNSET = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": KV_HEADS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": CHOSEN,
}
OFF = r"drop|jitter|noise|mask_(time|feature)_prob"  # what draws numbers while it trains
SCALES = r"(?<!dim_)multiplier$|_scale$|scaling$|scaling_factor$"  # a factor of 1 could be lost without a trace
LAYER_COUNTS = r"^(num_hidden_layers|n_layers?|num_layers)$"


def tiny(kind: type[PretrainedConfig], **changed: Any) -> PretrainedConfig:
    """The config with few and small layers, and nothing at random; with these fields as they are given."""
    was = kind()
    names = [name for name in signature(kind.__init__).parameters if name not in ("self", "kwargs", "args")]
    values = {name: _value(was, name) for name in names}
    count = next((value for name, value in values.items() if re.search(LAYER_COUNTS, name)), None)
    count = _value(was, "num_hidden_layers") if count is None else count
    lists = {name: value for name, value in values.items() if _per_layer(value, count)}
    layers = 4 if any(len({str(each) for each in value}) > 1 for value in lists.values()) else 2
    fields = {name: _shrunk(name, value, layers) for name, value in values.items()}
    fields |= {name: _kinds(value, layers) for name, value in lists.items()}
    if "kv_lora_rank" in fields:  # latent attention: every query head has its own keys, and one part of them rotates
        fields |= {"num_key_value_heads": HEADS, "head_dim": fields.get("qk_rope_head_dim")}
    fields |= {"is_decoder": True}
    fields = {name: value for name, value in fields.items() if name in names and value is not None}
    config = kind(**fields | changed)
    config._experts_implementation = "eager"  # the others have no fp64
    return config


def _value(config: PretrainedConfig, name: str) -> Any:
    """Fields that differ between layers can be read of a dict only, and some fields of a class are of none of its objects."""
    try:
        return getattr(config, name, None)
    except Exception:
        return config.to_dict().get(name)


def _shrunk(name: str, was: Any, layers: int) -> Any:
    """None: it stays as it was."""
    if isinstance(was, PretrainedConfig):
        return tiny(type(was))
    if was is None:
        return UNSET.get(name)
    if isinstance(was, bool):
        return False if was and re.search("kernel|cuda", name) else None
    if isinstance(was, float):
        if re.search(OFF, name):
            return 0.0
        return 0.75 if was == 1.0 and re.search(SCALES, name) else None
    if name == "eos_token_id":
        return 2
    if name == "intermediate_size" and isinstance(was, list):
        return [48] * layers
    if not isinstance(was, int):
        return None
    if re.search(OFF, name):
        return 0
    if re.search(LAYER_COUNTS, name):
        return layers
    for pattern, value in SIZES:
        if re.search(pattern, name):
            return value(was) if callable(value) else value
    return None


def _per_layer(value: Any, count: int | None) -> bool:
    return isinstance(value, list) and len(value) == count and not isinstance(value[0], float)


def _kinds(values: list[Any], layers: int) -> list[Any]:
    """Each kind of layer at least once: kinds that alternate do so again, others follow each other."""
    values = [HEADS if isinstance(each, int) and each > 4 else each for each in values]
    kinds = list(dict.fromkeys(map(_frozen, values)))
    turns = sum(one != other for one, other in pairwise(values))
    alternate = turns > len(kinds) - 1
    return [kinds[index % len(kinds) if alternate else min(index, len(kinds) - 1)] for index in range(layers)]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def without_randomness(model: Any) -> None:
    """Dropout that no field of the config turns off."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_p", "layerdrop"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
