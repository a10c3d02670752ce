"""What one rank of a mesh holds and runs: its stages, its parts of their parameters, its part of each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshkit.core.sharding import chunk
from meshkit.mask import Mask
from meshkit.memory import Treatment
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import Layout
from meshkit.parallel.expert import ExpertLayout, in_expert_view
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.plan import Plan, match_table
from meshkit.preflight.explain._explanation import ParamRow
from meshkit.resolve import Resolved
from meshkit.strategy import ContextPolicy, MemoryPolicy


@dataclass(frozen=True)
class Local:
    """A parameter as one tensor rank holds it, before fully_shard."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    expert: bool = False
    """of experts that have ranks of their own"""
    dims: dict[str, int] = field(default_factory=dict)
    """axis of the expert view -> the dim it splits"""

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
class RankModel:
    """One rank of the mesh. place: on each axis, 0 where it is not named."""

    resolved: Resolved
    place: dict[str, int]

    @property
    def model(self) -> nn.Module:
        return self.resolved.program.model

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    @property
    def spec(self) -> MeshSpec:
        return self.resolved.spec

    @property
    def memory(self) -> MemoryPolicy:
        return self.resolved.memory

    @property
    def zero(self) -> int:
        return self.resolved.zero

    @property
    def sequence(self) -> bool:
        return self.resolved.sequence

    @property
    def context(self) -> ContextPolicy:
        return self.resolved.strategy.context

    @property
    def layout(self) -> TensorLayout | None:
        return self.resolved.layout

    @property
    def cut(self) -> Cut | None:
        return self.resolved.cut

    @property
    def blocks(self) -> list[str]:
        return self.resolved.blocks_of(self.at("pp"))

    @property
    def units(self) -> list[str]:
        return self.resolved.units_of(self.at("pp"))

    @property
    def experts(self) -> Mapping[str, ExpertLayout]:
        return self.resolved.experts

    @property
    def treated(self) -> Mapping[str, Treatment]:
        return self.resolved.treatments

    @property
    def tiled(self) -> Sequence[str]:
        """Feed-forwards that run in parts."""
        return self.resolved.mlps if self.memory.mlp_chunks > 1 else ()

    @property
    def compute(self) -> torch.dtype:
        return self.resolved.compute

    def treatment(self, module: str) -> Treatment:
        """What is kept of the module, by the block it lies in: nothing of a block without gradients is run again."""
        around = next((block for block in self.treated if module.startswith(f"{block}.")), "")
        if around and not self.flow.leaves(around):
            return Treatment()
        return self.treated.get(around, Treatment(regather=self.memory.regather))

    @cached_property
    def flow(self) -> Flow:
        stage_of = self.cut.stages.stage_of if self.cut is not None else None
        return Flow(self.model, self.plan, blocks=list(self.treated), stage_of=stage_of)

    @cached_property
    def params(self) -> dict[str, Local]:
        return held_params(self)

    def at(self, axis: str) -> int:
        return self.place.get(axis, 0)

    def runs(self, module: str) -> bool:
        """Does this rank run the module, which may lie inside of a stage's, or around them?"""
        return self.cut is None or self.cut.runs(module, self.at("pp"))

    def sharded_over(self, name: str) -> tuple[str, int, int]:
        """(axis, ranks, place of this rank on it) over which fully_shard shards the parameter."""
        spec = self.spec
        if not self.params[name].expert:
            return shard_axis(spec), spec.dp_shard * spec.cp, self._folded // spec.tp
        return "edp", spec.edp, self._folded // (spec.ep * spec.etp)

    @property
    def expert_place(self) -> tuple[int, int]:
        """Places on (ep, etp)."""
        spec = self.spec
        return divmod(self._folded % (spec.ep * spec.etp), spec.etp)

    @property
    def _folded(self) -> int:
        """Place on dp_shard x cp x tp as one axis."""
        return (self.at("dp_shard") * self.spec.cp + self.at("cp")) * self.spec.tp + self.at("tp")

    def row(self, name: str) -> ParamRow:
        """Where the parameter lies, and what of it this rank keeps."""
        param, spec = self.params[name], self.spec
        placements: dict[str, str] = {}
        shape = list(param.shape)
        if self.cut is not None:
            placements["pp"] = f"stage {self.cut.stages.stage_of(name)}"
        if spec.dp_replicate > 1:
            placements["dp_replicate"] = "Replicate"
        axis, shards, index = self.sharded_over(name)
        if shards > 1:
            placements[axis] = "Shard(0)"
            part = chunk(shape[0], shards, index) if shape else slice(0, 1)
            shape[:1] = [part.stop - part.start]
        if param.dims:
            placements |= {axis: f"Shard({dim})" for axis, dim in param.dims.items()}
        elif self.layout is not None and name in self.layout.params:
            placement = self.layout.params[name].placement
            placements["tp"] = f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate"
        return ParamRow(name, param.whole, param.dtype, placements, prod(shape) * param.dtype.itemsize)


