"""Laws 1 to 3 with the tokens of a sequence on several ranks: a whole model equals one device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from tests.parity.cases import Cell
from tests.parity.test_parity import check, choices, draws

# How the ranks are shared between cp and the other axes.
FEW = [
    (2, "cp=2"),
    (3, "cp=3"),
    (4, "cp=4"),
    (4, "dp_shard=2 cp=2"),
    (4, "dp_replicate=2 cp=2"),
    (4, "cp=2 tp=2"),
]
EIGHT = ["cp=8", "cp=4 tp=2", "dp_shard=2 cp=2 tp=2", "dp_replicate=2 cp=2 tp=2", "dp_replicate=2 dp_shard=2 cp=2"]

policies = st.builds(
    mk.ContextPolicy,
    scheme=st.sampled_from(["auto", "ring", "all_gather", "group_cast", "ulysses"]),
    balance=st.sampled_from(["auto", "contiguous", "zigzag", "per_document", "locality"]),
)


@pytest.mark.parametrize(("world", "mesh"), FEW, ids=lambda value: str(value).replace(" ", ","))
@draws(5)
@given(choice=choices, policy=policies)
def test_a_model_on_a_few_ranks_equals_one_device(
    world: int, mesh: str, choice: dict, policy: mk.ContextPolicy
) -> None:
    check(world, Cell(mesh=mesh, context=policy, **choice))


@pytest.mark.parametrize("mesh", EIGHT)
@draws(2)
@given(choice=choices, policy=policies)
def test_a_model_on_eight_ranks_equals_one_device(mesh: str, choice: dict, policy: mk.ContextPolicy) -> None:
    check(8, Cell(mesh=mesh, context=policy, **choice))
