"""Lower bounds of bytes that hold for a strategy before it is resolved, of parts that were traced once.

Each is a sum of terms that the composed estimate has, too, and leaves others away: of bytes everything but states, what FSDP
keeps of a stage, and what blocks keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Cut, Schedule
from meshkit.parallel.shardings import hops_between, ranks_between, shardings_of
from meshkit.preflight._instants import greatest_instants, stages_of_ranks
from meshkit.preflight.search._bounds import Array, Microbatch, Stages, table_of
from meshkit.resolve import Resolved
from meshkit.strategy import DataPolicy, OptimizerPolicy, Shardings, Strategy

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shares:
    """Over how many ranks a row of shardings spreads what is held: states, of which experts by their own. gathers: what
    decides which bytes beside those are there: whether dense parameters, and experts, are on several ranks, and on how many
    their secondary copies are; 0 without such copies. frees: whether parameters are gathered again in backward. adds_whole:
    whether microbatches add up gradients that no data axis shards.
    """

    states: int
    experts: int
    frees: bool
    adds_whole: bool
    gathers: tuple[bool, bool, int, int]

    @staticmethod
    def of(strategy: Strategy, spec: MeshSpec) -> Shares:
        return Shares._of(strategy.zero, strategy.data, spec)

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def _of(zero: int | None, data: DataPolicy, spec: MeshSpec) -> Shares:
        try:
            row = shardings_of(Strategy(zero=zero, data=data), spec)
        except PlanError:
            row = Shardings()  # it is refused, whatever it holds
        states, experts = (ranks_between(spec, "none", row.states, experts=each) for each in (False, True))
        copies = [
            ranks_between(spec, "none", row.parameters, experts=each)
            if hops_between(spec, row.parameters, row.states, experts=each) > 1
            else 0
            for each in (False, True)
        ]
        gathers = states == 1, experts == 1, copies[0], copies[1]
        return Shares(states, experts, row.frees_parameters, not row.reduces_every_microbatch, gathers)


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of parameters that train. blocks: of each block without its experts, as tp splits them; experts: of those, as
    ep and etp do; held: of both, of which dp_shard and cp share what is held. around: outside of blocks, by module.
    """

    blocks: Array
    experts: Array
    held: Array
    around: Mapping[str, float]

    @staticmethod
    def of(resolved: Resolved, spec: MeshSpec) -> Elements:
        """spec: of any strategy with the blocks and experts of `resolved`."""
        program = resolved.program
        routed = tuple(f"{name}." for name in resolved.experts)
        blocks = dict.fromkeys(resolved.blocks, 0.0)
        experts = dict.fromkeys(resolved.blocks, 0.0)
        around: dict[str, float] = {}
        for name, param in program.parameters.items():
            if name not in program.trained:
                continue
            owner = next((each for each in _holders(name) if each in blocks), None)
            if owner is None:
                key = name.rpartition(".")[0]
                around[key] = around.get(key, 0.0) + param.numel() / spec.tp
            elif name.startswith(routed):
                experts[owner] += param.numel() / (spec.ep * spec.etp)
            else:
                blocks[owner] += param.numel() / spec.tp
        of_blocks, of_experts = (np.array([*each.values()]) for each in (blocks, experts))
        # edp, which shares experts, has the ranks of tp beside those of dp_shard and cp.
        return Elements(of_blocks, of_experts, of_blocks + of_experts * spec.ep * spec.etp / spec.tp, around)

    @cached_property
    def total(self) -> float:
        return float(self.held.sum()) + sum(self.around.values())

    def added(self, strategy: Strategy) -> float:
        """Gradients that microbatches add to those before, in the step, of a rank of pp that has the mean of all."""
        spec = strategy.mesh_for()
        shares = Shares.of(strategy, spec)
        dense, experts = (1, 1) if shares.adds_whole else (shares.states, shares.experts)
        of_microbatch = (self.blocks.sum() + sum(self.around.values())) / dense + self.experts.sum() / experts
        return float(of_microbatch) / spec.pp * ((strategy.microbatches or 1) - 1)


@dataclass(frozen=True, eq=False)
class Kept:
    """Bytes of one microbatch by block, as `kept_of_blocks` says them. top: what the head and the loss hold at most."""

    kept: Array
    waits: Array
    rise: Array
    top: float

    @staticmethod
    def of(sizes: Mapping[str, tuple[int, int, int]]) -> Kept:
        kept, waits, rise = np.array([size for name, size in sizes.items() if name], dtype=np.float64).reshape(-1, 3).T
        return Kept(kept, waits, rise, float(sizes[""][0]))

    def part(self, share: float, *, top: bool) -> Kept:
        return Kept(self.kept * share, self.waits * share, self.rise * share, self.top * share if top else 0.0)


@dataclass(frozen=True)
class Ranks:
    """Of each rank of pp: elements of its parameters that train, and the most bytes of all that no data axis shards.

    sets: how many of each element are held, with the states of the optimizer.
    """

    sets: int
    elements: Array
    whole_bytes: Array

    def least_bytes(self, shards: int, itemsize: int) -> float:
        """Where so many ranks share them evenly. itemsize: of a parameter."""
        held = self.sets * itemsize / shards
        return float((held * self.elements + self.whole_bytes).max())


