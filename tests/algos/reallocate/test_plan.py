"""Plans of reallocation without ranks: a mover in numpy, and bytes counted element by element."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshkit as mk
from meshkit.algos.reallocate import Layout, ReallocationPlan, TensorRegions, layout_of, plan_reallocation
from tests.algos.reallocate.cases import DENSE, MODELS, TIED_ODD, Model, whole_model

SPECS = {
    1: ["tp=1"],
    2: ["dp_shard=2", "tp=2", "pp=2", "dp_replicate=2", "cp=2"],
    3: ["dp_shard=3", "tp=3", "pp=3"],
    4: ["pp=2 tp=2", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "cp=4", "tp=4"],
    6: ["pp=3 dp_shard=2", "dp_shard=3 tp=2", "dp_shard=6"],
    8: ["pp=2 dp_shard=2 tp=2", "dp_replicate=2 cp=2 tp=2", "dp_shard=8", "dp_shard=4 tp=2"],
    64: ["dp_replicate=8 dp_shard=2 tp=4", "pp=2 dp_shard=8 tp=4", "dp_shard=64"],
}
EXPERTS = ["dp_shard=4 ep=2", "dp_shard=2 tp=2 ep=2 etp=2", "tp=4 ep=4", "dp_shard=8 ep=3", "pp=2 dp_shard=4 ep=2"]


@st.composite
def layouts(draw: st.DrawFn, model: Model) -> Layout:
    size = draw(st.sampled_from(list(SPECS)))
    known = SPECS[size]
    if model.experts:
        known = [
            *known,
            *(text for text in EXPERTS if mk.MeshSpec.parse(text).world_size == size and "ep=3" not in text),
        ]
    spec = draw(st.sampled_from(known))
    first = draw(st.integers(0, 8))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return laid(model, spec, first, dtype)


@lru_cache(maxsize=512)
def laid(model: Model, spec: str, first: int = 0, dtype: torch.dtype = torch.float32) -> Layout:
    ranks = range(first, first + mk.MeshSpec.parse(spec).world_size)
    return layout_of(whole_model(model), spec, plan=model.plan, ranks=ranks, dtype=dtype)


def slices(region: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in region)


def move(plan: ReallocationPlan, src: Layout, dst: Layout) -> None:
    """Every rank has a whole array with its own part filled, and nothing else; every element is written once."""
    for name, there in dst.tensors.items():
        whole = np.arange(1, 1 + int(np.prod(there.shape)), dtype=np.int64).reshape(there.shape)
        have = {rank: np.zeros_like(whole) for rank in src.ranks}
        for rank, region in src.tensors[name].regions.items():
            have[rank][slices(region)] = whole[slices(region)]
        got = {rank: np.zeros_like(whole) for rank in dst.ranks}
        for transfers in [plan.copies, *plan.rounds]:
            sent = []
            for transfer in (transfer for transfer in transfers if transfer.name == name):
                at = slices(transfer.region)
                assert not got[transfer.receiver][at].any()
                # All of a round is read before any of it arrives: a relay has what came in an earlier round.
                sent.append((transfer, at, (got if transfer.relayed else have)[transfer.sender][at].copy()))
            for transfer, at, values in sent:
                got[transfer.receiver][at] = values
        for rank in dst.ranks:
            expected = np.zeros_like(whole)
            if rank in there.regions:
                expected[slices(there.regions[rank])] = whole[slices(there.regions[rank])]
            np.testing.assert_array_equal(got[rank], expected, name)


def missing_bytes(src: Layout, dst: Layout) -> int:
    """Element by element, what each receiver lacks, in the narrower dtype."""
    total = 0
    for name, there in dst.tensors.items():
        have = src.tensors[name]
        size = min(have.dtype.itemsize, there.dtype.itemsize)
        for rank, region in there.regions.items():
            needed = np.zeros(there.shape, dtype=bool)
            needed[slices(region)] = True
            if rank in have.regions:
                needed[slices(have.regions[rank])] = False
            total += int(needed.sum()) * size
    return total


def missing_on_nodes(src: Layout, dst: Layout, ranks_per_node: int) -> int:
    """Element by element, what each node needs and none of its ranks has, in the narrower dtype."""
    total = 0
    for name, there in dst.tensors.items():
        have = src.tensors[name]
        needed: dict[int, np.ndarray] = {}
        for rank, region in there.regions.items():
            needed.setdefault(rank // ranks_per_node, np.zeros(there.shape, bool))[slices(region)] = True
        for rank, region in have.regions.items():
            if rank // ranks_per_node in needed:
                needed[rank // ranks_per_node][slices(region)] = False
        total += sum(int(of_node.sum()) for of_node in needed.values()) * min(have.dtype.itemsize, there.dtype.itemsize)
    return total


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MODELS), st.sampled_from([256, 4096, 2**20]))
def test_every_element_arrives_once_and_no_byte_too_many(data: st.DataObject, model: Model, bucket_bytes: int) -> None:
    src, dst = data.draw(layouts(model)), data.draw(layouts(model))
    plan = plan_reallocation(src, dst, bucket_bytes=bucket_bytes, ranks_per_node=4)
    move(plan, src, dst)
    assert plan.bytes_moved == plan.lower_bound_bytes == missing_bytes(src, dst)
    assert plan.bytes_between_nodes == missing_on_nodes(src, dst, 4)
    for transfers in plan.rounds:
        busy = dict.fromkeys({*src.ranks, *dst.ranks}, 0)
        for transfer in transfers:
            assert transfer.sender != transfer.receiver
            busy[transfer.sender] += transfer.bytes
            busy[transfer.receiver] += transfer.bytes
        assert max(busy.values()) <= bucket_bytes
    assert str(plan).startswith("moves ")


def test_the_same_layout_moves_nothing() -> None:
    layout = laid(DENSE, "dp_shard=2 tp=2")
    plan = plan_reallocation(layout, layout)
    assert (plan.bytes_moved, plan.messages, plan.rounds) == (0, 0, ())
    assert plan.bytes_local == sum(layout.bytes_of(rank) for rank in layout.ranks)
    assert "lower bound 0 B (nothing)" in str(plan)


def test_a_tied_parameter_moves_once_to_each_rank_that_has_an_end() -> None:
    src, dst = laid(TIED_ODD, "tp=1", 4), laid(TIED_ODD, "pp=2")
    embedding = [
        transfer
        for transfers in plan_reallocation(src, dst).rounds
        for transfer in transfers
        if transfer.name == "embed_tokens.weight"
    ]
    assert sorted(transfer.receiver for transfer in embedding) == [0, 1]
    assert "lm_head.weight" not in dst.tensors


def test_replicas_share_the_sending_and_one_of_the_same_node_comes_first() -> None:
    src, dst = laid(DENSE, "dp_replicate=4"), laid(DENSE, "dp_replicate=4", 4)
    sent: dict[int, int] = {}
    for (sender, _), moved in plan_reallocation(src, dst).links.items():
        sent[sender] = sent.get(sender, 0) + moved
    assert len(set(sent.values())) <= 4 and min(sent.values()) > 0.8 * max(sent.values())
    near = plan_reallocation(src, laid(DENSE, "dp_shard=2", 4), ranks_per_node=3)
    assert {a for (a, b) in near.links} == {3}
    assert near.bytes_between_nodes == 0


@pytest.mark.parametrize(
    ("source", "ranks", "engines", "nodes"),
    [
        ("dp_shard=8", 0, "dp_replicate=8", 1),  # a trainer's node, and eight whole models on another
        ("dp_shard=8", 0, "dp_replicate=64", 8),
        ("pp=2 dp_shard=2 tp=2", 0, "dp_replicate=6 tp=4", 3),  # six models, each on half of a node
        ("tp=1", 7, "dp_replicate=8 tp=8", 8),
    ],
)
def test_a_sync_sends_one_model_to_each_node(source: str, ranks: int, engines: str, nodes: int) -> None:
    src, dst = laid(DENSE, source, ranks), laid(DENSE, engines, 8, torch.bfloat16)
    plan = plan_reallocation(src, dst, bucket_bytes=2**16)
    model = sum(2 * int(np.prod(laid.shape)) for laid in dst.tensors.values())
    assert plan.bytes_between_nodes == nodes * model
    assert plan.bytes_moved == plan.lower_bound_bytes == missing_bytes(src, dst)
    move(plan, src, dst)
    leaves, enters = (
        Counter[int](),
        Counter[int](),
    )
    for (sender, receiver), size in plan.links.items():
        if sender // 8 != receiver // 8:
            leaves[sender // 8] += size
            enters[receiver] += size
    # A tree: the trainer's node does not send to all others; and the ranks of a node take turns as its relay.
    assert leaves[0] <= max(1, -(-nodes // 2)) * model
    by_node = [[enters[rank] for rank in dst.ranks if rank // 8 == node] for node in range(1, nodes + 1)]
    assert all(max(sizes) <= 2 * model / 8 for sizes in by_node), by_node


def test_what_is_rounded_travels_rounded_unless_the_receiver_computes_with_it() -> None:
    wide, narrow = laid(DENSE, "tp=1"), laid(DENSE, "tp=1", 1, torch.bfloat16)
    rounded, exact = plan_reallocation(wide, narrow), plan_reallocation(wide, narrow, exact=True)
    assert exact.bytes_moved == 2 * rounded.bytes_moved == wide.bytes_of(0)
    assert plan_reallocation(narrow, wide).bytes_moved == rounded.bytes_moved


def test_a_plan_says_bytes_bound_links_and_who_sends_to_whom() -> None:
    text = str(plan_reallocation(laid(DENSE, "tp=1"), laid(DENSE, "tp=2"), ranks_per_node=1))
    assert "lower bound" in text and "(1.00x)" in text and "between nodes" in text
    assert text.splitlines()[-2].split() == ["from", "\\", "to", "1"]
    many = str(plan_reallocation(laid(DENSE, "dp_shard=64"), laid(DENSE, "dp_shard=64", 7)))
    assert many.splitlines()[-1].endswith("links")


def test_a_64_rank_layout_needs_neither_ranks_nor_memory() -> None:
    with torch.device("meta"):
        model = mk.models.Llama(replace(mk.models.LLAMA3_8B, num_hidden_layers=2))
    src = layout_of(model, "dp_shard=16 tp=4", plan=mk.models.LLAMA_PLAN)
    dst = layout_of(model, "dp_replicate=8 tp=8", plan=mk.models.LLAMA_PLAN, dtype=torch.bfloat16)
    plan = plan_reallocation(src, dst)
    held = sum(laid.dtype.itemsize * int(np.prod(laid.shape)) for laid in src.tensors.values())
    assert plan.bytes_moved == plan.lower_bound_bytes <= 64 * max(dst.bytes_of(rank) for rank in dst.ranks)
    assert sum(src.bytes_of(rank) for rank in src.ranks) >= held


def test_different_models_and_sources_with_gaps_are_refused() -> None:
    dense, tied = laid(DENSE, "tp=1"), laid(TIED_ODD, "tp=1")
    with pytest.raises(
        mk.errors.PlanError, match=r"different models: 'embed_tokens.weight' has shape \(64, 32\) there and \(61, 32\)"
    ):
        plan_reallocation(dense, tied)
    less = Layout({name: of for name, of in dense.tensors.items() if name != "norm.weight"}, dense.ranks)
    with pytest.raises(
        mk.errors.PlanError, match="only the source has 'norm.weight', and the destination does not. Build both"
    ):
        plan_reallocation(dense, less)
    adapters = Layout({**dense.tensors, "a.lora_A.weight": dense.tensors["norm.weight"]}, dense.ranks)
    with pytest.raises(
        mk.errors.PlanError, match=r"only the destination has 'a.lora_A.weight'.*merge them by mk.lora.merge first"
    ):
        plan_reallocation(dense, adapters)
    half = TensorRegions((4,), torch.float32, {0: ((0, 2),)})
    with pytest.raises(
        mk.errors.PlanError,
        match=r"the ranks \[0\] of the source do not hold each element of 'w' \(4,\) once: 2 too few",
    ):
        plan_reallocation(
            Layout({"w": half}, (0,)), Layout({"w": TensorRegions((4,), torch.float32, {1: ((0, 4),)})}, (1,))
        )
