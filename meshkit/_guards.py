"""The guards of a run: what looks at a call of the model before it runs, for what was not known when it was resolved."""

from __future__ import annotations

from meshkit.parallel.rows import RowsGuard
from meshkit.parallel.tensor.guard import Guard
from meshkit.resolve import Resolved


def guards_of(resolved: Resolved) -> list[Guard | RowsGuard]:
    found: list[Guard | RowsGuard] = []
    program, spec, blocks = resolved.program, resolved.spec, resolved.blocks
    if resolved.layout is not None:
        found.append(Guard(program, resolved.layout, resolved.example, resolved.outline, blocks=blocks))
    if spec.pp * spec.dp_replicate * spec.dp_shard > 1:
        closed = dict.fromkeys(resolved.experts, "experts")
        found.append(RowsGuard(program, resolved.rows, blocks=blocks, closed=closed))
    return found
