"""The strategies of one world, best first: what waits by a lower bound, what is learnt of it in turn, and what was priced."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count as counting

import numpy as np

from meshkit.errors import MeshkitError
from meshkit.mesh import MeshSpec
from meshkit.preflight.placement import min_max_partition
from meshkit.preflight.search._ahead import Task
from meshkit.preflight.search._bounds import Array, Microbatch, Seconds, Stages, table_of
from meshkit.preflight.search._goal import least_cost
from meshkit.preflight.search._held import Again, Alive, Kept, Ranks, Shares, ranks_of
from meshkit.preflight.search._mix import mixed_recompute
from meshkit.preflight.search._pricing import Pricing, recompute_of
from meshkit.preflight.search._result import Tried, reason_of
from meshkit.preflight.search._space import Group
from meshkit.strategy import OptimizerPolicy, RecomputeMode, Strategy

AHEAD = 32  # of what waits; what it is asked for lies within
FEWER_ROWS = 0.99  # experts apart were seen to take up to .4 % less of a step for each row where there are fewer rows
SIMULATED = 2048  # tasks; a longer table is simulated once, when its strategy is priced


@dataclass(order=True)
class _Node:
    """Of the heap. level: how much is known of the group. See `Level`."""

    bound: float
    number: int
    group: Group = field(compare=False)
    level: int = field(compare=False)


class Level(IntEnum):
    """Of what microbatch seconds and bytes are, from cheap to dear."""

    WHOLE = 0
    """kernels on a rank that splits none, of which tp and cp take their share"""
    SENT = 1
    """the same and the messages of its family, which are not traced"""
    TABLED = 2
    """the same by the pipeline's table"""
    TRACED = 3
    """its family's largest"""
    OWN = 4
    """its own"""


