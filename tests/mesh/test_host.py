"""Values between hosts: a tree of small groups says what one group of all ranks would, for any number of ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from meshkit.core import _torch
from meshkit.mesh import host, host_ranks
from meshkit.mesh.host import WIDTH, levels
from tests.world import pool, run_ranks

LONG = 5000
"""characters of a value that no first message holds"""


def sockets(size: int, rank: int) -> int:
    """That gloo has open: one for each other rank of each group, and one to listen."""
    return sum(len(group) for level in levels(size) for group in level if rank in group)


@given(st.integers(1, 16_384))
def test_every_rank_is_reached_over_few_sockets(size: int) -> None:
    reached = {0}
    for level in reversed(levels(size)):
        for group in level:
            assert len(group) <= WIDTH
            assert group[0] in reached  # the first is told by the level above
            assert not reached & {*group[1:]}
            reached |= {*group}
    assert reached == {*range(size)}
    assert 2 * sockets(size, 0) + sockets(8, 0) <= 64  # with a tree for saves in the background, and one of cp=8


def told(width: int, text: str, ranks: tuple[int, ...] | None) -> Any:
    mesh = mk.init_mesh(text, ranks=ranks)
    if not mesh.here:
        return None
    before, host.WIDTH = host.WIDTH, width
    try:
        tree = host.HostRanks(mesh.group, timedelta(seconds=60))
        rank, size = tree.rank, tree.size
        values = [f"{each}" * (LONG if each % 2 else 1) for each in range(size)]
        assert tree.all_gather(values[rank]) == values
        assert tree.gather(values[rank]) == (values if rank == 0 else None)
        assert tree.broadcast(values[rank]) == values[0]
        assert tree.scatter(values if rank == 0 else None) == values[rank]
        assert tree.all_reduce(rank, sum) == sum(range(size))
        assert tree.all_reduce(values[rank], "".join) == "".join(values)  # in order
    finally:
        host.WIDTH = before
    return len(tree._groups)


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize(("text", "ranks"), [("dp_shard=6", None), ("tp=5", (0, 2, 3, 4, 5)), ("tp=1", (3,))])
def test_a_tree_says_what_a_group_would(width: int, text: str, ranks: tuple[int, ...] | None) -> None:
    groups = pool(6).run(told, width, text, ranks)
    assert max(each or 0 for each in groups) == len([*_levels(width, len(ranks or range(6)))])


def _levels(width: int, size: int) -> Any:
    while size > 1:
        size = -(-size // width)
        yield size


def beside() -> list[int]:
    """Two threads meet at once, in other orders on each rank."""
    mesh = mk.init_mesh("dp_shard=3")
    channels = [mesh.host.apart(timedelta(seconds=60)) for _ in range(2)]
    sums: list[int] = [0, 0]

    def meet(number: int) -> None:
        for turn in range(30):
            sums[number] += channels[number].all_reduce(turn * 10**number, sum)

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(2)]
    for thread in threads if dist.get_rank() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_threads_meet_beside_each_other() -> None:
    assert pool(3).run(beside) == [[3 * 435, 3 * 4350]] * 3


def lost() -> str:
    mesh = mk.init_mesh("dp_shard=3")
    short = mesh.host.apart(timedelta(seconds=1))
    said = []
    for _ in range(2) if dist.get_rank() < 2 else ():
        with pytest.raises(
            dist.DistError, match="between hosts: another rank is gone, or did not come within 1 s"
        ) as told:
            short.all_gather(1)
        said.append(_torch.says_peer_is_lost(told.value))
    assert mesh.host.all_gather(dist.get_rank()) == [0, 1, 2]  # nobody else is lost with it
    return str(said)


def test_who_does_not_come_is_said_to_be_lost_within_the_timeout_and_there_alone() -> None:
    assert run_ranks(3, lost) == ["[True, True]", "[True, True]", "[]"]


def same() -> bool:
    mesh = mk.init_mesh("dp_shard=2")
    return mesh.host is mesh.host is host_ranks(mesh.group)


def test_a_mesh_has_one_tree() -> None:
    assert pool(2).run(same) == [True, True]
