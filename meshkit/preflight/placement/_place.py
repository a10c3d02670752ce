"""place: the order of ranks, and the blocks of each stage, on which a strategy's step is forecast to be fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from meshkit.cluster import Cluster, memory_of, speed_of
from meshkit.errors import MeshkitError, PlanError
from meshkit.mask import Mask
from meshkit.mesh import MeshSpec
from meshkit.preflight._flags import flags_of
from meshkit.preflight._format import format_bytes
from meshkit.preflight.estimate import Composed, MemoryProfiles, compose
from meshkit.preflight.forecast import Batch, Forecast, Prices, Profiles, StepProfile, forecast_profile, profile_step
from meshkit.preflight.placement._orders import Orders
from meshkit.preflight.placement._partition import min_max_partition
from meshkit.preflight.placement._seen import seen_of
from meshkit.resolve import resolve_alike
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import Strategy

PHASES = ("forward", "backward", "weight")
UNFIT_S = 1e9  # seconds that a step which does not fit counts as, for each byte that its fullest rank lacks


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The best placement of a strategy. `str()` is the printed form.

    strategy: the given one with `mesh.placement`, and `pipeline.stages` where stages on slower or smaller devices have fewer
    blocks. forecast, given: of it, and of the strategy as it was given. exact: every order of blocks was looked at. priced:
    how many steps that differ were priced. lacks_bytes, given_lacks_bytes: of the rank of pp that needs most beside what its
    devices have, of a cluster that says so by `Unlike.memory_bytes`; 0 where it fits.
    """

    strategy: Strategy
    forecast: Forecast
    given: Forecast
    exact: bool
    priced: int
    lacks_bytes: int = 0
    given_lacks_bytes: int = 0

    def __str__(self) -> str:
        saved = 1 - self.forecast.seconds / self.given.seconds
        found = f"{self.priced} steps priced, {'of all orders' if self.exact else 'found by annealing'}"
        if self.given_lacks_bytes:
            less = f"as they are a rank lacks {format_bytes(self.given_lacks_bytes)}"
        elif not saved:
            return f"the ranks as they are: step {self.given.seconds:.4g} s, and no order is faster ({found})"
        else:
            less = f"{saved:.1%} less than {self.given.seconds:.4g} s as they are"
        return f"{flags_of(self.strategy)}\nstep {self.forecast.seconds:.4g} s, {less} ({found})"


def place(
    model: nn.Module,
    strategy: Strategy | None = None,
    cluster: Cluster | str = "h100",
    batch: Batch | None = None,
    *,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    profiles: Profiles | None = None,
    **choices: Any,
) -> Placed:
    """Which rank of the mesh sits where on the cluster, and how many blocks each stage has, so that the step is forecast to
    be fastest (Pipette 2024; Holmes 2023). Arguments as `forecast`'s.

    Ranks of a node stay together, in any order. Of up to 8 blocks that `Cluster.unlike` tells apart all orders are looked at,
    each with stages by its devices' speed too; of more an annealed walk, which the same input repeats. Where nothing is
    unlike, the strategy is the answer. A placement or stages that the strategy has already are looked at as given. Where
    `Unlike.memory_bytes` says what devices have, the step fits them, by its composed peaks.
    Raises: as `forecast`; PlanError for a world that is a part of a block, and where nothing fits.
    """
    chosen = Strategy.of(strategy, choices)
    machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    kept = Profiles() if profiles is None else profiles
    sizes = chosen.mesh_for()
    step = batch or Batch(sequences=(chosen.microbatches or 1) * sizes.dp_replicate * sizes.dp_shard, seq_len=4096)

    def profiled(other: Strategy) -> StepProfile:
        resolved = resolve_alike(kept.program_of(model), other, sizes, device_type=machine.device.kernels)
        return profile_step(
            resolved,
            step,
            microbatches=other.microbatches or 1,
            mask=mask,
            loss=loss,
            kernels=machine.device.kernels,
            profiles=kept,
        )

    memory = MemoryProfiles()

    def peaks(other: Strategy) -> Composed:
        return compose(
            resolve_alike(kept.program_of(model), other, sizes, device_type=machine.device.kernels),
            rows=step.rows(sizes),
            seq_len=step.seq_len,
            microbatches=other.microbatches,
            profiles=memory,
            mask=mask,
            loss=loss,
            kernels=machine.device.kernels,
        )

    placed = best_placed(chosen, machine, profiled, peaks)
    if placed.lacks_bytes:
        raise PlanError(
            f"place: on every order of ranks one of them lacks memory, {format_bytes(placed.lacks_bytes)} at least. Give the "
            "strategy more stages, shards or recompute."
        )
    return placed


def best_placed(
    strategy: Strategy,
    cluster: Cluster,
    profiled: Callable[[Strategy], StepProfile],
    peaks: Callable[[Strategy], Composed],
) -> Placed:
    """`place` of a strategy of which, and of other stages than its own, `profiled` and `peaks` tell profile and memory. Where
    nothing fits, what lacks least."""
    given = profiled(strategy)
    told = forecast_profile(given, cluster)
    if cluster.unlike is None:
        return Placed(strategy=strategy, forecast=told, given=told, exact=True, priced=1)
    orders, steps = Orders.of(cluster, given.spec.world_size), Steps(strategy, cluster, profiled, peaks)
    as_given = Step(strategy, told, steps.lacks_bytes(strategy, given.spec))
    seen = seen_of(given, cluster, orders.ranks)
    order = orders.best(seen, lambda order: steps.of(orders.ranks(order)).cost)
    best = min(as_given, steps.of(orders.ranks(order)), key=lambda step: step.cost)
    return Placed(
        strategy=best.strategy,
        forecast=best.forecast,
        given=told,
        exact=orders.is_exact,
        priced=steps.priced,
        lacks_bytes=best.lacks_bytes,
        given_lacks_bytes=as_given.lacks_bytes,
    )


