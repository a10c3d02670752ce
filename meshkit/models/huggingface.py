"""Hugging Face folders (config.json, safetensors), read into shards and written from them one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshkit.errors import CheckpointError, PlanError
from meshkit.models.layers import LinearScaling, Llama3Scaling, Rope, YarnScaling
from meshkit.models.llama import LlamaConfig
from meshkit.sharding import full_tensor, local_slices, local_tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# ----------------------------------------------------------------------------------------------------- config.json


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a model_type means where config.json is silent: its class in transformers and that class's defaults."""

    architecture: str
    max_position_embeddings: int
    biases: bool | None = False  # of q, k, v alone; None: `attention_bias` says, and means o_proj too
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads


FAMILIES = {
    "llama": _Family(architecture="LlamaForCausalLM", max_position_embeddings=2048, biases=None),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", max_position_embeddings=32_768, biases=True),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM", max_position_embeddings=32_768, biases=None, qk_norm=True, head_dim=128
    ),
    "mistral": _Family(architecture="MistralForCausalLM", max_position_embeddings=131_072),
}
DEFAULT_WINDOW = 4096  # of Mistral, and of Qwen with use_sliding_window, in transformers

# Features of these families that the decoder does not have, and the value that means "not used".
ABSENT_FEATURES: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
ROPE_SCALINGS = {"default": None, "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def config_from_pretrained(folder: str | os.PathLike[str]) -> LlamaConfig:
    """Read config.json of a llama, qwen2, qwen3 or mistral model, as transformers 4 or 5 wrote it.

    Raises: CheckpointError if the file is missing or damaged; PlanError, naming the field, for what `Llama` lacks.
    """
    path = Path(folder) / CONFIG_FILE
    raw = _read_json(path)
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise PlanError(f"{path}: model_type={model_type!r} is not supported. Llama covers {', '.join(FAMILIES)}.")
    family = FAMILIES[model_type]
    for name, unused in ABSENT_FEATURES.items():
        if raw.get(name) not in (None, unused):
            raise PlanError(f"{path}: {name}={raw[name]!r} is not supported. Llama has {name}={unused!r} only.")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in sizes if raw.get(name) is None]
    if missing:
        raise PlanError(f"{path}: has no {missing[0]}, which a {model_type} model needs.")
    heads = raw["num_attention_heads"]
    max_positions = raw.get("max_position_embeddings", family.max_position_embeddings)
    biases = raw.get("attention_bias", False) if family.biases is None else family.biases
    return LlamaConfig(
        **{name: raw[name] for name in sizes},
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or family.head_dim or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=max_positions,
        sliding_window=_window_from(raw, model_type, path),
        attention_bias=biases,
        attention_output_bias=biases and family.biases is None,
        qk_norm=family.qk_norm,
        rope=_rope_from(raw, max_positions, path),
    )


def _window_from(raw: dict[str, Any], model_type: str, path: Path) -> int | None:
    """The window of all layers; transformers reads it for Mistral always and for Qwen with use_sliding_window."""
    if model_type == "llama" or (model_type.startswith("qwen") and not raw.get("use_sliding_window")):
        return None
    window: int | None = raw.get("sliding_window", DEFAULT_WINDOW)
    if window is None or model_type == "mistral":
        return window
    layers, full = raw["num_hidden_layers"], raw.get("max_window_layers", 28)
    kinds = raw.get("layer_types") or ["full_attention"] * min(full, layers) + ["sliding_attention"] * (layers - full)
    if len(set(kinds)) > 1:
        raise PlanError(
            f"{path}: {kinds.count('sliding_attention')} of {layers} layers have a sliding window, the others not "
            "(use_sliding_window, max_window_layers, layer_types). Llama has one kind of attention in all layers."
        )
    return window if kinds[0] == "sliding_attention" else None


