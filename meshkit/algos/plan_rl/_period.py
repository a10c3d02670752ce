"""The steady state of a dataflow (cyclic scheduling): rules between calls, and the least period that keeps them.

A rule (u, v, k) is: v of iteration i + k begins after u of iteration i has ended: start_v + k period >= start_u + seconds_u.
The least period is the largest ratio of seconds to k over the cycles of the rules (Reiter 1968; Lawler 1976).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshkit.algos.dataflow import Call
from meshkit.algos.plan_rl._problem import Choice, Problem

TOL_CYCLE = 1e-12  # relative to the period: cycles that are longer by rounding alone


@dataclass(frozen=True)
class Rule:
    before: str
    after: str
    lag: int


@dataclass(frozen=True, kw_only=True)
class Steady:
    """starts: seconds of each task in its own iteration, from the first on. period: from an iteration to the next."""

    period_s: float
    starts: Mapping[str, float]


def sync_name(model: str, mesh: str) -> str:
    return f"sync {model} -> {mesh}"


def needs_of(calls: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """(maker, call) of each field that a call reads."""
    makers = {name: call.name for call in calls for name in call.gives}
    for call in calls:
        yield from dict.fromkeys((makers[name], call.name) for name in call.needs if name in makers)


def fixed_rules(problem: Problem) -> Iterator[Rule]:
    """Those that hold wherever meshes lie: fields within an iteration, and a call after itself. Between stages fields are
    there already with staleness, and what is read of the iteration before is ruled by the weights."""
    stages = {call.name: call.stage for call in problem.calls}
    for before, after in needs_of(problem.calls):
        yield Rule(before, after, 0)
    for name in stages:
        yield Rule(name, name, 1)


def crossing_rules(problem: Problem, call: Call, sync: str) -> Iterator[Rule]:
    """A call and a sync that share ranks. Rollouts of iteration i + staleness run before the sync of iteration i."""
    ahead = problem.staleness if call.stage == "rollout" else 0
    yield Rule(call.name, sync, -ahead)
    yield Rule(sync, call.name, ahead + 1)


def stage_rules(problem: Problem, rollout: Call, train: Call) -> Iterator[Rule]:
    """Calls of the two stages that share ranks: a flow runs the rollouts of iteration i + staleness, then trains on i."""
    yield Rule(rollout.name, train.name, -problem.staleness)
    yield Rule(train.name, rollout.name, problem.staleness + 1)


def order_rules(first: str, then: str) -> Iterator[Rule]:
    """Two tasks of one stage that share ranks, in this order in each iteration."""
    yield Rule(first, then, 0)
    yield Rule(then, first, 1)


def least_period(rules: Iterable[Rule], seconds: Mapping[str, float]) -> Steady:
    """Cycles of positive length are removed by raising the period to their ratio, until none is left.

    A cycle without a lag that takes time is a mistake in the rules: an order that contradicts what calls need.
    """
    every = list(dict.fromkeys(rules))
    period = 0.0
    while True:
        starts, cycle = _longest(every, seconds, period)
        if cycle is None:
            return Steady(period_s=period, starts=starts)
        lag = sum(rule.lag for rule in cycle)
        assert lag > 0, f"a cycle without a lag: {cycle}"
        period = sum(seconds[rule.before] for rule in cycle) / lag


def _longest(
    rules: Sequence[Rule], seconds: Mapping[str, float], period: float
) -> tuple[dict[str, float], list[Rule] | None]:
    """Earliest starts by Bellman-Ford, or a cycle whose length is positive."""
    starts = dict.fromkeys(seconds, 0.0)
    came: dict[str, Rule] = {}
    slack = TOL_CYCLE * max([period, *seconds.values()])
    changed: str | None = None
    for _ in range(len(starts) + 1):
        changed = None
        for rule in rules:
            earliest = starts[rule.before] + seconds[rule.before] - rule.lag * period
            if earliest > starts[rule.after] + slack:
                starts[rule.after], came[rule.after], changed = earliest, rule, rule.after
        if changed is None:
            return starts, None
    assert changed is not None
    for _ in starts:  # back onto the cycle
        changed = came[changed].before
    cycle, name = [came[changed]], came[changed].before
    while name != changed:
        cycle.append(came[name])
        name = came[name].before
    return starts, cycle


def seconds_of(problem: Problem, choice: Choice) -> dict[str, float]:
    """Of each call and each sync that is there."""
    seconds = {call.name: choice[call.on].seconds[call.name] for call in problem.calls}
    for model, mesh in problem.syncs:
        source, destination = choice[problem.homes[model]], choice[mesh]
        if source.place != destination.place:
            seconds[sync_name(model, mesh)] = problem.move_s(model, source, destination)
    return seconds


def units_of(problem: Problem, choice: Choice) -> dict[str, frozenset[int]]:
    """The units of each call and each sync that is there."""
    units = {call.name: frozenset(choice[call.on].units) for call in problem.calls}
    for model, mesh in problem.syncs:
        source, destination = choice[problem.homes[model]], choice[mesh]
        if source.place != destination.place:
            units[sync_name(model, mesh)] = frozenset(source.units) | frozenset(destination.units)
    return units


def steady_state(problem: Problem, choice: Choice, order: Sequence[str]) -> Steady:
    """The plan's steady state where tasks of one stage that share ranks run in this order: of names, syncs among them."""
    seconds, units = seconds_of(problem, choice), units_of(problem, choice)
    calls = {call.name: call for call in problem.calls}
    rules = [*fixed_rules(problem)]
    present = [name for name in order if name in seconds]
    for index, first in enumerate(present):
        for then in present[index + 1 :]:
            if units[first].isdisjoint(units[then]):
                continue
            one, other = calls.get(first), calls.get(then)
            if (one is None) != (other is None):
                call, sync = (one, then) if one is not None else (other, first)
                assert call is not None
                rules += crossing_rules(problem, call, sync)
            elif one is None or other is None or one.stage == other.stage:
                rules += order_rules(first, then)
            else:
                rollout, train = (one, other) if one.stage == "rollout" else (other, one)
                rules += stage_rules(problem, rollout, train)
    steady = least_period(rules, seconds)
    if problem.cores:
        busy_s = sum(choice[call.on].core_s.get(call.name, 0.0) for call in problem.calls)
        return Steady(period_s=max(steady.period_s, busy_s / problem.cores), starts=steady.starts)
    return steady
