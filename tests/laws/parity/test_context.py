"""Laws 1 to 3 with the tokens of a sequence on several ranks: a whole model equals one device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from tests.depth import covering, deal, deep, draws, thin
from tests.laws.parity.cases import Cell
from tests.laws.parity.test_parity import CHOICES, check, choices

# How the ranks are shared between cp and the other axes.
FEW = [
    (2, "cp=2"),
    (3, "cp=3"),
    (4, "cp=4"),
    (4, "dp_shard=2 cp=2"),
    (4, "dp_replicate=2 cp=2"),
    (4, "cp=2 tp=2"),
]
EIGHT = [
    (8, "cp=8"),
    (8, "cp=4 tp=2"),
    (8, "dp_shard=2 cp=2 tp=2"),
    (8, "dp_replicate=2 cp=2 tp=2"),
    (8, "dp_replicate=2 dp_shard=2 cp=2"),
]

POLICIES = {
    "scheme": ["auto", "ring", "all_gather", "group_cast", "ulysses"],
    "balance": ["auto", "contiguous", "zigzag", "per_document", "locality"],
}
policies = st.builds(mk.strategy.ContextPolicy, **{name: st.sampled_from(values) for name, values in POLICIES.items()})


def cells() -> list:
    """Every scheme with every balance; most of them on few ranks."""
    found = []
    for (world, mesh), row in deal(covering({**CHOICES, **POLICIES}), (FEW * 5)[:26] + EIGHT):
        policy = mk.strategy.ContextPolicy(**{name: row.pop(name) for name in POLICIES})
        found.append(pytest.param(world, Cell(mesh=mesh, context=policy, **row), id=mesh.replace(" ", ",")))
    return sorted(found, key=lambda cell: cell.values[0])


@pytest.mark.parametrize(("world", "cell"), thin(cells(), 10))
def test_a_model_equals_one_device(world: int, cell: Cell) -> None:
    check(world, cell)


TOP = mk.strategy.ContextPolicy(sparse=mk.strategy.BlockTopK(block=3, top=2))
SLASH = mk.strategy.ContextPolicy(sparse=mk.strategy.VerticalSlash(block=2, vertical=1, slash=2, queries=3))
SPARSE = [
    (1, Cell(mesh="dp_shard=1", context=TOP, documents=True, microbatches=2)),
    (2, Cell(mesh="cp=2", context=SLASH, microbatches=3)),
    (2, Cell(mesh="pp=2", context=SLASH, microbatches=3, recompute="full")),
    (3, Cell(mesh="cp=3", context=TOP, window=5, tokens=17)),
    (4, Cell(mesh="cp=2 tp=2", context=SLASH, heads=(9, 3), sequence=True, documents=True, recompute="selective")),
    (4, Cell(mesh="cp=2 tp=2", context=TOP, heads=(8, 1))),  # ranks of tp have queries of one key/value head
    (4, Cell(mesh="dp_shard=2 cp=2", context=TOP, microbatches=2, recompute="full", documents=True)),
    (4, Cell(mesh="dp_replicate=2 cp=2", context=SLASH, qwen=True, zero=1, tokens=13)),
    (8, Cell(mesh="dp_shard=2 cp=2 tp=2", context=TOP, microbatches=2, all_masked_microbatch=True)),
]


@pytest.mark.parametrize(("world", "cell"), SPARSE, ids=str)
def test_attention_to_chosen_blocks_equals_one_device(world: int, cell: Cell) -> None:
    check(world, cell)


@deep
@pytest.mark.parametrize(("world", "mesh"), FEW + EIGHT)
@draws(2)
@given(choice=choices, policy=policies)
def test_any_choices_equal_one_device(world: int, mesh: str, choice: dict, policy: mk.strategy.ContextPolicy) -> None:
    check(world, Cell(mesh=mesh, context=policy, **choice))
