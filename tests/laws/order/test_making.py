"""How groups are made: the same calls on all ranks of the parent, inside and outside of a mesh on a part of the world."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.core import _torch
from meshkit.parallel.pipeline._channels import in_rounds, open_channels, ways_of
from meshkit.preflight.order import EAGER, LAZY, Call, Event, deadlock, gathered, mismatches, recording
from tests.tiny import tiny_config
from tests.world import pool, run_ranks

WORLD = 6
TIMEOUT = timedelta(seconds=60)
splits = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="gloo is not split, so that what is recorded is not NCCL's"
)


def recorded(make: Callable[..., None], *args: object) -> list[list[Event]]:
    with recording(None) as events:
        make(*args)
    return gathered(events, None)


def verdict(ranks: list[list[Event]]) -> list[str]:
    return [*mismatches(ranks), *(line for rules in (LAZY, EAGER) for line in deadlock(ranks, rules))]


def makings(events: list[Event]) -> list[Call]:
    return [event for event in events if isinstance(event, Call) and event.op.startswith("split into")]


# -------------------------------------------------------------------------------------------------------------- meshkit's


def mesh_and_what_is_made_later(text: str, ranks: tuple[int, ...] | None) -> None:
    mesh = mk.init_mesh(text, ranks=ranks)
    if not mesh.here:
        return
    mesh.expert_ranks.get_group()
    open_channels.cache_clear()
    placement = [*range(mesh.spec.pp), *range(mesh.spec.pp)]
    open_channels(mesh["pp"].get_group(), in_rounds(ways_of(placement, tied=True)), mesh.device)
    _ = mesh.host


PARTS = {
    "dp_shard=2 tp=2": (1, 2, 4, 5),  # several groups on each axis, where the two sides once made other calls
    "dp_replicate=2 dp_shard=2": (0, 1, 2, 3),
    "dp_shard=2 cp=2 ep=2": (0, 2, 3, 4),
    "pp=2 cp=2": (2, 3, 4, 5),
    "pp=3": (0, 2, 4),
    "pp=5": (0, 1, 2, 4, 5),
    "tp=1": (3,),
}


@splits
@pytest.mark.parametrize("text", PARTS)
def test_ranks_outside_take_part_in_one_call_and_those_inside_in_the_same_ones(text: str) -> None:
    ranks = pool(WORLD).run(recorded, mesh_and_what_is_made_later, text, PARTS[text])[0]
    assert not verdict(ranks)
    inside = [[call.op for call in makings(events)] for rank, events in enumerate(ranks) if rank in PARTS[text]]
    outside = [[call.op for call in makings(events)] for rank, events in enumerate(ranks) if rank not in PARTS[text]]
    assert {tuple(ops) for ops in outside} == {(f"split into {[list(PARTS[text])]}",)}
    parents = [{call.group.ranks for call in makings(events)[1:]} for events in ranks]
    assert all(set(PARTS[text]).issuperset(parent) for of_rank in parents for parent in of_rank)
    assert len({len(ops) for ops in inside}) == 1


@splits
@pytest.mark.parametrize("text", ["pp=2 dp_shard=3", "dp_shard=3 tp=2", "dp_shard=6 ep=3", "pp=6"])
def test_all_ranks_of_a_mesh_on_the_world_make_the_same_calls(text: str) -> None:
    assert not verdict(pool(WORLD).run(recorded, mesh_and_what_is_made_later, text, None)[0])


def train_on_two_parts() -> None:
    config = tiny_config(tie_word_embeddings=True)
    for text, ranks in (("pp=2 dp_shard=2", (0, 2, 3, 5)), ("tp=2", (1, 4))):
        mesh = mk.init_mesh(text, ranks=ranks)
        if not mesh.here:
            continue
        open_channels.cache_clear()
        run = mk.parallelize(mk.models.Llama(config), mesh, plan=mk.models.LLAMA_PLAN)
        ids = (torch.arange(36).view(4, 9) % config.vocab_size).tensor_split(mesh.data_ranks)[mesh.data_rank]
        run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, microbatches=2)
        mk.clip_grad_norm(run, 1.0)


@splits
def test_models_on_parts_make_their_groups_and_train_without_the_others() -> None:
    ranks = pool(WORLD).run(recorded, train_on_two_parts)[0]
    assert not verdict(ranks)
    assert all(len(events) > 20 for events in ranks)


# ---------------------------------------------------------------------------------- what was done before, and what is planted


def flattened_by_other_calls() -> None:
    """Ranks inside flattened by one split, ranks outside made a group after the other."""
    pairs = [[0, 1], [2, 3]]
    if dist.get_rank() < 4:
        dist.split_group(split_ranks=pairs, timeout=TIMEOUT)
    else:
        for pair in pairs:
            dist.new_group(pair, timeout=TIMEOUT)


def twin_by_its_members() -> None:
    dist.new_group([1, 2], timeout=TIMEOUT, use_local_synchronization=True)


def one_rank_skips() -> None:
    for partition in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        if dist.get_rank() != 5 or partition[0] == [0, 1]:
            dist.split_group(split_ranks=partition, timeout=TIMEOUT)


def in_another_order() -> None:
    partitions = ([[0, 1], [2, 3]], [[4, 5]])
    for partition in partitions if dist.get_rank() < 4 else reversed(partitions):
        dist.split_group(split_ranks=partition, timeout=TIMEOUT)


def by_all() -> None:
    for pair in ([0, 1], [2, 3]):
        dist.new_group(pair, timeout=TIMEOUT)
    dist.split_group(split_ranks=[[0, 1, 2], [3, 4, 5]], timeout=TIMEOUT)


@splits
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (flattened_by_other_calls, "of rank 4 it is split into [[0, 1]]"),
        (twin_by_its_members, "call 0 of rank 0 is None, of rank 1 it is split into [[1, 2]]"),
        (one_rank_skips, "call 1 of rank 0 is split into [[0, 2], [1, 3]]"),
        (in_another_order, "of rank 4 it is split into [[4, 5]]"),
        (by_all, ""),
    ],
)
def test_what_gloo_forgives_is_called_a_fault(make: Callable[[], None], said: str) -> None:
    ranks = run_ranks(WORLD, recorded, make)[0]  # torch's counters, by which it names groups, differ afterwards
    found = mismatches(ranks)
    assert bool(found) == bool(said) and said in "".join(found)
    for rules in (LAZY, EAGER):
        stopped = make in (twin_by_its_members, one_rank_skips, flattened_by_other_calls)
        assert bool(deadlock(ranks, rules)) == stopped


# ------------------------------------------------------------------------------------------------------------- the groups


def groups_of_both_ways(text: str) -> list[dict[str, list[int]]]:
    found = []
    for by_split in (True, False):
        _torch.groups._GLOO_SPLITS, before = by_split and _torch.groups._GLOO_SPLITS, _torch.groups._GLOO_SPLITS
        try:
            mesh = mk.init_mesh(text)
            open_channels.cache_clear()
            rounds = in_rounds(ways_of(range(mesh.spec.pp), tied=True))
            channels = open_channels(mesh["pp"].get_group(), rounds, mesh.device)
        finally:
            _torch.groups._GLOO_SPLITS = before
        every = {str(group_axes): group for group_axes, group in (mesh.members.by_axes if mesh.members else {}).items()}
        every |= {str(way): group for way, group in channels.groups.items()}
        for group in every.values():
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total == group.size()
        found.append({axes: dist.get_process_group_ranks(group) for axes, group in every.items()})
    return found


@pytest.mark.parametrize("text", ["pp=3 dp_shard=2", "dp_shard=3 tp=2 ep=2"])
def test_groups_split_and_groups_made_by_their_members_have_the_same_ranks(text: str) -> None:
    for split, by_members in pool(WORLD).run(groups_of_both_ways, text):
        assert split == by_members and split
