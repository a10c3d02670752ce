"""Laws 1 to 3: on every mesh, training equals one device."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.parity.cases import Cell, build, run_cell
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs
TOL_FP32 = 1e-5  # relative to values of order 1; parameters are not compared, Adam amplifies noise in zero gradients

# Every way to write 1, 2, 4 and 8 ranks as dp_replicate × dp_shard × tp.
MESHES = [
    (world, f"dp_replicate={r} dp_shard={s} tp={t}")
    for world in (1, 2, 4, 8)
    for r, s, t in product((1, 2, 4, 8), repeat=3)
    if r * s * t == world
]

choices = st.fixed_dictionaries(
    {
        "sequence": st.booleans(),
        "microbatches": st.integers(1, 3),
        "zero": st.sampled_from([1, 2, 3]),
        "recompute": st.sampled_from(["none", "full", "selective"]),
        "tied": st.booleans(),
        "vocab": st.sampled_from([64, 61]),
        "hidden_mlp": st.sampled_from([48, 45]),
        "heads": st.sampled_from([(8, 2), (8, 8), (8, 1), (9, 3), (12, 3)]),
        "qwen": st.booleans(),
        "window": st.sampled_from([None, 5]),
        "documents": st.booleans(),
        "all_masked_microbatch": st.booleans(),
    }
)


few_ranks = pytest.mark.parametrize(
    ("world", "mesh"), [pair for pair in MESHES if pair[0] < 8], ids=lambda value: str(value).replace(" ", ",")
)
eight_ranks = pytest.mark.parametrize("mesh", [mesh for world, mesh in MESHES if world == 8])


def draws(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),  # shrinking would restart the ranks for every try
        suppress_health_check=list(HealthCheck),
    )


@few_ranks
@draws(6)
@given(choice=choices)
def test_loss_gradients_norm_and_parameters_equal_one_device(world: int, mesh: str, choice: dict) -> None:
    check(world, Cell(mesh=mesh, **choice))


@eight_ranks
@draws(3)
@given(choice=choices)
def test_eight_ranks_equal_one_device(mesh: str, choice: dict) -> None:
    check(8, Cell(mesh=mesh, **choice))


def check(world: int, cell: Cell) -> None:
    for outcome in pool(world).run(run_cell, cell):
        assert outcome.loss <= TOL_FP64, cell
        assert outcome.gradient <= TOL_FP64, (outcome.worst, cell)
        assert outcome.norm <= TOL_FP64, cell
        assert outcome.parameter <= TOL_FP64, cell


@pytest.mark.parametrize("mesh", ["dp_shard=4", "tp=4", "dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2"])
@pytest.mark.parametrize("sequence", [False, True])
def test_fp32_loss_and_gradients_equal_one_device(mesh: str, sequence: bool) -> None:
    cell = Cell(mesh=mesh, sequence=sequence, dtype="float32", tied=True, vocab=61, qwen=True, documents=True)
    for outcome in pool(4).run(run_cell, cell):
        assert outcome.loss <= TOL_FP32 and outcome.norm <= TOL_FP32 and outcome.gradient <= TOL_FP32, outcome


def test_names_of_parameters_are_those_of_one_device() -> None:
    cell = Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="full", tied=True)
    expected = [name for name, _ in build(cell).named_parameters()]
    for outcome in pool(4).run(run_cell, cell):
        assert outcome.names == expected
