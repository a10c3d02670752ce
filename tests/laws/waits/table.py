"""Law 10 as data: where the host waits in a step of two layers, and how many operators it launches, by cell."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshkit.strategy import States
from tests.laws.gate.cell import Cell


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """waits: how often in a step, by the file that asks. launches: of forward and backward. clip: of norm and clipping.
    copied_beside: bytes that go to the device with the batch: the count of its labels, what ranks say that they do, indices,
    row counts of experts."""

    waits: dict[str, int] = field(default_factory=dict)
    launches: int
    clip: int
    copied_beside: int = 56


DISPATCH, PADDED = "parallel/expert/_dispatch.py", "parallel/expert/_padded.py"
LOOP, CP = "models/experts.py", "parallel/context/_split.py"

PINNED: list[tuple[Cell, Pinned]] = [
    (Cell(mesh="dp_shard=2", precision="fp32"), Pinned(launches=300, clip=15)),
    (Cell(mesh="dp_shard=2 tp=2", precision="fp32", sizes="uneven"), Pinned(launches=497, clip=20, copied_beside=1592)),
    (Cell(mesh="pp=2", precision="fp32", microbatches=2), Pinned(launches=501, clip=15)),
    (Cell(mesh="dp_shard=2", precision="fp32", model="tied", recompute="full"), Pinned(launches=377, clip=15)),
    # The ranks of cp compare their batches on the host, over gloo.
    (
        Cell(mesh="cp=2", precision="fp32", model="qwen", context="ulysses"),
        Pinned(waits={CP: 1}, launches=470, clip=15),
    ),
    # Torch's grouped product needs no counts on the host where all experts are here; a loop over them does.
    (Cell(mesh="dp_shard=2", precision="fp32", model="moe"), Pinned(launches=395, clip=15)),
    (Cell(mesh="dp_shard=2", precision="fp64", model="moe"), Pinned(waits={LOOP: 1}, launches=502, clip=13)),
    (
        Cell(mesh="dp_shard=2 ep=2", precision="fp32", model="moe"),
        Pinned(waits={DISPATCH: 1}, launches=406, clip=20, copied_beside=136),
    ),
    # Padded rows need no counts on the host; at the end of the step it asks whether all of them fitted.
    (
        Cell(mesh="dp_shard=2 ep=2", precision="fp32", model="moe", max_rows=96),
        Pinned(waits={PADDED: 1}, launches=441, clip=20),
    ),
    (
        Cell(mesh="dp_shard=2 ep=2", precision="fp32", model="mla", max_rows=96, recompute="full"),
        Pinned(waits={PADDED: 1}, launches=854, clip=20),
    ),
    (
        Cell(mesh="tp=2", precision="fp32", model="mla"),
        Pinned(waits={DISPATCH: 1}, launches=658, clip=25, copied_beside=88),
    ),
]
UPDATE: dict[States, int] = {"fp32": 2, "8bit": 58, "4bit": 74, "fp8": 58}
"""Launches of an optimizer's step, however many parameters there are."""
