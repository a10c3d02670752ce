"""Laws 1 to 3 of hybrid decoders: recurrent mixers in every other layer, on every axis, equal one device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from tests.depth import covering, deal, deep, draws, thin
from tests.laws.parity.cases import Cell
from tests.laws.parity.test_parity import check

MESHES = [
    (1, "tp=1"),
    (2, "cp=2"),
    (3, "cp=3"),
    (4, "cp=4"),
    (4, "tp=4"),
    (4, "cp=2 tp=2"),
    (4, "dp_shard=2 cp=2"),
    (4, "pp=2 cp=2"),
    (8, "cp=4 tp=2"),
    (8, "pp=2 cp=2 tp=2"),
    (8, "pp=2 dp_shard=2 cp=2"),
    (8, "dp_replicate=2 cp=2 tp=2"),
]
CHOICES: dict[str, list[Any]] = {
    "mixer": ["delta", "mamba2"],
    "sequence": [False, True],
    "microbatches": [2, 3],
    "zero": [1, 3],
    "recompute": ["none", "full", "selective"],
    "tied": [False, True],
    "vocab": [64, 61],
    "documents": [True, False],
    "all_masked_microbatch": [False, True],
    "balance": ["auto", "contiguous", "zigzag", "locality"],
    "scheme": ["auto", "ring", "ulysses"],
}


def cell_of(mesh: str, choice: dict[str, Any]) -> Cell:
    choice = dict(choice)
    policy = mk.strategy.ContextPolicy(scheme=choice.pop("scheme"), balance=choice.pop("balance"))
    layers = 4 if "pp" in mesh else 2
    return Cell(mesh=mesh, layers=layers, context=policy, **choice)


CELLS = [
    pytest.param(world, cell_of(mesh, choice), id=f"{mesh.replace(' ', ',')}-{choice['mixer']}")
    for (world, mesh), choice in deal(covering(CHOICES), MESHES * 2)
]


@pytest.mark.parametrize(("world", "cell"), thin(sorted(CELLS, key=lambda cell: cell.values[0]), 2))
def test_a_hybrid_equals_one_device(world: int, cell: Cell) -> None:
    check(world, cell)


@deep
@pytest.mark.parametrize(("world", "mesh"), [*MESHES, (16, "pp=2 dp_shard=2 cp=2 tp=2")])
@draws(2)
@given(choice=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_any_choices_of_a_hybrid_equal_one_device(world: int, mesh: str, choice: dict[str, Any]) -> None:
    check(world, cell_of(mesh, choice))