@dataclass(frozen=True)
class Alive:
    """What ranks of a pipeline hold at the instants of its table of which no other instant of the rank holds as much of all.

    ranks: of each instant. stages: [instants, stages of a rank]. Of each such stage then: kept, microbatches whose forward is
    kept for backward; waits, those that only W is left of; gathered, summed: whether its first forward, and its first
    gradient of weights, was; running: whether its backward begins.
    """

    world: int
    ranks: Indices
    stages: Indices
    kept: Array
    waits: Array
    gathered: Array
    summed: Array
    running: Array

    @staticmethod
    def of(table: Schedule) -> Alive:
        ranks: list[int] = []
        stages: list[list[int]] = []
        held: list[Array] = []
        for rank, of_rank in stages_of_ranks(table).items():
            found = greatest_instants(table.ranks[rank], of_rank)
            held.append(found)
            ranks += [rank] * len(found)
            stages += [of_rank] * len(found)
        return Alive(table.world, np.array(ranks), np.array(stages), *np.moveaxis(np.concatenate(held), 2, 0))

    def most(self, kept: Array, waits: Array, gathered: Array, summed: Array, running: Array) -> Array:
        """Bytes of each rank, of those of each stage."""
        at = self.stages
        held = self.kept * kept[at] + self.waits * waits[at] + self.gathered * gathered[at] + self.summed * summed[at]
        held += self.running * running[at]
        most = np.zeros(self.world)
        np.maximum.at(most, self.ranks, held.sum(1))
        return most

    def fullest(
        self, kept: Array, waits: Array, gathered: Array, summed: Array, running: Array
    ) -> list[tuple[float, dict[int, float]]]:
        """Of each rank the most bytes, as `most`, and how many microbatches each of its stages keeps at that instant."""
        at = self.stages
        held = self.kept * kept[at] + self.waits * waits[at] + self.gathered * gathered[at] + self.summed * summed[at]
        total = (held + self.running * running[at]).sum(1)
        found = []
        for rank in range(self.world):
            of_rank = np.flatnonzero(self.ranks == rank)
            top = of_rank[total[of_rank].argmax()]
            found.append(
                (float(total[top]), dict(zip(self.stages[top].tolist(), self.kept[top].tolist(), strict=True)))
            )
        return found

    @cached_property
    def shares(self) -> Array:
        """For each rank how many microbatches of all of its stages it keeps, at least, whichever blocks these have."""
        least = np.zeros(self.world)
        for rank in range(self.world):
            kept = self.kept[self.ranks == rank]
            least[rank] = max(kept.min(1).max(), kept.mean(0).min())
        return least


def ranks_of(
    strategy: Strategy,
    elements: Elements,
    itemsize: int,
    kept: Kept | None,
    stages: Stages | None,
    alive: Alive | None,
) -> Ranks:
    """stages: None where they are not known. Of data axes it asks for `Shares.gathers` alone."""
    spec, precision = strategy.mesh_for(), strategy.memory.precision
    sets = 3 if strategy.memory.optimizer == OptimizerPolicy() else 1
    if spec.pp > 1 and (stages is None or alive is None):
        return _of_any_stages(sets, spec.pp, elements, kept, alive)
    computed = itemsize if precision is None else precision.compute.itemsize
    summed = itemsize if precision is None else precision.reduce.itemsize
    # One shard is not gathered.
    shares = Shares.of(strategy, spec)
    alone, experts_alone, of_copies, of_experts_copies = shares.gathers
    gathers = elements.blocks * (0 if alone else computed)
    gathers = gathers + elements.experts * (0 if experts_alone else computed)
    copies = elements.blocks * (computed / of_copies if of_copies else 0)
    copies = copies + elements.experts * (computed / of_experts_copies if of_experts_copies else 0)
    if stages is None or alive is None:
        most = 0.0
        if kept is not None:
            inside = kept.kept.sum() + kept.top
            most = max(inside, _in_backward(kept, gathers, copies, frees=shares.frees))
        return Ranks(sets, np.array([elements.total]), np.array([most]))
    # With pp a stage is gathered once a step, and its gradients are reduced once.
    gathered, weights, own = (
        stages.sums(each) for each in (gathers, elements.blocks + elements.experts, elements.held)
    )
    none = np.zeros(len(own))
    sizes = (none, none) if kept is None else (stages.sums(kept.kept), stages.sums(kept.waits))
    rise = none if kept is None else stages.least(kept.rise)
    most_bytes = alive.most(*sizes, gathered, weights * summed, rise)
    if kept is not None:  # in the loss the last stage is gathered, and holds a microbatch
        last = stages.placement[-1]
        most_bytes[last] = max(most_bytes[last], sizes[0][-1] + gathered[-1] + kept.top)
    for stage, names in zip((0, -1), stages.ends, strict=True):
        own[stage] += sum(size for key, size in elements.around.items() if _is_in(key, names))
    elements_of = np.zeros(alive.world)
    np.add.at(elements_of, np.array(stages.placement), own)
    return Ranks(sets, elements_of, most_bytes)


