"""Dynamic groups: a model whose documents are shared out by their lengths equals one device, or is refused with the reason."""

from __future__ import annotations

import pytest

import meshkit as mk
from tests.laws.parity.cases import Cell
from tests.laws.parity.test_parity import check

GROUPS = ("by_length", "flexsp", "bytescale", "zeppelin")
CELLS = [
    (2, "cp=2", {"groups": "by_length"}, {}),
    (3, "cp=3", {"groups": "by_length"}, {"microbatches": 3, "zero": 1}),
    (4, "cp=4", {"groups": "by_length"}, {"microbatches": 2, "zero": 2}),
    (4, "cp=4", {"groups": "flexsp"}, {"microbatches": 2}),
    (4, "cp=4", {"groups": "zeppelin"}, {}),
    (3, "cp=3", {"groups": "bytescale", "tokens_per_rank": 9}, {"microbatches": 6, "zero": 1}),
    (4, "cp=2 tp=2", {"groups": "by_length"}, {"sequence": True, "microbatches": 2}),
    (4, "dp_shard=2 cp=2", {"groups": "by_length"}, {"microbatches": 2, "window": 5}),
    (4, "pp=2 cp=2", {"groups": "by_length"}, {"microbatches": 4, "zero": 1}),
]


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(("world", "mesh", "context", "choices"), CELLS, ids=[f"{c[1]} {c[2]['groups']}" for c in CELLS])
def test_a_model_equals_one_device(world: int, mesh: str, context: dict, choices: dict, documents: bool) -> None:
    """Without documents each row is one of 16 tokens, of which there are five on up to four ranks."""
    policy = mk.strategy.ContextPolicy(**context)
    if documents:
        choices = {**choices, "all_masked_microbatch": True}
    check(world, Cell(mesh=mesh, context=policy, documents=documents, **choices))
