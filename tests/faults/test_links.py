"""A slow link is told apart from a slow rank: on a really slow link, and by arithmetic."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshkit.faults.links import Link, Sample, links_of, with_references
from meshkit.metrics import Stragglers
from tests.checkpoint.training import build
from tests.faults.switch import CARD, Switch, switch
from tests.world import fork

TOL_S = 1e-9  # sums of a few numbers
END_S = 120.0


def sample(ranks: tuple[int, ...], count: int, waited: float, ended: float, **more: Any) -> Sample:
    values = {"axis": "tp", "key": "k", "message": False, "size": 1000, "began": waited} | more
    return Sample(ranks=ranks, count=count, waited=waited, ended=ended, **values)


def test_the_wire_is_the_wait_of_the_last_to_come_and_the_rest_is_lateness() -> None:
    # Rank 1 comes 2 s late; then the call travels 0.5 s. The clocks of the ranks differ by an hour.
    (link,) = links_of("tp", {0: [[sample((0, 1), 1, 10.0, 12.5)]], 1: [[sample((0, 1), 1, 3612.0, 3612.5)]]})
    assert abs(link.wire_s - 0.5) < TOL_S and abs(link.late_s - 2.0) < TOL_S
    assert abs(link.bytes_per_s - 2000) < TOL_S


def test_messages_both_ways_need_no_common_clock() -> None:
    hour, way = 3600.0, 0.25

    def message(source: int, target: int, sent: float, at: int) -> Sample:
        ranks, key = (source, target), f"{source}>{target}"
        if at == source:
            return sample(ranks, 1, sent + at * hour, sent + 0.01 + at * hour, message=True, key=key)
        return sample(ranks, 1, sent - 1 + at * hour, sent + way + at * hour, message=True, key=key)

    by_rank = {rank: [[message(0, 1, 10.0, rank), message(1, 0, 20.0, rank)]] for rank in (0, 1)}
    (link,) = links_of("pp", by_rank)
    assert abs(link.wire_s - 2 * way) < TOL_S and abs(link.late_s - 2.0) < TOL_S


def link(ranks: tuple[int, ...], wire_s: float) -> Link:
    return Link(axis="dp_shard", ranks=ranks, calls=3, bytes_per_s=1e6, wire_s=wire_s, late_s=0.0)


def test_a_link_is_compared_to_others_of_its_axis_and_to_its_own_best() -> None:
    least: dict[Any, float] = {}
    good = with_references([link((0, 2), 0.1), link((1, 3), 0.1)], least)
    assert not any(each.is_slow(1.0) for each in good)
    one = with_references([link((0, 2), 0.5), link((1, 3), 0.1)], {})
    assert [each.ranks for each in one if each.is_slow(1.0)] == [(0, 2)]
    both = with_references([link((0, 2), 0.5), link((1, 3), 0.5)], least)
    assert [each.is_slow(1.0) for each in both] == [True, True]
    assert "the link between ranks 0 and 2 on dp_shard is slow: 3 calls of a step take 0.5 s" in str(both[0])
    assert not one[0].is_slow(100.0)  # of a step of 100 s nobody notices


@pytest.fixture
def four() -> Iterator[Switch]:
    try:
        with switch(4) as made:
            yield made
    except OSError as error:
        pytest.skip(
            f"no switch here: {error} (network namespaces need root, `ip` and `tc` of iproute2, htb of the kernel)"
        )


def measured(rank: int, made: Switch, folder: str, slow: int | None) -> None:
    """In a process of its own, on its own network."""
    made.enter(rank)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": CARD,
        "MASTER_ADDR": made.addresses[0],
        "MASTER_PORT": "29500",
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank),
    }
    training = build("dp_shard=2 tp=2", num_hidden_layers=2)
    stragglers = Stragglers(training.run.mesh, every_steps=4, steps=3, factor=2)
    for step in range(1, 5):
        with stragglers.measure(step):
            time.sleep(0.5 if rank == slow else 0)
            training.train(1)
    assert stragglers.last is not None
    said = {
        "rank": str(stragglers.slow or ""),
        "links": list(stragglers.slow_links),
        "matrix": stragglers.last.matrix(),
        "axes": list(stragglers.last.axes),
    }
    (Path(folder) / str(rank)).write_text(json.dumps(said))
    os._exit(0)


def said_by_four(made: Switch, folder: Path, slow: int | None) -> dict[str, Any]:
    ranks = [fork(measured, rank, made, str(folder), slow) for rank in range(4)]
    try:
        for rank in ranks:
            rank.join(END_S)
        assert [rank.exitcode for rank in ranks] == [0] * 4
    finally:
        for rank in ranks:
            rank.kill()
    said = [json.loads((folder / str(rank)).read_text()) for rank in range(4)]
    assert all(each == said[0] for each in said), said
    return said[0]  # type: ignore[no-any-return]


def test_a_link_of_a_few_megabits_is_named_and_no_rank(four: Switch, tmp_path: Path) -> None:
    four.slow_down(0, 2, "2mbit")
    said = said_by_four(four, tmp_path, None)
    assert {"dp_shard", "tp"} <= set(said["axes"])
    assert said["rank"] == "", said
    assert len(said["links"]) == 1 and said["links"][0].startswith("the link between ranks 0 and 2 on dp_shard"), said


def test_a_slow_rank_is_named_and_no_link(four: Switch, tmp_path: Path) -> None:
    said = said_by_four(four, tmp_path, 3)
    assert said["links"] == [], said
    assert "rank 3 on" in said["rank"], said
