"""On recorded routings of a mixture of experts without balance, copies by load even out ranks for few bytes."""

from __future__ import annotations

import numpy as np

from benchmarks.expert_load import ROUTINGS, by_load, every_rank, replay
from meshkit.strategy import ExpertPolicy

LIMIT = 1.1  # the busiest rank over the mean


def test_copies_by_load_even_out_ranks_at_half_the_copies_of_every_rank() -> None:
    counts = np.load(ROUTINGS)["counts"]
    defaults = ExpertPolicy(copies=1)
    ours = replay(counts, by_load(1, target=defaults.target), defaults.history)
    assert ours["busiest_over_mean"] <= LIMIT
    # What every rank gets alike: two experts, which the table of docs/moe.md had, and as many as reach the limit.
    assert replay(counts, every_rank(2), defaults.history)["busiest_over_mean"] > 1.5
    assert ours["copies"] <= replay(counts, every_rank(2), defaults.history)["copies"] / 2
    enough = next(hot for hot in range(1, 33) if replay(counts, every_rank(hot), 5)["busiest_over_mean"] <= LIMIT)
    assert ours["copies"] <= replay(counts, every_rank(enough), defaults.history)["copies"] / 10
