"""The state of an optimizer by single-device names: tensors of each parameter, and facts that are no tensors.

A tensor's key is `optimizer.<parameter>.<key>`, as `optimizer.layers.0.weight.exp_avg`. What is no tensor (options such as
lr, and state that is a number) is `ParameterFacts`, by parameter too, so the groups of an optimizer may be cut up differently
where the state goes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshkit.core.model_state import copies_of
from meshkit.core.sharding import local_slices, local_tensor, placed
from meshkit.errors import CheckpointError

OPTIMIZER = "optimizer."
# How an optimizer computes, not what it computes: the run that loads keeps its own.
IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# An option that only groups of this kind of optimizer have, whose state means nothing to another; the first that is there.
# Those with betas and none of the others are as AdamW.
KINDS = {
    "steps": "Muon",
    "ns_steps": "torch.optim.Muon",
    "beta2_decay": "Adafactor",
    "momentum_decay": "NAdam",
    "lambd": "ASGD",
    "alpha": "RMSprop",
    "etas": "Rprop",
    "rho": "Adadelta",
    "lr_decay": "Adagrad",
    "betas": "AdamW",
    "momentum": "SGD",
}


class HoldsState(Protocol):
    """What state is read from and written to: a torch.optim.Optimizer, or an outer optimizer with the one inside of it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> MutableMapping[Tensor, Any]: ...


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """What the optimizer holds of one parameter beside tensors: the options of its group, and state that is a number."""

    options: dict[str, Any]
    values: dict[str, Any]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Single-device name by id, after `model_tensors` has brought back the sharded parameters."""
    copies = copies_of(model)
    return {id(param): copies.get(name, name) for name, param in model.named_parameters()}


def is_writer(key: str, tensor: Tensor) -> bool:
    """Whether this rank is the replica that writes. A hash of the key spreads the writing over the replicas.

    Of plain tensors every rank is a writer, and DCP chooses one.
    """
    if not isinstance(tensor, DTensor):
        return True
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            # This rank's number among replicas, in mixed radix over the axes that replicate.
            replica = replica * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
            replicas *= tensor.device_mesh.size(axis)
    # crc32, since Python's hash of a string differs between processes.
    return zlib.crc32(key.encode()) % replicas == replica


def _writes_first_element(name: str, param: Tensor) -> bool:
    """Whether this rank writes the first element, and so also the facts that are saved once for the full parameter."""
    holds_first = all(region.start == 0 and (region.stop > 0 or not param.numel()) for region in local_slices(param))
    return holds_first and is_writer(name, param)


def finish_update(optimizer: HoldsState) -> None:
    """Apply an update that the host optimizer is still computing in the background, before its state is read or written."""
    finish = getattr(optimizer, "finish", None)
    if finish is not None:
        finish()


def optimized(optimizer: HoldsState, names: Mapping[int, str]) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """(name, parameter, its group) of every parameter that the optimizer holds."""
    rows = []
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointError(
                    f"the optimizer's group {number} holds a parameter of shape {tuple(param.shape)} that is not the "
                    "model's. Build the optimizer from the run's parameters, after parallelize()."
                )
            rows.append((names[id(param)], param, group))
    return rows


def optimizer_state(
    optimizer: HoldsState, names: Mapping[int, str], *, replicas: bool = False
) -> tuple[dict[str, Tensor], dict[str, ParameterFacts]]:
    """(tensors, facts) of the optimizer on this rank, not copied.

    replicas: with the plain tensors that other ranks have too, and one answers for.
    Raises: CheckpointError for a plain tensor beside a sharded parameter: which elements it holds is not known.
    """
    tensors: dict[str, Tensor] = {}
    facts: dict[str, ParameterFacts] = {}
    for name, param, group in optimized(optimizer, names):
        is_leader = _writes_first_element(name, param)
        values: dict[str, Any] = {}
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                _refuse_unknown_layout(name, key, value, param)
                # A plain tensor beside the parameter (a step counter) is the same on every rank and saved once; of a
                # DTensor each rank has its shard.
                if is_leader or replicas or isinstance(value, DTensor):
                    tensors[f"{OPTIMIZER}{name}.{key}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                values[key] = value
            else:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name!r} is a {type(value).__name__}: tensors, numbers and strings "
                    "can be saved."
                )
        if is_leader:
            options = {key: deepcopy(_number(value)) for key, value in group.items() if key not in IMPLEMENTATION}
            facts[name] = ParameterFacts(options=options, values=values)
    return tensors, facts


def _refuse_unknown_layout(name: str, key: str, value: Tensor, param: Tensor) -> None:
    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise CheckpointError(
            f"optimizer state {key!r} of {name!r} is a plain tensor of shape {tuple(value.shape)}, but the parameter "
            "is sharded, so where it lies in the whole is not known. Keep it as a DTensor (torch.zeros_like(param)) or "
            "a scalar."
        )


def _number(option: Any) -> Any:
    """An lr may be a tensor that a captured graph reads."""
    return option.item() if isinstance(option, Tensor) and option.numel() == 1 else option


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where state is to go. like: the tensor that is laid out as it; None for one that each rank has whole. make: the
    optimizer's own tensor where it fits, else a new one."""

    shape: tuple[int, ...]
    like: Tensor | None
    make: Callable[[], Tensor]


