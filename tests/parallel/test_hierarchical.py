"""Hierarchical collectives equal flat ones: bit for bit where sums are exact, on ranks with different data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.hierarchical import ALIGNMENT, all_gather, all_reduce, all_to_all, chunks_of, reduce_scatter
from meshkit.parallel.shardings import Hops, shard_mesh, zero_row
from meshkit.preflight.order import EAGER, LAZY, Call, deadlock, gathered, mismatches, recording
from meshkit.strategy import DataPolicy
from tests.laws.parity.cases import Cell, Moe, mesh_for
from tests.laws.parity.test_bytes import assert_alike, observe_step
from tests.parallel.test_shardings import check, without_tokens
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64_SUM = 1e-12  # only the order of summation differs
NODES = [
    "dp_shard=2x2",
    "dp_shard=2x4",
    "dp_shard=4x2",
    "dp_shard=1x4",
    "dp_shard=4",
]  # the last has one rank in a node
# (elements of a part, chunk_bytes): none, one, uneven last chunks; 1 is rounded up.
SIZES = [(0, None), (0, 64), (1, None), (1, 1), (7, None), (7, 1), (29, 64), (29, 10**6)]


def groups(spec: str) -> tuple[Hops, dist.ProcessGroup]:
    """(the two groups, both as one)"""
    mesh = mesh_for(spec)
    if spec == "dp_shard=4":
        return Hops(inner=mesh["tp"].get_group(), outer=mesh["dp_shard"].get_group()), mesh["dp_shard"].get_group()
    hops = Hops(inner=mesh.over("dp_intra").get_group(), outer=mesh.over("dp_inter").get_group())
    return hops, mesh["dp_shard"].get_group()


def drawn(size: int, kind: str, group: dist.ProcessGroup) -> Tensor:
    """Other values on each rank. kind: "integers" in fp64, whose sums are exact; or a dtype."""
    generator = torch.Generator().manual_seed(17 + dist.get_rank(group))
    if kind == "integers":
        return torch.randint(-1000, 1000, (size,), generator=generator).double()
    return torch.randn(size, generator=generator, dtype=torch.float64).to(getattr(torch, kind))


def poisoned(size: int, like: Tensor) -> Tensor:
    return torch.full((size,), 77.0, dtype=like.dtype)


def differences(spec: str, kind: str) -> dict[str, float]:
    """Of each collective the largest over all sizes and chunks."""
    hops, flat = groups(spec)
    ranks, found = flat.size(), dict.fromkeys(("all_gather", "in place", "reduce_scatter", "all_reduce"), 0.0)

    def compare(name: str, one: Tensor, other: Tensor) -> None:
        assert not one.isnan().any()
        if one.numel():
            found[name] = max(found[name], float((one.double() - other.double()).abs().max()))

    for size, chunk in SIZES:
        part = drawn(size, kind, flat)
        out, expected = poisoned(ranks * size, part), poisoned(ranks * size, part)
        all_gather(out, part, hops, chunk_bytes=chunk)
        if size:
            dist.all_gather_into_tensor(expected, part, group=flat)
        compare("all_gather", out, expected)
        out.fill_(77.0)
        own = out[dist.get_rank(flat) * size :][:size]  # as FSDP gathers: its part lies in the result
        own.copy_(part)
        all_gather(out, own, hops, chunk_bytes=chunk)
        compare("in place", out, expected)
        whole, out, expected = drawn(ranks * size, kind, flat), poisoned(size, part), poisoned(size, part)
        kept = whole.clone()
        reduce_scatter(out, whole, hops, chunk_bytes=chunk)
        assert whole.equal(kept)
        if size:
            dist.reduce_scatter_tensor(expected, whole.clone(), group=flat)
        compare("reduce_scatter", out, expected)
        out, expected = part.clone(), part.clone()
        all_reduce(out, hops, chunk_bytes=chunk)
        if size:
            dist.all_reduce(expected, group=flat)
        compare("all_reduce", out, expected)
    return found


@pytest.mark.parametrize("spec", NODES)
def test_sums_of_integers_equal_flat_ones_bit_for_bit(spec: str) -> None:
    for found in pool(8 if spec in NODES[1:3] else 4).run(differences, spec, "integers"):
        assert max(found.values()) == 0, found


@pytest.mark.parametrize("spec", NODES[:2])
def test_other_sums_differ_in_their_order_alone(spec: str) -> None:
    for found in pool(8 if spec == NODES[1] else 4).run(differences, spec, "float64"):
        assert max(found.values()) < TOL_FP64_SUM, found
        assert found["all_gather"] == found["in place"] == 0


def test_bf16_is_gathered_bit_for_bit() -> None:
    for found in pool(4).run(differences, NODES[0], "bfloat16"):
        assert found["all_gather"] == found["in place"] == 0


def all_ranks_have_the_same_sum() -> Tensor:
    hops, flat = groups(NODES[0])
    values = drawn(129, "float32", flat)
    all_reduce(values, hops, chunk_bytes=64)
    return values


def test_an_all_reduce_leaves_the_same_bits_on_every_rank() -> None:
    first, *others = pool(4).run(all_ranks_have_the_same_sum)
    assert all(first.equal(other) for other in others)


# ----------------------------------------------------------------------------------------------------------------- all-to-all


def table(ranks: int, kind: str) -> list[list[int]]:
    if kind == "even":
        return [[3] * ranks] * ranks
    counts = torch.randint(0, 9, (ranks, ranks), generator=torch.Generator().manual_seed(5))
    counts[1] = 0  # a rank that sends nothing
    counts[:, ranks - 1] = 0  # and one that gets nothing
    if kind == "one pair":
        counts[:] = 0
        counts[0, ranks - 1] = 5
    return counts.tolist()


def exchanged(spec: str, kind: str) -> list[bool]:
    hops, flat = groups(spec)
    rank, counts = dist.get_rank(flat), table(flat.size(), kind)
    rows = drawn(sum(counts[rank]) * 3, "float64", flat).view(-1, 3)
    arriving = [counts[sender][rank] for sender in range(flat.size())]
    expected = rows.new_empty(sum(arriving), 3)
    dist.all_to_all_single(expected, rows, arriving, counts[rank], group=flat)
    return [all_to_all(rows, counts, hops, chunks=chunks).equal(expected) for chunks in (1, 2, 5, 20)]


@pytest.mark.parametrize("kind", ["even", "uneven", "one pair"])
@pytest.mark.parametrize("spec", NODES)
def test_an_all_to_all_equals_a_flat_one_bit_for_bit(spec: str, kind: str) -> None:
    for found in pool(8 if spec in NODES[1:3] else 4).run(exchanged, spec, kind):
        assert all(found), found


# ---------------------------------------------------------------------------------------------------------- order, and chunks


def in_order() -> tuple[list[str], int]:
    """(what stops, calls of a rank)"""
    hops, flat = groups(NODES[0])
    mesh = mesh_for(NODES[0])
    counts = table(4, "uneven")
    with recording(mesh) as events:
        out = torch.empty(4 * 64)
        all_gather(out, drawn(64, "float32", flat), hops, chunk_bytes=64)
        reduce_scatter(torch.empty(64), out, hops, chunk_bytes=64)
        all_reduce(out, hops, chunk_bytes=64)
        all_to_all(torch.ones(sum(counts[dist.get_rank(flat)]), 2), counts, hops, chunks=3)
    of_ranks = gathered(events, mesh)
    calls = sum(isinstance(event, Call) and event.where != "init_mesh" for event in of_ranks[0])
    return [line for rules in (LAZY, EAGER) for line in deadlock(of_ranks, rules)] + mismatches(of_ranks), calls


def test_all_ranks_issue_their_calls_in_the_order_that_nccl_wants() -> None:
    for stops, calls in pool(4).run(in_order):
        assert stops == []
        assert calls == 4 * 2 + 4 * 2 + 8 * 3 + 3 * 2  # chunks x hops


def log_of(run: Callable[[Hops], None]) -> list[str]:
    hops, _ = groups(NODES[0])
    log: list[str] = []
    names = {id(hops.inner): "inside", id(hops.outer): "across"}
    plain = dist.all_gather_into_tensor

    class Work:
        def __init__(self, work: dist.Work, name: str) -> None:
            self.work, self.name = work, name

        def wait(self) -> None:
            self.work.wait()
            log.append(f"wait {self.name}")

    def gather(out: Tensor, part: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Work:
        log.append(names[id(group)])
        work = plain(out, part, group=group, async_op=async_op)
        assert work is not None
        return Work(work, names[id(group)])

    dist.all_gather_into_tensor = gather  # type: ignore[assignment]
    try:
        run(hops)
    finally:
        dist.all_gather_into_tensor = plain
    return log


def three_chunks() -> list[str]:
    return log_of(lambda hops: all_gather(torch.empty(4 * 12), torch.ones(12), hops, chunk_bytes=16))


def test_the_next_chunk_is_on_its_way_across_before_one_is_waited_for() -> None:
    # Each chunk's hop inside begins with the next chunk's hop across under way.
    turns = ["across", "across", "wait across", "inside"]
    expected = [*turns, "across", "wait across", "inside", "wait inside", "wait across", "inside", "wait inside"]
    assert pool(4).run(three_chunks)[0] == [*expected, "wait inside"]


def test_chunks_begin_where_every_dtype_has_whole_elements() -> None:
    assert chunks_of(0, 64) == () == chunks_of(0, None)
    assert chunks_of(100, None) == (100,)
    assert chunks_of(100, 32) == (32, 32, 32, 4)
    assert chunks_of(96, 20) == (32, 32, 32)
    assert chunks_of(1, 1) == (1,)
    assert all(size % ALIGNMENT == 0 for size in chunks_of(10**6 + 3, 1000)[:-1])


# ----------------------------------------------------------------------------------------------------------------------- FSDP


def by_nodes(**choices: Any) -> DataPolicy:
    return DataPolicy(collectives="hierarchical", chunk_bytes=512, **choices)


CELLS = [
    (4, Cell(mesh="dp_shard=2x2", data=by_nodes(), microbatches=2, vocab=61, hidden_mlp=45)),
    (8, Cell(mesh="dp_shard=2x4", data=by_nodes(), recompute="full", tied=True, vocab=61)),
    (8, Cell(mesh="dp_shard=4x2", zero=1, data=by_nodes(), microbatches=3)),
    (4, Cell(mesh="dp_shard=2x2", zero=2, data=by_nodes(), microbatches=2, qwen=True)),
    (
        8,
        Cell(mesh="dp_shard=2x2 tp=2", data=by_nodes(), sequence=True, recompute="selective", microbatches=2, vocab=61),
    ),
    (8, Cell(mesh="dp_shard=2x2 cp=2", data=by_nodes(), documents=True, microbatches=3)),
    (8, Cell(mesh="pp=2 dp_shard=2x2", zero=1, data=by_nodes(), layers=4, microbatches=2, tied=True)),
    (8, Cell(mesh="dp_replicate=2 dp_shard=2x2", data=by_nodes(), microbatches=2, hidden_mlp=45)),
    (8, Cell(mesh="dp_replicate=2 dp_shard=2x2", data=by_nodes(states="replicas"), microbatches=2)),
    (4, Cell(mesh="dp_shard=2x2", data=by_nodes(parameters="node"), microbatches=2)),  # hpZ: its reductions
    (8, Cell(mesh="dp_shard=2x2 tp=2 ep=2", data=by_nodes(), moe=Moe(shared=24), layers=3, microbatches=2)),
    (4, Cell(mesh="dp_shard=1x4", data=by_nodes())),  # one node: flat
    (4, Cell(mesh="dp_shard=2x2", data=by_nodes(), all_masked_microbatch=True, microbatches=3)),
]


@pytest.mark.parametrize(("world", "cell"), CELLS, ids=str)
def test_fsdp_by_nodes_equals_one_device_and_sends_what_is_explained(world: int, cell: Cell) -> None:
    check(world, cell)
    found = pool(world).run(observe_step, cell)
    if cell.moe is not None:  # which tokens go where is said for an even routing
        found = [(without_tokens(seen), without_tokens(said)) for seen, said in found]
    assert_alike(found)


@pytest.mark.parametrize("spec", ["dp_shard=2x2", "dp_shard=4x8", "dp_shard=4x2 tp=4"])
def test_bytes_across_nodes_are_those_of_one_rank_in_each(spec: str) -> None:
    """S bytes in a flat ring are (n - 1) / n of S through a node's links; by nodes (o - 1) / o."""
    sizes = MeshSpec.parse(spec)
    with torch.device("meta"):
        model = mk.models.Llama(tiny_config(hidden_size=64, intermediate_size=128))
    said = {
        policy: mk.explain(model, spec, plan=mk.models.LLAMA_PLAN, data=policy, rows=2, seq_len=16)
        for policy in (DataPolicy(), by_nodes())
    }
    flat, nodes = (Counter[str]() for _ in range(2))
    for found, policy in ((flat, DataPolicy()), (nodes, by_nodes())):
        for message, times in said[policy].messages.items():
            if message.op in ("all_gather", "reduce_scatter") and message.axis.startswith("dp_"):
                found[message.axis] += message.size * times
    assert set(flat) == {"dp_shard"}
    assert nodes == {"dp_intra": flat["dp_shard"], "dp_inter": flat["dp_shard"] // sizes.dp_intra}


REFUSED = [
    ({"collectives": "rings"}, r"collectives='rings'\): choose one of flat, hierarchical"),
    ({"chunk_bytes": 4}, r"chunk_bytes=4\) is of hierarchical collectives"),
    ({"collectives": "hierarchical", "chunk_bytes": 0}, r"chunk_bytes=0\): a chunk has a whole number"),
    ({"collectives": "hierarchical", "gather": "int8"}, "gather='int8', collectives='hierarchical'.*go in one hop"),
    ({"collectives": "hierarchical", "reduce": "int4"}, "reduce='int4', collectives='hierarchical'.*go in one hop"),
]


@pytest.mark.parametrize(("choices", "words"), REFUSED, ids=str)
def test_what_no_run_can_do_is_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        DataPolicy(**choices)


def test_a_mesh_that_tells_no_nodes_apart_is_refused() -> None:
    with torch.device("meta"):
        model = mk.models.Llama(tiny_config())
    with pytest.raises(PlanError, match="hierarchical'.: this mesh tells no nodes apart.*dp_shard=2x2 does"):
        mk.explain(model, "dp_shard=4", plan=mk.models.LLAMA_PLAN, data=by_nodes(), rows=2, seq_len=16)
    mk.explain(
        model, "tp=2", plan=mk.models.LLAMA_PLAN, data=by_nodes(), rows=2, seq_len=16
    )  # one file fits many meshes


def of_a_loop() -> list[str]:
    """What `fully_shard` says of a mesh and a policy of which only one goes by nodes."""
    mesh, policy = mk.init_mesh("dp_shard=2x2"), DataPolicy(collectives="hierarchical")
    made = {given: shard_mesh(mesh, zero_row(3), policy=given) for given in (None, policy)}
    said = []
    for where, given in ((mesh.data, policy), (made[None], policy), (made[policy], None), (made[policy], policy)):
        try:
            mk.fully_shard(torch.nn.Linear(8, 8), where, policy=given)
            said.append("")
        except PlanError as error:
            said.append(str(error))
    return said


def test_a_loop_of_ones_own_says_it_in_both_places() -> None:
    for flat, without, unsaid, right in pool(4).run(of_a_loop):
        assert "its policy has hierarchical collectives and its mesh has not" in flat
        assert without == flat
        assert "its mesh has hierarchical collectives and its policy has not" in unsaid
        assert right == ""
