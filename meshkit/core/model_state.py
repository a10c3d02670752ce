"""The state dict of the single-device model, of which a rank of `pp` holds some stages: all names, and who owns what.

Checkpoints, exports and comparisons name tensors as the single-device model does; a rank with pipeline stages has only some
of them. `FullModel` says what there is besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshkit.errors import PlanError

_KEY = "_meshkit_full_model"
_GROUP = "_meshkit_group"
_NOTES = "_meshkit_notes"
_DISPLACED = "_meshkit_displaced"


class Notes(Protocol):
    """What ranks that hold a model say that they do with it, to be compared; see `meshkit.mesh.agreement`."""

    def note(self, what: str, facts: Mapping[str, object]) -> None: ...


@dataclass(frozen=True)
class FullModel:
    """The tensors of all stages, and the rank that answers for each.

    tensors: parameters and persistent buffers of all stages, on meta, by their single-device names, each once.
    tied: further names of tied parameters on any rank -> single-device name.
    owners: single-device name -> the rank of `group` that counts the tensor in norms and writes it to checkpoints.
    copies: name in this rank's modules -> single-device name, for parameters that this rank holds and another owns.
    group: the axis pp.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    owners: dict[str, int]
    copies: dict[str, str]
    group: ProcessGroup


def set_full_model(module: nn.Module, full: FullModel) -> None:
    module.__dict__[_KEY] = full


def full_model_of(module: nn.Module) -> FullModel | None:
    """None without pipeline stages: then the rank has all modules, if only shards of their parameters."""
    full: FullModel | None = module.__dict__.get(_KEY)
    return full


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """The single-device model's `state_dict`, with the tensors themselves, tied ones under each of their names.

    Tensors of other ranks' stages are on meta.
    Raises: PlanError where parts of tensors are in other places than the single-device model has them.
    """
    refuse_displaced(module)
    local_state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    full = full_model_of(module)
    if full is None:
        return local_state
    local_names = {name: local_name for local_name, name in full.copies.items()}
    state = {name: local_state.get(local_names.get(name, name), tensor) for name, tensor in full.tensors.items()}
    return {**state, **{name: state[first] for name, first in full.tied.items()}}


def copies_of(module: nn.Module) -> dict[str, str]:
    """See `FullModel.copies`; empty without stages."""
    full = full_model_of(module)
    return full.copies if full is not None else {}


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank holds, by single-device name, each once, sharded as the optimizer
    sees them.
    Raises: PlanError where parts of tensors are in other places than the single-device model has them.
    """
    refuse_displaced(module)
    # `state_dict` comes first for its side effect: FSDP puts its shards back for it. After an evaluation the root unit is
    # still gathered, and its parameters would be unsharded copies, which the optimizer does not update; and after a load the
    # next forward would use the old copies.
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    copies = copies_of(module)
    return {**{copies.get(name, name): param.detach() for name, param in module.named_parameters()}, **buffers}


def set_displaced(module: nn.Module, why: str) -> None:
    """Say that parts of tensors are in other places than the single-device model has them; empty: that none are. As long as
    some are, the module has no `state_dict`."""
    if _DISPLACED not in module.__dict__:
        module.register_state_dict_pre_hook(_before_state_dict)
    module.__dict__[_DISPLACED] = why


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    refuse_displaced(module)


def refuse_displaced(module: nn.Module) -> None:
    """Raises: PlanError where parts of tensors are in other places than the single-device model has them."""
    if why := module.__dict__.get(_DISPLACED):
        raise PlanError(why)


def set_group(module: nn.Module, group: ProcessGroup) -> None:
    module.__dict__[_GROUP] = group


def group_of(module: nn.Module) -> ProcessGroup | None:
    """The ranks that hold the model together, where its mesh is on a part of the world; None for all of the world."""
    group: ProcessGroup | None = module.__dict__.get(_GROUP)
    return group


def set_notes(module: nn.Module, notes: Notes) -> None:
    module.__dict__[_NOTES] = notes


def note(module: nn.Module, what: str, facts: Mapping[str, object]) -> None:
    """Say what this rank does with a model; nothing where it is on no mesh."""
    notes: Notes | None = module.__dict__.get(_NOTES)
    if notes is not None:
        notes.note(what, facts)