@dataclass(frozen=True)
class Step:
    strategy: Strategy
    forecast: Forecast
    lacks_bytes: int

    @property
    def cost(self) -> float:
        return self.forecast.seconds + UNFIT_S * self.lacks_bytes


class Steps:
    """Steps of one strategy by the placement of their ranks. priced: how many."""

    def __init__(
        self,
        strategy: Strategy,
        cluster: Cluster,
        profiled: Callable[[Strategy], StepProfile],
        peaks: Callable[[Strategy], Composed],
    ) -> None:
        self.strategy, self.cluster, self.priced = strategy, cluster, 0
        self._profiled, self._peaks = profiled, peaks
        self._profiles: dict[Strategy, StepProfile] = {}
        self._needed: dict[Strategy, tuple[int, ...]] = {}
        self._balanced: dict[tuple[tuple[float, ...], tuple[float, ...]], Strategy] = {}

    def of(self, placement: tuple[int, ...]) -> Step:
        """The better of the strategy's own stages and of those that follow the speed and memory of their devices."""
        first = self._step(self.strategy, placement)
        if (balanced := self._balanced_on(first.forecast.profile.spec)) == self.strategy:
            return first
        return min(first, self._step(balanced, placement), key=lambda step: step.cost)

    def _step(self, strategy: Strategy, placement: tuple[int, ...]) -> Step:
        profile = self._profile(strategy)
        profile = replace(profile, spec=replace(profile.spec, placement=placement))
        self.priced += 1
        lacks_bytes = self.lacks_bytes(strategy, profile.spec)
        return Step(replace(strategy, mesh=profile.spec), forecast_profile(profile, self.cluster), lacks_bytes)

    def lacks_bytes(self, strategy: Strategy, spec: MeshSpec) -> int:
        """Of the rank of pp that lacks most; spec: with the placement, which `strategy` has not."""
        return max(
            0, *(math.ceil(need - room) for need, room in zip(*self._need_and_room(strategy, spec), strict=True))
        )

    def _need_and_room(self, strategy: Strategy, spec: MeshSpec) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Bytes of each rank of pp, and of its least device; nothing is asked of memory where all devices are alike."""
        room = tuple(memory_of(self.cluster, spec, rank) for rank in range(spec.pp))
        if math.inf in room:
            return (0,) * spec.pp, (1.0,) * spec.pp
        if strategy not in self._needed:
            self._needed[strategy] = tuple(rank.peak_bytes for rank in self._peaks(strategy).ranks)
        return self._needed[strategy], room

    def _profile(self, strategy: Strategy) -> StepProfile:
        if strategy not in self._profiles:
            self._profiles[strategy] = self._profiled(strategy)
        return self._profiles[strategy]

    def _balanced_on(self, spec: MeshSpec) -> Strategy:
        """With as many blocks in each stage as the speeds of their devices want, and their memory holds; the strategy, where
        it says them itself."""
        profile, strategy = self._profile(self.strategy), self.strategy
        if profile.schedule is None or strategy.pipeline.stages is not None:
            return strategy
        speeds = tuple(speed_of(self.cluster, spec, rank) for rank in range(spec.pp))
        _, room = self._need_and_room(strategy, spec)
        if len(set(speeds)) == 1 and not self.lacks_bytes(strategy, spec):
            return strategy
        if (speeds, room) not in self._balanced:
            try:
                self._balanced[speeds, room] = self._with_stages(profile.schedule.placement, speeds, spec)
            except MeshkitError:  # stages that this model or schedule cannot have
                self._balanced[speeds, room] = strategy
        return self._balanced[speeds, room]

    def _with_stages(self, placement: Sequence[int], speeds: Sequence[float], spec: MeshSpec) -> Strategy:
        """placement: the rank of pp of each stage. Ranks that lack memory get fewer blocks until all have enough."""
        blocks = self._seconds.blocks
        most = [len(blocks)] * len(placement)
        while min(most) >= 1 and sum(most) >= len(blocks):
            counts = min_max_partition(
                blocks,
                len(placement),
                first=self._seconds.first,
                last=self._seconds.last,
                speeds=[speeds[rank] for rank in placement],
                most=most,
            )
            other = replace(self.strategy, pipeline=replace(self.strategy.pipeline, stages=counts))
            self._profile(other)
            if not self.lacks_bytes(other, spec):
                return other
            for rank, (need, room) in enumerate(zip(*self._need_and_room(other, spec), strict=True)):
                if need > room:
                    mine = [stage for stage, of in enumerate(placement) if of == rank]
                    for stage in mine:
                        most[stage] = counts[stage]
                    # What it holds beside its blocks is no less with fewer, so of these no more than the same share fit.
                    held = sum(counts[stage] for stage in mine)
                    for _ in range(held - min(held - 1, int(held * room / need))):
                        most[max(mine, key=most.__getitem__)] -= 1
        return self.strategy

    @cached_property
    def _seconds(self) -> _Blocks:
        """Of each block of a microbatch, at the device's whole speed, and of what the first and last stage do beside them."""
        profile = self._profile(self.strategy)
        prices = Prices(replace(self.cluster, unlike=None), profile.spec)
        stages = [
            [(part, sum(prices.part(part).seconds(phase) for phase in PHASES)) for part in stage]
            for stage in profile.stages
        ]
        blocks = [seconds for stage in stages for part, seconds in stage if part.is_block]
        ends = [sum(seconds for part, seconds in stages[end] if not part.is_block) for end in (0, -1)]
        return _Blocks(blocks, *ends)


@dataclass(frozen=True)
class _Blocks:
    blocks: Sequence[float]
    first: float
    last: float
