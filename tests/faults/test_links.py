"""A slow link is told apart from a slow rank: on a really slow link, and by arithmetic."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshkit.faults.links import IN_A_ROW, Link, LinkHistory, Sample, links_of
from meshkit.metrics import Stragglers
from tests.checkpoint.training import build
from tests.faults.switch import CARD, Switch, switch
from tests.world import fork, pool

TOL_S = 1e-9  # sums of a few numbers
END_S = 120.0


def sample(ranks: tuple[int, ...], count: int, waited: float, ended: float, **more: Any) -> Sample:
    values = {"axis": "tp", "key": "k", "message": False, "size": 1000, "began": waited} | more
    return Sample(ranks=ranks, count=count, waited=waited, ended=ended, **values)


def test_the_wire_is_the_wait_of_the_last_to_come_and_the_rest_is_lateness() -> None:
    # Rank 1 comes 2 s late; then the call travels 0.5 s. The clocks of the ranks differ by an hour.
    early, late = sample((0, 1), 1, 10.0, 12.5), sample((0, 1), 1, 3612.0, 3612.5)
    (link,) = links_of("tp", {0: [[early]], 1: [[late]]})
    assert abs(link.wire_s - 0.5) < TOL_S and abs(link.late_s - 2.0) < TOL_S
    assert abs(link.bytes_per_s - 2000) < TOL_S
    # No wire is blamed for what either end's carriers, or the last to come itself, waited for a processor.
    early, late = replace(early, carriers_starved_s=0.0625, starved_s=9.0), replace(late, starved_s=0.25)
    (link,) = links_of("tp", {0: [[early]], 1: [[late]]})
    assert abs(link.wire_s - 0.1875) < TOL_S and abs(link.starved_s - 0.3125) < TOL_S
    # In a second step they waited for one less, and longer for the wire: the quicker step is the wire's own.
    again = [replace(each, ended=each.ended + 0.125, starved_s=0.125) for each in (early, late)]
    (link,) = links_of("tp", {0: [[early], [again[0]]], 1: [[late], [again[1]]]})
    assert abs(link.wire_s - 0.4375) < TOL_S and abs(link.most_s - 0.4375) < TOL_S


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


def test_collectives_and_messages_of_the_same_ranks_add_up_in_a_step() -> None:
    """Not the quicker of the two: messages that take a second would hide behind an all-reduce of 16 bytes."""
    common = {"axis": "pp", "ranks": (0, 1)}
    summed = [sample(waited=10.0, ended=10.125, key="sum", count=1, **common)]
    there = sample(waited=20.0, ended=21.0, key="0>1", count=1, message=True, **common)
    back = replace(there, ranks=(1, 0), key="1>0")
    by_rank = {rank: [[*summed, there, back]] for rank in (0, 1)}
    (one,) = links_of("pp", by_rank)
    assert abs(one.wire_s - 2.125) < TOL_S and one.calls == 3
    assert abs(one.bytes_per_s - 3000 / 2.125) < 1e-6  # bytes a second, of a few thousand


def test_each_message_counts_for_itself_and_the_clocks_are_known_from_all_measured_steps() -> None:
    """A link that lets the first bytes pass at full speed is as slow as it is for the others; where the receiver comes late,
    another step says what the clocks differ by."""
    hour = 3600.0

    def step(began: float, ways_s: Sequence[float], late_s: float = 0.0) -> dict[int, list[Sample]]:
        samples: dict[int, list[Sample]] = {0: [], 1: []}
        for index, way_s in enumerate(ways_s):
            for source in (0, 1):
                at, more = began + 3 * index + source, {"message": True, "axis": "pp", "key": f"from {source}"}
                ranks, count = (source, 1 - source), int(began) + index
                arrives = at + way_s
                waited = arrives + late_s if late_s else at
                there = {"waited": at + source * hour, "ended": at + 0.01 + source * hour}
                here = {"waited": waited + (1 - source) * hour, "ended": max(waited, arrives) + (1 - source) * hour}
                samples[source].append(sample(ranks, count, **there, **more))
                samples[1 - source].append(sample(ranks, count, **here, **more))
        return samples

    first, second = step(100.0, (0.125, 1.0)), step(200.0, (0.125, 0.125), late_s=0.75)
    (one,) = links_of("pp", {rank: [first[rank]] for rank in (0, 1)})
    assert abs(one.wire_s - 2 * (0.125 + 1.0)) < TOL_S
    (both,) = links_of("pp", {rank: [first[rank], second[rank]] for rank in (0, 1)})
    assert abs(both.wire_s) < TOL_S and abs(both.most_s - 2 * (0.125 + 1.0)) < TOL_S  # nobody waits in the second


def link(ranks: tuple[int, ...], *steps_s: float) -> Link:
    return Link(
        axis="dp_shard",
        ranks=ranks,
        calls=3,
        bytes_per_s=1e6,
        wire_s=min(steps_s),
        late_s=0.0,
        most_s=max(steps_s),
    )


def slow_in(history: LinkHistory, *links: Link, work_s: float = 1.0, step_s: float = 1.0) -> list[tuple[int, ...]]:
    """Of two reports alike."""
    for _ in range(IN_A_ROW):
        found = history.compared(links, work_s=dict.fromkeys(range(4), work_s), step_s=step_s)
    return [each.ranks for each in found if each.is_slow]


def test_a_link_is_compared_to_others_of_its_axis_and_to_its_own_best() -> None:
    history = LinkHistory()
    assert slow_in(history, link((0, 2), 0.1), link((1, 3), 0.1)) == []
    assert slow_in(LinkHistory(), link((0, 2), 0.5), link((1, 3), 0.1)) == [(0, 2)]
    assert slow_in(history, link((0, 2), 0.5), link((1, 3), 0.5)) == [(0, 2), (1, 3)]
    assert slow_in(LinkHistory(), link((0, 2), 0.5), link((1, 3), 0.1), step_s=100.0) == []  # nobody notices
    (one, _) = history.compared([link((0, 2), 0.5), link((1, 3), 0.5)], work_s=dict.fromkeys(range(4), 1.0), step_s=1.0)
    assert "the link between ranks 0 and 2 on dp_shard is slow: 3 calls of a step take 0.5 s" in str(one)


def test_one_report_names_no_link() -> None:
    history, calm = LinkHistory(), link((1, 3), 0.1)
    for wire_s in (0.5, 0.1, 0.5, 0.1):
        found = history.compared([link((0, 2), wire_s), calm], work_s=dict.fromkeys(range(4), 1.0), step_s=1.0)
        assert not any(each.is_slow for each in found)


def test_a_report_that_owes_its_length_to_processors_is_no_word_for_or_against_a_link() -> None:
    slow, quick = link((0, 2), 0.5), link((0, 2), 0.1)
    neither, calm = replace(quick, starved_s=0.4), link((1, 3), 0.1)

    def named(*reports: Link) -> list[bool]:
        history = LinkHistory()
        found = [history.compared([each, calm], work_s=dict.fromkeys(range(4), 1.0), step_s=1.0) for each in reports]
        return [links[0].is_slow for links in found]

    assert named(neither, slow, neither, slow, neither, slow) == [False, False, False, True, False, True]
    assert not any(named(slow, quick, slow, neither, quick, slow, neither, neither, neither, slow))


def test_a_link_that_takes_no_longer_than_others_in_their_slowest_step_is_not_slow() -> None:
    assert slow_in(LinkHistory(), link((0, 2), 0.5, 0.6), link((1, 3), 0.1, 0.8)) == []
    assert slow_in(LinkHistory(), link((0, 2), 0.5, 0.6), link((1, 3), 0.1, 0.4)) == [(0, 2)]


def test_where_the_ranks_work_slower_too_their_links_are_not_slow() -> None:
    history = LinkHistory()
    assert slow_in(history, link((0, 2), 0.1), link((1, 3), 0.1)) == []
    busy = link((0, 2), 0.5), link((1, 3), 0.4)
    assert slow_in(history, *busy, work_s=4.0, step_s=5.0) == []  # a busy machine
    assert slow_in(history, *busy, work_s=1.0, step_s=1.5) == [(0, 2), (1, 3)]


def test_no_link_is_blamed_for_what_its_ranks_waited_for_a_processor() -> None:
    def of(starved_s: float) -> list[tuple[int, ...]]:
        def taking(ranks: tuple[int, ...], seconds: float, starved_s: float = 0.0) -> Link:
            calls = [sample(ranks, 1, 10.0, 10.0 + seconds, axis="dp_shard", carriers_starved_s=starved_s / 2)]
            return links_of("dp_shard", {rank: [calls] for rank in ranks})[0]

        history = LinkHistory()
        assert slow_in(history, taking((0, 2), 0.001), taking((1, 3), 0.001)) == []
        return slow_in(history, taking((0, 2), 0.2, starved_s), taking((1, 3), 0.001), step_s=0.5)

    assert of(starved_s=0.0) == of(starved_s=0.1) == [(0, 2)]
    assert of(starved_s=0.19) == of(starved_s=0.3) == []


def test_noise_names_no_link_and_hides_none() -> None:
    """Waits for a processor, of now and then many times the way itself, in each of three steps."""
    drawn, reports = random.Random(1), 2000
    false = missed = 0
    history = LinkHistory()
    for report in range(reports):
        busy = 1.0 + 4.0 * (report // 20 % 2)  # comes and goes
        steps = {ranks: [0.1 * busy * (1 + drawn.expovariate(1.5)) for _ in range(3)] for ranks in ((0, 2), (1, 3))}
        links = [link(ranks, *values) for ranks, values in steps.items()]
        false += any(
            each.is_slow for each in history.compared(links, work_s=dict.fromkeys(range(4), busy), step_s=busy)
        )
        if report % 100 == 50:  # ten times as slow, in two reports
            slow = [link((0, 2), *(10 * value for value in steps[0, 2])), links[1]]
            missed += slow_in(copy.deepcopy(history), *slow, work_s=busy, step_s=10 * busy) != [(0, 2)]
    assert false <= reports // 500
    assert missed == 0


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
    stragglers = Stragglers(training.run.mesh, every_steps=8, steps=3, factor=2)
    for step in range(1, 12):  # the report of step 8 is confirmed in step 11
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


def reports_of(steps: int) -> tuple[list[str], int]:
    """(what was said of ranks and links, reports)"""
    training = build("dp_shard=2 tp=2", num_hidden_layers=2)
    stragglers = Stragglers(training.run.mesh, every_steps=4, steps=3, factor=2)
    said, reports = [], 0
    for step in range(1, steps + 1):
        with stragglers.measure(step):
            training.train(1)
        if stragglers.last is not None and stragglers.last.step == step:
            reports += 1
            said += [str(each) for each in (stragglers.slow, *stragglers.slow_links) if each is not None]
    return said, reports


def test_a_busy_machine_names_nobody() -> None:
    """First it is calm, so that all links know better times."""
    ranks = pool(4)
    spinning = [sys.executable, "-c", "while True: pass"]
    hogs: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        hogs.extend(subprocess.Popen(spinning) for _ in range(2 * (os.cpu_count() or 1)))

    later = threading.Timer(2.0, begin)
    later.start()
    try:
        answers = ranks.run(reports_of, 40)
    finally:
        later.cancel()
        later.join()
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert hogs, "it was over before the machine was busy"
    said, reports = answers[0]
    assert said == [] and reports >= 10
