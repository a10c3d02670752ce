"""Laws 1 to 3 with a model's layers on several ranks: every schedule trains as one device does."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshkit.parallel.pipeline import plan_stages
from tests.depth import covering, deal, deep, draws, thin
from tests.laws.parity.cases import Cell
from tests.laws.parity.test_parity import CHOICES, check, choices

SCHEDULES = [
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe-v",
    "hanayo",
    "auto",
]

# (ranks, mesh, layers, schedule): every schedule alone, and those that differ in kind with a second and a third axis.
RUNS = [
    *((ranks, f"pp={ranks}", 2 * ranks + 1, schedule) for ranks in (2, 3, 4) for schedule in SCHEDULES),
    *(
        (4, f"pp=2 {axis}=2", 5, schedule)
        for axis in ("dp_shard", "dp_replicate", "tp", "cp")
        for schedule in ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v")
    ),
    *(
        (8, mesh, 8, schedule)
        for mesh in ("pp=2 dp_shard=2 tp=2", "pp=2 cp=2 tp=2", "pp=4 dp_shard=2")
        for schedule in ("1f1b", "zbv")
    ),
]
ROWS = covering({**CHOICES, "microbatches": [1, 3, 5]})


@pytest.mark.parametrize(
    ("run", "choice"), [pytest.param(*each, id=f"{each[0][1]},{each[0][3]}") for each in thin(deal(ROWS, RUNS), 12)]
)
def test_every_schedule_equals_one_device(run: tuple[int, str, int, str], choice: dict) -> None:
    ranks, mesh, layers, schedule = run
    check(ranks, Cell(mesh=mesh, layers=layers, schedule=schedule, **choice))


@deep
@pytest.mark.parametrize("run", RUNS, ids=str)
@draws(2)
@given(choice=choices, microbatches=st.integers(1, 6))
def test_any_choices_equal_one_device(run: tuple[int, str, int, str], choice: dict, microbatches: int) -> None:
    ranks, mesh, layers, schedule = run
    check(ranks, Cell(mesh=mesh, layers=layers, schedule=schedule, **{**choice, "microbatches": microbatches}))


class Costs(nn.Module):
    """An embedding, which costs nothing, blocks of so many parameters, and a norm and a head behind them."""

    def __init__(self, blocks: list[int], head: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 2)
        self.layers = nn.ModuleList(nn.Linear(1, cost, bias=False) for cost in blocks)
        self.norm = nn.LayerNorm(1, bias=False)
        self.head = nn.Linear(1, head, bias=False)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 20), st.data())
def test_no_other_stages_have_a_cheaper_dearest_one(blocks: list[int], head: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(blocks)))

    def dearest(edges: tuple[int, ...]) -> int:
        sums = [sum(blocks[first:after]) for first, after in pairwise((0, *edges, len(blocks)))]
        return max(*sums[:-1], sums[-1] + 1 + head) if sums[:-1] else sums[0] + 1 + head

    names = [f"layers.{index}" for index in range(len(blocks))]
    stages = plan_stages(Costs(blocks, head), names, count)
    assert [name for stage in stages.blocks for name in stage] == names
    edges = tuple(accumulate(len(stage) for stage in stages.blocks))[:-1]
    assert len(edges) == count - 1
    assert dearest(edges) == min(map(dearest, combinations(range(1, len(blocks)), count - 1)))


def test_stages_of_given_sizes_equal_one_device() -> None:
    check(2, Cell(mesh="pp=2", layers=5, stages=(1, 4), microbatches=3, tied=True))


@pytest.mark.parametrize(
    ("ranks", "cell"),
    [
        (2, Cell(mesh="pp=2", layers=3, stages=(0, 3), microbatches=3)),
        (2, Cell(mesh="pp=2", layers=3, stages=(3, 0), microbatches=3, tied=True)),
        (4, Cell(mesh="pp=4", layers=4, stages=(0, 2, 2, 0), microbatches=5, tied=True)),
        (2, Cell(mesh="pp=2", layers=4, stages=(0, 2, 2, 0), schedule="zbv", microbatches=4, tied=True)),
        (
            4,
            Cell(
                mesh="pp=2 dp_shard=2", layers=2, stages=(0, 1, 1, 0), schedule="zbv", microbatches=4, recompute="full"
            ),
        ),
        (4, Cell(mesh="pp=2 tp=2", layers=3, stages=(0, 3), schedule="zb-h1", sequence=True, microbatches=4)),
        (4, Cell(mesh="pp=2 cp=2", layers=3, stages=(3, 0), microbatches=2)),
    ],
    ids=lambda each: f"{each.mesh},{each.schedule},{each.stages}" if isinstance(each, Cell) else "",
)
def test_embedding_and_head_on_stages_of_their_own_equal_one_device(ranks: int, cell: Cell) -> None:
    check(ranks, cell)
