"""The guards of a run: what looks at a call of the model before it runs, for what was not known when it was resolved."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshkit.core.asked_once import AskedOnce
from meshkit.parallel.rows import RowsGuard
from meshkit.parallel.state_writes import StateGuard, StateWatch, refuse_of_microbatches
from meshkit.parallel.tensor.guard import Guard
from meshkit.resolve import Resolved


def guards_of(resolved: Resolved, asked: AskedOnce) -> list[Guard | RowsGuard | StateGuard]:
    found: list[Guard | RowsGuard | StateGuard] = []
    program, spec, blocks = resolved.program, resolved.spec, resolved.blocks
    if resolved.layout is not None:
        found.append(Guard(program, resolved.layout, resolved.example, resolved.outline, blocks=blocks, asked=asked))
    closed = dict.fromkeys(resolved.experts, "experts")
    ranks = spec.pp * spec.dp_replicate * spec.dp_shard > 1
    found.append(
        RowsGuard(
            program,
            resolved.rows,
            blocks=blocks,
            closed=closed,
            ranks=ranks,
            parts=spec.dp_replicate * spec.dp_shard,
            first=refuse_of_microbatches,
            asked=asked,
        )
    )
    if resolved.cut is not None:
        found.append(StateGuard(program, closed=closed, repeated=resolved.repeated, asked=asked))
    return found


def rows_of(guards: Sequence[Guard | RowsGuard | StateGuard]) -> RowsGuard:
    return next(each for each in guards if isinstance(each, RowsGuard))


def state_of(
    model: nn.Module, resolved: Resolved, guards: Sequence[Guard | RowsGuard | StateGuard], asked: AskedOnce
) -> StateGuard | StateWatch:
    """What looks at the state that the model writes: of stages the guard that reads, else what sees it written."""
    guard = next((each for each in guards if isinstance(each, StateGuard)), None)
    closed = dict.fromkeys(resolved.experts, "experts")
    compiled = bool(resolved.strategy.compile)
    return guard or StateWatch(
        model, resolved.program, closed=closed, repeated=resolved.repeated, compiled=compiled, asked=asked
    )
