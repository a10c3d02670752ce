"""SkipPipe: each microbatch passes some stages only, on a path that a search chooses so that the step ends soonest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations, pairwise, product

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._paths import Path, after, before
from meshkit.parallel.pipeline._simulate import Times, simulate
from meshkit.parallel.pipeline._table import Schedule, Task

from ._costs import costs_of
from ._greedy import Costs
from ._placement import at_least_one, loop, schedule_of

VISITS = 200_000  # tasks that the search for paths schedules: some seconds
Paths = tuple[Path, ...]


def skip_pipe(
    ranks: int,
    microbatches: int,
    *,
    ratio: float = 0.25,
    reorder: bool = False,
    absent: Collection[int] = (),
    times: Times | None = None,
    max_live: int | None = None,
) -> Schedule:
    """Every microbatch skips about `ratio` of the stages, all stages but the first and the last equally often.

    It trains another model than one device does with all blocks: each step, a microbatch's loss is that of the model without
    the blocks it skips. ratio: of all passes of a microbatch through a stage, the share that is left out, rounded; two
    microbatches differ by one stage at most, and two stages by one microbatch. reorder: whether a path may have stages in
    another order than the model's, as slow hops may ask for. absent: stages that no microbatch passes, as those of ranks that
    have left; they count as skipped. times: of F, B = I + W and hops, per stage; by default F = I = W = 1 and free hops.
    max_live: how many microbatches are under way at a time, `ranks` by default as in 1F1B.
    Activations: at most max_live microbatches on every rank.
    Deterministic. One stage per rank, whole backwards. The paths begin as a rotation, with the shortest hops first where they
    may be reordered; then two microbatches exchange stages, or one changes its order, while the step ends sooner. Every
    candidate is a list schedule: a free rank runs what has arrived, so no two microbatches meet on a rank.
    Raises: PlanError for a ratio that skips more than the stages between the first and the last, and for absent ends.
    Source: Blagoev et al. 2025, SkipPipe (arXiv 2502.19913), whose scheduler finds paths without collisions by another search.
    """
    at_least_one("skip_pipe", ranks=ranks, microbatches=microbatches)
    missing = frozenset(absent)
    _refuse(ranks, ratio, missing, max_live)
    times = times or Times()
    placement = loop(ranks, 1)
    search = _Search(placement, costs_of(times, ranks), min(max_live or ranks, microbatches), reorder)
    paths = search.best(list(_starts(ranks, microbatches, ratio, missing, search)))
    tables = (
        schedule_of("skip-pipe", microbatches, placement, orders, paths=paths) for orders in search.schedules(paths)
    )
    return min(tables, key=lambda table: simulate(table, times).makespan_s)


def _refuse(ranks: int, ratio: float, absent: frozenset[int], max_live: int | None) -> None:
    between = max(0, ranks - 2)
    if not 0 <= ratio * ranks <= between:
        raise PlanError(
            f"skip_pipe(ratio={ratio}): of {ranks} stages the first and the last are always passed, so that a microbatch skips "
            f"at most {between}. Give a ratio from 0 to {between}/{ranks}."
        )
    if not absent <= set(range(1, ranks - 1)):
        raise PlanError(
            f"skip_pipe(absent={tuple(sorted(absent))}): only stages from 1 to {ranks - 2} can be left out; the first has the "
            "embedding, and the last the head and the loss."
        )
    if max_live is not None:
        at_least_one("skip_pipe", max_live=max_live)


def _starts(
    ranks: int, microbatches: int, ratio: float, absent: frozenset[int], search: _Search
) -> Iterator[Paths]:
    """Rotations: the stages that a microbatch skips follow those of the microbatch before it."""
    present = [stage for stage in range(1, ranks - 1) if stage not in absent]
    left_out = max(0, round(ratio * ranks * microbatches) - len(absent) * microbatches)
    # All passes that are left out in one line, cut into microbatches: both counts then differ by one at most.
    for stride in range(1, max(2, len(present))):
        turns = _rotation(len(present), stride)
        edges = [left_out * microbatch // microbatches for microbatch in range(microbatches + 1)]
        paths = []
        for begin, end in pairwise(edges):
            skipped = {present[turns[turn % len(turns)]] for turn in range(begin, end)} if present else set()
            middle = [stage for stage in present if stage not in skipped]
            paths.append((0, *middle, ranks - 1) if ranks > 1 else (0,))
        yield tuple(paths)
        if search.reorder:
            yield tuple(map(search.shortest, paths))


def _rotation(count: int, stride: int) -> list[int]:
    """Every number below `count` once, in steps of `stride`."""
    found: dict[int, None] = {}
    for start in range(count):
        at = start
        while at not in found:
            found[at] = None
            at = (at + stride) % count
    return list(found)


class _Search:
    """Paths whose list schedule ends soonest. limit: microbatches under way at a time."""

    def __init__(self, placement: Sequence[int], costs: Costs, limit: int, reorder: bool) -> None:
        self.placement, self.costs, self.limit, self.reorder = placement, costs, limit, reorder
        self.visits = VISITS

    def best(self, starts: Sequence[Paths]) -> Paths:
        found = [(self.seconds(paths), number, paths) for number, paths in enumerate(dict.fromkeys(starts))]
        ended = []
        for share, (seconds, number, paths) in enumerate(sorted(found)):
            # The later ones, which start worse, with what the first have left.
            self.visits = max(self.visits, VISITS // 4) if share < 2 else self.visits
            ended.append((*self._improved(paths, seconds), number))
        return min(ended, key=lambda each: (each[1], each[2]))[0]

    def _improved(self, paths: Paths, seconds: float) -> tuple[Paths, float]:
        improved = True
        while improved and self.visits > 0:
            improved = False
            for other in self._neighbours(paths):
                if self.visits <= 0:
                    break
                if (ends_s := self.seconds(other)) < seconds:
                    paths, seconds, improved = other, ends_s, True
                    break
        return paths, seconds

    def _neighbours(self, paths: Paths) -> Iterator[Paths]:
        for one, other in combinations(range(len(paths)), 2):
            first, second = paths[one], paths[other]
            if first == second:
                continue
            yield _with(paths, {one: second, other: first})
            for mine, theirs in product(set(first) - set(second), set(second) - set(first)):
                yield _with(paths, {one: self._put(first, mine, theirs), other: self._put(second, theirs, mine)})
        for number, path in enumerate(paths if self.reorder else ()):
            for one, other in combinations(range(1, len(path) - 1), 2):
                swapped = list(path)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                yield _with(paths, {number: tuple(swapped)})

    def _put(self, path: Path, old: int, new: int) -> Path:
        changed = tuple(new if stage == old else stage for stage in path)
        return changed if self.reorder else tuple(sorted(changed))

    def shortest(self, path: Path) -> Path:
        """The path with its stages in an order of short hops: two change places while that is shorter."""

        def length(order: Sequence[int]) -> float:
            return sum(self._hop(one, other) for one, other in pairwise(order))

        best, improved = list(path), True
        while improved:
            improved = False
            for one, other in combinations(range(1, len(best) - 1), 2):
                # Turning the piece between them round exchanges neighbours too: 2-opt.
                turned = best[:one] + best[one : other + 1][::-1] + best[other + 1 :]
                if length(turned) < length(best) - 1e-12:
                    best, improved = turned, True
        return tuple(best)

    def _hop(self, one: int, other: int) -> float:
        source, target = self.placement[one], self.placement[other]
        return self.costs.hop(source, target) if source != target else 0.0

    def seconds(self, paths: Paths) -> float:
        self.visits -= 2 * 2 * sum(map(len, paths))
        return min(self._list_schedule(paths, rule)[0] for rule in (_backward_first, _forward_first))

    def schedules(self, paths: Paths) -> list[list[list[Task]]]:
        return [self._list_schedule(paths, rule)[1] for rule in (_backward_first, _forward_first)]

    def _list_schedule(
        self, paths: Paths, rule: Callable[[Task], tuple[int, int]]
    ) -> tuple[float, list[list[Task]]]:
        """(seconds, tasks of each rank in order): a free rank runs, of what has arrived, what the rule prefers."""
        ranks = 1 + max(self.placement)
        arrived: list[list[Task]] = [[] for _ in range(ranks)]
        orders: list[list[Task]] = [[] for _ in range(ranks)]
        free_at = [0.0] * ranks
        # (time, rank, what arrives there then); of one moment all is taken in before a rank chooses.
        events: list[tuple[float, int, tuple[Task, ...]]] = []
        entered = 0

        def enter(at_s: float) -> None:
            nonlocal entered
            if entered < len(paths):
                heapq.heappush(events, (at_s, self.placement[0], (Task("F", 0, entered),)))
                entered += 1

        for _ in range(self.limit):
            enter(0.0)
        end_s = 0.0
        while events:
            now, awake = events[0][0], set()
            while events and events[0][0] == now:
                _, rank, tasks = heapq.heappop(events)
                awake.add(rank)
                arrived[rank] += tasks
            for rank in sorted(awake):
                if free_at[rank] > now or not arrived[rank]:
                    continue
                task = min(arrived[rank], key=rule)
                arrived[rank].remove(task)
                orders[rank].append(task)
                op, stage, microbatch = task
                end_s = now + (self.costs.f_s if op == "F" else self.costs.b_s)[stage]
                free_at[rank] = end_s
                heapq.heappush(events, (end_s, rank, ()))
                follows = _follows(task, paths[microbatch])
                if follows is None:
                    enter(end_s)
                else:
                    there = end_s + self._hop(stage, follows.stage)
                    heapq.heappush(events, (there, self.placement[follows.stage], (follows,)))
        return max(free_at), orders


def _follows(task: Task, path: Path) -> Task | None:
    """The microbatch's next task: on along its path, back from its end; None after its last."""
    op, stage, microbatch = task
    if op == "F":
        onward = after(path).get(stage)
        return Task("B", stage, microbatch) if onward is None else Task("F", onward, microbatch)
    back = before(path).get(stage)
    return None if back is None else Task("B", back, microbatch)


def _backward_first(task: Task) -> tuple[int, int]:
    return task.op == "F", task.microbatch


def _forward_first(task: Task) -> tuple[int, int]:
    return task.op != "F", task.microbatch


def _with(paths: Paths, changed: dict[int, Path]) -> Paths:
    return tuple(changed.get(number, path) for number, path in enumerate(paths))
