"""LoRA adapters in the folder format of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.digests import check_digests, digest_all, listed
from meshkit.errors import CheckpointError
from meshkit.lora import Lora, is_adapter, lora_of
from meshkit.models.huggingface.config import read_json
from meshkit.models.huggingface.folder import gatherer, is_rank_zero, on_rank_zero, open_safetensors, save_tensors
from meshkit.models.huggingface.names import Piece, adapter_pieces, named_pieces

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# PEFT wraps a model twice: PeftModel.base_model is a LoraModel, whose .model is the user's.
PREFIX = "base_model.model."
# Fields of adapter_config.json that change how an adapter computes, and the values that are supported.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "megatron_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),  # others change the weights beneath
}


# --------------------------------------------------------------------------------------------------------- writing


def save_lora(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    base: str | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters as a folder that PEFT's `from_pretrained` and `load_lora` read. Every rank must call it.

    base: name or path of the frozen model, noted in the folder. beside: writes more files into the folder that it is given,
    on rank 0. The folder must not exist or be empty; it appears under its name when it is complete. For a model whose names
    are transformers' ones, as those of `meshkit.models` become.
    Wire: the all-gathers of one tensor at a time; with pp also one message to rank 0 for each of other stages.
    Memory: rank 0 holds all adapters on the host. Raises: CheckpointError, on every rank, if the folder is not empty;
    PlanError for a model without adapters.
    """
    folder = Path(folder)
    pieces = adapter_pieces(model, "save_lora")
    config = _config(model, pieces, base)
    partial = folder.with_name(f".{folder.name}.partial")

    def begin() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"save_lora: {folder} exists and is not empty. Choose another folder or remove it.")
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir(parents=True)

    def finish() -> None:
        save_tensors(adapters, partial / WEIGHTS_FILE)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        shutil.copymode(partial / CONFIG_FILE, partial / WEIGHTS_FILE)  # as in folder.py
        if beside is not None:
            beside(partial)
        digest_all(partial)
        partial.rename(folder)

    on_rank_zero(model, begin)
    owners, gather = gatherer(model)
    adapters: dict[str, Tensor] = {}
    for key, piece in pieces.items():
        full = gather(piece.tensor, owners.get(id(piece.tensor), 0))
        if is_rank_zero(model):
            adapters[PREFIX + key] = full.to("cpu", copy=True).contiguous()
    on_rank_zero(model, finish)


def _config(model: nn.Module, pieces: dict[str, Piece], base: str | None) -> dict[str, object]:
    lora = lora_of(model)
    assert lora is not None
    targets = list(dict.fromkeys(key.rpartition(".lora_")[0] for key in pieces if is_adapter(key)))
    all_modules = [key.removesuffix(".weight") for key in named_pieces(model, "save_lora") if key.endswith(".weight")]
    # PEFT declares lora_alpha as an integer.
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    saved = dict.fromkeys(key.rpartition(".")[0] for key in pieces if not is_adapter(key))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "target_modules": _short(targets, all_modules),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        # True is the plain initialisation, of no effect once weights are loaded; inference_mode freezes them in PEFT
        # until asked otherwise.
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _short(targets: list[str], all_modules: list[str]) -> list[str]:
    """Last components of the names, if no other module has one of them; else full names. PEFT adapts all that end in one."""
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in targets))
    adapted = set(targets)
    unambiguous = all(name in adapted for name in all_modules if name.rpartition(".")[2] in leaves)
    return leaves if unambiguous else targets


# --------------------------------------------------------------------------------------------------------- reading


def lora_options(folder: str | os.PathLike[str], model: nn.Module | None = None) -> dict[str, Any]:
    """What `mk.lora` must be told so that `load_lora` can read the folder: targets, rank, alpha, rslora, modules_to_save.

    model: of transformers, whose modules these are; None: one of `meshkit.models`. lora_dropout is left out, since it
    changes training only. Raises: CheckpointError for adapters of another kind, and for modules that the model has not.
    """
    config = _read_config(Path(folder))
    return {
        "targets": _patterns(Path(folder), config["target_modules"], model),
        "rank": config["r"],
        "alpha": float(config["lora_alpha"]),
        "rslora": bool(config.get("use_rslora", False)),
        "modules_to_save": _patterns(Path(folder), config.get("modules_to_save") or [], model),
    }


