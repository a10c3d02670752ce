"""Cells of the gate on the device `late`: every law holds and there is no race; with a mistake planted something is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.cells import judged, mistaken
from tests.device.mistakes import MISTAKES, Mistake
from tests.device.world import run
from tests.laws.gate.cell import Cell

pytestmark = [pytest.mark.gate, pytest.mark.turns(8)]
CELLS = list(dict.fromkeys(mistake.cell for mistake in MISTAKES))
WIDER = [
    Cell(sizes="uneven", mesh="dp_shard=2", offload="host", optimizer="host", recompute="selective", microbatches=2),
    Cell(offload="disk", optimizer="host", microbatches=2),
    Cell(model="tied", mesh="pp=2", microbatches=3, offload="disk"),
    Cell(model="moe", mesh="dp_shard=2 ep=2", recompute="selective", offload="disk"),
    Cell(mesh="dp_shard=2", microbatches=2, recompute="selective", gather="int8", reduce="int4"),
    Cell(mesh="dp_replicate=2 dp_shard=2", resume="dp_replicate=2 dp_shard=2", gather="fp8", reduce="int8"),
    Cell(mesh="dp_shard=4 dp_intra=2", microbatches=2, recompute="full", row=("node", "node", "all")),
    # Experts are gathered ahead by FSDP, and by calls: on two streams.
    Cell(model="moe", mesh="dp_replicate=2 dp_shard=2 ep=2", microbatches=2, row=("all", "all", "replicas")),
]


@pytest.mark.parametrize("cell", [*CELLS, *WIDER], ids=str)
def test_every_law_holds_and_streams_wait_for_each_other(cell: Cell, tmp_path: Path) -> None:
    assert run(cell.spec.world_size, judged, cell, str(tmp_path / "c")) == [({}, [])] * cell.spec.world_size


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_found(mistake: Mistake, tmp_path: Path) -> None:
    # Work is delayed at random: what a mistake breaks need not show in the first run.
    runs = (run(mistake.cell.spec.world_size, mistaken, mistake, str(tmp_path / str(number))) for number in range(8))
    assert any(broken or races for told in runs for broken, races in told)


def test_there_are_at_least_twenty_mistakes() -> None:
    assert len({(mistake.file, mistake.old, mistake.new) for mistake in MISTAKES}) >= 20
