"""search: the best strategy of a space by exact best-first branch and bound over forecasts, with memory as a constraint."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count as counting
from math import ceil
from typing import Literal

from torch import nn

from meshkit.cluster import Cluster
from meshkit.errors import MeshkitError, PlanError
from meshkit.mesh import MeshSpec
from meshkit.preflight.estimate import Composed, MemoryProfiles, compose, estimate
from meshkit.preflight.forecast import (
    Batch,
    Forecast,
    Prices,
    Profiles,
    StepProfile,
    forecast_profile,
    profile_step,
)
from meshkit.preflight.search._partition import min_max_partition
from meshkit.preflight.search._result import Found, Neighbour, Tried, pareto, why_it_loses
from meshkit.preflight.search._space import Space, divisors
from meshkit.resolve import Resolved, resolve, resolve_alike
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import OptimizerPolicy, Strategy

Goal = Literal["time", "cost", "fewest ranks"] | Callable[[Forecast], float]
PHASES = ("forward", "backward", "weight")
FUSED = ("gpipe", "1f1b")  # the gradients of a stage's inputs leave when those of its weights are there too
ONE_STAGE = (*FUSED, "zb-h1", "zb-h2")


def search(
    model: nn.Module,
    cluster: Cluster | str,
    batch: Batch,
    *,
    world: int,
    device_memory: int | None = None,
    space: Space | None = None,
    goal: Goal = "time",
    fixed: Strategy | None = None,
    loss: Loss = next_token_loss,
    exhaustive: bool = False,
    recheck: bool = True,
    progress: Callable[[int, int, Tried | None], None] | None = None,
) -> Found:
    """The strategy of `world` ranks on which a step of the batch is forecast to be best, of those that fit.

    model: any nn.Module, on meta is enough. device_memory: bytes; None does not look at memory. goal: "time", seconds of a
    step; "cost", seconds times ranks; "fewest ranks", the least divisor of the world on which something fits, then time; or a
    function of a `Forecast`, for which everything is priced. fixed: choices that stay, as precision. exhaustive: price
    everything, also what cannot be best by its bound. recheck: the winner by the traced `estimate` as well, for seconds.
    progress: called with how many were priced, how many are left, and the best so far.
    Refusals are `resolve`'s, made with the strategy itself; no strategy is left out for another reason than its bound.
    Raises: PlanError for no world, and for a goal that there is not.
    """
    if type(world) is not int or world < 1:
        raise PlanError(f"search(world={world!r}): a world has a whole number of ranks, at least 1.")
    if not callable(goal) and goal not in ("time", "cost", "fewest ranks"):
        raise PlanError(
            f'search(goal={goal!r}): choose "time", "cost", "fewest ranks", or give a function of a Forecast.'
        )
    machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    base = fixed or Strategy()
    asked = (space or Space()).fixed_by(base)
    pricing = _Pricing(model, machine, batch, loss, goal)
    worlds = divisors(world) if goal == "fewest ranks" else [world]
    for ranks in worlds:
        found = _of_world(pricing, ranks, asked, base, device_memory, exhaustive or callable(goal), recheck, progress)
        if found.winner is not None:
            break
    return found


@dataclass(frozen=True)
class Microbatch:
    """Seconds of kernels and blocking messages of one microbatch, in all stages together."""

    forward_s: float
    backward_s: float
    weight_s: float

    def least_s(self, strategy: Strategy, *, share: float = 1.0) -> float:
        """Lower bound of the step's seconds with stages cut anywhere. share: of these seconds, that the microbatch takes.

        A rank of pp computes the mean of all at least. Where each has one stage of seconds x, it waits for the stages before
        it, for the first microbatch and after the last: their x, summed, and m times its own are no longer than the step C.
        With all of them equal C is least:
        C = X / (1 - (1 - 1/m) ** p), X the seconds of all stages.
        """
        count, stages = strategy.microbatches or 1, strategy.mesh_for().pp
        through = self.forward_s + self.backward_s
        total = through + self.weight_s
        least = total * count / stages
        if stages > 1 and strategy.pipeline.schedule in ONE_STAGE:
            if strategy.pipeline.schedule in FUSED:
                through = total
            least = max(least, through / (1 - (1 - 1 / count) ** stages))
        return least * share


class _Pricing:
    """Resolves, composes and prices strategies of one model, batch and cluster, each once."""

    def __init__(self, model: nn.Module, cluster: Cluster, batch: Batch, loss: Loss, goal: Goal) -> None:
        self.model, self.cluster, self.batch, self.loss, self.goal = model, cluster, batch, loss, goal
        self.profiles, self.memory = Profiles(), MemoryProfiles()
        self.program = self.profiles.program_of(model)
        self._resolved: dict[str, Resolved] = {}
        self._profiles: dict[str, StepProfile] = {}
        self._peaks: dict[str, Composed] = {}
        self._tried: dict[str, Tried] = {}
        self._microbatches: dict[Hashable, Microbatch] = {}

    def forget(self) -> None:
        """What is large and of single strategies; of thousands it would not fit."""
        self._resolved.clear()
        self._profiles.clear()

    def resolved(self, strategy: Strategy) -> Resolved:
        key = repr(strategy)
        if key not in self._resolved:
            kernels = self.cluster.device.kernels
            self._resolved[key] = resolve_alike(self.program, strategy, strategy.mesh_for(), device_type=kernels)
        return self._resolved[key]

    def profile(self, strategy: Strategy) -> StepProfile:
        key = repr(strategy)
        if key not in self._profiles:
            self._profiles[key] = profile_step(
                self.resolved(strategy),
                self.batch,
                microbatches=strategy.microbatches or 1,
                loss=self.loss,
                kernels=self.cluster.device.kernels,
                profiles=self.profiles,
            )
        return self._profiles[key]

    def tried(self, strategy: Strategy) -> Tried:
        key = repr(strategy)
        if key not in self._tried:
            told = forecast_profile(self.profile(strategy), self.cluster)
            self._tried[key] = Tried(strategy=strategy, forecast=told, memory=self.peak(strategy), cost=self.cost(told))
        return self._tried[key]

    def cost(self, told: Forecast) -> float:
        if callable(self.goal):
            return self.goal(told)
        return told.seconds * told.ranks if self.goal == "cost" else told.seconds

    def balanced(self, strategy: Strategy) -> Strategy | None:
        """With stages that are as fast as can be; None where they are so already, or were given."""
        cut = self.resolved(strategy).cut
        if cut is None or strategy.pipeline.stages is not None:
            return None
        profile = self.profile(strategy)
        prices = Prices(self.cluster, profile.spec)
        blocks = {name for stage in cut.stages.blocks for name in stage}
        seconds: list[float] = []
        around = [0.0] * len(profile.stages)
        for stage, parts in enumerate(profile.stages):
            own = {part.name: _part_s(prices, part) for part in parts}
            # In a stage that is like another its parts have that one's names: blocks are counted, not looked up.
            of_blocks = [s for name, s in own.items() if name in blocks]
            seconds += of_blocks
            around[stage] = sum(own.values()) - sum(of_blocks)
        counts = tuple(len(stage) for stage in cut.stages.blocks)
        if len(seconds) != sum(counts):
            return None
        best = min_max_partition(seconds, len(counts), first=around[0], last=around[-1])
        return None if best == counts else replace(strategy, pipeline=replace(strategy.pipeline, stages=best))

    def microbatch(self, strategy: Strategy) -> Microbatch:
        """Of this strategy's microbatch; those that compute alike are traced once."""
        key = _computes(strategy, self.batch)
        if key not in self._microbatches:
            profile = self.profile(strategy)
            prices = Prices(self.cluster, profile.spec)
            parts = [prices.part(part) for stage in profile.stages for part in stage]
            forward, backward, weight = (sum(part.seconds(phase) for part in parts) for phase in PHASES)
            self._microbatches[key] = Microbatch(forward, backward, weight)
        return self._microbatches[key]

    def peak(self, strategy: Strategy) -> Composed:
        key = repr(strategy)
        if key not in self._peaks:
            resolved = self.resolved(strategy)
            self._peaks[key] = compose(
                resolved,
                rows=self.batch.rows(resolved.spec),
                seq_len=self.batch.seq_len,
                microbatches=strategy.microbatches,
                profiles=self.memory,
                loss=self.loss,
                kernels=self.cluster.device.kernels,
            )
        return self._peaks[key]

    def least_bytes(self, strategy: Strategy) -> int:
        """Of the rank that has most: parameters, and with AdamW in fp32 its moments, shared evenly."""
        spec = strategy.mesh_for()
        sets = 3 if strategy.memory.optimizer == OptimizerPolicy() else 1
        parameters, trained = self.program.parameters, self.program.trained
        alone = {id(param): param for name, param in parameters.items() if name in trained}.values()
        total = sum(param.numel() * param.element_size() for param in alone)
        return sets * total * spec.dp_replicate // spec.world_size


