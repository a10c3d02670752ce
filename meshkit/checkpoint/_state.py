"""The state of a run by single-device names: parameters, optimizer state and RNG, to write and to read into.

| key                          | is                                                                       |
|------------------------------|--------------------------------------------------------------------------|
| `model.<name>`               | a parameter or persistent buffer; a tied one under its first name        |
| `optimizer.<parameter>.<key>`| optimizer state, for example exp_avg                                     |
| `rng.<rank>.<device type>`   | state of torch's global generator of that rank                           |
| `wires.<parameter>`          | what rounding took of the gradients of each data rank (error feedback)   |

What is not a tensor (options such as lr, and state that is a number) is `ParameterFacts`, by parameter too, so the
groups of an optimizer may be cut up differently when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshkit.checkpoint._dcp import Index, Part
from meshkit.core.model_state import full_model_of, model_tensors
from meshkit.core.optimizer_state import OPTIMIZER, is_writer
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.parallel.wires import rounding_errors_of, set_rounding_errors

MODEL = "model."
WIRES = "wires."


def full_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers of the model, the same on every rank; those of other stages are on meta."""
    full_model = full_model_of(model)
    return {**(full_model.tensors if full_model is not None else {}), **model_tensors(model)}


def parts_to_write(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """The shards that this rank writes, without copying. One rank writes a shard that several ranks hold (replicas)."""
    parts = {}
    for key, tensor in tensors.items():
        slices = local_slices(tensor)
        local = local_tensor(tensor)
        # A rank that holds nothing writes nothing; a tensor without elements is written all the same, or its name
        # would be missing.
        is_empty_shard = tensor.numel() and not local.numel()
        if not is_empty_shard and is_writer(key, tensor):
            offset = tuple(region.start for region in slices)
            parts[key] = Part(tensor=local, offset=offset, shape=tuple(tensor.shape))
    return parts


def parameter_of(key: str) -> str:
    """The parameter or buffer that a key of the model or the optimizer belongs to."""
    return key.removeprefix(MODEL) if key.startswith(MODEL) else key.removeprefix(OPTIMIZER).rpartition(".")[0]


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """State of torch's global generators: the CPU's, and that of the rank's accelerator."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"rng.{rank}.{device.type}"] = torch.get_device_module(device.type).get_rng_state()
    return states


def rng_targets(rank: int, device: torch.device, index: Index) -> dict[str, Tensor]:
    return {key: state for key, state in rng_tensors(rank, device).items() if key in index.tensors}


def wires_to_read(model: nn.Module, index: Index) -> dict[str, Tensor]:
    """What to read rounding errors into: of as many data ranks as saved them. Empty without error feedback."""
    ranks = {key.removeprefix(WIRES): shape[0] for key, (shape, _) in index.tensors.items() if key.startswith(WIRES)}
    return {f"{WIRES}{name}": errors for name, errors in rounding_errors_of(model, ranks).items()}


def set_wires(model: nn.Module, read: Mapping[str, Tensor]) -> None:
    set_rounding_errors(model, {key.removeprefix(WIRES): errors for key, errors in read.items()})


def set_rng(states: Mapping[str, Tensor]) -> None:
    for key, state in states.items():
        device_type = key.rpartition(".")[2]
        (torch if device_type == "cpu" else torch.get_device_module(device_type)).set_rng_state(state)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as manifests and refusals say it."""
    return str(dtype).removeprefix("torch.")
