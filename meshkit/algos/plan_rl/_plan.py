"""plan_rl: from calls with works, models and a cluster to the plan whose iteration takes least."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshkit.algos.dataflow import Call
from meshkit.algos.plan_rl._costs import Costs, PlannedModel
from meshkit.algos.plan_rl._moves import Moves
from meshkit.algos.plan_rl._places import Place, PlanSpace, alternatives
from meshkit.algos.plan_rl._problem import Problem
from meshkit.algos.plan_rl._result import RLPlan
from meshkit.algos.plan_rl._search import search_plan
from meshkit.cluster import Cluster
from meshkit.errors import PlanError
from meshkit.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """An iteration as data: what a script's `planned_calls(config)` returns.

    calls: in an order in which they can run, with works. models: by the names in works. strategy: what all meshes have, as
    precision. tokens_per_microbatch, staleness: of the run. beside: (learner, sampler) where the script's flags put the
    sampler on all of the learner's ranks or on the last ones alone.
    """

    calls: Sequence[Call]
    models: Mapping[str, PlannedModel]
    strategy: Strategy = field(default_factory=Strategy)
    tokens_per_microbatch: int = 16_384
    staleness: int = 0
    beside: tuple[str, str] | None = None


def problem_of(
    run: PlannedRun,
    cluster: Cluster | str,
    *,
    world: int,
    device_memory: float | None = None,
    space: PlanSpace | None = None,
) -> Problem:
    """The priced alternatives of every call, which `search_plan` chooses from. Traces models; no ranks, no GPU.

    Raises: PlanError for a world that is not of whole units, for meshes that nothing can run, and models that are not there.
    """
    machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    asked = space or PlanSpace()
    unit_ranks = asked.unit_ranks or _unit_ranks(world, machine)
    if world < 1 or world % unit_ranks:
        raise PlanError(
            f"plan_rl(world={world}): not of whole units of {unit_ranks} ranks. Change the world, or unit_ranks."
        )
    units = world // unit_ranks
    costs = Costs(
        dict(run.models),
        machine,
        fixed=run.strategy,
        tokens_per_microbatch=run.tokens_per_microbatch,
        device_bytes=device_memory,
    )
    moves = Moves(
        dict(run.models),
        machine,
        unit_ranks=unit_ranks,
        dtype=torch.float32 if run.strategy.memory.precision is None else torch.bfloat16,
    )
    apart = {} if run.beside is None else _beside(run.beside, units)
    places = {
        mesh: frozenset(pair[index] for pair in pairs)
        for ends, pairs in apart.items()
        for index, mesh in enumerate(ends)
    }
    return Problem(
        calls=run.calls,
        meshes=alternatives(run.calls, costs, units=units, unit_ranks=unit_ranks, space=asked, places=places),
        units=units,
        device_bytes=device_memory,
        staleness=run.staleness,
        move_s=moves.seconds,
        least_s=moves.least_s,
        cores=machine.host.cores * max(1, world // machine.tiers[0].ranks),
        apart=apart,
    )


def plan_rl(
    run: PlannedRun,
    cluster: Cluster | str,
    *,
    world: int,
    device_memory: float | None = None,
    space: PlanSpace | None = None,
    limit_s: float = 30.0,
    gap: float = 0.02,
    workers: int | None = None,
) -> RLPlan:
    """The ranks and the layout of every call whose iteration is forecast to take least, by CP-SAT, with its gap.

    cluster: a `Cluster`, a datasheet's name, or a file. device_memory: bytes of a rank; None does not look at memory.
    limit_s: of the search, after the costs; it stops at the gap, a share of the period.
    Calls of one mesh run on the same ranks; a call alone on its mesh is placed by itself. Fields of samples are not priced.
    Raises: PlanError where nothing fits, and without ortools.
    Source: Mei et al. 2024 (ReaL), whose search is a Markov chain without a bound.
    """
    began = time.monotonic()
    problem = problem_of(run, cluster, world=world, device_memory=device_memory, space=space)
    priced_s = time.monotonic() - began
    found = search_plan(problem, limit_s=limit_s, gap=gap, workers=workers)
    machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    return RLPlan(
        found=found, cluster=machine.name, unit_ranks=world // problem.units, priced_s=priced_s, run_beside=run.beside
    )


def _unit_ranks(world: int, cluster: Cluster) -> int:
    """A rank on a single node, else a node."""
    node = cluster.tiers[0].ranks
    return 1 if world <= node else node


def _beside(ends: tuple[str, str], units: int) -> dict[tuple[str, str], frozenset[tuple[Place, Place]]]:
    """The learner on the first ranks and the sampler on the others, or both on all."""
    pairs = {((0, units), (0, units))} | {((0, units - last), (units - last, last)) for last in range(1, units)}
    return {ends: frozenset(pairs), (ends[1], ends[0]): frozenset((there, here) for here, there in pairs)}
