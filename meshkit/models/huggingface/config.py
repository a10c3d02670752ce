"""config.json of Hugging Face folders: fields and defaults of each model family, and features that are refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshkit.core.digests import check_digests
from meshkit.core.read_file import read_json_object
from meshkit.errors import CheckpointError, PlanError
from meshkit.models.deepseek import DeepseekV3Config
from meshkit.models.layers import LinearScaling, Llama3Scaling, Rope, YarnScaling
from meshkit.models.llama import LlamaConfig
from meshkit.models.moe import MixtralConfig, Qwen3MoeConfig

CONFIG_FILE = "config.json"

# A MixtralConfig and a Qwen3MoeConfig are LlamaConfigs.
ModelConfig = LlamaConfig | DeepseekV3Config


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A model_type: its class in transformers, and that class's defaults for fields that config.json leaves out."""

    architecture: str
    max_position_embeddings: int
    biases: bool | None = False  # of q, k, v alone; None: `attention_bias` says, and means o_proj too
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    model: str = "Llama"  # ours


# Defaults matter: transformers leaves fields out of config.json that equal its class's default.
FAMILIES = {
    "llama": _Family(architecture="LlamaForCausalLM", max_position_embeddings=2048, biases=None),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", max_position_embeddings=32_768, biases=True),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM", max_position_embeddings=32_768, biases=None, qk_norm=True, head_dim=128
    ),
    "mistral": _Family(architecture="MistralForCausalLM", max_position_embeddings=131_072),
    "mixtral": _Family(
        architecture="MixtralForCausalLM",
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        model="Mixtral",
    ),
    "qwen3_moe": _Family(
        architecture="Qwen3MoeForCausalLM", max_position_embeddings=32_768, biases=None, qk_norm=True, model="Qwen3Moe"
    ),
    "deepseek_v3": _Family(
        architecture="DeepseekV3ForCausalLM", max_position_embeddings=4096, biases=None, model="DeepseekV3"
    ),
}
DEFAULT_WINDOW = 4096  # of Mistral, and of Qwen with use_sliding_window, in transformers

# Features of these families that the decoder does not have, and the value that means "not used".
ABSENT_FEATURES: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "router_jitter_noise": 0.0,  # Mixtral
    "scoring_func": "sigmoid",  # DeepSeek's own folders, and so on
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
ROPE_SCALINGS = {"default": None, "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields of DeepSeek-V3, and what transformers takes where config.json has none.
DEEPSEEK_DEFAULTS: dict[str, object] = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "rope_interleave": True,
}

# --------------------------------------------------------------------------------------------------------- reading


