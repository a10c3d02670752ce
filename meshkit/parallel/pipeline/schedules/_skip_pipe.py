"""SkipPipe: each microbatch passes some stages only, on a path that a search chooses so that the step ends soonest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations, pairwise, product

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._paths import Path, after, before
from meshkit.parallel.pipeline._simulate import Times, simulate
from meshkit.parallel.pipeline._table import Schedule, Task

from ._costs import costs_of
from ._exchange import improved
from ._greedy import Costs
from ._placement import at_least_one, loop, schedule_of

VISITS = 60_000  # tasks that the search for paths schedules: about two seconds
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
    may be reordered; then microbatches exchange stages, or change their order, from the best found so far on. Each candidate
    is a list schedule, in which a free rank runs what has arrived, so that no two microbatches meet on a rank; the last one's
    rows are exchanged on the critical path.
    Raises: PlanError for a ratio that skips more than the stages between the first and the last, and for absent ends.
    Source: Blagoev et al. 2025, SkipPipe (arXiv 2502.19913), whose scheduler finds such paths by another search.
    """
    at_least_one("skip_pipe", ranks=ranks, microbatches=microbatches)
    missing = frozenset(absent)
    _refuse(ranks, ratio, missing, max_live)
    times = times or Times()
    placement = loop(ranks, 1)
    present = frozenset(range(1, ranks - 1)) - missing
    search = _Search(placement, costs_of(times, ranks), min(max_live or ranks, microbatches), reorder, present)
    left_out = max(0, round(ratio * ranks * microbatches) - len(missing) * microbatches)
    paths = search.best(_starts(search, microbatches, left_out))
    tables = [
        schedule_of("skip-pipe", microbatches, placement, orders, paths=paths) for orders in search.schedules(paths)
    ]
    best = min((simulate(table, times) for table in tables), key=lambda simulation: simulation.makespan_s)
    return improved(best, times, search.limit).schedule


def _refuse(ranks: int, ratio: float, absent: frozenset[int], max_live: int | None) -> None:
    between = max(0, ranks - 2)
    if not 0 <= ratio * ranks <= between:
        raise PlanError(
            f"skip_pipe(ratio={ratio}): of {ranks} stages the first and the last are always passed, so that a microbatch "
            f"skips at most {between}. Give a ratio from 0 to {between}/{ranks}."
        )
    if not absent <= set(range(1, ranks - 1)):
        raise PlanError(
            f"skip_pipe(absent={tuple(sorted(absent))}): only stages from 1 to {ranks - 2} can be left out; the first has "
            "the embedding, and the last the head and the loss."
        )
    if max_live is not None:
        at_least_one("skip_pipe", max_live=max_live)


def _starts(search: _Search, microbatches: int, left_out: int) -> Iterator[Paths]:
    """Rotations: the stages that a microbatch skips follow those of the microbatch before it."""
    present, last = sorted(search.present), len(search.placement) - 1
    # All passes that are left out in one line, cut into microbatches: both counts then differ by one at most.
    edges = [left_out * microbatch // microbatches for microbatch in range(microbatches + 1)]
    for stride in range(1, max(2, len(present))):
        turns = _rotation(len(present), stride)
        paths = []
        for begin, end in pairwise(edges):
            skipped = {present[turns[turn % len(turns)]] for turn in range(begin, end)}
            middle = [stage for stage in present if stage not in skipped]
            paths.append((0, *middle, last) if last else (0,))
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
    """Paths whose list schedule ends soonest. limit: microbatches under way at a time. present: stages that can be passed or
    skipped."""

    def __init__(
        self, placement: Sequence[int], costs: Costs, limit: int, reorder: bool, present: frozenset[int]
    ) -> None:
        self.placement, self.costs, self.limit, self.reorder, self.present = placement, costs, limit, reorder, present
        self.visits = VISITS

    def best(self, starts: Iterable[Paths]) -> Paths:
        """Best first: of the best paths of which not all neighbours are seen, the next. Where there are few, all are seen."""
        seen: dict[Paths, float] = {}
        frontier: list[tuple[float, int, Iterator[Paths]]] = []

        def look(paths: Paths) -> None:
            seconds = self.seconds(paths)
            heapq.heappush(frontier, (seconds, len(seen), self._neighbours(paths)))
            seen[paths] = seconds

        for paths in dict.fromkeys(starts):
            look(paths)
        while frontier and self.visits > 0:
            unseen = next((paths for paths in frontier[0][2] if paths not in seen), None)
            if unseen is None:
                heapq.heappop(frontier)
            else:
                look(unseen)
        return min(seen, key=seen.__getitem__)

    def _neighbours(self, paths: Paths) -> Iterator[Paths]:
        """As many passes in all, and stages and microbatches as even as they were asked to be."""
        for one, other in combinations(range(len(paths)), 2):
            if paths[one] != paths[other]:
                yield _with(paths, {one: paths[other], other: paths[one]})
        for number, path in enumerate(paths if self.reorder else ()):
            for one, other in combinations(range(1, len(path) - 1), 2):
                swapped = list(path)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                yield _with(paths, {number: tuple(swapped)})
        # A stage less on one path, and one more on this or another.
        for one, other in product(range(len(paths)), repeat=2):
            for dropped in paths[one][1:-1]:
                for added in self.present - set(paths[other]):
                    less = _with(paths, {one: tuple(stage for stage in paths[one] if stage != dropped)})
                    for more in self._longer(less[other], added):
                        if self._even(found := _with(less, {other: more})):
                            yield found
        # Each of two with a stage of the other's.
        for one, other in combinations(range(len(paths)), 2):
            for mine, theirs in product(set(paths[one]) - set(paths[other]), set(paths[other]) - set(paths[one])):
                first, second = (
                    tuple(new if stage == old else stage for stage in path)
                    for path, old, new in ((paths[one], mine, theirs), (paths[other], theirs, mine))
                )
                if not self.reorder:
                    first, second = tuple(sorted(first)), tuple(sorted(second))
                yield _with(paths, {one: first, other: second})

    def _longer(self, path: Path, added: int) -> Iterator[Path]:
        if self.reorder:
            yield from ((*path[:place], added, *path[place:]) for place in range(1, len(path)))
        else:
            yield tuple(sorted((*path, added)))

    def _even(self, paths: Paths) -> bool:
        lengths = [len(path) for path in paths]
        passing = [sum(stage in path for path in paths) for stage in self.present]
        return max(lengths) - min(lengths) <= 1 and max(passing) - min(passing) <= 1

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

    def _list_schedule(self, paths: Paths, rule: Callable[[Task], tuple[int, int]]) -> tuple[float, list[list[Task]]]:
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