def load_lora(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Read a folder of `save_lora` or PEFT into the model's adapters, in place, on any mesh.

    Each rank reads only the regions it holds. Nothing is communicated, and nothing is changed if anything does not fit.
    Raises: CheckpointError for other adapters than the model's, naming the first difference; PlanError without adapters.
    """
    folder = Path(folder)
    pieces = {PREFIX + key: piece for key, piece in adapter_pieces(model, "load_lora").items()}
    _refuse_other(lora_of(model), _read_config(folder), folder)
    check_digests(folder, [WEIGHTS_FILE], CheckpointError)
    with open_safetensors(folder / WEIGHTS_FILE) as reader:
        stored_keys = list(reader.keys())
        missing = [key for key in pieces if key not in set(stored_keys)]
        unexpected = [key for key in stored_keys if key not in pieces]
        if missing or unexpected:
            which = (
                f"has no {missing[0]!r}, which the model has" if missing else f"has {unexpected[0]!r}, the model not"
            )
            raise CheckpointError(
                f"{folder}: {which} ({len(missing)} are missing, {len(unexpected)} unexpected). Give mk.lora the options "
                "that mk.models.lora_options reads from this folder."
            )
        for key in stored_keys:
            shape = tuple(reader.get_slice(key).get_shape())
            if shape != pieces[key].shape:
                raise CheckpointError(f"{folder}: {key!r} has the shape {shape}, but the model's {pieces[key].shape}.")
        with torch.no_grad():
            for key in stored_keys:
                local_region = pieces[key].local()
                if local_region is not None:
                    local_region[1].copy_(reader.get_slice(key)[local_region[0]])
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).exists() and CONFIG_FILE not in listed(folder, CheckpointError):
        raise CheckpointError(f"{folder} holds no {CONFIG_FILE}, as a folder of adapters does.")
    config: dict[str, Any] = read_json(folder / CONFIG_FILE)
    for key, allowed in PLAIN.items():
        if key in config and config[key] not in allowed:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: {key}={config[key]!r} is not supported, only {allowed[0]!r}. Merge these adapters "
                "into their model with PEFT."
            )
    return config


def _refuse_other(lora: Lora | None, config: dict[str, Any], folder: Path) -> None:
    assert lora is not None
    ours = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    theirs = {"r": config["r"], "lora_alpha": config["lora_alpha"], "use_rslora": bool(config.get("use_rslora"))}
    if ours != theirs:
        raise CheckpointError(
            f"{folder}: the adapters have {theirs}, but the model's {ours}. Give mk.lora the options that "
            "mk.models.lora_options reads from this folder."
        )


def _patterns(folder: Path, names: Any, model: nn.Module | None) -> tuple[str, ...]:
    """PEFT takes a module whose name is one of these or ends in one; names of our models have no leading `model.`."""
    if not isinstance(names, list) or not all(re.fullmatch(r"[\w.]+", name) for name in names):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: modules {names!r} are not a list of names. Give mk.lora its targets yourself."
        )
    if model is not None:
        inside = {
            each: [name for name, _ in model.named_modules() if f".{name}".endswith(f".{each}")] for each in names
        }
        if lost := next((each for each in names if not inside[each]), None):
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: the {type(model).__name__} has no module {lost!r}. Give the model that was adapted."
            )
        return tuple(dict.fromkeys(name for each in names for name in inside[each]))
    local_names = dict.fromkeys(name.removeprefix("model.") for name in names)
    return tuple(name if name in ("lm_head", "embed_tokens") or "." in name else f"**.{name}" for name in local_names)
