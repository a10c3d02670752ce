"""Snapshot: what a checkpoint holds beside its tensors. Saving makes one, loading reads one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from meshkit.checkpoint import _folder as files
from meshkit.checkpoint._dcp import Checksum
from meshkit.checkpoint._values import decode, encode
from meshkit.core.optimizer_state import ParameterFacts
from meshkit.errors import CheckpointError

STATE, STATE_TENSORS = "state.json", "state.safetensors"
PICKLED_STATE = "state.pt"  # of an older format
CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run after `step` optimizer steps, without its tensors.

    state: state_dicts of scheduler and data loader (None if not saved) and the user's `extra`, the same on every rank.
    facts: of each parameter, what the optimizer holds that is not a tensor; while saving, of this rank's parameters only.
    config: the configuration as JSON text.
    """

    step: int
    state: Mapping[str, Any]
    facts: Mapping[str, ParameterFacts]
    config: str

    def shared_text(self) -> dict[str, str]:
        """All that is saved once for all ranks, as text, so that ranks can compare it."""
        return {
            "step": repr(self.step),
            "config": self.config,
            **{name: repr(value) for name, value in self.state.items()},
        }

    def encode(self) -> tuple[Any, dict[str, Tensor]]:
        """State and facts as (JSON, tensors)."""
        facts = {name: dataclasses.asdict(entry) for name, entry in self.facts.items()}
        return encode({**self.state, "optimizer": facts})


def write_snapshot(folder: Path, snapshot: Snapshot) -> dict[str, Checksum]:
    """Write `state.json`, its tensors and `config.json`, synced to disk; returns their checksums by file name."""
    values, tensors = snapshot.encode()
    return {
        STATE: files.write_file(folder / STATE, json.dumps(values, indent=1).encode()),
        STATE_TENSORS: files.write_file(folder / STATE_TENSORS, safetensors.torch.save(tensors)),
        CONFIG: files.write_file(folder / CONFIG, snapshot.config.encode()),
    }


def read_snapshot(folder: Path, step: int, *, pickled: bool) -> Snapshot:
    """pickled: of the older format."""
    return snapshot_of(read_state(folder, pickled=pickled), step, (folder / CONFIG).read_text())


def snapshot_of(state: dict[str, Any], step: int, config: str) -> Snapshot:
    """state: with the facts of the optimizer, decoded."""
    facts = {name: ParameterFacts(**entry) for name, entry in state.pop("optimizer").items()}
    return Snapshot(step=step, state=state, facts=facts, config=config)


def read_state(folder: Path, *, pickled: bool) -> dict[str, Any]:
    state: dict[str, Any]
    if pickled:
        state = torch.load(folder / PICKLED_STATE, map_location="cpu", weights_only=True)
        return state
    try:
        tensors = safetensors.torch.load((folder / STATE_TENSORS).read_bytes())
        state = decode(json.loads((folder / STATE).read_bytes()), tensors)
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged: {error}.") from error
    return state


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Deep copies, through the encoding of the file: what it could not read back is refused before writing.

    Training goes on while a thread writes, so the state_dicts must not share memory with the run.
    """
    copies = {}
    for name, value in state.items():
        try:
            values, tensors = encode(value)
            text = json.dumps(values)
            copies[name] = decode(json.loads(text), safetensors.torch.load(safetensors.torch.save(tensors)))
        except Exception as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise CheckpointError(
                f"save(): the state of {name} cannot be saved: {reason}. Use numbers, strings, tensors, and lists and "
                "dicts of them."
            ) from error
    return copies


def encode_config(config: Any) -> str:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    return json.dumps(config, indent=1, default=str)


def config_difference(saved: str, current: str) -> str:
    """The first four fields that differ, as a sentence; "" if none does or either configuration is null."""
    saved_config, current_config = json.loads(saved), json.loads(current)
    if saved_config is None or current_config is None:
        return ""
    old, new = _leaves(saved_config), _leaves(current_config)
    changes = [f"{key} was {old.get(key)}, is {new.get(key)}" for key in {**new, **old} if old.get(key) != new.get(key)]
    more = f", and {len(changes) - 4} more" if len(changes) > 4 else ""
    return f" The configuration differs: {'; '.join(changes[:4])}{more}." if changes else ""


def _leaves(value: Any, prefix: str = "") -> dict[str, str]:
    """Leaves of nested dicts as JSON text, by dotted key."""
    if not isinstance(value, dict):
        return {prefix: json.dumps(value)}
    leaves: dict[str, str] = {}
    for key, inner in value.items():
        leaves |= _leaves(inner, f"{prefix}.{key}" if prefix else key)
    return leaves