def _rope_from(raw: dict[str, Any], max_positions: int, path: Path) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    found: dict[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    values = {name: value for name, value in found.items() if value is not None}
    theta = values.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    kind = values.get("rope_type") or values.get("type") or "default"
    for name in ("rope_type", "type"):
        values.pop(name, None)
    if kind not in ROPE_SCALINGS:
        raise PlanError(f"{path}: rope type {kind!r} is not supported. Llama has {', '.join(ROPE_SCALINGS)}.")
    scaling = ROPE_SCALINGS[kind]
    known = {} if scaling is None else {entry.name: entry for entry in fields(scaling)}
    if "original_max_position_embeddings" in known:
        original = raw.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        values["original_max_position_embeddings"] = original or max_positions
    if kind == "yarn":
        _resolve_yarn(values, max_positions)
    if values.get("partial_rotary_factor") == 1.0:
        del values["partial_rotary_factor"]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise PlanError(
            f"{path}: the field {unknown[0]!r} of rope type {kind!r} is not supported. "
            f"Llama's has {', '.join(known) or 'no fields'}."
        )
    missing = [name for name, entry in known.items() if name not in values and entry.default is MISSING]
    if missing:
        raise PlanError(f"{path}: rope type {kind!r} needs the field {missing[0]!r}.")
    return Rope(theta=theta, scaling=None if scaling is None else scaling(**values))


def _resolve_yarn(values: dict[str, Any], max_positions: int) -> None:
    """Replace the fields that only imply others, as transformers does."""
    values.setdefault("factor", max_positions / values["original_max_position_embeddings"])
    mscale, mscale_all_dim = values.pop("mscale", None), values.pop("mscale_all_dim", None)
    if mscale and mscale_all_dim:
        log = math.log(values["factor"])
        values.setdefault("attention_factor", (0.1 * mscale * log + 1) / (0.1 * mscale_all_dim * log + 1))


def save_config(
    config: LlamaConfig, folder: str | os.PathLike[str], *, extra: Mapping[str, object] | None = None
) -> None:
    """Write config.json, in the form that transformers 4 and 5 both read.

    extra: more fields, for example {"bos_token_id": 1, "eos_token_id": 2}, which are null otherwise.
    Raises: PlanError for a combination that no family of transformers has.
    """
    _write_config(config_to_dict(config), Path(folder), extra)


def _write_config(raw: Mapping[str, object], folder: Path, extra: Mapping[str, object] | None) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps({**raw, **(extra or {})}, indent=2) + "\n")


def config_to_dict(config: LlamaConfig) -> dict[str, object]:
    """The fields of config.json. Raises: PlanError for a combination that no family of transformers has."""
    model_type = _model_type(config)
    out: dict[str, object] = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "attention_bias": config.attention_bias,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model_type == "mistral":
        out["sliding_window"] = config.sliding_window
    elif config.sliding_window is not None:
        out |= {"use_sliding_window": True, "sliding_window": config.sliding_window, "max_window_layers": 0}
    return out


def _model_type(config: LlamaConfig) -> str:
    """The family of transformers that computes what this config says."""
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


def _rope_scaling(rope: Rope) -> dict[str, object] | None:
    if rope.scaling is None:
        return None
    kinds = {scaling: kind for kind, scaling in ROPE_SCALINGS.items()}
    values = {name: value for name, value in asdict(rope.scaling).items() if value is not None}
    return {"rope_type": kinds[type(rope.scaling)], **values}


# --------------------------------------------------------------------------------------------------------- reading


def load_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Read the safetensors of a Hugging Face folder into the model's parameters and persistent buffers, in place.

    They may be plain tensors or DTensors on any mesh: each rank reads only the regions it holds, one tensor at a time,
    and converts them to the parameter's dtype and device. Nothing is communicated, and nothing is changed if names or
    shapes do not fit. `model` is a `Llama` or a transformers model; a tied parameter may be in the folder under one of
    its names or under all.
    Raises: CheckpointError for missing, unexpected, misshapen or damaged tensors, naming the first and its file.
    """
    tensors = _named_tensors(model, "load_pretrained")
    files = _weight_files(Path(folder))
    _refuse_other_names(tensors, files, Path(folder))
    for file, keys in _by_file(files).items():
        with _open(file) as reader:
            for key in keys:
                _refuse_other_shape(file, key, reader.get_slice(key), tensors[key])
    loaded: dict[int, str] = {}
    for file, keys in _by_file(files).items():
        with _open(file) as reader:
            for key in keys:
                region, local = local_slices(tensors[key]), local_tensor(tensors[key])
                if not local.numel():
                    continue
                first = loaded.setdefault(id(tensors[key]), key)
                part = reader.get_slice(key)[region]
                if first == key:
                    local.copy_(part)
                elif not torch.equal(local, part.to(local)):
                    raise CheckpointError(
                        f"{file}: {key!r} and {first!r} differ, but are one tied parameter in the model. Build it with "
                        "tie_word_embeddings=False."
                    )
    return model


def _named_tensors(model: nn.Module, verb: str) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in Hugging Face files; a tied one under each of its names."""
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if tensor.is_meta:
            raise PlanError(f"{verb}: {name!r} is still on meta. Call parallelize() or model.to_empty() first.")
    if any(name.startswith("model.") for name in own):  # a transformers model
        return own
    return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in own.items()}


def _weight_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor in the folder -> the file that holds it."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists():
        with _open(single) as reader:
            files = dict.fromkeys(reader.keys(), single)
    elif index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} is damaged: it has no weight_map.")
        files = {key: folder / name for key, name in weight_map.items()}
    else:
        raise CheckpointError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}.")
    # Rotary frequencies, which old files hold and every implementation recomputes.
    return {key: file for key, file in files.items() if not key.endswith("rotary_emb.inv_freq")}


def _by_file(files: dict[str, Path]) -> dict[Path, list[str]]:
    out: dict[Path, list[str]] = {}
    for key, file in files.items():
        out.setdefault(file, []).append(key)
    return out