def config_from_pretrained(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read config.json of a model of one of FAMILIES, as transformers 4 or 5 wrote it.

    Returns the config of the model of ours: `build_model` makes it.
    Raises: CheckpointError if the file is missing or damaged; PlanError, naming the field, for what that model lacks.
    """
    path = Path(folder) / CONFIG_FILE
    raw = read_json(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise PlanError(f"{path}: model_type={model_type!r} is not supported. {_covered()}.")
    family = FAMILIES[model_type]
    for name, unused in ABSENT_FEATURES.items():
        # That of the files, and not of the model: load_pretrained reads them.
        in_blocks = name == "quantization_config" and is_fp8(raw)
        if raw.get(name) not in (None, unused) and not in_blocks:
            raise PlanError(
                f"{path}: {name}={raw[name]!r} is not supported. {family.model} has {name}={unused!r} only."
            )
    missing = [name for name in SIZES if raw.get(name) is None]
    if missing:
        raise PlanError(f"{path}: has no {missing[0]}, which a {model_type} model needs.")
    return _deepseek_from(raw, family, path) if model_type == "deepseek_v3" else _llama_from(raw, family, path)


def _covered() -> str:
    ours: dict[str, list[str]] = {}
    for model_type, family in FAMILIES.items():
        ours.setdefault(family.model, []).append(model_type)
    return "; ".join(f"{model} covers {', '.join(types)}" for model, types in ours.items())


def _llama_from(raw: dict[str, Any], family: _Family, path: Path) -> LlamaConfig:
    model_type, heads = raw["model_type"], raw["num_attention_heads"]
    max_positions = raw.get("max_position_embeddings", family.max_position_embeddings)
    biases = raw.get("attention_bias", False) if family.biases is None else family.biases
    values: dict[str, Any] = {
        **{name: raw[name] for name in SIZES},
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or family.head_dim or raw["hidden_size"] // heads,
        "rms_norm_eps": raw.get("rms_norm_eps", family.rms_norm_eps),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "max_position_embeddings": max_positions,
        "sliding_window": _window_from(raw, model_type, path),
        "attention_bias": biases,
        "attention_output_bias": biases and family.biases is None,
        "qk_norm": family.qk_norm,
        "rope": _rope_from(raw, max_positions, family, path),
    }
    if model_type == "mixtral":
        experts = {
            "num_local_experts": raw.get("num_local_experts"),
            "num_experts_per_tok": raw.get("num_experts_per_tok"),
        }
        return MixtralConfig(**values, **_without_none(experts))
    if model_type == "qwen3_moe":
        experts = {
            "num_experts": raw.get("num_experts") or raw.get("num_local_experts"),  # transformers 5 writes the second
            "mlp_only_layers": tuple(raw.get("mlp_only_layers") or ()),
            **{name: raw.get(name) for name in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")},
            "decoder_sparse_step": raw.get("decoder_sparse_step"),
        }
        return Qwen3MoeConfig(**values, **_without_none(experts))
    return LlamaConfig(**values)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _deepseek_from(raw: dict[str, Any], family: _Family, path: Path) -> DeepseekV3Config:
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise PlanError(
            f"{path}: num_key_value_heads={kv_heads} is not supported. DeepseekV3 has one for each of the {heads} heads."
        )
    max_positions = raw.get("max_position_embeddings", family.max_position_embeddings)
    # Read apart from the rope: it scales scores and not cos and sin, see `_score_scale` in deepseek.py.
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return DeepseekV3Config(
        **{name: raw[name] for name in SIZES},
        **{name: raw.get(name, default) for name, default in DEEPSEEK_DEFAULTS.items()},  # type: ignore[arg-type]  # the config checks
        rms_norm_eps=raw.get("rms_norm_eps", family.rms_norm_eps),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=max_positions,
        attention_bias=raw.get("attention_bias", False),
        rope=_rope_from(raw, max_positions, family, path),
        mscale_all_dim=scaling.get("mscale_all_dim") or 0.0,
    )


def _window_from(raw: dict[str, Any], model_type: str, path: Path) -> int | None:
    """The window of all layers; transformers reads it for Mistral and Mixtral always and for Qwen with use_sliding_window."""
    if model_type == "llama" or (model_type.startswith("qwen") and not raw.get("use_sliding_window")):
        return None
    window: int | None = raw.get("sliding_window", None if model_type == "mixtral" else DEFAULT_WINDOW)
    if window is None or model_type in ("mistral", "mixtral", "qwen3_moe"):
        return window
    layers, full = raw["num_hidden_layers"], raw.get("max_window_layers", 28)
    kinds = raw.get("layer_types") or ["full_attention"] * min(full, layers) + ["sliding_attention"] * (layers - full)
    if len(set(kinds)) > 1:
        raise PlanError(
            f"{path}: {kinds.count('sliding_attention')} of {layers} layers have a sliding window, the others not "
            "(use_sliding_window, max_window_layers, layer_types). Llama has one kind of attention in all layers."
        )
    return window if kinds[0] == "sliding_attention" else None


def _rope_from(raw: dict[str, Any], max_positions: int, family: _Family, path: Path) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    rope_fields: dict[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    values = {name: value for name, value in rope_fields.items() if value is not None}
    # Where both versions' fields are present the nested one wins, as in transformers 5.
    given = values.pop("rope_theta", None), raw.get("rope_theta"), family.rope_theta
    theta = next(each for each in given if each is not None)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not (theta > 0 and math.isfinite(theta)):
        raise PlanError(f"{path}: rope_theta is {theta!r}, and must be a number above 0.")
    kind, legacy_kind = values.pop("rope_type", None), values.pop("type", None)
    kind = kind or legacy_kind or "default"
    if kind not in ROPE_SCALINGS:
        raise PlanError(f"{path}: rope type {kind!r} is not supported. {family.model} has {', '.join(ROPE_SCALINGS)}.")
    scaling = ROPE_SCALINGS[kind]
    scaling_fields = {} if scaling is None else {entry.name: entry for entry in fields(scaling)}
    if "original_max_position_embeddings" in scaling_fields:
        original = raw.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        values["original_max_position_embeddings"] = original or max_positions
    if kind == "yarn":
        _resolve_yarn(values, max_positions)
    # 1.0 is all of the head, which is what is here; any other value is refused as unknown.
    if values.get("partial_rotary_factor") == 1.0:
        del values["partial_rotary_factor"]
    _refuse_rope_fields(values, scaling_fields, kind, family, path)
    return Rope(theta=theta, scaling=None if scaling is None else scaling(**values))


def _refuse_rope_fields(
    values: dict[str, Any], scaling_fields: dict[str, Any], kind: str, family: _Family, path: Path
) -> None:
    unknown = [name for name in values if name not in scaling_fields]
    if unknown:
        raise PlanError(
            f"{path}: the field {unknown[0]!r} of rope type {kind!r} is not supported. "
            f"{family.model}'s has {', '.join(scaling_fields) or 'no fields'}."
        )
    missing = [name for name, entry in scaling_fields.items() if name not in values and entry.default is MISSING]
    if missing:
        raise PlanError(f"{path}: rope type {kind!r} needs the field {missing[0]!r}.")


def _resolve_yarn(values: dict[str, Any], max_positions: int) -> None:
    """Replace the fields that only imply others, as transformers does."""
    values.setdefault("factor", max_positions / values["original_max_position_embeddings"])
    mscale, mscale_all_dim = values.pop("mscale", None), values.pop("mscale_all_dim", None)
    if mscale and mscale_all_dim:
        log = math.log(values["factor"])
        # DeepSeek's form: cos and sin get the ratio of both factors, and scores the square of the second.
        values.setdefault("attention_factor", (0.1 * mscale * log + 1) / (0.1 * mscale_all_dim * log + 1))


# --------------------------------------------------------------------------------------------------------- writing


def save_config(
    config: ModelConfig, folder: str | os.PathLike[str], *, extra: Mapping[str, object] | None = None
) -> None:
    """Write config.json, in the form that transformers 4 and 5 both read.

    extra: more fields, for example {"bos_token_id": 1, "eos_token_id": 2}, which are null otherwise.
    Raises: PlanError for a combination that no family of transformers has.
    """
    write_config(config_to_dict(config), Path(folder), extra)


def write_config(raw: Mapping[str, object], folder: Path, extra: Mapping[str, object] | None) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps({**raw, **(extra or {})}, indent=2) + "\n")


def config_to_dict(config: ModelConfig) -> dict[str, object]:
    """The fields of config.json. Raises: PlanError for a combination that no family of transformers has."""
    model_type = _model_type(config)
    out: dict[str, object] = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        **{name: getattr(config, name) for name in SIZES},
        "num_key_value_heads": config.num_key_value_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        # transformers 4's fields, which 5 still reads and moves into rope_parameters; 4 does not read those.
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "attention_bias": config.attention_bias,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(config, DeepseekV3Config):
        out |= {name: getattr(config, name) for name in DEEPSEEK_DEFAULTS}
        if config.mscale_all_dim and isinstance(out["rope_scaling"], dict):
            # Beside attention_factor it says nothing of cos and sin any more, but still scales the scores.
            out["rope_scaling"] |= {"mscale_all_dim": config.mscale_all_dim}
        return out
    out["head_dim"] = config.head_dim
    if isinstance(config, MixtralConfig):
        out |= {name: getattr(config, name) for name in ("num_local_experts", "num_experts_per_tok")}
    elif isinstance(config, Qwen3MoeConfig):
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
        out |= {name: getattr(config, name) for name in names}
        out["mlp_only_layers"] = list(config.mlp_only_layers)
    if model_type in ("mistral", "mixtral"):
        out["sliding_window"] = config.sliding_window
    elif config.sliding_window is not None:
        # max_window_layers=0: all layers from number 0 on have the window. transformers' default of 28 would spare
        # the first 28.
        out |= {"use_sliding_window": True, "sliding_window": config.sliding_window, "max_window_layers": 0}
    return out


def _model_type(config: ModelConfig) -> str:
    """The family of transformers that computes what this config says."""
    if isinstance(config, DeepseekV3Config):
        return "deepseek_v3"
    if isinstance(config, MixtralConfig | Qwen3MoeConfig):
        return _moe_type(config)
    all_or_none = config.attention_bias == config.attention_output_bias
    if config.qk_norm and all_or_none:
        return "qwen3"
    if config.attention_bias and not config.attention_output_bias and not config.qk_norm:
        return "qwen2"
    # transformers' mistral without a window is its llama, and takes a hidden_size that the heads do not divide.
    uneven = config.hidden_size % config.num_attention_heads != 0
    if not config.attention_bias and (uneven or config.sliding_window is not None):
        return "mistral"
    if config.sliding_window is None and all_or_none:
        return "llama"
    raise PlanError(
        f"save_config: no family of transformers has qk_norm={config.qk_norm}, attention_bias={config.attention_bias}, "
        f"attention_output_bias={config.attention_output_bias} and sliding_window={config.sliding_window} together. "
        "Save with meshkit's checkpoints instead."
    )


def _moe_type(config: MixtralConfig | Qwen3MoeConfig) -> str:
    mixtral = isinstance(config, MixtralConfig)
    fixed = {
        "qk_norm": not mixtral,
        "attention_output_bias": not mixtral and config.attention_bias,
        "router_bias": False,
    }
    fixed |= {"attention_bias": False} if mixtral else {}
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise PlanError(
                f"save_config: transformers' {'mixtral' if mixtral else 'qwen3_moe'} has {name}={value}, but the config has "
                f"{getattr(config, name)}. Save with meshkit's checkpoints instead."
            )
    return "mixtral" if mixtral else "qwen3_moe"


def _rope_scaling(rope: Rope) -> dict[str, object] | None:
    if rope.scaling is None:
        return None
    kinds = {scaling: kind for kind, scaling in ROPE_SCALINGS.items()}
    values = {name: value for name, value in asdict(rope.scaling).items() if value is not None}
    return {"rope_type": kinds[type(rope.scaling)], **values}


def is_fp8(raw: Mapping[str, Any]) -> bool:
    """Whether the files of this config.json hold weights in fp8, with scales beside them."""
    return (raw.get("quantization_config") or {}).get("quant_method") == "fp8"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a folder, which is compared with the folder's digests, if it has them."""
    check_digests(path.parent, [path.name], CheckpointError)
    return read_json_object(path, CheckpointError, advice="Give the folder of a Hugging Face model.")
