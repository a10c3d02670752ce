"""One rank of a mesh: its pipeline stages, its shards of their parameters, and where gradients flow in its modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshkit.core.sharding import chunk
from meshkit.mask import Mask
from meshkit.memory import Treatment
from meshkit.mesh import MeshSpec, group_axes
from meshkit.mesh.groups import TOKENS
from meshkit.mesh.world import ranks_per_node
from meshkit.parallel.context import Layout
from meshkit.parallel.expert import ExpertLayout, Placement, expected_placement, in_expert_view
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.shardings import axes_between, axes_outside
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.plan import Plan, match_table
from meshkit.preflight.explain._explanation import ParamRow
from meshkit.resolve import Resolved
from meshkit.strategy import ContextPolicy, MemoryPolicy, Shardings

Made = TypeVar("Made")


@dataclass(frozen=True)
class LocalParam:
    """A parameter as one rank holds it after tensor and expert parallelism, and before fully_shard."""

    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    expert: bool = False
    """a parameter of routed experts, which are split over ep and etp"""
    dims: dict[str, int] = field(default_factory=dict)
    """axis of the expert mesh -> the tensor dim that it splits"""
    fp8: bool = False
    """gathered in fp8, one byte an element"""
    whole: bool = False
    """kept whole by every data rank"""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def kind(self) -> Hashable:
        """What the bytes depend on that ranks keep and send of it."""
        return self.shape, self.dtype, self.trains, self.expert, self.fp8, self.whole


@dataclass(frozen=True)
class LocalBatch:
    """A microbatch as one rank runs it: rows, tokens of each row on this rank of `cp`, and who sees whom."""

    rows: int
    tokens: int
    mask: Mask | None
    layout: Layout | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """The model as one rank holds it. coordinate: the rank's index on each axis, 0 where it is not named. placements: of
    experts, as a run has them; None: as it begins."""

    resolved: Resolved
    coordinate: dict[str, int]
    placements: Mapping[str, Placement] | None = None

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
    def shardings(self) -> Shardings:
        return self.resolved.shardings

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
    def treatments(self) -> Mapping[str, Treatment]:
        return self.resolved.treatments

    @property
    def chunked_mlps(self) -> Sequence[str]:
        """Feed-forwards (MLPs) that run in chunks of tokens."""
        return self.resolved.mlps if self.memory.mlp_chunks > 1 else ()

    @property
    def compute(self) -> torch.dtype:
        return self.resolved.compute

    def treatment(self, module: str) -> Treatment:
        """The activation checkpointing of the block that is the module, or holds it; without gradients none."""
        # Autograd saves nothing for a block through which no gradient flows, so there is nothing to recompute either.
        owner = next((block for block in self.treatments if f"{module}.".startswith(f"{block}.")), "")
        if owner and not self.flow.leaves(owner):
            return Treatment()
        return self.treatments.get(owner, Treatment(regather=self.memory.regather))

    @cached_property
    def flow(self) -> Flow:
        def made() -> Flow:
            stage_of = self.cut.stages.stage_of if self.cut is not None else None
            return Flow(self.model, self.plan, blocks=list(self.treatments), stage_of=stage_of)

        return self.derived("flow", made)

    @cached_property
    def params(self) -> dict[str, LocalParam]:
        return self.derived(("params", self.place), lambda: local_params(self))

    @property
    def place(self) -> Hashable:
        """The indices on which it depends what the rank holds before fully_shard."""
        return self.at("pp"), self.at("tp"), self.expert_coordinate

    def derived(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, kept with the decisions. key: all that it depends on besides; on no size of a data axis."""
        derived = self.resolved.derived
        if key not in derived:
            derived[key] = make()
        made: Made = derived[key]
        return made

    def at(self, axis: str) -> int:
        return self.coordinate.get(axis, 0)

    def runs(self, module: str) -> bool:
        """Whether this rank runs the module or something inside of it."""
        return self.cut is None or self.cut.runs(module, self.at("pp"))

    def sharded_over(self, param: LocalParam) -> tuple[str, int, int]:
        """(axis, its size, this rank's index on it) over which fully_shard shards the parameter."""
        if param.whole:
            return "", 1, 0
        spec, inner = self.spec, self.spec.ep * self.spec.etp if param.expert else self.spec.tp
        index = (self.at("dp_replicate") * spec.dp_shard * spec.cp * spec.tp + self._inner_index) // inner
        axis, size = self.axis(axes_between("none", self.shardings.states, experts=param.expert))
        return axis, size, index % size

    def axis(self, axes: Sequence[str]) -> tuple[str, int]:
        """(name, size) of some axes that are taken as one."""
        return "_".join(group_axes(self.spec, *axes)), prod(getattr(self.spec, axis) for axis in axes)

    @property
    def expert_coordinate(self) -> tuple[int, int]:
        """Indices on (ep, etp)."""
        spec = self.spec
        return divmod(self._inner_index % (spec.ep * spec.etp), spec.etp)

    @cached_property
    def expert_nodes(self) -> tuple[int, ...]:
        """The node of each rank of ep."""
        spec, inside = self.spec, self.spec.ep * self.spec.etp
        outside = self.at("pp") * spec.dp_replicate + self.at("dp_replicate")
        first = outside * spec.dp_shard * spec.cp * spec.tp + self._inner_index // inside * inside
        return tuple((first + rank * spec.etp) // ranks_per_node() for rank in range(spec.ep))

    def placement(self, experts: str) -> Placement:
        """Where the experts of this module are computed: in the run, or else in its first step."""
        if self.placements is not None and experts in self.placements:
            return self.placements[experts]
        count = self.experts[experts].experts
        return expected_placement(self.resolved.strategy.experts, count, self.spec.ep, self.expert_nodes)

    @property
    def _inner_index(self) -> int:
        """Index on dp_shard x cp x tp as one axis: the expert mesh is made of the same ranks."""
        return (self.at("dp_shard") * self.spec.cp + self.at("cp")) * self.spec.tp + self.at("tp")

    def row(self, name: str) -> ParamRow:
        """The parameter as it is printed: placement on each axis, and the bytes that this rank keeps."""
        param = self.params[name]
        placements: dict[str, str] = {}
        if self.cut is not None:
            placements["pp"] = f"stage {self.cut.stages.stage_of(name)}"
        outside, copies = self.axis(
            TOKENS if param.whole else axes_outside(self.shardings.states, experts=param.expert)
        )
        if copies > 1:
            placements[outside] = "Replicate"
        axis, shards, _ = self.sharded_over(param)
        if shards > 1:
            placements[axis] = "Shard(0)"
        if param.dims:
            placements |= {axis: f"Shard({dim})" for axis, dim in param.dims.items()}
        elif self.layout is not None and name in self.layout.params:
            placement = self.layout.params[name].placement
            placements["tp"] = f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate"
        return ParamRow(name, param.full_shape, param.dtype, placements, self._held_bytes(param))

    def held(self) -> dict[str, tuple[int, int]]:
        """Of each parameter, the (elements, bytes) that this rank keeps."""
        known: dict[Hashable, tuple[int, int]] = {}
        held = {}
        for name, param in self.params.items():
            if param.kind not in known:
                size = self._held_bytes(param)
                known[param.kind] = size // param.dtype.itemsize, size
            held[name] = known[param.kind]
        return held

    def _held_bytes(self, param: LocalParam) -> int:
        shape = list(param.shape)
        _, shards, index = self.sharded_over(param)
        if shards > 1:
            # FSDP2 splits dim 0 as torch.chunk does, so the last ranks have fewer rows, or none.
            rows = chunk(shape[0], shards, index)
            shape[:1] = [rows.stop - rows.start]
        return prod(shape) * param.dtype.itemsize


def local_params(rank_model: RankModel) -> dict[str, LocalParam]:
    """The parameters that this rank holds, by name; a tied one under its first name only."""
    params: dict[str, LocalParam] = {}
    seen: set[int] = set()
    precision = rank_model.memory.precision
    gathers = precision is not None and precision.fp8 is not None and precision.fp8.gather
    in_fp8 = {f"{name}.weight" for name in rank_model.resolved.fp8} if gathers else set[str]()
    for name, param in _stage_params(rank_model.model, rank_model.cut, rank_model.at("pp")):
        if id(param) in seen:
            continue
        seen.add(id(param))
        owner, _, key = name.rpartition(".")
        if owner in rank_model.experts and in_expert_view(rank_model.spec):
            params[name] = _local_expert(rank_model, rank_model.experts[owner].dims[key], param)
            continue
        shape = list(param.shape)
        placement = rank_model.layout.params[name].placement if rank_model.layout is not None else None
        if isinstance(placement, Shard):
            local = chunk(shape[placement.dim], rank_model.spec.tp, rank_model.at("tp"))
            shape[placement.dim] = local.stop - local.start
        params[name] = LocalParam(
            tuple(shape),
            tuple(param.shape),
            param.dtype,
            param.requires_grad,
            fp8=name in in_fp8,
            whole=name in rank_model.resolved.whole,
        )
    return params


def _local_expert(rank_model: RankModel, feature_dim: int, param: Tensor) -> LocalParam:
    shape = list(param.shape)
    dims: dict[str, int] = {}
    for axis, dim, index in (
        ("ep", 0, rank_model.expert_coordinate[0]),
        ("etp", feature_dim, rank_model.expert_coordinate[1]),
    ):
        if (ranks := getattr(rank_model.spec, axis)) > 1:
            local = chunk(shape[dim], ranks, index)
            shape[dim] = local.stop - local.start
            dims[axis] = dim
    return LocalParam(tuple(shape), tuple(param.shape), param.dtype, param.requires_grad, True, dims)


def _stage_params(model: nn.Module, cut: Cut | None, rank: int) -> Iterable[tuple[str, Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return named if cut is None else ((name, param) for name, param in named if cut.runs(name, rank))


def microbatch_mask(mask: Mask | Sequence[Mask] | None, rows: list[int], *, tokens: int) -> Mask | None:
    """The mask of these rows. A microbatch without rows runs a row where no token sees another: see `Run.parts`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    return Mask.joined([mask[row] for row in rows]) if rows else Mask.documents([1] * tokens)


# Where gradients flow. Autograd goes back to the first parameter that trains, so modules before it send nothing in backward.


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
        block_names = set(blocks)
        self._order = {name: index for index, name in enumerate(modules)}
        for name, style in styles.items():
            parent = name.rpartition(".")[0]
            if style.kind == "sequence" and parent in block_names:
                self._order[name] = self._order[parent]
        self._trained = [name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad]
        trained_at = [self._order[name.rpartition(".")[0]] for name in self._trained]
        self._first = min(trained_at, default=len(modules))
        self._rows = {name for name, style in styles.items() if style.kind == "row"}
        self._stage_of = stage_of

    def enters(self, module: str) -> bool:
        """Whether the module's input has a gradient."""
        received = self._stage_of is not None and bool(self._stage_of(module))
        return received or self._first < self._order[module]

    def leaves(self, module: str) -> bool:
        """Whether the module's output has a gradient; for a row(), its output before the bias is added."""
        bias = f"{module}.bias" if module in self._rows else None
        return self.enters(module) or any(name != bias for name in self._inside(module))

    def last_without_gradient(self, modules: Sequence[str]) -> str | None:
        """Of the modules whose output has no gradient, the last one to run."""
        without_gradient = [name for name in modules if not self.leaves(name)]
        return max(without_gradient, key=self._order.__getitem__, default=None)

    def attends(self, module: str) -> bool:
        """Whether q, k or v has a gradient: something trains before the row() that ends the attention module."""
        if self.enters(module):
            return True
        after = tuple(f"{row}." for row in self._rows if row.startswith(f"{module}."))
        return any(not name.startswith(after) for name in self._inside(module))

    def _inside(self, module: str) -> Iterator[str]:
        """The trained parameters inside the module."""
        return (name for name in self._trained if not module or name.startswith(f"{module}."))
