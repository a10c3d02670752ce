"""The fullest instants of a pipeline's table: what a rank holds of microbatches where it holds most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from meshkit.parallel.pipeline import Row, Schedule

Array = npt.NDArray[np.float64]


def stages_of_ranks(table: Schedule) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stage, rank in enumerate(table.placement):
        found.setdefault(rank, []).append(stage)
    return found


def greatest_instants(rows: Sequence[Row], stages: Sequence[int]) -> Array:
    """[instants, stages, (kept, waits, gathered, summed, running)] of a rank, of the instants of which no other has as much
    of all: microbatches whose forward is kept for backward, those that only W is left of; whether the stage's first forward,
    and its first gradient of weights, was; whether its backward begins.
    """
    found = _greatest(_instants(rows, {stage: at for at, stage in enumerate(stages)}))
    return found.reshape(len(found), len(stages), 5)


def _instants(rows: Sequence[Row], place: Mapping[int, int]) -> Array:
    """[instants, stages x (kept, waits, gathered, summed, running)] of a rank: after each row that adds something, and where
    a backward begins.
    """
    now = [0] * (5 * len(place))
    seen: dict[tuple[int, ...], None] = {}
    for row in rows:
        grows = False
        for op, stage, _ in row.tasks:
            at = 5 * place[stage]
            if op in ("B", "I"):
                seen[(*now[: at + 4], 1, *now[at + 5 :])] = None
            if op == "F":
                now[at] += 1
                grows, now[at + 2] = True, 1
            elif op == "I":
                now[at] -= 1
                now[at + 1] += 1
                grows = True
            else:
                now[at if op == "B" else at + 1] -= 1
                grows, now[at + 3] = grows or not now[at + 3], 1
        if grows:
            seen[tuple(now)] = None
    return np.array(list(seen), dtype=np.float64)


def _greatest(vectors: Array) -> Array:
    """Those than which no other is at least as large in everything."""
    order = vectors[np.argsort(-vectors.sum(1), kind="stable")]
    kept: list[Array] = []
    for each in order:
        if not any((other >= each).all() for other in kept):
            kept.append(each)
    return np.array(kept)
