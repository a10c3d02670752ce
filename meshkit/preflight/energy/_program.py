"""The linear program of energy: seconds of each row that cost the fewest joules within the seconds of the step.

| variable | of                                                                        |
|----------|---------------------------------------------------------------------------|
| start    | each row, from 0                                                          |
| more     | each segment of a row's convex joules: seconds beyond the segment's begin |
| step     | one: the seconds of the step, at most what is asked                       |

Slopes of segments rise, so a least fills them in order. Constraints: a row starts after its dependencies end, and ends with
the step. Source: Chung et al. 2024 (Perseus, arXiv 2312.06902), whose cuts of a graph step along the same front.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshkit.errors import PlanError
from meshkit.preflight.energy._power import Choice


class Edge(NamedTuple):
    """Row `after` starts `hop_s` after row `before` ends, or later. Rows are numbered through all ranks."""

    before: int
    after: int
    hop_s: float


class Solved(NamedTuple):
    """seconds: of each row. joules: of all rows, beyond those of waiting. step_s: what the step takes."""

    seconds: np.ndarray
    joules: float
    step_s: float


def solve(
    rows: Sequence[Sequence[Choice]], edges: Sequence[Edge], *, step_s: float, waiting_watts: float | None = None
) -> Solved:
    """rows: the convex choices of each. waiting_watts: of all ranks; where given, the step is as short as pays.

    step_s: the longest it may be.

    Raises: PlanError without scipy, and where the program has no solution.
    """
    optimize, sparse = _scipy()
    count = len(rows)
    segments = [(row, before, after) for row, kept in enumerate(rows) for before, after in pairwise(kept)]
    step = count + len(segments)
    cost = np.zeros(step + 1)
    upper = np.full(step + 1, np.inf)
    upper[step] = step_s
    of_row: list[list[int]] = [[] for _ in rows]
    for variable, (row, before, after) in enumerate(segments, start=count):
        upper[variable] = after.seconds - before.seconds
        cost[variable] = (after.joules - before.joules) / upper[variable]
        of_row[row].append(variable)
    if waiting_watts is not None:
        cost[step] = waiting_watts
    entries: list[tuple[int, int, float]] = []
    right: list[float] = []
    ends = [(row, step, 0.0) for row in range(count)]  # each row ends with the step, or before
    for line, (before_row, later, hop_s) in enumerate([*edges, *ends]):
        # start + seconds + hop <= start of the later row, or the step
        entries += [(line, before_row, 1.0), (line, later, -1.0)]
        entries += [(line, variable, 1.0) for variable in of_row[before_row]]
        right.append(-rows[before_row][0].seconds - hop_s)
    lines, columns, values = (np.array(part) for part in zip(*entries, strict=True))
    matrix = sparse.csr_matrix((values, (lines, columns)), shape=(len(right), step + 1))
    bounds = np.stack([np.zeros(step + 1), upper], axis=1)
    found = optimize.linprog(cost, A_ub=matrix, b_ub=np.array(right), bounds=bounds, method="highs")
    if found.status != 0:
        raise PlanError(f"no frequency plan takes {step_s:.6g} s: {found.message}")
    seconds = np.array([kept[0].seconds + sum(found.x[of]) for kept, of in zip(rows, of_row, strict=True)])
    joules = sum(kept[0].joules for kept in rows) + float(cost[count:step] @ found.x[count:step])
    return Solved(seconds, joules, float(found.x[step]))


def _scipy() -> tuple[Any, Any]:
    """Loaded when a plan is asked for: `import meshkit` stays light."""
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError as missing:
        raise PlanError(
            "energy plans need scipy, which is in the optional extra `search`. "
            'Install it with: pip install "meshkit[search]"'
        ) from missing
    return optimize, sparse
