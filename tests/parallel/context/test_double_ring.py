"""Ring attention in two levels equals one attention, and each network card sends what `explain` says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from meshkit.mask import Mask
from meshkit.parallel.context import Shape, choose, traffic
from meshkit.parallel.context._traffic import across_nodes, total
from meshkit.strategy import ContextPolicy
from tests.depth import draws
from tests.laws.parity.cases import Cell, mesh_for
from tests.laws.parity.test_bytes import assert_alike, observe_step
from tests.laws.parity.test_parity import check as check_model
from tests.parallel.context.test_attention import Case, check, heads, inputs, masks, own, split_mask
from tests.world import pool

NODES = [(2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 1, 1), (4, 4, 2), (6, 2, 1), (6, 3, 1), (6, 2, 2)]


@pytest.mark.parametrize(("ranks", "node", "ulysses"), NODES)
@draws(6)
@given(mask=masks, heads=heads, rows=st.integers(1, 2), dtype=st.sampled_from(["float64", "float32"]))
def test_outputs_and_gradients_equal_one_attention(ranks, node, ulysses, mask, heads, rows, dtype) -> None:
    policy = ContextPolicy(scheme="double_ring", node=node, ulysses=ulysses)
    check(Case(ranks=ranks, mask=mask, policy=policy, heads=heads, rows=rows, dtype=dtype))


def crossing(case: Case) -> tuple[Counter[int], Counter[tuple[str, int]], int]:
    """(bytes that this rank sent each other one, its messages by size, those that `across_nodes` says)."""
    sent: Counter[int] = Counter()
    mesh = mesh_for(f"cp={case.ranks}")
    mask = split_mask(case)
    q, k, v, dout = (own(mask, x).requires_grad_() for x in inputs(case, torch.float64))
    watched = torch.distributed.batch_isend_irecv

    def batch(ops):
        for op in ops:
            if op.op is torch.distributed.isend:
                sent[op.group_peer] += op.tensor.numel() * op.tensor.element_size()
        return watched(ops)

    torch.distributed.batch_isend_irecv = batch
    try:
        with mk.observe(mesh) as seen:
            torch.autograd.grad(mask.attend(q, k, v), (q, k, v), dout.detach())
    finally:
        torch.distributed.batch_isend_irecv = watched
    shape = Shape(heads=4, kv_heads=2, head_dim=8, itemsize=8, sum_itemsize=8)
    said = across_nodes(mask.layout, mask.rank, shape, node=case.policy.node)
    forward, backward = traffic(mask.layout, mask.rank, shape)
    assert Counter({(m.op, m.size): n for m, n in seen.items()}) == forward + backward
    return sent, forward + backward, said


@pytest.mark.parametrize("scheme", ["ring", "double_ring"])
@pytest.mark.parametrize(("ranks", "node"), [(4, 2), (6, 2), (6, 3), (4, 4)])
def test_what_crosses_nodes_is_explained_and_shared_by_the_cards(scheme: str, ranks: int, node: int) -> None:
    policy = ContextPolicy(scheme=scheme, node=node, balance="zigzag")  # type: ignore[arg-type]
    found = pool(ranks).run(crossing, Case(ranks=ranks, mask=Mask.causal(24), policy=policy))
    cards = []
    for rank, (sent, messages, said) in enumerate(found):
        assert sum(sent.values()) == total(messages)
        cards.append(sum(size for other, size in sent.items() if other // node != rank // node))
        assert cards[-1] == said
    nodes, block = ranks // node, 24 // ranks * 2 * 2 * 8 * 8
    if scheme == "double_ring":  # keys twice and gradients once, of every other node
        assert set(cards) == {3 * (nodes - 1) * block}
    else:
        assert sorted(cards) == [0] * (ranks - nodes) + [(3 * ranks - 2) * block] * nodes if nodes > 1 else True


def test_explain_says_the_bytes_of_a_card() -> None:
    shape = Shape(heads=32, kv_heads=8, head_dim=128)
    choice = choose(Mask.causal(65_536), 32, ContextPolicy(scheme="double_ring"), shape)
    block = 65_536 // 32 * 2 * 8 * 128
    two, one = block * 3 * (2 * 2 + 4), block * (31 * 2 * 2 + 32 * 4)
    assert f"{two:,} over each network card of a node of 8 ranks, {one:,} over one in a ring" in str(choice)


CELLS = [
    (4, Cell(mesh="cp=4", context=ContextPolicy(scheme="double_ring", node=2), documents=True, microbatches=2)),
    (4, Cell(mesh="cp=4", context=ContextPolicy(scheme="double_ring", node=2), recompute="full", tokens=13)),
    (8, Cell(mesh="cp=4 tp=2", context=ContextPolicy(scheme="double_ring", node=2), heads=(9, 3), sequence=True)),
]


@pytest.mark.parametrize(("world", "cell"), CELLS, ids=str)
def test_a_model_equals_one_device(world: int, cell: Cell) -> None:
    check_model(world, cell)


def test_a_step_sends_what_is_explained() -> None:
    assert_alike(pool(4).run(observe_step, CELLS[0][1]))


@pytest.mark.parametrize(("ranks", "policy"), [(6, {}), (4, {"node": 3}), (4, {"node": 2, "ulysses": 4})])
def test_nodes_of_other_sizes_are_refused(ranks: int, policy: dict) -> None:
    made = ContextPolicy(scheme="double_ring", **policy)
    with pytest.raises(mk.errors.PlanError, match=f"node={made.node} and ulysses=.* on cp={ranks}: nodes have equally"):
        choose(Mask.causal(24), ranks, made, Shape(heads=4, kv_heads=4, head_dim=8))
