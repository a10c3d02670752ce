"""Expert placements are tables: checked, drawn, chosen by load, and every rank's rows follow from them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.parallel.expert import DispatchPlan, Placement, choose_copies, choose_owners, rank_loads
from meshkit.parallel.expert._shares import level, share_rows


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=9))
    copies = [
        tuple(sorted(draw(st.sets(st.integers(0, ranks - 1), max_size=3)) - {owner})) if draw(st.booleans()) else ()
        for owner in owners
    ]
    return Placement(ranks, tuple(owners), tuple(copies))


@st.composite
def loaded(draw: st.DrawFn) -> tuple[Placement, list[int]]:
    placement = draw(placements())
    size = placement.experts
    return placement, draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))


def test_a_table_is_drawn_and_one_that_cannot_be_is_refused_with_an_arrow() -> None:
    assert str(Placement(2, (0, 0, 1), ((1,), (), ()))) == "expert  0 1 2\nrank 0  O O .\nrank 1  c . O"
    with pytest.raises(PlanError, match=r"expert 1 is owned by rank 0 and copied to \[0\], of 2") as refused:
        Placement(2, (0, 0, 1), ((), (0,), ()))
    assert str(refused.value).endswith("rank 1  . . O\n          ^")
    with pytest.raises(PlanError, match="3 experts have owners, but 1 have copies"):
        Placement(2, (0, 0, 1), ((),))
    with pytest.raises(PlanError, match=r"expert 0 is owned by rank 5"):
        Placement(2, (5,), ((),))


@given(placements())
def test_every_expert_lies_with_its_owner_and_its_copies_and_nowhere_else(placement: Placement) -> None:
    for expert, rank in product(range(placement.experts), range(placement.ranks)):
        holds = placement.owners[expert] == rank or rank in placement.copies[expert]
        assert (expert in placement.on[rank]) == holds == (rank in placement.holders[expert])
    moved = [(e, to) for rank in range(placement.ranks) for to, es in enumerate(placement.sent(rank)) for e in es]
    assert sorted(moved) == sorted((e, to) for e, ranks in enumerate(placement.copies) for to in ranks)
    assert len(moved) == placement.copies_made


def busiest_by_search(placement: Placement, totals: list[int]) -> int:
    """The least busiest load that any split has: by the bound of every set of ranks, which max-flow min-cut makes exact."""
    least = 0
    for chosen in product((False, True), repeat=placement.ranks):
        ranks = {rank for rank, here in enumerate(chosen) if here}
        if ranks:
            inside = sum(t for t, holders in zip(totals, placement.holders, strict=True) if set(holders) <= ranks)
            least = max(least, -(-inside // len(ranks)))
    return least


@given(loaded())
def test_rows_of_copied_experts_are_levelled_as_far_as_any_split_could(case: tuple[Placement, list[int]]) -> None:
    placement, totals = case
    split = level(placement, totals)
    for expert, rows in split.items():
        assert sum(rows) == totals[expert] and min(rows) >= 0
    loads = rank_loads(placement, totals)
    assert sum(loads) == sum(totals)
    assert max(loads) <= busiest_by_search(placement, totals) + 1  # whole rows: a last one may go either way


@given(placements(), st.integers(1, 2), st.data())
def test_all_ranks_agree_on_where_each_row_goes(placement: Placement, etp: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=placement.experts, max_size=placement.experts)
    counts = [[data.draw(row) for _ in range(etp)] for _ in range(placement.ranks)]
    nodes = tuple(rank // 2 for rank in range(placement.ranks))
    plans = {(i, j): DispatchPlan(counts, (i, j), placement, nodes) for i in range(placement.ranks) for j in range(etp)}
    for (i, j), plan in plans.items():
        assert sum(plan.sent()) == sum(counts[i][j])
        for rank in range(placement.ranks):
            assert plan.sent()[rank] == plans[rank, j].received()[i]
        starts, lengths = plan.segments()
        rows = [row for start, length in zip(starts, lengths, strict=True) for row in range(start, start + length)]
        assert sorted(rows) == list(range(sum(counts[i][j])))  # each row once
        assert sum(plan.per_expert()) == sum(plan.gathered())
    totals = [sum(c[e] for of_ep in counts for c in of_ep) for e in range(placement.experts)]
    assert [sum(plans[rank, 0].per_expert()) for rank in range(placement.ranks)] == rank_loads(placement, totals)


@given(loaded(), st.data())
def test_rows_stay_on_their_rank_where_the_shares_allow_it(
    case: tuple[Placement, list[int]], data: st.DataObject
) -> None:
    placement, _ = case
    row = st.lists(st.integers(0, 9), min_size=placement.experts, max_size=placement.experts)
    counts = [data.draw(row) for _ in range(placement.ranks)]
    shares = share_rows(placement, counts, (0,) * placement.ranks)
    for expert, of_sources in shares.items():
        holders = placement.holders[expert]
        for place, holder in enumerate(holders):
            taken = sum(source[place] for source in of_sources)
            assert of_sources[holder][place] == min(counts[holder][expert], taken)


@given(loaded(), st.integers(0, 3), st.sampled_from([1.0, 1.1, 1.5]))
def test_copies_are_few_and_help(case: tuple[Placement, list[int]], most: int, target: float) -> None:
    placement, totals = case
    alone = placement.with_copies([()] * placement.experts)
    chosen = choose_copies(alone, totals, (0,) * placement.ranks, most=most, target=target)
    assert chosen.owners == placement.owners
    assert max(map(len, chosen.copied)) <= most
    before, after = max(rank_loads(alone, totals)), max(rank_loads(chosen, totals))
    assert after <= before
    if before <= target * sum(totals) / placement.ranks:
        assert not chosen.copies_made


def test_a_copy_goes_to_the_owners_node_where_a_rank_there_can_take_as_much() -> None:
    """Rank 0 is busy; 1 is on its node, 2 and 3 are not."""
    alone = Placement(4, (0, 1, 2, 3), ((),) * 4)
    near = choose_copies(alone, [400, 20, 10, 10], (0, 0, 1, 1), most=1, target=3.0)
    assert near.copies == ((1,), (), (), ())
    far = choose_copies(alone, [400, 200, 10, 10], (0, 0, 1, 1), most=1, target=2.5)
    assert far.copies == ((2,), (), (), ())  # rank 1 has no room for rows


@given(loaded(), st.sampled_from([None, 4]))
def test_owners_even_out_loads_and_no_rank_is_without(case: tuple[Placement, list[int]], most: int | None) -> None:
    placement, totals = case
    before = Placement.contiguous(placement.experts, placement.ranks)
    owners = choose_owners(before.owners, totals, (0,) * placement.ranks, ranks=placement.ranks, most=most)
    after = Placement(placement.ranks, owners, ((),) * placement.experts)
    assert max(rank_loads(after, totals)) <= max(rank_loads(before, totals))
    sizes = [len(owned) for owned in after.owned]
    if most is None:
        assert sizes == [len(owned) for owned in before.owned]
    else:
        assert all(
            now <= max(most, then) and (now >= 1 or not then)
            for now, then in zip(sizes, map(len, before.owned), strict=True)
        )


def test_owners_may_be_uneven() -> None:
    owners = choose_owners((0, 0, 0, 1, 1, 1), [90, 10, 10, 10, 10, 10], (0, 0), ranks=2, most=5)
    assert owners.count(0) == 1 and owners[0] == 0  # the busy one alone
    even = choose_owners((0, 0, 0, 1, 1, 1), [90, 80, 10, 10, 10, 10], (0, 0), ranks=2)
    assert even.count(0) == 3 and even[0] != even[1]
