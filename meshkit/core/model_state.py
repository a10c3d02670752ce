"""The single-device model of which this rank holds some stages: what the other ranks of `pp` hold, and under which names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

_KEY = "_meshkit_full_model"
_GROUP = "_meshkit_group"


@dataclass(frozen=True)
class FullModel:
    """tensors: parameters and persistent buffers of all stages, on meta, by their single-device names, each once.

    tied: further names of parameters, of whichever rank -> single-device name.
    owners: the rank of `group`, the axis pp, that counts and writes each. copies: parameters of this rank that are
    another's too, which counts them: name here -> single-device name.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    owners: dict[str, int]
    copies: dict[str, str]
    group: ProcessGroup


def set_full_model(module: nn.Module, whole: FullModel) -> None:
    module.__dict__[_KEY] = whole


def full_model_of(module: nn.Module) -> FullModel | None:
    """None for a module that this rank holds whole, apart from shards."""
    whole: FullModel | None = module.__dict__.get(_KEY)
    return whole


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by single-device name, a tied one under each of its names: `state_dict` of the model
    on one device, with the tensors themselves. What other stages hold is on meta.
    """
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    whole = full_model_of(module)
    if whole is None:
        return own
    here = {name: key for key, name in whole.copies.items()}
    state = {name: own.get(here.get(name, name), tensor) for name, tensor in whole.tensors.items()}
    return {**state, **{name: state[first] for name, first in whole.tied.items()}}


def copies_of(module: nn.Module) -> dict[str, str]:
    """See `FullModel.copies`; empty without stages."""
    whole = full_model_of(module)
    return whole.copies if whole is not None else {}


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank holds, by single-device name, each once, sharded as the optimizer
    sees them.
    """
    # First, since FSDP brings its shards back for it. After an evaluation the root unit is still gathered: its parameters
    # would be whole copies, not those the optimizer updates, and after a load the next forward would use the old copies.
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    copies = copies_of(module)
    return {**{copies.get(name, name): param.detach() for name, param in module.named_parameters()}, **buffers}


def set_group(module: nn.Module, group: ProcessGroup) -> None:
    module.__dict__[_GROUP] = group


def group_of(module: nn.Module) -> ProcessGroup | None:
    """All ranks that hold the model together, for one on a part of the world; None is all of the world."""
    group: ProcessGroup | None = module.__dict__.get(_GROUP)
    return group
