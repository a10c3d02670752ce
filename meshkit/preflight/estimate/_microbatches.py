"""Least number of microbatches (gradient accumulation) whose step has the same peak as all of them."""

from __future__ import annotations

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import check
from meshkit.resolve import Resolved


def least_microbatches(resolved: Resolved, microbatches: int) -> int:
    """At most `microbatches`.

    Without pp three: the first makes gradients, the last reduces over replicas, and those between are alike. With pp one
    more than fill every rank of the table, so that a rank is full again while gradients are there.
    """
    if resolved.cut is None:
        return min(3, microbatches)
    generate, ranks = resolved.cut.generate, resolved.spec.pp
    live = check(generate(ranks, microbatches)).peak_live
    filled = False
    for count in range(1, microbatches):
        try:
            table = check(generate(ranks, count))
        except PlanError:
            continue  # a table of one size, or of multiples
        if filled:
            return count
        filled = table.peak_live == live
    return microbatches


def rows_of(rows: int, microbatches: int, count: int) -> int:
    """The rows of a step of `count` microbatches that are as large as the first and the last of all."""
    smaller, larger = divmod(rows, microbatches)
    return count * smaller + min(larger, count - 1) if count < microbatches else rows
