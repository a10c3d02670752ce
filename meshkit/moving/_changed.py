"""What was done to a running model after it was split, and a move would lose: it is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from meshkit.core.code import is_ours
from meshkit.core.digests import digest_bytes
from meshkit.errors import PlanError
from meshkit.moving._agree import gathered
from meshkit.step import Run

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def later_changes(run: Run) -> str:
    """Hooks and buffers that the model was given after `parallelize`, and buffers that are held twice; else empty."""
    full = run.full_model
    modules, params = dict(full.named_modules()), dict(full.named_parameters(remove_duplicate=False))
    buffers = dict[int, str]()
    for name, buffer in run.model.named_buffers(remove_duplicate=False):
        if buffers.setdefault(id(buffer), name) != name:
            both = f"{buffers[id(buffer)]!r} and {name!r}"
            return f"{both} are one buffer, which would be two after a move. Keep it in one module."
    for name, module in run.model.named_modules():
        if (before := modules.get(name)) is None:
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and before._buffers.get(key) is None:
                return f"buffer {f'{name}.{key}'.lstrip('.')!r} was made after parallelize. {_BEFORE}"
        if _made_later(module, before, _HOOKS):
            return f"module {name or 'of the model'!r} was given a hook after parallelize. {_BEFORE}"
        for attribute, value in vars(module).items():
            if attribute not in _OF_MODULES and holds(value, lambda each: id(each) in buffers):
                return (
                    f"module {name or 'of the model'!r} holds a buffer in its attribute {attribute!r}, too, which would be "
                    "that of before the move. Read it by its name."
                )
    for name, param in run.model.named_parameters():
        if name in params and _made_later(param, params[name], _OF_PARAMETERS):
            return f"parameter {name!r} was given a hook after parallelize. {_BEFORE}"
    return ""


_BEFORE = (
    "A move makes the model anew from what parallelize got, and would lose it: do so before parallelize, or remove it."
)


def _made_later(now: Any, before: Any, tables: Iterable[str]) -> bool:
    for table in tables:
        known: Mapping[int, Any] = getattr(before, table, None) or {}
        functions = {id(hook) for hook in known.values()}
        for key, hook in (getattr(now, table, None) or {}).items():
            if key not in known and id(hook) not in functions and not is_ours(hook) and not _is_torchs(hook):
                return True
    return False


def _is_torchs(function: Any) -> bool:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__module__", "")).startswith("torch.")


def holds(value: Any, wanted: Callable[[Any], bool], depth: int = 3) -> bool:
    """Whether a value, or what is in it, a list, a dict, and what is in those, is wanted."""
    if wanted(value):
        return True
    if not depth or not isinstance(value, dict | list | tuple | set):
        return False
    inside: Iterable[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(holds(each, wanted, depth - 1) for each in inside)


def refuse_parted_buffers(run: Run, model: nn.Module) -> None:
    """model: as `like_running` made it. With pp each rank knows the values of its own stages' buffers, and of those that are
    not persistent no other rank gets them.

    Wire: an all-gather of digests over the mesh, as objects. Raises: PlanError, on every rank, where ranks would differ.
    """
    if run.mesh.spec.pp == 1:
        return
    persistent = model.state_dict().keys()
    own = {
        name: digest_bytes(buffer.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, buffer in model.named_buffers()
        if name not in persistent and not buffer.is_meta
    }
    told = gathered(run.mesh, lambda: own)
    for name in own:
        if len({each.get(name) for each in told}) > 1:
            raise PlanError(
                f"move: buffer {name!r} is not persistent, and the stages have other values of it than those of before "
                "parallelize. Register it with persistent=True, or set it after the move."
            )