def _refuse_other_names(tensors: dict[str, Tensor], files: dict[str, Path], folder: Path) -> None:
    present = {id(tensors[key]) for key in files if key in tensors}
    missing = [key for key, tensor in tensors.items() if id(tensor) not in present]
    unexpected = [key for key in files if key not in tensors]
    if missing:
        raise CheckpointError(
            f"{folder} has no tensor {missing[0]!r}, which the model needs ({len(missing)} of {len(tensors)} are "
            f"missing, {len(unexpected)} are unexpected). Build the model from this folder's {CONFIG_FILE}."
        )
    if unexpected:
        raise CheckpointError(
            f"{files[unexpected[0]]} holds {unexpected[0]!r}, which the model does not have ({len(unexpected)} are "
            f"unexpected). Build the model from this folder's {CONFIG_FILE}."
        )


def _refuse_other_shape(file: Path, key: str, found: Any, tensor: Tensor) -> None:
    if tuple(found.get_shape()) != tuple(tensor.shape):
        raise CheckpointError(
            f"{file}: {key!r} has the shape {tuple(found.get_shape())}, but the model's has {tuple(tensor.shape)}. "
            f"Build the model from this folder's {CONFIG_FILE}."
        )
    if tensor.is_floating_point() and found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise CheckpointError(
            f"{file}: {key!r} has the dtype {found.get_dtype()}, which cannot be converted to {tensor.dtype}. "
            "Quantised files are not supported."
        )


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A safetensors reader whose errors name the file."""
    if not file.exists():
        raise CheckpointError(f"{file} does not exist, but {INDEX_FILE} refers to it.")
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or incomplete: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. Give the folder of a Hugging Face model.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, but must hold an object.")
    return content


# --------------------------------------------------------------------------------------------------------- writing


def save_pretrained(
    model: nn.Module,
    config: LlamaConfig | Mapping[str, object],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write a folder that transformers' `from_pretrained` and `load_pretrained` read. Every rank must call it.

    config: of a `Llama`; for a transformers model `model.config.to_dict()`. dtype: of the file's floating tensors, None
    keeps the model's. extra: more fields for config.json, see `save_config`. The folder must not exist or be empty; it
    appears under its name when it is complete, and not before.
    Wire: the all-gathers of one tensor at a time. Memory: global rank 0 holds one file, at most max_shard_bytes or one
    larger tensor; the others one tensor.
    Raises: CheckpointError, on every rank, if the folder is not empty; PlanError for a config that no family has.
    """
    if "_names_elsewhere" in model.__dict__:
        raise CheckpointError(
            "save_pretrained: the ranks of pp hold different layers, which are not gathered into one folder yet. Save from a "
            "run without pp."
        )
    folder = Path(folder)
    raw = config_to_dict(config) if isinstance(config, LlamaConfig) else config
    tensors = _named_tensors(model, "save_pretrained")
    first_names = {id(tensor): key for key, tensor in reversed(tensors.items())}
    tensors = {key: tensor for key, tensor in tensors.items() if first_names[id(tensor)] == key}
    shards = _split(tensors, max_shard_bytes, dtype)
    partial = folder.with_name(f".{folder.name}.partial")

    def begin() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"save_pretrained: {folder} exists and is not empty. Choose another folder or remove it."
            )
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir(parents=True)

    def finish() -> None:
        if len(shards) > 1:
            total = sum(_bytes(tensor, dtype) for tensor in tensors.values())
            weight_map = {key: file for file, keys in shards.items() for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        _write_config(raw, partial, extra)
        partial.rename(folder)

    _on_rank_zero(begin)
    for file, keys in shards.items():
        held: dict[str, Tensor] = {}
        for key in keys:
            whole = full_tensor(tensors[key])
            if _is_rank_zero():
                held[key] = whole.to("cpu", _saved_dtype(whole, dtype)).contiguous()
            del whole
        if _is_rank_zero():
            save_file(held, partial / file, metadata={"format": "pt"})
    _on_rank_zero(finish)


def _split(tensors: dict[str, Tensor], max_bytes: float, dtype: torch.dtype | None) -> dict[str, list[str]]:
    """File name -> the tensors in it, in order, each file filled up to max_bytes."""
    parts: list[list[str]] = [[]]
    room = max_bytes
    for key, tensor in tensors.items():
        size = _bytes(tensor, dtype)
        if parts[-1] and size > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(key)
        room -= size
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": keys for number, keys in enumerate(parts, 1)}


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * _saved_dtype(tensor, dtype).itemsize


def _saved_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_rank_zero() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _on_rank_zero(action: Callable[[], None]) -> None:
    """Do it on global rank 0; every rank waits for it, and raises what it raised. Wire: one broadcast of a string."""
    refusal: list[str | None] = [None]
    if _is_rank_zero():
        try:
            action()
        except (CheckpointError, OSError) as error:
            refusal = [str(error)]
    if _distributed():
        dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise CheckpointError(refusal[0])
