"""Greedy list scheduling of a pipeline under a memory limit, safe from deadlock (the banker's algorithm).

Time runs forward, and a free rank starts the best task whose inputs have arrived. Under a memory limit plain greed can
deadlock: forwards of one stage may fill a rank until there is no room for the forward that would let it free anything. So
each rank carries a plan, an order of its F and I that is known to finish within the limit. It starts a task out of turn only
if the rest of the plan still fits afterwards (the banker's algorithm, Dijkstra 1965). Tasks start only with all their inputs,
so the remaining plans never wait for one another in a circle.

W is in no plan. It waits for no other rank and frees memory, so it fills gaps, and goes first where F needs its memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshkit.parallel.pipeline._table import Task

Plan = tuple[tuple[Task, ...], ...]
"""Per rank, its F and I tasks in an order that can run. The I of a whole backward is called I too."""

Rule = Callable[[Task, int], tuple[int, ...]]
"""(task, its index in the plan) -> key; of the tasks that can start, the one with the smallest key does."""

EPSILON = 1e-9  # of the sum of all times: arrivals closer than this count as one moment, whatever the rounding of sums


def in_turn(task: Task, index: int) -> tuple[int, ...]:
    """As planned, and out of turn only where the rank would idle."""
    return (index,)


def backward_first(task: Task, index: int) -> tuple[int, ...]:
    """1F1B's rule: I before F, and the oldest microbatch first."""
    return (task.op == "F", task.microbatch, -task.stage if task.op == "F" else task.stage)


def backward_first_deep(task: Task, index: int) -> tuple[int, ...]:
    """I before F, and the stage nearest to the loss first."""
    return (task.op == "F", -task.stage, task.microbatch)


def forward_first(task: Task, index: int) -> tuple[int, ...]:
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
    unit = (1.0,) * stages
    return Costs(f_s=unit, i_s=unit, w_s=unit, b_s=(2.0,) * stages, hop=lambda source, target: 0.0)


def depth_first(placement: Sequence[int], microbatches: int) -> Plan:
    """One microbatch after the other, through all stages and back: a rank holds at most one activation per stage."""
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
    """Schedule greedily: on every free rank, start the task that the rule prefers among those that can run and are safe.

    max_live: per rank, a limit on activations of one (stage, microbatch), held from F to the end of B or W.
    split: I and W apart; otherwise whole backwards, B.
    patience: start a W only if nothing better arrives within this part of its time.
    """
    stages, count = len(placement), len(plan)
    limits = list(max_live) if max_live is not None else [stages * microbatches] * count
    assert all(plan_peak(order) <= most for order, most in zip(plan, limits, strict=True)), "the plan is over the limit"
    settings = _Settings(placement, microbatches, costs, rule, split, patience)
    ranks = [_Rank(rank, plan[rank], limits[rank], placement) for rank in range(count)]
    progress = _Progress(stages, microbatches)
    # (time, rank): the rank is free again, or an input has arrived. All events of one moment are taken before a rank chooses.
    events = [(0.0, rank) for rank in range(count)]
    while events:
        now, awake = events[0][0], set()
        while events and events[0][0] <= now + settings.epsilon:
            awake.add(heapq.heappop(events)[1])
        # Sorted, so that every rank of a job finds the same table.
        for rank in sorted(awake):
            # An input came while the rank is busy: the event of its own end will wake it again.
            if ranks[rank].free_at > now + settings.epsilon:
                continue
            task = _choose(settings, progress, ranks[rank], now)
            if task is not None:
                for event in _start(settings, progress, ranks[rank], task, now):
                    heapq.heappush(events, event)
    assert sum(len(rank.order) for rank in ranks) == stages * microbatches * (3 if split else 2), "a safe order stopped"
    return tuple(tuple(rank.order) for rank in ranks)


class _Settings:
    """The arguments of a call of `list_schedule`, which do not change."""

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: Costs,
        rule: Rule,
        split: bool,
        patience: float,
    ) -> None:
        self.placement, self.microbatches, self.rule, self.split = placement, microbatches, rule, split
        self.hop = costs.hop
        self.task_s = {"F": costs.f_s, "I": costs.i_s if split else costs.b_s, "W": costs.w_s}
        self.patience_s = [patience * seconds for seconds in costs.w_s]
        self.epsilon = EPSILON * (sum(costs.f_s) + sum(self.task_s["I"]) + sum(costs.w_s))