def _part_s(prices: Prices, part: object) -> float:
    priced = prices.part(part)  # type: ignore[arg-type]
    return sum(priced.seconds(phase) for phase in PHASES)


@dataclass(order=True)
class _Node:
    """Of the heap: a family, strategies that differ in rows and ranks alone, or one of them. is_known: its own microbatch was
    traced.
    """

    bound: float
    number: int
    family: Hashable = None
    strategy: Strategy | None = None
    is_known: bool = False


def _of_world(
    pricing: _Pricing,
    world: int,
    space: Space,
    base: Strategy,
    device_bytes: int | None,
    exhaustive: bool,
    recheck: bool,
    progress: Callable[[int, int, Tried | None], None] | None,
) -> Found:
    began = time.monotonic()
    strategies = list(
        space.strategies(
            pricing.batch, world, base, node=pricing.cluster.tiers[0].ranks, experts=_experts(pricing, base)
        )
    )
    families: dict[Hashable, list[Strategy]] = {}
    refused: Counter[str] = Counter()
    unfit = 0
    for strategy in strategies:
        if device_bytes is not None and pricing.least_bytes(strategy) > device_bytes and not exhaustive:
            unfit += 1
        else:
            families.setdefault(_computes(strategy, pricing.batch)[:-1], []).append(strategy)
    number = counting()
    heap = [_Node(0.0, next(number), family=key) for key in families]
    left = sum(map(len, families.values()))
    best: Tried | None = None
    least: tuple[int, Strategy] | None = None
    tried: list[Tried] = []
    scale = world if pricing.goal == "cost" else 1
    while heap and (exhaustive or best is None or heap[0].bound * scale < best.cost):
        node = heapq.heappop(heap)
        if node.strategy is None:
            for strategy, bound in _opened(pricing, families[node.family], refused):
                heapq.heappush(heap, _Node(bound, next(number), strategy=strategy))
            pricing.forget()
            left = sum(1 if each.strategy else len(families[each.family]) for each in heap)
            continue
        if not node.is_known:
            try:
                bound = pricing.microbatch(node.strategy).least_s(node.strategy)
            except MeshkitError as error:
                refused[_reason(error)] += 1
                left -= 1
                continue
            heapq.heappush(heap, _Node(max(bound, node.bound), next(number), strategy=node.strategy, is_known=True))
            continue
        left -= 1
        for strategy in _variants(pricing, node.strategy, refused, balance=space.balance):
            try:
                peak_bytes = pricing.peak(strategy).peak_bytes
                least = min(least or (peak_bytes, strategy), (peak_bytes, strategy), key=lambda each: each[0])
                fits = device_bytes is None or peak_bytes <= device_bytes
                unfit += not fits
                if fits or exhaustive:
                    tried.append(pricing.tried(strategy))
            except MeshkitError as error:
                refused[_reason(error)] += 1
                continue
            if fits and (best is None or tried[-1].cost < best.cost):
                if recheck and not _is_right(pricing, tried[-1], device_bytes):
                    unfit += 1
                    continue
                best = tried[-1]
        pricing.forget()
        if progress is not None:
            progress(len(tried), left, best)
    fitting = [each for each in tried if each.fits(device_bytes)]
    return Found(
        winner=best,
        front=pareto(fitting),
        tried=tuple(tried),
        refused=dict(refused),
        unfit=unfit,
        cut=left if heap else 0,
        least=least,
        neighbours=() if best is None else tuple(_neighbours(pricing, best, space, device_bytes)),
        device_bytes=device_bytes,
        took_s=time.monotonic() - began,
    )


