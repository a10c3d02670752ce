"""Laws 1 to 3: on every mesh, training equals one device."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import covering, deal, deep, draws, thin
from tests.laws.parity.cases import Cell, build, run_cell
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

CHOICES = {
    "sequence": [False, True],
    "microbatches": [1, 2, 3],
    "zero": [1, 2, 3],
    "recompute": ["none", "full", "selective"],
    "tied": [False, True],
    "vocab": [64, 61],
    "hidden_mlp": [48, 45],
    "heads": [(8, 2), (8, 8), (8, 1), (9, 3), (12, 3)],
    "qwen": [False, True],
    "window": [None, 5],
    "documents": [False, True],
    "all_masked_microbatch": [False, True],
}
choices = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})
FEW_RANKS = [(world, mesh) for world, mesh in MESHES if world < 8]
EIGHT_RANKS = [(world, mesh) for world, mesh in MESHES if world == 8]
CELLS = [
    pytest.param(world, Cell(mesh=mesh, **choice), id=mesh.replace(" ", ","))
    for (world, mesh), choice in deal(covering(CHOICES), FEW_RANKS * 3 + EIGHT_RANKS)
]


@pytest.mark.parametrize(("world", "cell"), thin(sorted(CELLS, key=lambda cell: cell.values[0]), 10))
def test_loss_gradients_norm_and_parameters_equal_one_device(world: int, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.gate
@pytest.mark.parametrize(("world", "cell"), CELLS[-len(MESHES) :])  # each mesh once
def test_every_factorisation_equals_one_device(world: int, cell: Cell) -> None:
    check(world, cell)


@deep
@pytest.mark.parametrize(("world", "mesh"), MESHES)
@draws(2)
@given(choice=choices)
def test_any_choices_equal_one_device(world: int, mesh: str, choice: dict) -> None:
    check(world, Cell(mesh=mesh, **choice))


def check(world: int, cell: Cell) -> None:
    for outcome in pool(world).run(run_cell, cell):
        assert outcome.loss <= TOL_FP64, cell
        assert outcome.gradient <= TOL_FP64, (outcome.worst, cell)
        assert outcome.norm <= TOL_FP64, cell
        assert outcome.parameter <= TOL_FP64, cell


@pytest.mark.parametrize(("tied", "sequence"), [(False, True), (True, False)])
def test_a_rank_that_holds_no_word_equals_one_device(tied: bool, sequence: bool) -> None:
    check(4, Cell(mesh="tp=4", vocab=5, tied=tied, sequence=sequence))


def test_uneven_parts_of_features_equal_one_device() -> None:
    """On torch 2.11 autograd made gradients of the parts of `down_proj` whole."""
    check(2, Cell(mesh="tp=2", hidden_mlp=45))


MESHES_FP32 = ["dp_shard=4", "tp=4", "dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2"]


@pytest.mark.parametrize(("mesh", "sequence"), thin(list(product(MESHES_FP32, [False, True])), 3))
def test_fp32_loss_and_gradients_equal_one_device(mesh: str, sequence: bool) -> None:
    cell = Cell(mesh=mesh, sequence=sequence, dtype="float32", tied=True, vocab=61, qwen=True, documents=True)
    for outcome in pool(4).run(run_cell, cell):
        assert outcome.loss <= TOL_FP32 and outcome.norm <= TOL_FP32 and outcome.gradient <= TOL_FP32, outcome


def test_names_of_parameters_are_those_of_one_device() -> None:
    cell = Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="full", tied=True)
    expected = [name for name, _ in build(cell).named_parameters()]
    for outcome in pool(4).run(run_cell, cell):
        assert outcome.names == expected
