"""List scheduling of a pipeline under a limit of memory, safe from deadlock.

Time runs forward, and a rank that is free starts the best task that is there. A limit makes plain greed dangerous: the
forwards of one stage can fill a rank until there is no room for the forward that would let anything go. So each rank
carries a plan, an order of its F and I that is known to finish within the limit, and starts a task out of turn only if
the rest of the plan still fits afterwards (the banker's algorithm, Dijkstra 1965). What is started has all it needs, so
the plans left over never wait for one another in a circle.

W is in no plan. It waits for nobody and makes room, so it fills the gaps, and comes first where F needs the room.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshkit.parallel.pipeline._table import Task

Plan = tuple[tuple[Task, ...], ...]
"""Per rank, its F and I tasks in an order that can run. The I of a whole backward is called I too."""

Rule = Callable[[Task, int], tuple[int, ...]]
"""The key of a task and its place in the plan; of the tasks that are there, the one with the smallest key starts."""

EPSILON = 1e-9  # of the sum of all times: what arrives so little later has arrived


def in_turn(task: Task, place: int) -> tuple[int, ...]:
    """As planned, and out of turn only where the rank would idle."""
    return (place,)


def backward_first(task: Task, place: int) -> tuple[int, ...]:
    """1F1B's rule: I before F, and the oldest microbatch first."""
    return (task.op == "F", task.microbatch, -task.stage if task.op == "F" else task.stage)


def backward_first_deep(task: Task, place: int) -> tuple[int, ...]:
    """I before F, and the stage nearest to the loss first."""
    return (task.op == "F", -task.stage, task.microbatch)


def forward_first(task: Task, place: int) -> tuple[int, ...]:
    """F before I while memory lasts: of F the deepest stage first, of I the shallowest. Fills the pipeline soonest."""
    return (task.op != "F", -task.stage if task.op == "F" else task.stage, task.microbatch)


RULES: tuple[Rule, ...] = (in_turn, backward_first, backward_first_deep, forward_first)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds per stage, and per hop between two ranks."""

    f_s: Sequence[float]
    i_s: Sequence[float]
    w_s: Sequence[float]
    b_s: Sequence[float]
    hop: Callable[[int, int], float]


def unit_costs(stages: int) -> Costs:
    """F = I = W = 1, B = 2 and free hops: what the papers draw."""
    one = (1.0,) * stages
    return Costs(f_s=one, i_s=one, w_s=one, b_s=(2.0,) * stages, hop=lambda source, target: 0.0)


def depth_first(placement: Sequence[int], microbatches: int) -> Plan:
    """One microbatch after the other, through all stages and back: it fits in as many activations as a rank has stages."""
    stages = range(len(placement))
    plan: list[list[Task]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in range(microbatches):
        for stage in stages:
            plan[placement[stage]].append(Task("F", stage, microbatch))
        for stage in reversed(stages):
            plan[placement[stage]].append(Task("I", stage, microbatch))
    return tuple(map(tuple, plan))


def repeat_block(placement: Sequence[int], microbatches: int, starts: dict[tuple[str, int], int], period: int) -> Plan:
    """A building block, repeated for every microbatch one period later (Qi et al. 2024, section 2).

    starts: slot of every ("F" or "I", stage) for microbatch 0.
    """
    plan: list[list[tuple[int, Task]]] = [[] for _ in range(max(placement) + 1)]
    for (op, stage), start in starts.items():
        for microbatch in range(microbatches):
            plan[placement[stage]].append((start + period * microbatch, Task(op, stage, microbatch)))
    return tuple(tuple(task for _, task in sorted(rank)) for rank in plan)


def plan_peak(rank: Sequence[Task]) -> int:
    """The most activations a rank's plan holds at a time, if every W follows its I at once."""
    return max(accumulate((1 if task.op == "F" else -1 for task in rank), initial=0))