def _experts(pricing: _Pricing, base: Strategy) -> int:
    """Of the block that has most, by the plan; 0 without."""
    resolved = resolve(pricing.program, replace(base, mesh=MeshSpec()), MeshSpec())
    modules = pricing.program.modules
    counts = [getattr(modules[name], "num_experts", 0) for name in resolved.experts]
    return max((each if isinstance(each, int) and each else pricing.batch.tokens for each in counts), default=0)


def _computes(strategy: Strategy, batch: Batch) -> tuple[Hashable, ...]:
    """What one microbatch of a rank depends on, its rows last: strategies with equal ones trace the same."""
    spec = strategy.mesh_for()
    inner = spec.cp, spec.tp, spec.ep, spec.etp
    recompute = repr(strategy.memory.recompute)
    return inner, strategy.sequence, recompute, strategy.context.scheme, _rows(strategy, batch)


def _opened(pricing: _Pricing, strategies: Sequence[Strategy], refused: Counter[str]) -> list[tuple[Strategy, float]]:
    """The family's strategies with their bounds, by the largest microbatch, whose rows take the least seconds each."""
    waiting = sorted(strategies, key=lambda each: -_rows(each, pricing.batch))
    while waiting:
        try:
            largest = pricing.microbatch(waiting[0])
        except MeshkitError as error:
            refused[_reason(error)] += 1
            waiting.pop(0)
            continue
        most = _rows(waiting[0], pricing.batch)
        # A model of rates favours size; measured points may not.
        is_modelled = not (pricing.cluster.device.curves or pricing.cluster.collectives)
        return [
            (each, largest.least_s(each, share=_rows(each, pricing.batch) / most) if is_modelled else 0.0)
            for each in waiting
        ]
    return []


