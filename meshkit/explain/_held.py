"""What one rank of a mesh holds and runs: its stages, its parts of their parameters, its part of each microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshkit.explain._explanation import ParamRow
from meshkit.mask import Mask
from meshkit.memory.policy import MemoryPolicy
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import ContextPolicy, Layout
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.tensor_layout import TensorLayout
from meshkit.plan import Plan
from meshkit.sharding import chunk


@dataclass(frozen=True)
class Local:
    """A parameter as one tensor rank holds it, before fully_shard."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    trains: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Part:
    """A microbatch as one rank runs it."""

    rows: int
    tokens: int
    mask: Mask | None
    layout: Layout | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One rank of the mesh, and the choices of the run."""

    model: nn.Module
    plan: Plan
    spec: MeshSpec
    memory: MemoryPolicy
    zero: int
    sequence: bool
    context: ContextPolicy
    place: dict[str, int]
    layout: TensorLayout | None
    cut: Cut | None
    params: dict[str, Local]
    blocks: list[str]
    units: list[str]

    @property
    def compute(self) -> torch.dtype:
        if self.memory.precision is not None:
            return self.memory.precision.compute
        return next(self.model.parameters()).dtype

    def at(self, axis: str) -> int:
        return self.place.get(axis, 0)

    def runs(self, module: str) -> bool:
        """Does this rank run the module, which may lie inside of a stage's, or around them?"""
        return self.cut is None or self.cut.runs(module, self.at("pp"))

    def row(self, name: str) -> ParamRow:
        """Where the parameter lies, and what of it this rank keeps."""
        param, spec = self.params[name], self.spec
        placements: dict[str, str] = {}
        shape = list(param.shape)
        if self.cut is not None:
            placements["pp"] = f"stage {self.cut.stages.stage_of(name)}"
        if spec.dp_replicate > 1:
            placements["dp_replicate"] = "Replicate"
        shards = spec.dp_shard * spec.cp
        if shards > 1:
            placements[shard_axis(spec)] = "Shard(0)"
            part = chunk(shape[0], shards, self.at("dp_shard") * spec.cp + self.at("cp")) if shape else slice(0, 1)
            shape[:1] = [part.stop - part.start]
        if self.layout is not None:
            placement = self.layout.params[name].placement
            placements["tp"] = f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate"
        return ParamRow(name, param.whole, param.dtype, placements, prod(shape) * param.dtype.itemsize)


def local_params(
    model: nn.Module, spec: MeshSpec, layout: TensorLayout | None, cut: Cut | None, place: dict[str, int]
) -> dict[str, Local]:
    """The parameters this rank holds, each once, by their names on this rank."""
    params: dict[str, Local] = {}
    seen: set[int] = set()
    for name, param in _own(model, cut, place.get("pp", 0)):
        if id(param) not in seen:
            seen.add(id(param))
            shape = list(param.shape)
            placement = layout.params[name].placement if layout is not None else None
            if isinstance(placement, Shard):
                part = chunk(shape[placement.dim], spec.tp, place.get("tp", 0))
                shape[placement.dim] = part.stop - part.start
            params[name] = Local(tuple(shape), tuple(param.shape), param.dtype, param.requires_grad)
    return params


def _own(model: nn.Module, cut: Cut | None, rank: int) -> Iterable[tuple[str, Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return named if cut is None else ((name, param) for name, param in named if cut.runs(name, rank))


def shard_axis(spec: MeshSpec) -> str:
    """The axis over which fully_shard shards."""
    return "_".join(axis for axis in ("dp_shard", "cp") if getattr(spec, axis) > 1)


def part_masks(mask: Mask | Sequence[Mask] | None, rows: list[int]) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    return Mask.joined([mask[row] for row in rows]) if rows else None
