"""Least number of microbatches (gradient accumulation) whose step has the same peak as all of them."""

from __future__ import annotations

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Schedule, check
from meshkit.preflight._instants import greatest_instants, stages_of_ranks
from meshkit.resolve import Resolved


def least_microbatches(resolved: Resolved, microbatches: int) -> int:
    """At most `microbatches`.

    Without pp three: the first makes gradients, the last reduces over replicas, and those between are alike. With pp as many
    as give every rank of the table the same fullest instants as all.
    """
    if resolved.cut is None:
        return min(3, microbatches)
    generate, ranks = resolved.cut.generate, resolved.spec.pp
    wanted = _fullest(check(generate(ranks, microbatches)).schedule)
    for count in range(1, microbatches):
        try:
            found = _fullest(check(generate(ranks, count)).schedule)
        except PlanError:
            continue  # a table of one size, or of multiples
        if found == wanted:
            return count
    return microbatches


def _fullest(table: Schedule) -> dict[int, set[tuple[float, ...]]]:
    """Of each rank."""
    return {
        rank: {
            tuple(each) for each in greatest_instants(table.ranks[rank], stages).reshape(-1, 5 * len(stages)).tolist()
        }
        for rank, stages in stages_of_ranks(table).items()
    }


def rows_of(rows: int, microbatches: int, count: int) -> int:
    """The rows of a step of `count` microbatches that are as large as the first and the last of all."""
    smaller, larger = divmod(rows, microbatches)
    return count * smaller + min(larger, count - 1) if count < microbatches else rows
