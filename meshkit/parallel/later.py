"""Changes of a model after it was split that ranks would lose, or of which nothing is proved: parameters that are made or
replaced, values assigned by `.data`, hooks that are put on gradients, other forwards, hooks of modules that change what they
see, and graphs of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.code import is_ours
from meshkit.mesh import Mesh
from meshkit.parallel.later_hooks import LaterHooks

# [Note: values assigned by `.data`]
# A DTensor is a wrapper around this rank's shard, with a storage of its own that nothing reads. `param.data = values` puts
# another wrapper's storage into it and leaves the shard as it was: the values are lost. What converts a module
# (`model.to(...)`) exchanges wrapper and shard together. FSDP gathers from memory that it found when it began, so there a
# shard in other memory is lost too.


@dataclass(frozen=True)
class _Slot:
    """A parameter of a module. Of a DTensor also its shard and its storage, which is held so that no other gets its key."""

    param: nn.Parameter | None
    shard: Tensor | None = None
    storage: UntypedStorage | None = None
    key: int = 0

    @staticmethod
    def of(param: nn.Parameter | None) -> _Slot:
        if not isinstance(param, DTensor):
            return _Slot(param)
        return _Slot(param, _torch.shard_object(param), param.untyped_storage(), _torch.storage_key(param))


@dataclass
class LaterChanges:
    """A model as it was split, to look before each step at what has changed since.

    sequence: whether ranks of tp have other tokens inside of blocks.
    """

    model: nn.Module
    mesh: Mesh
    sequence: bool
    _slots: WeakKeyDictionary[nn.Module, dict[str, _Slot]] = field(init=False)
    _forwards: WeakKeyDictionary[nn.Module, Any] = field(init=False)
    _hooks: LaterHooks = field(init=False)
    _fsdp: bool = field(init=False)

    def __post_init__(self) -> None:
        self._slots = WeakKeyDictionary(
            {module: {key: _Slot.of(p) for key, p in module._parameters.items()} for module in self.model.modules()}
        )
        self._forwards = WeakKeyDictionary({module: vars(module).get("forward") for module in self.model.modules()})
        self._hooks = LaterHooks()
        self._fsdp = any(isinstance(module, FSDPModule) for module in self.model.modules())

    def moved(self, module: nn.Module) -> None:
        """Its parameters have other memory now, which is no change of the user's."""
        self._slots[module] = {key: _Slot.of(param) for key, param in module._parameters.items()}

    def refusal(self, microbatches: int | None) -> str:
        """Why a step, or with None an evaluation, would not be that of one device; empty where it would.

        For values that were assigned to a shard's `.data`; in a step also for a trained parameter of whose gradient each rank
        would have a part, or which is in the place of a shard, and for a hook that would get a part of a gradient; and for a
        whole model that was compiled. For a module with another forward; a hook that was put on one is looked at when it
        runs, see `LaterHooks`.
        """
        axis = next((axis for axis in ("tp", "pp") if self.mesh[axis].size() > 1), None)
        if axis is not None and _torch.is_compiled(self.model):
            return (
                f"the model was compiled as a whole after parallelize, but on {axis} no graph holds what ranks do around its "
                "forward. Give parallelize compile=True, which compiles its blocks, or compile those: for name in "
                "run.blocks: run.model.get_submodule(name).compile()."
            )
        for name, module in self.model.named_modules():
            if (forward := vars(module).get("forward")) is not self._forwards.get(module) and not is_ours(forward):
                return (
                    f"module {name or 'the model'!r} has got another forward after parallelize, of which nothing is proved. "
                    "Change the model first, and give parallelize the changed one."
                )
            self._hooks.look_at(name, module)
            known = self._slots.get(module, {})
            for key, param in module._parameters.items():
                if param is None:
                    continue
                why = self._why_old_values(param, known, key)
                if not why and microbatches is not None and param.requires_grad:
                    why = self._why_lost(param, known.get(key)) or self._why_no_hook(param, microbatches)
                if why:
                    return f"parameter {f'{name}.{key}'.lstrip('.')!r} {why}"
        return ""

    def _why_old_values(self, param: nn.Parameter, known: dict[str, _Slot], key: str) -> str:
        slot = known.get(key)
        if slot is None or slot.shard is None or param is not slot.param:
            return ""
        now = _Slot.of(param)
        if now.shard is slot.shard and now.key == slot.key:
            return ""
        moved = now.shard is None or now.shard.data_ptr() != slot.shard.data_ptr()
        if now.shard is slot.shard or (self._fsdp and moved):
            return (
                "was given other values by assignment (param.data = ..., or model.to a dtype) after parallelize: it is a "
                "shard, and forward reads the memory that it had. Write into that: with torch.no_grad(): "
                "param.copy_(values), or param.mul_(...)."
            )
        known[key] = now
        return ""

    def _why_lost(self, param: nn.Parameter, slot: _Slot | None) -> str:
        """Empty for one that has been there."""
        # Under FSDP a gathered parameter may be in the place of its shard; at what else is, a unit looks before it gathers.
        if slot is not None and (self._fsdp or param is slot.param):
            return ""
        if self.mesh.tokens.size() > 1:
            why = "no data rank sums its gradient with the others"
        elif self.sequence:
            why = "with sequence parallelism no rank of tp sums its gradient with the others"
        elif slot is not None and slot.shard is not None and not isinstance(param, DTensor):
            why = "a shard was in its place"
        else:
            return ""
        return f"was made after parallelize: {why}. Change the model first, and give parallelize the changed one."

    def _why_no_hook(self, param: nn.Parameter, microbatches: int) -> str:
        if not _has_hooks(param):
            return ""
        # FSDP runs hooks of the other kind, on shards of what it has reduced.
        if self.mesh.tokens.size() > 1 and (param._backward_hooks or not isinstance(param, DTensor)):
            why = "there it is a shard, whose hooks do not run in backward"
        elif microbatches > 1:
            why = "backward would run it in each microbatch, on a part of the step's gradient"
        elif self.mesh["pp"].size() > 1:
            why = "with pp, gradients of stages that share it are added after backward"
        else:
            return ""
        return (
            f"has got a hook on its gradient after parallelize: {why}. Register it before parallelize, which runs it once a "
            "step on the whole gradient; or change param.grad between forward_backward and the optimizer's step."
        )


def _has_hooks(param: nn.Parameter) -> bool:
    """The user's: an optimizer on the host and an estimate have their own."""
    accumulated: Mapping[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return bool(param._backward_hooks) or any(not is_ours(hook) for hook in accumulated.values())
