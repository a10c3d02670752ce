"""Law 10 as data: where the host may wait in a step, and what is launched, by cell."""

from __future__ import annotations

from dataclasses import dataclass

from tests.laws.gate.cell import Cell


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """waits_a_layer: of a layer that is not the first. other_waits: of the rest of the step, in all. launches_a_layer: forward
    and backward."""

    waits_a_layer: int = 0
    other_waits: int = 0
    launches_a_layer: int


PINNED: list[tuple[Cell, Pinned]] = [
    (Cell(mesh="dp_shard=2"), Pinned(launches_a_layer=0)),
]
