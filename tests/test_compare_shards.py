"""Whatever element of a tensor is wrong, each rank that holds it says so, and no other."""

from __future__ import annotations

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import full_tensor, local_slices
from tests.compare_shards import computed_once, difference, same_bits
from tests.laws.parity.cases import Cell, start
from tests.world import pool


def find(mesh: str) -> dict[str, list[tuple[float, bool, bool]]]:
    """For each parameter, with each of its corners wrong in turn: (difference, same bits, whether the corner is here)."""
    run = start(Cell(mesh=mesh, vocab=61, hidden_mlp=45))
    found: dict[str, list[tuple[float, bool, bool]]] = {}
    for name, param in run.named_parameters():
        right = full_tensor(param)
        assert difference(param, right) == 0 and same_bits(param, right)
        for corner in ([0] * param.ndim, [size - 1 for size in param.shape]):
            wrong = right.clone()
            wrong[tuple(corner)] += 0.5
            here = all(part.start <= at < part.stop for part, at in zip(local_slices(param), corner, strict=True))
            found.setdefault(name, []).append((difference(param, wrong), same_bits(param, wrong), here))
    return found


@pytest.mark.parametrize("mesh", ["dp_shard=2 tp=2", "dp_replicate=2 tp=2", "dp_shard=4"])
def test_an_element_that_is_wrong_is_seen_where_it_is(mesh: str) -> None:
    ranks = pool(4).run(find, mesh)
    for name in ranks[0]:
        for told in zip(*(rank[name] for rank in ranks), strict=True):
            assert any(here for _, _, here in told), name
            assert [(worst > 0.4, same) for worst, same, _ in told] == [(here, not here) for _, _, here in told], name


def rank_of_the_oracle() -> int:
    return computed_once(mk.init_mesh().rank.__add__, 1)


def test_rank_0_computes_what_all_ranks_compare_with() -> None:
    assert pool(2).run(rank_of_the_oracle) == [1, 1]


def test_a_nan_is_the_largest_difference() -> None:
    assert max(0.0, difference(torch.tensor([1.0, torch.nan]), torch.ones(2))) == torch.inf


def test_another_shape_is_no_small_difference() -> None:
    with pytest.raises(AssertionError):
        difference(torch.zeros(2), torch.zeros(3))