def list_schedule(
    placement: Sequence[int],
    microbatches: int,
    plan: Plan,
    *,
    costs: Costs,
    rule: Rule,
    max_live: Sequence[int] | None = None,
    split: bool = True,
    patience: float = 0.0,
) -> tuple[tuple[Task, ...], ...]:
    """Start, on every rank that is free, the task the rule prefers of those that are there and safe.

    max_live: per rank, a limit on activations of one (stage, microbatch), held from F to the end of B or W.
    split: I and W apart; otherwise whole backwards, B.
    patience: start a W only if nothing better arrives within this part of its time.
    """
    stages, ranks = len(placement), len(plan)
    limit = list(max_live) if max_live is not None else [stages * microbatches] * ranks
    assert all(plan_peak(rank) <= most for rank, most in zip(plan, limit, strict=True)), "the plan is over the limit"
    places = [{task: place for place, task in enumerate(rank)} for rank in plan]
    back_s = costs.i_s if split else costs.b_s
    epsilon = EPSILON * (sum(costs.f_s) + sum(back_s) + sum(costs.w_s))
    mine = [[stage for stage in range(stages) if placement[stage] == rank] for rank in range(ranks)]

    forwards, backwards = [0] * stages, [0] * stages  # started so far; microbatches go through a stage in order
    input_at = [[0.0 if stage == 0 else None for _ in range(microbatches)] for stage in range(stages)]
    gradient_at: list[list[float | None]] = [[None] * microbatches for _ in range(stages)]
    unfinished = [0] * ranks  # F without I: what the plan accounts for
    live = [0] * ranks  # F without B or W: what the limit is about
    weights: list[list[Task]] = [[] for _ in range(ranks)]
    next_weight, next_place = [0] * ranks, [0] * ranks
    free_at = [0.0] * ranks
    orders: list[list[Task]] = [[] for _ in range(ranks)]

    def started(task: Task) -> bool:
        return (forwards if task.op == "F" else backwards)[task.stage] > task.microbatch

    def safe(rank: int, task: Task) -> bool:
        """Would the plan still fit if this F, out of turn or not, went first?"""
        planned, held = plan[rank], unfinished[rank] + 1
        while started(planned[next_place[rank]]):
            next_place[rank] += 1
        for place in range(next_place[rank], places[rank][task]):
            if held > limit[rank]:
                return False
            if not started(planned[place]):
                held += 1 if planned[place].op == "F" else -1
        return held <= limit[rank]

    def choose(rank: int, now: float) -> Task | None:
        here: list[Task] = []
        soonest = float("inf")
        for stage in mine[rank]:
            nexts = []
            if (microbatch := backwards[stage]) < forwards[stage]:
                nexts.append((gradient_at[stage][microbatch], Task("I", stage, microbatch)))
            if (microbatch := forwards[stage]) < microbatches:
                nexts.append((input_at[stage][microbatch], Task("F", stage, microbatch)))
            for arrives, task in nexts:
                if arrives is None or (task.op == "F" and not safe(rank, task)):
                    continue
                if arrives <= now + epsilon:
                    here.append(task)
                else:
                    soonest = min(soonest, arrives)
        weight = weights[rank][next_weight[rank]] if next_weight[rank] < len(weights[rank]) else None
        if here:
            best = min(here, key=lambda task: rule(task, places[rank][task]))
            return weight if best.op == "F" and live[rank] == limit[rank] else best
        if weight and soonest >= now + patience * costs.w_s[weight.stage] - epsilon:
            return weight
        return None

    events = [(0.0, rank) for rank in range(ranks)]
    while events:
        now, awake = events[0][0], set()
        while events and events[0][0] <= now + epsilon:
            awake.add(heapq.heappop(events)[1])
        for rank in sorted(awake):
            if free_at[rank] > now + epsilon or (task := choose(rank, now)) is None:
                continue
            op, stage, microbatch = task
            if op == "F":
                end = now + costs.f_s[stage]
                forwards[stage] += 1
                unfinished[rank] += 1
                live[rank] += 1
                reader, arrivals = (stage + 1, input_at) if stage + 1 < stages else (stage, gradient_at)
            elif op == "I":
                end = now + back_s[stage]
                backwards[stage] += 1
                unfinished[rank] -= 1
                reader, arrivals = stage - 1, gradient_at
                if split:
                    weights[rank].append(Task("W", stage, microbatch))
                else:
                    live[rank] -= 1
            else:
                end = now + costs.w_s[stage]
                next_weight[rank] += 1
                live[rank] -= 1
                reader = -1
            if reader >= 0:
                target = placement[reader]
                arrives = end + (costs.hop(rank, target) if target != rank else 0.0)
                arrivals[reader][microbatch] = arrives
                heapq.heappush(events, (arrives, target))
            orders[rank].append(task if split or op == "F" else Task("B", stage, microbatch))
            free_at[rank] = end
            heapq.heappush(events, (end, rank))
    assert sum(map(len, orders)) == stages * microbatches * (3 if split else 2), "a safe order stopped"
    return tuple(map(tuple, orders))