def _rows(strategy: Strategy, batch: Batch) -> int:
    """Of a microbatch."""
    return ceil(batch.rows(strategy.mesh_for()) / (strategy.microbatches or 1))


def _variants(pricing: _Pricing, strategy: Strategy, refused: Counter[str], *, balance: bool) -> list[Strategy]:
    """The strategy, and the same with stages that are as fast as can be."""
    if not balance or strategy.mesh_for().pp == 1:
        return [strategy]
    try:
        other = pricing.balanced(strategy)
    except MeshkitError as error:
        refused[_reason(error)] += 1
        return []
    return [strategy] if other is None else [strategy, other]


def _reason(error: MeshkitError) -> str:
    return str(error).splitlines()[0]


def _is_right(pricing: _Pricing, tried: Tried, device_bytes: int | None) -> bool:
    """By the traced estimate of its fullest rank."""
    if device_bytes is None:
        return True
    traced = estimate(
        pricing.model,
        strategy=tried.strategy,
        rows=pricing.batch.rows(tried.forecast.profile.spec),
        seq_len=pricing.batch.seq_len,
        coordinate={"pp": tried.memory.worst.pp_rank},
        kernels=pricing.cluster.device.kernels,
        loss=pricing.loss,
    )
    return traced.peak_bytes <= device_bytes


# Neighbours: the best with one choice changed


def _neighbours(pricing: _Pricing, best: Tried, space: Space, device_bytes: int | None) -> list[Neighbour]:
    found = []
    for change, strategy in _changed(best.strategy, space):
        try:
            other = pricing.tried(strategy)
        except MeshkitError as error:
            found.append(Neighbour(change, f"refused: {_reason(error)}"))
            continue
        found.append(Neighbour(change, why_it_loses(best, other, device_bytes)))
    return found


def _changed(best: Strategy, space: Space) -> list[tuple[str, Strategy]]:
    spec = best.mesh_for()
    changed: list[tuple[str, Strategy]] = []
    plain = replace(best, pipeline=replace(best.pipeline, stages=None))
    for axis in ("tp", "pp", "cp"):
        for size in (getattr(spec, axis) // 2, getattr(spec, axis) * 2):
            allowed = getattr(space, axis)
            shards, rest = divmod(spec.dp_shard * getattr(spec, axis), size or 1)
            if size and not rest and shards and (allowed is None or size in allowed):
                mesh = replace(spec, **{axis: size, "dp_shard": shards})
                changed.append((f"{axis}={size}", replace(plain, mesh=mesh)))
    count = best.microbatches or 1
    for parts in (count // 2, count * 2):
        if parts and (space.microbatches is None or parts in space.microbatches):
            changed.append((f"microbatches={parts}", replace(best, microbatches=parts)))
    for mode in space.recompute:
        if mode != best.memory.recompute:
            changed.append((f"recompute={mode}", replace(best, memory=replace(best.memory, recompute=mode))))
    if spec.tp > 1 and len(space.sequence) > 1:
        changed.append((f"sequence={not best.sequence}", replace(best, sequence=not best.sequence)))
    if spec.pp > 1:
        for name in space.schedule:
            if name != best.pipeline.schedule:
                changed.append((f"schedule={name}", replace(plain, pipeline=replace(plain.pipeline, schedule=name))))
    for zero in space.zero if spec.pp == 1 else ():
        if zero != best.zero:
            changed.append((f"zero={zero}", replace(best, zero=zero)))
    return changed