def optimizer_targets(
    optimizer: HoldsState,
    names: Mapping[int, str],
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    facts: Mapping[str, ParameterFacts],
) -> dict[str, Target]:
    """Where each tensor of a saved state is to go, by key. tensors: (shape, dtype) of what was saved. Changes nothing.

    Raises: CheckpointError if the optimizer holds other parameters than the saved one, groups what had different
    options, or has state that cannot be laid out.
    """
    rows = optimized(optimizer, names)
    ours = dict.fromkeys(name for name, _, _ in rows)
    in_model = set(names.values())
    for name in [*ours, *(name for name in facts if name in in_model)]:
        if name not in facts or name not in ours:
            with_it, without_it = ("this run's", "the saved one") if name not in facts else ("the saved", "this run's")
            raise CheckpointError(
                f"{with_it} optimizer holds {name!r}, but {without_it} does not. Build the optimizer over the same "
                "parameters, or pass optimizer=None to load the model alone."
            )
    _refuse_other_kind(rows, facts)
    refuse_saved = getattr(optimizer, "refuse_saved", None)  # of an outer optimizer, as `finish`
    if refuse_saved is not None:
        refuse_saved(entry.values for entry in facts.values())
    _refuse_mixed_groups(optimizer, names, facts)
    keys: dict[str, list[str]] = {}
    for key in tensors:
        if key.startswith(OPTIMIZER):
            keys.setdefault(key.removeprefix(OPTIMIZER).rpartition(".")[0], []).append(key)
    targets = {}
    for name, param, group in rows:
        current = optimizer.state.get(param, {})
        for key in keys.get(name, []):
            short = key.rpartition(".")[2]
            targets[key] = _target(name, short, *tensors[key], param, group, current.get(short))
    return targets


def _refuse_other_kind(rows: list[tuple[str, Tensor, dict[str, Any]]], facts: Mapping[str, ParameterFacts]) -> None:
    """Refuse the state of another kind of optimizer: low-bit moments, or master weights, mean nothing to a plain one."""
    for name, _, group in rows:
        saved, ours = _kind(facts[name].options), _kind(group)
        if saved != ours:
            raise CheckpointError(
                f"the optimizer state of {name!r} was saved as {saved!r}, and this run's optimizer holds it as {ours!r}. "
                "Use the optimizer and OptimizerPolicy of the saved run, or pass optimizer=None to load the model alone."
            )


def _kind(options: Mapping[str, Any]) -> str:
    """As what an optimizer holds the state of a group: its `state_kind`, or by the options that it has."""
    of_options = next((kind for option, kind in KINDS.items() if option in options), "plain")
    return str(options.get("state_kind", of_options))


def _refuse_mixed_groups(optimizer: HoldsState, names: Mapping[int, str], facts: Mapping[str, ParameterFacts]) -> None:
    for group in optimizer.param_groups:
        first, *rest = [names[id(param)] for param in group["params"]] or [""]
        for other in rest:
            for key, value in facts[first].options.items():
                if facts[other].options.get(key) != value:
                    raise CheckpointError(
                        f"{first!r} and {other!r} are in one group of this run's optimizer, but were saved with "
                        f"{key}={value!r} and {key}={facts[other].options.get(key)!r}. Group the parameters as in the "
                        "saved run."
                    )


def _target(
    name: str,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    param: Tensor,
    group: Mapping[str, Any],
    current: Any,
) -> Target:
    if isinstance(current, Tensor) and tuple(current.shape) == shape and current.dtype == dtype:
        return Target(shape=shape, like=current, make=lambda: current)
    if not shape and (param.ndim or key == "step"):
        # Where torch.optim keeps a step counter.
        on_device = group.get("fused") or group.get("capturable")
        device = param.device if on_device else torch.device("cpu")
        return Target(shape=shape, like=None, make=lambda: torch.empty((), dtype=dtype, device=device))
    if shape == tuple(param.shape):
        # Of the shard: `empty_like` of a DTensor would search for a sharding, for each shape on each mesh.
        return Target(
            shape=shape, like=param, make=lambda: placed(param, torch.empty_like(local_tensor(param), dtype=dtype))
        )
    if not isinstance(param, DTensor):
        return Target(shape=shape, like=None, make=lambda: torch.empty(shape, dtype=dtype, device=param.device))
    raise CheckpointError(
        f"optimizer state {key!r} of {name!r} was saved with shape {shape}, but the parameter has "
        f"{tuple(param.shape)}, so how to shard it is not known. Take one optimizer step before load(): "
        "its tensors are then read into."
    )


def set_optimizer(
    optimizer: HoldsState, names: Mapping[int, str], read: Mapping[str, Tensor], facts: Mapping[str, ParameterFacts]
) -> None:
    """Give the optimizer the tensors that were read and the saved options. State that was not saved is dropped."""
    states: dict[str, dict[str, Any]] = {name: dict(entry.values) for name, entry in facts.items()}
    for key, tensor in read.items():
        name, _, short = key.removeprefix(OPTIMIZER).rpartition(".")
        states[name][short] = tensor
    for name, param, _ in optimized(optimizer, names):
        # Replaced, not merged: state that the saved run did not have must not outlive the load.
        optimizer.state.pop(param, None)
        if states[name]:
            optimizer.state[param] = states[name]
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        for key, value in facts[names[id(group["params"][0])]].options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # in place: a captured graph reads this tensor
            else:
                group[key] = value
