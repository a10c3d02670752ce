"""search: the best strategy of a space by exact best-first branch and bound over forecasts, with memory as a constraint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from meshkit.cluster import Cluster
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.preflight.estimate import estimate
from meshkit.preflight.forecast import Batch
from meshkit.preflight.search._ahead import Ahead
from meshkit.preflight.search._goal import Goal, refuse_goal
from meshkit.preflight.search._host import refuse_disk
from meshkit.preflight.search._neighbours import neighbours
from meshkit.preflight.search._pricing import Pricing
from meshkit.preflight.search._result import Found, Tried, pareto
from meshkit.preflight.search._space import Space, divisors
from meshkit.preflight.search._world import World
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import DataPolicy, PipelinePolicy, Strategy


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
    limit_s: float | None = None,
    processes: int = 1,
    progress: Callable[[int, int, Tried | None], None] | None = None,
) -> Found:
    """The strategy of `world` ranks on which a step of the batch is forecast to be best, of those that fit.

    model: any nn.Module, on meta is enough. device_memory: bytes; None does not look at memory. Devices of which
    `Unlike.memory_bytes` of the cluster says less have that. goal: "time", seconds of a step; "cost", seconds times ranks;
    "energy", joules of a step, of a cluster that says `device.power`; "fewest ranks", the least divisor of the world on which
    something fits, then time; or a function of a `Forecast`, for which everything is priced. fixed: choices that stay, as
    precision. exhaustive: price everything, also what cannot be best by its bound. recheck: also by the traced `estimate` a
    winner that fits by less than what its composed peak may be wrong by.
    limit_s: processor seconds, of others too while it waits for them, after which the best so far is the answer, and
    `Found.gap` says what was left. processes: how many trace, this one among them; the others are forked, and trace what is
    likely to be asked for next, so the answer is the same. progress: called with how many were priced, how many are left, and
    the best so far.
    Refusals are `resolve`'s, made with the strategy itself; no strategy is left out for another reason than its bound.
    Raises: PlanError for no world, a goal that there is not, and processes that cannot be; ClusterError for a disk without a
    rate.
    """
    if type(world) is not int or world < 1:
        raise PlanError(f"search(world={world!r}): a world has a whole number of ranks, at least 1.")
    machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    machine, device_memory = _with_room(machine, device_memory)
    refuse_goal(goal, machine)
    Ahead.refuse(processes)
    base = fixed or Strategy()
    asked = (space or Space()).fixed_by(base)
    refuse_disk(asked, machine)
    limit = None if limit_s is None else time.process_time() + limit_s
    pricing = Pricing(model, machine, batch, loss, goal, processes)
    worlds = divisors(world) if goal == "fewest ranks" else [world]
    try:
        for ranks in worlds:
            found = _of_world(
                pricing, ranks, asked, base, device_memory, exhaustive or callable(goal), recheck, limit, progress
            )
            if found.winner is not None:
                break
    finally:
        pricing.ahead.close()
    return found


def _with_room(cluster: Cluster, device_bytes: int | None) -> tuple[Cluster, int | None]:
    """No device has more than is asked for; the largest has what bounds go by. Without a number memory is not looked at."""
    unlike = cluster.unlike
    if unlike is None or not unlike.memory_bytes:
        return cluster, device_bytes
    if device_bytes is None:
        rest = unlike.speed or unlike.bytes_per_s
        return replace(cluster, unlike=replace(unlike, memory_bytes=()) if rest else None), None
    rooms = tuple(min(size, float(device_bytes)) for size in unlike.memory_bytes)
    return replace(cluster, unlike=replace(unlike, memory_bytes=rooms)), int(max(rooms))


def _of_world(
    pricing: Pricing,
    world: int,
    space: Space,
    base: Strategy,
    device_bytes: int | None,
    exhaustive: bool,
    recheck: bool,
    until: float | None,
    progress: Callable[[int, int, Tried | None], None] | None,
) -> Found:
    began = time.monotonic()
    state = World(pricing, world, device_bytes, exhaustive=exhaustive, balance=space.balance)
    node_ranks, experts = pricing.cluster.tiers[0].ranks, _experts(pricing, base)
    sizes = space.sizes(world, node=node_ranks, experts=experts)
    mix = device_bytes is not None
    state.add(list(space.groups(pricing.batch, world, base, node=node_ranks, experts=experts, mix=mix)))
    ended = False
    while True:
        while (node := state.next()) is not None:
            if until is not None and time.process_time() + pricing.ahead.waited_s > until:
                state.push(node.bound, node.group, node.level)
                ended = True
                break
            state.step(node)
            if progress is not None:
                progress(len(state.tried), state.left, state.best)
        if state.best is None or not recheck or _is_right(pricing, state.best, device_bytes):
            break
        state.drop_best()
    fitting = [each for each in state.tried if each.fits(device_bytes)]
    return Found(
        winner=state.best,
        front=pareto(fitting),
        tried=tuple(state.tried),
        refused=dict(state.refused),
        unfit=state.unfit,
        cut=state.left,
        gap=state.gap,
        least=state.least,
        neighbours=()
        if state.best is None
        else tuple(neighbours(pricing, state.best, base, space, sizes, device_bytes, node=node_ranks, ended=ended)),
        device_bytes=device_bytes,
        took_s=time.monotonic() - began,
    )


def _experts(pricing: Pricing, base: Strategy) -> int:
    """Of the block that has most, by the plan; 0 without."""
    plain = replace(base, mesh=MeshSpec(), microbatches=1, pipeline=PipelinePolicy(), zero=None, data=DataPolicy())
    resolved = pricing.resolved(plain)
    modules = pricing.program.modules
    counts = [getattr(modules[name], "num_experts", 0) for name in resolved.experts]
    return max((each if isinstance(each, int) and each else pricing.batch.tokens for each in counts), default=0)


def _is_right(pricing: Pricing, tried: Tried, device_bytes: int | None) -> bool:
    """Whether it fits: by the traced estimate of its fullest rank, where the composed one may be wrong by what decides."""
    if device_bytes is None:
        return True
    rank, room = tried.tightest(device_bytes)
    if rank.peak_bytes * (1 + tried.memory.within) <= room:
        return True
    traced = estimate(
        pricing.model,
        strategy=tried.strategy,
        rows=pricing.batch.rows(tried.forecast.profile.spec),
        seq_len=pricing.batch.seq_len,
        coordinate={"pp": rank.pp_rank},
        kernels=pricing.cluster.device.kernels,
        loss=pricing.loss,
    )
    return traced.peak_bytes <= room