def held_params(held: RankModel) -> dict[str, Local]:
    """The parameters this rank holds, each once, by their names on this rank."""
    params: dict[str, Local] = {}
    seen: set[int] = set()
    for name, param in _own(held.model, held.cut, held.at("pp")):
        if id(param) in seen:
            continue
        seen.add(id(param))
        owner, _, key = name.rpartition(".")
        if owner in held.experts and in_expert_view(held.spec):
            params[name] = _expert(held, held.experts[owner].dims[key], param)
            continue
        shape = list(param.shape)
        placement = held.layout.params[name].placement if held.layout is not None else None
        if isinstance(placement, Shard):
            part = chunk(shape[placement.dim], held.spec.tp, held.at("tp"))
            shape[placement.dim] = part.stop - part.start
        params[name] = Local(tuple(shape), tuple(param.shape), param.dtype, param.requires_grad)
    return params


def _expert(held: RankModel, feature_dim: int, param: Tensor) -> Local:
    shape = list(param.shape)
    dims: dict[str, int] = {}
    for axis, dim, place in (("ep", 0, held.expert_place[0]), ("etp", feature_dim, held.expert_place[1])):
        if (ranks := getattr(held.spec, axis)) > 1:
            part = chunk(shape[dim], ranks, place)
            shape[dim] = part.stop - part.start
            dims[axis] = dim
    return Local(tuple(shape), tuple(param.shape), param.dtype, param.requires_grad, True, dims)


def _own(model: nn.Module, cut: Cut | None, rank: int) -> Iterable[tuple[str, Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return named if cut is None else ((name, param) for name, param in named if cut.runs(name, rank))


def shard_axis(spec: MeshSpec) -> str:
    """The axis over which fully_shard shards."""
    return "_".join(axis for axis in ("dp_shard", "cp") if getattr(spec, axis) > 1)


def part_masks(mask: Mask | Sequence[Mask] | None, rows: list[int], *, tokens: int) -> Mask | None:
    """Of a microbatch. One without rows is run as a row of zeros, where no token sees another: see `Run.parts`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    return Mask.joined([mask[row] for row in rows]) if rows else Mask.documents([1] * tokens)


# Where gradients flow: autograd goes back to the first parameter that trains, and what lies before sends nothing then.


class Flow:
    """Which modules' inputs and outputs have gradients.

    blocks: of the whole model. stage_of: a module's stage of a pipeline; what a stage receives always has a gradient.
    Modules are taken to run in the order in which they are defined, but the norms of a block, its sequence() children, before
    the rest of it: models define them last, and run them first.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        blocks: Sequence[str],
        stage_of: Callable[[str], int | None] | None = None,
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        styles = match_table(plan.tensor, modules, what="module")
        around = set(blocks)
        self._place = {name: place for place, name in enumerate(modules)}
        for name, style in styles.items():
            parent = name.rpartition(".")[0]
            if style.kind == "sequence" and parent in around:
                self._place[name] = self._place[parent]
        self._trained = [name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad]
        places = [self._place[name.rpartition(".")[0]] for name in self._trained]
        self._first = min(places, default=len(modules))
        self._rows = {name for name, style in styles.items() if style.kind == "row"}
        self._stage_of = stage_of

    def enters(self, module: str) -> bool:
        """Has the module's input a gradient?"""
        received = self._stage_of is not None and bool(self._stage_of(module))
        return received or self._first < self._place[module]

    def leaves(self, module: str) -> bool:
        """Has the module's output a gradient? That of a row() is looked at before its bias is added."""
        bias = f"{module}.bias" if module in self._rows else None
        return self.enters(module) or any(name != bias for name in self._inside(module))

    def last_without_gradient(self, modules: Sequence[str]) -> str | None:
        """The last to run of those whose output has no gradient."""
        silent = [name for name in modules if not self.leaves(name)]
        return max(silent, key=self._place.__getitem__, default=None)

    def attends(self, module: str) -> bool:
        """Has what goes into an attention, before the row() that ends its module, a gradient?"""
        if self.enters(module):
            return True
        after = tuple(f"{row}." for row in self._rows if row.startswith(f"{module}."))
        return any(not name.startswith(after) for name in self._inside(module))

    def _inside(self, module: str) -> Iterator[str]:
        """The parameters in it that train."""
        return (name for name in self._trained if not module or name.startswith(f"{module}."))
