"""The search (ReaLHF, execution plan): CP-SAT on lower bounds of weight syncs, then exact seconds of those it chose."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshkit.algos.plan_rl._period import Steady, seconds_of, steady_state, sync_name
from meshkit.algos.plan_rl._problem import Alternative, Choice, Problem
from meshkit.algos.plan_rl._solver import TICKS, Pair, Solver, solver_module
from meshkit.errors import PlanError

EXACT = 1e-6  # a period this near to the bound is the least there is


@dataclass(frozen=True, kw_only=True)
class Found:
    """choice, order: of the best plan. steady: its exact period and starts. bound_s: none has a smaller period.

    syncs_seen: pairs of layouts whose weight sync was planned. took_s: of the search alone, without costs.
    """

    problem: Problem
    choice: Choice
    order: tuple[str, ...]
    steady: Steady
    bound_s: float
    syncs_seen: int
    took_s: float

    @property
    def gap(self) -> float:
        """By how much the period may be above the least, as a share of it."""
        return max(0.0, self.steady.period_s / self.bound_s - 1) if self.bound_s else 0.0


def search_plan(
    problem: Problem,
    *,
    known: Sequence[Choice] = (),
    limit_s: float = 30.0,
    gap: float = 0.0,
    workers: int | None = None,
) -> Found:
    """The choice with the least period, by CP-SAT. known: choices to begin with, of which the answer is never slower.

    gap: to stop at, 0.02 for 2 %. workers: threads, default the cores there are.
    Raises: PlanError where nothing fits, and without ortools.
    """
    began = time.monotonic()
    solver_module()
    threads = workers or os.cpu_count() or 1
    best = _best_of(problem, [*known, *_first(problem)])
    # A period that no plan exceeds: all calls and syncs, one after the other, each as slow as it can be.
    most_s = best[2].period_s if best is not None else _slowest(problem)
    solver = Solver(problem, most_s)
    if best is not None:
        solver.hint(best[0])
    bound_s = 0.0
    while (left_s := limit_s - (time.monotonic() - began)) > 0 or best is None:
        solved = solver.solve(limit_s=max(left_s, limit_s / 4), gap=gap / 2 or EXACT, workers=threads)
        if solved is None:
            if best is None:
                raise PlanError(_nothing_fits(problem))
            bound_s = best[2].period_s
            break
        bound_s = max(bound_s, solved.bound_s)
        is_new = solver.look_at(_pairs(problem, solved.choice))
        found = _exact(problem, solved.choice, solved.order)
        if best is None or found[2].period_s < best[2].period_s:
            best = found
            solver.hint(best[0])
        if best[2].period_s <= bound_s * (1 + max(gap, _rounding(problem))) or not is_new:
            break
    assert best is not None
    choice, order, steady = best
    return Found(
        problem=problem,
        choice=choice,
        order=order,
        steady=steady,
        bound_s=min(bound_s, steady.period_s),
        syncs_seen=len(solver.looked_at),
        took_s=time.monotonic() - began,
    )


def evaluate(problem: Problem, choice: Choice, *, limit_s: float = 10.0) -> Found:
    """The best order for a given choice: what a plan made by hand takes under the same costs.

    Raises: PlanError where the choice does not fit.
    """
    if why := problem.refusal(choice):
        raise PlanError(f"this plan {why}. Choose other layouts.")
    only = replace(problem, meshes={mesh: [choice[mesh]] for mesh in problem.meshes})
    return search_plan(only, limit_s=limit_s)


def _rounding(problem: Problem) -> float:
    """What whole ticks leave open, as a share of the period."""
    return (len(problem.calls) + len(problem.syncs) + 1) / TICKS


def _exact(problem: Problem, choice: Choice, order: Sequence[str]) -> tuple[Choice, tuple[str, ...], Steady]:
    return choice, tuple(order), steady_state(problem, choice, order)


def _first(problem: Problem) -> list[Choice]:
    """Every call on all ranks: in the one layout that suits all meshes best, and each in its own best."""
    whole = {
        mesh: [each for each in alternatives if each.count == problem.units]
        for mesh, alternatives in problem.meshes.items()
    }
    if not all(whole.values()):
        return []
    own = {mesh: min(each, key=_total_s) for mesh, each in whole.items()}
    common = set.intersection(*({each.layout for each in alternatives} for alternatives in whole.values()))
    symmetric = [
        {mesh: min((each for each in of if each.layout == layout), key=_total_s) for mesh, of in whole.items()}
        for layout in sorted(common)
    ]
    return [own, *symmetric]


def _total_s(alternative: Alternative) -> float:
    return sum(alternative.seconds.values())


def _best_of(problem: Problem, choices: Sequence[Choice]) -> tuple[Choice, tuple[str, ...], Steady] | None:
    """Of those that fit, with calls in the order in which they are listed."""
    order = [*(call.name for call in problem.calls), *(sync_name(*each) for each in problem.syncs)]
    plans = [_exact(problem, choice, order) for choice in choices if not problem.refusal(choice)]
    return min(plans, key=lambda plan: plan[2].period_s, default=None)


def _slowest(problem: Problem) -> float:
    calls = sum(max(each.seconds[call.name] for each in problem.meshes[call.on]) for call in problem.calls)
    return 2 * calls


def _pairs(problem: Problem, choice: Choice) -> list[Pair]:
    present = seconds_of(problem, choice)
    return [
        (model, mesh, choice[problem.homes[model]], choice[mesh])
        for model, mesh in problem.syncs
        if sync_name(model, mesh) in present
    ]


def _nothing_fits(problem: Problem) -> str:
    assert problem.device_bytes is not None or problem.apart
    memory = "" if problem.device_bytes is None else f" of {problem.device_bytes / 2**30:,.1f} GiB"
    return (
        f"plan_rl: no choice of meshes fits the ranks{memory}. Give more ranks, more memory, recompute, or fewer rows at "
        "a time."
    )