@dataclass(frozen=True, eq=False)
class Again:
    """By block what a heavier mode of recompute saves of a microbatch's bytes, and its seconds, in place of a lighter one's.

    kept: of the lighter mode.
    """

    kept: Kept
    saved: Array
    seconds: Array

    @staticmethod
    def of(light: Kept, heavy: Kept, light_s: Microbatch, heavy_s: Microbatch) -> Again:
        seconds = [heavy_s.blocks[name].total_s - each.total_s for name, each in light_s.blocks.items()]
        return Again(light, np.maximum(light.kept - heavy.kept, 0), np.maximum(np.array(seconds), 0))

    def least_s(
        self,
        strategy: Strategy,
        elements: Elements,
        itemsize: int,
        stages: Stages | None,
        alive: Alive | None,
        device_bytes: int,
    ) -> Array:
        """Of each rank of pp the least seconds of a microbatch in which blocks run again, so that what it keeps may fit: of a
        knapsack of its blocks that may be divided. None of its buffers but those of FSDP in a pipeline are counted.
        """
        spec, precision = strategy.mesh_for(), strategy.memory.precision
        sets = 3 if strategy.memory.optimizer == OptimizerPolicy() else 1
        shares = Shares.of(strategy, spec)
        held = sets * itemsize / shares.states
        if stages is None or alive is None:
            needed = held * elements.total / spec.pp + self.kept.kept.sum() - device_bytes
            return np.array([_least_of_parts(self.saved, self.seconds, needed) if spec.pp == 1 else 0.0] * spec.pp)
        computed = itemsize if precision is None else precision.compute.itemsize
        summed = itemsize if precision is None else precision.reduce.itemsize
        alone, experts_alone, *_ = shares.gathers
        gathers = elements.blocks * (0 if alone else computed) + elements.experts * (0 if experts_alone else computed)
        none = np.zeros(len(stages.blocks))
        of_stages = (
            stages.sums(self.kept.kept),
            none,
            stages.sums(gathers),
            stages.sums(elements.blocks + elements.experts) * summed,
            none,
        )
        own = stages.sums(elements.held) * held
        stage_of = [stage for stage, names in enumerate(stages.blocks) for _ in names]
        found = np.zeros(alive.world)
        for rank, (most, kept_times) in enumerate(alive.fullest(*of_stages)):
            states = sum(own[stage] for stage in kept_times)
            times = np.array([kept_times.get(stage, 0.0) for stage in stage_of])
            found[rank] = _least_of_parts(self.saved * times, self.seconds, most + states - device_bytes)
        return found


def _least_of_parts(saved: Array, seconds: Array, needed: float) -> float:
    """The least seconds that save so many bytes, where a part of each may be taken; all of them where they do not."""
    if needed <= 0:
        return 0.0
    useful = saved > 0
    saved, seconds = saved[useful], seconds[useful]
    order = np.argsort(seconds / saved, kind="stable")
    total = saved[order].cumsum()
    whole = int(np.searchsorted(total, needed))
    if whole == len(order):
        return float(seconds.sum())
    before = total[whole - 1] if whole else 0.0
    part = (needed - before) / saved[order[whole]]
    return float(seconds[order[:whole]].sum() + part * seconds[order[whole]])


def _of_any_stages(sets: int, ranks: int, elements: Elements, kept: Kept | None, alive: Alive | None) -> Ranks:
    if kept is None or alive is None or not alive.shares.all():
        return Ranks(sets, np.array([elements.total / ranks]), np.zeros(1))
    # Ranks that keep a_r of their share of all bytes: the most of a_r x share_r is 1 / sum(1 / a_r) at least; of what they
    # hold each has a part as well.
    part = 1 / (1 / alive.shares).sum()
    least = elements.total * part / alive.shares.max()
    return Ranks(sets, np.array([elements.total / ranks, least]), np.array([0.0, part * kept.kept.sum()]))


def _in_backward(kept: Kept, gathers: Array, copies: Array, *, frees: bool) -> float:
    """The most that is there when backward of a block begins: it and the one before are gathered, or all are.

    copies: secondary ones, which those have that are gathered again, so not the last.
    """
    runs = kept.rise > 0  # the loss has no need of the others
    sizes = gathers[runs]
    if not len(sizes):
        return 0.0
    copied = np.concatenate([copies[runs][:-1].cumsum(), [copies[runs][:-1].sum()]])
    both = copied + sizes + np.concatenate([[0.0], sizes[:-1]]) if frees else sizes.cumsum()
    return float((kept.kept[runs].cumsum() + kept.rise[runs] + both).max())


def _holders(name: str) -> Iterator[str]:
    """The modules that a parameter is inside of, from the innermost on."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(module and f"{name}.".startswith(f"{module}.") for module in modules)


def alive_of(cut: Cut, ranks: int, microbatches: int) -> Alive | None:
    """None where there is no such table."""
    table = table_of(cut, ranks, microbatches)
    return None if table is None else Alive.of(table)
