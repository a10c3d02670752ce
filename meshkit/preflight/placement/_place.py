"""place: the order of ranks, and the blocks of each stage, on which a strategy's step is forecast to be fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from meshkit.cluster import Cluster, speed_of
from meshkit.errors import MeshkitError
from meshkit.mask import Mask
from meshkit.mesh import MeshSpec
from meshkit.preflight._flags import flags_of
from meshkit.preflight.forecast import Batch, Forecast, Prices, Profiles, StepProfile, forecast_profile, profile_step
from meshkit.preflight.placement._orders import Orders
from meshkit.preflight.placement._partition import min_max_partition
from meshkit.preflight.placement._seen import seen_of
from meshkit.resolve import resolve_alike
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import Strategy

PHASES = ("forward", "backward", "weight")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The best placement of a strategy. `str()` is the printed form.

    strategy: the given one with `mesh.placement`, and `pipeline.stages` where stages on slower devices have fewer blocks.
    forecast, given: of it, and of the strategy as it was given. exact: every order of blocks was looked at. priced: how many
    steps that differ were priced.
    """

    strategy: Strategy
    forecast: Forecast
    given: Forecast
    exact: bool
    priced: int

    def __str__(self) -> str:
        saved = 1 - self.forecast.seconds / self.given.seconds
        found = f"{self.priced} steps priced, {'of all orders' if self.exact else 'found by annealing'}"
        if not saved:
            return f"the ranks as they are: step {self.given.seconds:.4g} s, and no order is faster ({found})"
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
    unlike, the strategy is the answer. A placement or stages that the strategy has already are looked at as given.
    Raises: as `forecast`; PlanError for a world that is a part of a block.
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

    return best_placed(chosen, machine, profiled)


def best_placed(strategy: Strategy, cluster: Cluster, profiled: Callable[[Strategy], StepProfile]) -> Placed:
    """`place` of a strategy whose profile, and those of other stages, `profiled` returns."""
    given = profiled(strategy)
    told = forecast_profile(given, cluster)
    if cluster.unlike is None:
        return Placed(strategy=strategy, forecast=told, given=told, exact=True, priced=1)
    orders, steps = Orders.of(cluster, given.spec.world_size), Steps(strategy, cluster, profiled)
    seen = seen_of(given, cluster, orders.ranks)
    order = orders.best(seen, lambda order: steps.of(orders.ranks(order)).forecast.seconds)
    best = steps.of(orders.ranks(order))
    if best.forecast.seconds >= told.seconds:
        best = Step(strategy, told)
    return Placed(
        strategy=best.strategy, forecast=best.forecast, given=told, exact=orders.is_exact, priced=steps.priced
    )


@dataclass(frozen=True)
class Step:
    strategy: Strategy
    forecast: Forecast


class Steps:
    """Steps of one strategy by the placement of their ranks. priced: how many."""

    def __init__(self, strategy: Strategy, cluster: Cluster, profiled: Callable[[Strategy], StepProfile]) -> None:
        self.strategy, self.cluster, self._profiled, self.priced = strategy, cluster, profiled, 0
        self._profiles: dict[Strategy, StepProfile] = {}
        self._balanced: dict[tuple[float, ...], Strategy] = {}

    def of(self, placement: tuple[int, ...]) -> Step:
        """The faster of the strategy's own stages and of those that follow the speed of their devices."""
        first = self._step(self.strategy, placement)
        if (balanced := self._of_speeds(first.forecast.profile.spec)) == self.strategy:
            return first
        return min(first, self._step(balanced, placement), key=lambda step: step.forecast.seconds)

    def _step(self, strategy: Strategy, placement: tuple[int, ...]) -> Step:
        profile = self._profile(strategy)
        profile = replace(profile, spec=replace(profile.spec, placement=placement))
        self.priced += 1
        return Step(replace(strategy, mesh=profile.spec), forecast_profile(profile, self.cluster))

    def _profile(self, strategy: Strategy) -> StepProfile:
        if strategy not in self._profiles:
            self._profiles[strategy] = self._profiled(strategy)
        return self._profiles[strategy]

    def _of_speeds(self, spec: MeshSpec) -> Strategy:
        """With as many blocks in each stage as the speeds of their devices want; the strategy, where it says them itself."""
        profile, strategy = self._profile(self.strategy), self.strategy
        speeds = tuple(speed_of(self.cluster, spec, stage) for stage in range(spec.pp))
        if profile.schedule is None or strategy.pipeline.stages is not None or len(set(speeds)) == 1:
            return strategy
        if speeds not in self._balanced:
            of_stage = [speeds[rank] for rank in profile.schedule.placement]
            counts = min_max_partition(
                self._seconds.blocks,
                len(of_stage),
                first=self._seconds.first,
                last=self._seconds.last,
                speeds=of_stage,
            )
            other = replace(strategy, pipeline=replace(strategy.pipeline, stages=counts))
            try:
                self._profile(other)
            except MeshkitError:  # stages that this model or schedule cannot have
                other = strategy
            self._balanced[speeds] = other
        return self._balanced[speeds]

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