class _Progress:
    """Tasks started on all ranks. Microbatches go through a stage in order, so a count per stage says which have started."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self.forwards, self.backwards = [0] * stages, [0] * stages
        # Times at which the input of a stage's F and the gradient of its I arrive; None while unknown.
        self.input_at: list[list[float | None]] = [[None] * microbatches for _ in range(stages)]
        self.gradient_at: list[list[float | None]] = [[None] * microbatches for _ in range(stages)]
        self.input_at[0] = [0.0] * microbatches

    def started(self, task: Task) -> bool:
        return (self.forwards if task.op == "F" else self.backwards)[task.stage] > task.microbatch


class _Rank:
    """The state of one rank: its plan, its live activations, its deferred W."""

    def __init__(self, number: int, plan: Sequence[Task], limit: int, placement: Sequence[int]) -> None:
        self.number, self.plan, self.limit = number, plan, limit
        self.stages = [stage for stage, rank in enumerate(placement) if rank == number]
        self.index_of = {task: index for index, task in enumerate(plan)}
        self.next_index = 0  # all of the plan before it has started
        self.unfinished = 0  # F without I: the plan frees them
        self.live = 0  # F without B or W: the limit bounds them
        self.weights: deque[Task] = deque()  # W whose I is done, oldest first
        self.free_at = 0.0
        self.order: list[Task] = []


def _is_safe(progress: _Progress, rank: _Rank, task: Task) -> bool:
    """Whether the plan still fits within the limit if this F goes first, out of turn or not."""
    # Tasks that ran out of turn leave holes in the plan: skip all that have started.
    while progress.started(rank.plan[rank.next_index]):
        rank.next_index += 1
    live = rank.unfinished + 1
    for index in range(rank.next_index, rank.index_of[task]):
        if live > rank.limit:
            return False
        planned = rank.plan[index]
        if not progress.started(planned):
            live += 1 if planned.op == "F" else -1
    return live <= rank.limit


def _may_run(settings: _Settings, progress: _Progress, rank: _Rank) -> Iterator[tuple[float, Task]]:
    """Yields (arrival of its input, task) for the next I and the next safe F of each stage whose input is known to arrive."""
    for stage in rank.stages:
        forwards, backwards = progress.forwards[stage], progress.backwards[stage]
        # An I is always safe: it never needs room, and makes some at once or by its W.
        if backwards < forwards and (arrives := progress.gradient_at[stage][backwards]) is not None:
            yield arrives, Task("I", stage, backwards)
        if forwards < settings.microbatches and (arrives := progress.input_at[stage][forwards]) is not None:
            forward = Task("F", stage, forwards)
            if _is_safe(progress, rank, forward):
                yield arrives, forward


def _choose(settings: _Settings, progress: _Progress, rank: _Rank, now: float) -> Task | None:
    """The task that the rank starts now: the one that the rule prefers, else a W; None if waiting is better.

    A W comes first only where an F needs its room.
    """
    ready, soonest = [], float("inf")
    for arrives, task in _may_run(settings, progress, rank):
        if arrives <= now + settings.epsilon:
            ready.append(task)
        else:
            soonest = min(soonest, arrives)
    weight = rank.weights[0] if rank.weights else None
    if ready:
        best = min(ready, key=lambda task: settings.rule(task, rank.index_of[task]))
        # At the limit an F has to wait for memory, and the oldest W frees some.
        return weight if best.op == "F" and rank.live == rank.limit else best
    if weight is not None and soonest >= now + settings.patience_s[weight.stage] - settings.epsilon:
        return weight
    return None


def _start(
    settings: _Settings, progress: _Progress, rank: _Rank, task: Task, now: float
) -> Iterator[tuple[float, int]]:
    """Run the task; yields (time, rank) of its events: its output arrives, and its own rank is free again."""
    op, stage, microbatch = task
    end = now + settings.task_s[op][stage]
    if op == "F":
        progress.forwards[stage] += 1
        rank.unfinished += 1
        rank.live += 1
    elif op == "I":
        progress.backwards[stage] += 1
        rank.unfinished -= 1
        if settings.split:
            rank.weights.append(Task("W", stage, microbatch))
        else:
            rank.live -= 1
    else:
        rank.weights.popleft()
        rank.live -= 1
    reader = _reader(progress, task)
    if reader is not None:
        stage_of_reader, arrivals = reader
        target = settings.placement[stage_of_reader]
        arrives = end + (settings.hop(rank.number, target) if target != rank.number else 0.0)
        arrivals[stage_of_reader][microbatch] = arrives
        yield arrives, target
    rank.order.append(task if settings.split or op == "F" else Task("B", stage, microbatch))
    rank.free_at = end
    yield end, rank.number


def _reader(progress: _Progress, task: Task) -> tuple[int, list[list[float | None]]] | None:
    """(the stage that needs the task's output, its table of arrival times); None if no stage does."""
    if task.op == "F" and task.stage + 1 < len(progress.forwards):
        return task.stage + 1, progress.input_at
    if task.op == "F":
        return task.stage, progress.gradient_at  # the last stage has the loss
    if task.op == "I" and task.stage > 0:
        return task.stage - 1, progress.gradient_at
    return None