class World:
    """Best first over the strategies of one world: what waits, and what was found."""

    def __init__(
        self, pricing: Pricing, world: int, device_bytes: int | None, *, exhaustive: bool, balance: bool
    ) -> None:
        self.pricing, self.device_bytes = pricing, device_bytes
        self.world = world
        self.exhaustive, self.balance = exhaustive, balance
        self.dives, self.room = not exhaustive, defaultdict[int, float](lambda: 1.0)  # by ranks of pp
        self.refused: Counter[str] = Counter()
        self.unfit = self.left = 0
        self.tried: list[Tried] = []
        self.best: Tried | None = None
        self.least: tuple[int, Strategy] | None = None
        self.heap: list[_Node] = []
        self.aside: list[_Node] = []
        self._rows: dict[Hashable, int] = {}
        self._most_ep = 1
        self._ranks: dict[Hashable, Ranks | None] = {}
        self._balanced: dict[Hashable, tuple[int, ...] | None] = {}
        self._number = counting()
        # A model of rates favours size; measured points may not.
        self.is_modelled = not (pricing.cluster.device.curves or pricing.cluster.collectives)
        self.crowded = pricing.cluster.crowding > 1
        # Each placement has stages of its own, by the speed of its devices: bounds take no cut for granted.
        self.is_recut = (unlike := pricing.unlike.unlike) is not None and bool(unlike.speed or unlike.memory_bytes)

    def push(self, bound: float, group: Group, level: int) -> None:
        heapq.heappush(self.heap, _Node(bound, next(self._number), group, level))

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            rows = self.pricing.rows(group.first)
            for each in (self.pricing.family(group.first), None):  # of all families
                self._rows[each] = max(self._rows.get(each, 0), rows)
            self._most_ep = max(self._most_ep, group.meshes[0].ep)
        if not self.exhaustive and self.device_bytes is not None:
            # What every bound of bytes is made of, while this process reads pipelines.
            alike = {
                (recompute_of(each.first), each.first.memory.offload, self.ep(each.first)): each.first
                for each in groups
            }
            tasks = [self.pricing.task_of_whole(each, self._rows[None], self.ep(each)) for each in alike.values()]
            self.pricing.ahead.ask(tasks, each=len(tasks))
        for group in groups:
            if (refusal := self.pricing.refusal(group.first)) is not None:
                self.refused[reason_of(refusal)] += len(group)
                continue
            least_s = 0.0 if self.exhaustive else self.mean_s(group.first, Level.WHOLE)
            self.push(self.cost(group.first, least_s), group, Level.WHOLE)
            self.left += len(group)

    def next(self) -> _Node | None:
        """The least of what waits that may be better than the best. What was put aside waits with the rest once something
        fits; where nothing else is left before, that of the fewest bytes comes alone.
        """
        if self.aside and (self.best is not None or not self.heap):
            if self.best is None:
                return self.aside.pop(min(range(len(self.aside)), key=lambda at: self.bytes_of(self.aside[at])))
            for node in self.aside:
                heapq.heappush(self.heap, node)
            self.aside, self.dives = [], False
        return heapq.heappop(self.heap) if self.is_open else None

    def look_ahead(self, group: Group, level: Level) -> None:
        """Let others trace what comes after the group, were nothing put before it."""
        best, own = self.best, {task.key for task in self.tasks(group, level)}
        if not own or best is None:
            return
        waiting = [node for node in heapq.nsmallest(AHEAD, self.heap) if Level.SENT <= node.level < Level.OWN]
        tasks = [task for node in waiting if node.bound < best.cost for task in self.tasks(node.group, node.level + 1)]
        self.pricing.ahead.ask([task for task in tasks if task.key not in own])

    def tasks(self, group: Group, level: int) -> list[Task]:
        """What is traced so that so much is known of the group."""
        if level < Level.OWN:
            return self.pricing.tasks_of(group.first, self._rows[self.pricing.family(group.first)], kept=False)
        return self.pricing.tasks_of(group.first, self.pricing.rows(group.first), kept=True)

    @property
    def is_open(self) -> bool:
        """Whether something waits that may be better."""
        return bool(self.heap) and (self.exhaustive or self.best is None or self.heap[0].bound < self.best.cost)

    def step(self, node: _Node) -> None:
        """Learn more of the node, or price it."""
        group, level = node.group, Level(node.level + 1) if node.level < Level.OWN else None
        if level is Level.TABLED and self.dives and self.heap and self.is_tight(group):
            self.aside.append(node)
            return
        if level is Level.TABLED and (self.best is None or group.meshes[0].pp == 1):
            level = Level.TRACED
        if level is Level.TRACED and (self.best is None or self.pricing.is_traced(group.first)):
            level = Level.OWN  # until something fits there is nothing that a bound could cut
        if level in (Level.TRACED, Level.OWN) and not self.exhaustive:
            self.look_ahead(group, level)
        if self.exhaustive:
            for variant in self.variants(group):
                self.left -= len(variant)
                if variant.heavier is not None:
                    self.price_mixed(variant, variant.heavier)
                    continue
                for strategy in variant.strategies:
                    self.price(strategy)
        elif level is None:
            self.price_all(group)
        elif level is Level.SENT:
            small = self.small_enough(group, Level.WHOLE)  # wherever its stages are cut
            variants = [] if small is None else self.variants(small)
            self.left += sum(map(len, variants[1:]))
            for variant in variants:
                self.learn(variant, level, node.bound)
        else:
            self.learn(group, level, node.bound)

    def learn(self, group: Group, level: Level, bound: float) -> None:
        if level is Level.OWN and self.best is not None:
            bound = max(bound, self.least_cost(group, level))
            if bound >= self.best.cost:  # what it keeps need not be traced
                self.push(bound, group, level)
                return
        small = self.small_enough(group, level)
        if small is None:
            return
        if level is Level.OWN and self.best is None:
            self.price_all(small)
        else:
            self.push(max(bound, self.least_cost(small, level)), small, level)

    def least_cost(self, group: Group, level: Level) -> float:
        # Of a pipeline data axes change nothing.
        every = group.strategies if group.meshes[0].pp == 1 else (group.first,)
        return self.cost(group.first, min(self.least_s(strategy, level, group.heavier) for strategy in every))

    def small_enough(self, group: Group, level: Level) -> Group | None:
        """Those that may fit, by their least bytes; None where none may. Counts the others."""
        if self.device_bytes is None or level in (Level.TABLED, Level.TRACED):
            return group  # what it keeps is traced with its own rows alone, for that is asked for again
        ranks: dict[Hashable, Ranks | None] = {}
        small, smallest = [], group.smallest
        for spec in group.meshes:
            shares = Shares.of(group.first, spec)
            if shares.gathers not in ranks:
                ranks[shares.gathers] = self.ranks(smallest, level, spec)
            of_ranks = ranks[shares.gathers]
            if of_ranks is None or of_ranks.least_bytes(shares.states, self.pricing.itemsize) <= self.device_bytes:
                small.append(spec)
        self.unfit += len(group) - len(small)
        self.left -= len(group) - len(small)
        if len(small) == len(group):
            return group
        return replace(group, first=replace(group.first, mesh=small[0]), meshes=tuple(small)) if small else None

    def is_tight(self, group: Group) -> bool:
        """Whether it will not fit, as likely as not: were its least bytes as wrong as those of what was priced."""
        least = self.least_bytes(group.smallest, Level.SENT)
        return self.device_bytes is not None and least > self.room[group.meshes[0].pp] * self.device_bytes

    def bytes_of(self, node: _Node) -> float:
        """The least bytes of what was learnt to fit by them."""
        return self.least_bytes(node.group.smallest, Level.SENT)

    def price_all(self, group: Group) -> None:
        """Most shards first: where those do not fit, fewer do not either, for they hold more of everything but padding."""
        if group.heavier is not None:
            self.left -= len(group)
            self.price_mixed(group, group.heavier)
            return
        too_large = False
        for strategy in group.strategies:
            self.left -= 1
            shares = Shares.of(strategy, strategy.mesh_for())
            if too_large and shares.states > 1 and shares.experts > 1:  # one shard is not gathered
                self.unfit += 1
                continue
            peak_bytes = self.price(strategy)
            if self.device_bytes is not None and peak_bytes is not None:
                too_large = peak_bytes - self.pricing.padding_bytes(strategy) > self.device_bytes
                # What of a device the bound of the next may take, by how wrong this one was.
                pp = group.meshes[0].pp
                self.room[pp] = min(self.room[pp], self.least_bytes(strategy, Level.SENT) / peak_bytes)

    def price_mixed(self, group: Group, heavier: RecomputeMode) -> None:
        """Each with as few blocks in the heavier mode as fit, where it may be better."""
        assert self.device_bytes is not None, "without it nothing is mixed"
        for strategy in group.strategies:
            if self.best is not None and not self.exhaustive:
                least_s = self.least_s(strategy, Level.OWN, heavier)
                if self.cost(strategy, least_s) >= self.best.cost:
                    self.left += 1  # as what a bound has cut
                    continue
            try:
                mixed = mixed_recompute(self.pricing, strategy, heavier, self.device_bytes)
            except MeshkitError as error:
                self.refused[reason_of(error)] += 1
                continue
            if mixed is None:
                self.unfit += 1
            elif mixed.overrides:  # else it is one of the two modes, which are tried by themselves
                self.price(mixed)

    def variants(self, group: Group) -> list[Group]:
        """The strategies, and the same with stages that are as fast as can be."""
        first = group.first
        if not self.balance or self.is_recut or first.mesh_for().pp == 1 or first.pipeline.stages is not None:
            return [group]
        key = self.pricing.family(first), first.mesh_for().pp, first.pipeline.schedule
        if key not in self._balanced:
            self._balanced[key] = self.balanced(first)
        counts = self._balanced[key]
        if counts is None:
            return [group]
        return [group, replace(group, first=replace(first, pipeline=replace(first.pipeline, stages=counts)))]

    def balanced(self, strategy: Strategy) -> tuple[int, ...] | None:
        """Blocks of each stage; None where the cut has them so already, and where they cannot be told."""
        cut = self.pricing.cut(strategy)
        pricing, rows = self.pricing, self._rows[self.pricing.family(strategy)]
        microbatch = pricing.sent(strategy, rows, self.ep(strategy))
        if cut is None or microbatch is None:
            return None
        first, last = (
            Seconds.sum([microbatch.around[name] for name in names if name in microbatch.around]).total_s
            for names in Stages.of(cut).ends
        )
        seconds = [microbatch.blocks[name].total_s for stage in cut.stages.blocks for name in stage]
        counts = tuple(len(stage) for stage in cut.stages.blocks)
        best = min_max_partition(seconds, len(counts), first=first, last=last)
        return None if best == counts else best

    # ------------------------------------------------------------------------------------------------------- bounds

    def ep(self, strategy: Strategy) -> int:
        """On which experts have the most tokens each. Where nothing is dispatched there are no kernels for that either."""
        return self._most_ep if strategy.mesh_for().ep > 1 else 1

    def microbatch(self, strategy: Strategy, level: Level) -> tuple[Microbatch | None, float]:
        """(seconds of a microbatch, the share of them that the strategy's own takes at least).

        It has the most rows of all families, or of its family: they take the least seconds each. The same holds of ranks.
        """
        pricing, family, rows = self.pricing, self.pricing.family(strategy), self.pricing.rows(strategy)
        if level is Level.OWN:
            return pricing.microbatch(strategy, rows), 1.0
        most = self._rows[None if level is Level.WHOLE else family]
        if not self.is_modelled:
            return None, 1.0
        if level is Level.TRACED:
            fewer = FEWER_ROWS if strategy.mesh_for().ep > 1 else 1.0
            return pricing.microbatch(strategy, most), fewer * rows / most
        if level in (Level.SENT, Level.TABLED):
            return pricing.sent(strategy, most, self.ep(strategy)), rows / most
        spec = strategy.mesh_for()
        return pricing.whole(strategy, most, self.ep(strategy)), rows / most / (spec.cp * spec.tp)

    def cost(self, strategy: Strategy, least_s: float) -> float:
        """The least that the goal makes of a step of so many seconds at least."""
        joules = self.pricing.goal == "energy" and not self.exhaustive
        busy_s = self.mean_s(strategy, Level.WHOLE) if joules else 0.0
        return least_cost(self.pricing.goal, self.pricing.cluster, self.world, least_s, busy_s)

    def mean_s(self, strategy: Strategy, level: Level) -> float:
        microbatch, share = self.microbatch(strategy, level)
        return self.added_s(strategy) + (0.0 if microbatch is None else microbatch.least_s(strategy) * share)

    def least_s(self, strategy: Strategy, level: Level, heavier: RecomputeMode | None = None) -> float:
        """With its stages: what the slowest rank does, and by the pipeline's table; without, what FSDP sends beside it.

        heavier: of a mixture, of which so much runs again that it may fit.
        """
        microbatch, share = self.microbatch(strategy, level)
        added_s = self.added_s(strategy)
        if microbatch is None:
            return added_s
        again = None if heavier is None else self.again_s(strategy, heavier, level)
        again_s = None if again is None else again / share
        if strategy.mesh_for().pp > 1:
            return added_s + self._least_s(strategy, microbatch, level, share, again_s) * share
        gathers = self.pricing.gathers(strategy, self.ep(strategy))
        again_s = np.zeros(1) if again_s is None else again_s
        return added_s + gathers.least_s(microbatch, strategy.microbatches or 1, share, float(again_s[0]))

    def added_s(self, strategy: Strategy) -> float:
        """Of adding gradients up: each is read twice and written once."""
        elements, device = self.pricing.elements(strategy), self.pricing.cluster.device
        if elements is None:
            return 0.0
        rate = device.memory_bytes_per_s * device.efficiency.memory
        return 3 * self.pricing.itemsize * elements.added(strategy) / rate

    def again_s(self, strategy: Strategy, heavier: RecomputeMode, level: Level) -> Array | None:
        """Of each rank of pp the least seconds of a microbatch that the heavier mode of a mixture adds."""
        pricing, most = self.pricing, self._rows[self.pricing.family(strategy)]
        heavy = replace(strategy, memory=replace(strategy.memory, recompute=heavier))
        ep, elements = self.ep(strategy), pricing.elements(strategy)
        kept, kept_heavy = self.kept(strategy, level), self.kept(heavy, level)
        if self.device_bytes is None or elements is None or kept is None or kept_heavy is None:
            return None
        light_s, heavy_s = pricing.sent(strategy, most, ep), pricing.sent(heavy, most, ep)
        if light_s is None or heavy_s is None:
            return None
        again = Again.of(kept, kept_heavy, light_s, heavy_s)
        stages, alive = self.stages_alive(strategy, level)
        found = again.least_s(strategy, elements, pricing.itemsize, stages, alive, self.device_bytes)
        return found * (pricing.rows(strategy) / most)

    def _least_s(
        self, strategy: Strategy, microbatch: Microbatch, level: Level, share: float, again_s: Array | None
    ) -> float:
        pricing, spec, count = self.pricing, strategy.mesh_for(), strategy.microbatches or 1
        least, cut, stages = microbatch.least_s(strategy), pricing.cut(strategy), pricing.stages(strategy)
        if cut is None or stages is None or self.crowded or self.is_recut:
            return least
        least = max(least, stages.least_s(microbatch, count, again_s))
        cannot_be_best = self.best is not None and self.cost(strategy, least * share) >= self.best.cost
        if level >= Level.TABLED and len(stages.placement) * count <= SIMULATED and not cannot_be_best:
            table = table_of(cut, spec.pp, count)
            least = max(least, 0.0 if table is None else stages.simulated_s(microbatch, table))
        return least

    def least_bytes(self, strategy: Strategy, level: Level) -> float:
        ranks = self.ranks(strategy, level)
        states = Shares.of(strategy, strategy.mesh_for()).states
        return 0.0 if ranks is None else ranks.least_bytes(states, self.pricing.itemsize)

    def ranks(self, strategy: Strategy, level: Level, spec: MeshSpec | None = None) -> Ranks | None:
        """Of a rank that splits nothing, of whose bytes each row keeps its share at least; or of its own microbatch.

        spec: the strategy's mesh, where it is another than it says.
        """
        spec = spec or strategy.mesh_for()
        shares = Shares.of(strategy, spec)
        key = (
            self._learnt(level, strategy),
            self.pricing.rows(strategy),
            (spec.pp, spec.cp, spec.tp, spec.ep, spec.etp, shares.gathers, shares.frees),
            (strategy.pipeline.schedule, strategy.pipeline.stages, min(strategy.microbatches or 1, 2 * spec.pp)),
        )
        if key not in self._ranks:
            self._ranks[key] = self._ranks_of(replace(strategy, mesh=spec), level)
        return self._ranks[key]

    def _learnt(self, level: Level, strategy: Strategy) -> Hashable:
        """What bytes depend on beside the mesh and the pipeline."""
        memory, family = (recompute_of(strategy), strategy.memory.offload), None
        if level is Level.OWN:
            family = self.pricing.family(strategy)
        return level > Level.WHOLE, family, memory, strategy.memory.optimizer == OptimizerPolicy()

    def _ranks_of(self, strategy: Strategy, level: Level) -> Ranks | None:
        elements = self.pricing.elements(strategy)
        if elements is None:
            return None
        kept, (stages, alive) = self.kept(strategy, level), self.stages_alive(strategy, level)
        return ranks_of(strategy, elements, self.pricing.itemsize, kept, stages, alive)

    def kept(self, strategy: Strategy, level: Level) -> Kept | None:
        pricing, spec, rows = self.pricing, strategy.mesh_for(), self.pricing.rows(strategy)
        if level is Level.OWN:
            most, parts = rows, 1
            kept = pricing.kept(strategy, rows)
        else:
            most, parts = self._rows[None], spec.cp * spec.tp
            kept = pricing.kept_whole(strategy, most, self.ep(strategy))
        # A loss over a split vocabulary is another, which may hold less.
        return None if kept is None else kept.part(rows / (most * parts), top=parts == 1)

    def stages_alive(self, strategy: Strategy, level: Level) -> tuple[Stages | None, Alive | None]:
        """None where there are no stages, or they are not known yet."""
        stages = self.pricing.stages(strategy) if level > Level.WHOLE else None
        # What is alive at a time grows with the microbatches, until the pipeline is full.
        count = min(strategy.microbatches or 1, 2 * strategy.mesh_for().pp)
        return stages, self.pricing.alive(strategy, count)

    # ------------------------------------------------------------------------------------------------------- prices

    def price(self, strategy: Strategy) -> int | None:
        """Returns its peak; None for what is refused."""
        try:
            peak_bytes = self.pricing.peak(strategy).peak_bytes
            self.least = min(self.least or (peak_bytes, strategy), (peak_bytes, strategy), key=lambda each: each[0])
            fits = self.pricing.fits(strategy, self.device_bytes)
            if fits or self.exhaustive:
                self.pricing.forecast(strategy)
        except MeshkitError as error:
            self.refused[reason_of(error)] += 1
            return None
        if fits or self.exhaustive:
            tried = self.pricing.tried(strategy)  # what a goal of one's own raises is no refusal
            fits = fits and tried.fits(self.device_bytes)  # placed on devices of which some have less
            if fits or self.exhaustive:
                self.tried.append(tried)
        self.unfit += not fits
        if fits and (self.best is None or self.tried[-1].cost < self.best.cost):
            self.best = self.tried[-1]
        return peak_bytes

    @property
    def gap(self) -> float:
        """By which share of the best's cost something that was not priced may be better."""
        waiting = [node.bound for node in (*self.heap[:1], *self.aside)]
        if self.best is None or not waiting or not self.best.cost:
            return 0.0
        return max(0.0, 1 - min(waiting) / self.best.cost)

    def drop_best(self) -> None:
        """It does not fit, as the traced estimate says."""
        assert self.best is not None, "what is dropped was found"
        self.tried.remove(self.best)
        self.unfit += 1
        fitting = [each for each in self.tried if each.fits(self.device_bytes)]
        self.best = min(fitting, key=lambda each: each.cost, default=None)
