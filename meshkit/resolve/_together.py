"""Resolving on a mesh: the first rank decides, and the others are told."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshkit.core import _torch
from meshkit.core.asked_once import tellable
from meshkit.errors import MeshkitError, PlanError
from meshkit.mesh import Mesh
from meshkit.parallel.pipeline import generator_of
from meshkit.program import Program
from meshkit.resolve._resolve import resolve
from meshkit.resolve._resolved import Resolved
from meshkit.strategy import Strategy


def resolve_together(program: Program, strategy: Strategy, mesh: Mesh) -> Resolved:
    """`resolve` on every rank of the mesh. The model is read and proved by the first rank alone, which takes seconds.

    Wire: a gather of three digests; a broadcast of what was decided, some kilobytes.
    Raises: PlanError on all ranks, if some have another model, another strategy, or what `resolve` refuses.
    """
    device = mesh.device.type
    if mesh.spec.world_size == 1 or _torch.is_fake_group(mesh.group):
        return resolve(program, strategy, mesh.spec, device_type=device)
    _refuse_other_programs(program, strategy, mesh)
    own: Resolved | None = None
    told: list[bytes | MeshkitError | None] = [None]
    if dist.get_rank(mesh.group) == 0:
        # The refusal travels too: the others would wait for a rank that has raised.
        try:
            own = resolve(program, strategy, mesh.spec, device_type=device)
            told = [_packed(own, program.called_twice)]
        except MeshkitError as error:
            told = [tellable(error)]
        except Exception as error:
            told = [MeshkitError(f"parallelize: rank 0 raised {type(error).__name__}: {error}")]
            dist.broadcast_object_list(told, group=mesh.group, group_src=0, device=mesh.device)
            raise
    dist.broadcast_object_list(told, group=mesh.group, group_src=0, device=mesh.device)
    if isinstance(told[0], MeshkitError):
        raise told[0]
    return own or _unpacked(told[0] or b"", program, strategy)


# ------------------------------------------------------------------------------------------------------ what ranks are told


def _packed(resolved: Resolved, called_twice: Set[tuple[bool, ...]]) -> bytes:
    """Without the model and what the user gave, of which every rank has its own. called_twice: see `Program`."""
    own = _own(resolved.program, resolved.strategy)
    names = {id(value): name for name, value in own.items()}
    if resolved.cut is not None:
        names[id(resolved.cut.generate)] = _GENERATE

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return names.get(id(obj))

    packed = io.BytesIO()
    Pickler(packed).dump((resolved, called_twice))
    return packed.getvalue()


def _unpacked(packed: bytes, program: Program, strategy: Strategy) -> Resolved:
    own = _own(program, strategy)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return generator_of(strategy.pipeline.schedule) if pid == _GENERATE else own[pid]

    resolved: Resolved
    resolved, called_twice = Unpickler(io.BytesIO(packed)).load()
    program.called_twice.update(called_twice)
    return resolved


_GENERATE = "generate"


def _own(program: Program, strategy: Strategy) -> dict[str, Any]:
    policies = {f"strategy.{each.name}": getattr(strategy, each.name) for each in fields(strategy)}
    kept = {name: policy for name, policy in policies.items() if is_dataclass(policy)}
    return {"program": program, "example": program.example, "strategy": strategy, **kept}


# ------------------------------------------------------------------------------------------------------ what ranks must share


def _refuse_other_programs(program: Program, strategy: Strategy, mesh: Mesh) -> None:
    model = program.model
    shown = {
        "model": (type(model).__name__, _listed(model)),
        "code of the model": (f"{type(model).__name__} of {_file_of(type(model))}", _code_of(model)),
        "strategy": (str(strategy), _plain(strategy)),
    }
    own = {what: _digest(value) for what, (_, value) in shown.items()}
    told = torch.empty(mesh.spec.world_size * len(own), dtype=torch.int64, device=mesh.device)
    dist.all_gather_into_tensor(told, torch.tensor([*own.values()], device=mesh.device), group=mesh.group)
    for what, of_ranks in zip(own, told.view(-1, len(own)).T.tolist(), strict=True):
        others = [rank for rank, each in enumerate(of_ranks) if each != of_ranks[0]]
        if others:
            raise PlanError(
                f"parallelize: ranks {others} were given another {what} than rank 0. Give the same one on every rank of the "
                f"mesh; here it is {shown[what][0]}."
            )


def _listed(model: nn.Module) -> Any:
    named = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return [(name, type(module).__qualname__, module.training) for name, module in model.named_modules()], named


def _code_of(model: nn.Module) -> Any:
    """Where the forward of each class of module stands, and what it does: ranks are told of lines of it."""
    found = set()
    for kind in {type(module) for module in model.modules()}:
        code = _forward_of(kind)
        if code is not None and not kind.__module__.startswith("torch."):
            found.add((kind.__qualname__, _file_of(kind), code.co_firstlineno, code.co_code))
    return sorted(found)


def _forward_of(kind: type[nn.Module]) -> CodeType | None:
    return getattr(unwrap(kind.forward), "__code__", None)


def _file_of(kind: type[nn.Module]) -> str:
    code = _forward_of(kind)
    return Path(code.co_filename).name if code is not None else "an unknown file"


def _plain(value: Any) -> Any:
    """Less what ranks may have of their own: folders, and the state of functions."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, [(each.name, _plain(getattr(value, each.name))) for each in fields(value)]
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(each)) for each in value)
    plain = isinstance(value, str | int | float | torch.dtype | None)
    return value if plain else type(value).__qualname__


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
