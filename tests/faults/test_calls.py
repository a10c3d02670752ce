"""A ring of calls says which call is missing on which rank, and what it costs to keep."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.core import _torch, calls
from meshkit.core.calls import Call, Meeting, ring
from meshkit.faults.calls import CallFiles, Last, last_calls, missing_calls, packed, read_calls, unpacked, waits_in
from tests.checkpoint.training import build
from tests.world import pool


def last(
    count: int, *, waits: bool, op: str = "all_reduce", ranks: tuple[int, ...] = (0, 1, 2, 3), name: str = "a"
) -> Last:
    return Last(
        id=name, axis="tp", ranks=ranks, message=False, count=count, op=op, size=2_100_000, waits=waits, made=count
    )


def test_a_call_is_whole_when_the_watch_can_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, seen = Meeting("a", (0, 1), is_message=False), []
    # Where the watch might look while a call is made.
    monkeypatch.setattr(calls, "_place", lambda: (seen.append(meeting.last), (None, 0))[1])
    first = Call(meeting, "all_reduce", 4, None)
    second = Call(meeting, "all_reduce", 4, None)
    assert seen == [None, first] and meeting.last is second and second.count == 2


def test_the_rank_that_has_not_made_a_call_is_named_with_the_call() -> None:
    calls = {rank: [last(4711, waits=True)] for rank in range(3)} | {3: [last(4710, waits=False)]}
    assert missing_calls(calls) == ["rank 3 has not made call 4711 on tp (all_reduce of 2.1 MB): ranks 0-2 wait in it."]


def test_a_rank_of_which_nothing_is_known_is_missing_too() -> None:
    calls = {rank: [last(1, waits=True)] for rank in range(3)}
    assert missing_calls(calls)[0].startswith("rank 3 has not made call 1 on tp")


def test_the_rank_for_which_the_others_wait_comes_before_those_that_wait_for_it() -> None:
    def of(name: str, ranks: tuple[int, ...], count: int, waits: bool) -> Last:
        return last(count, waits=waits, ranks=ranks, name=name)

    calls = {
        0: [of("dp", (0, 2), 5, True), of("tp0", (0, 1), 9, False)],
        1: [of("tp0", (0, 1), 10, True)],  # for rank 0, which waits for rank 2
        2: [of("dp", (0, 2), 4, False)],
    }
    first, second = missing_calls(calls)
    assert first.startswith("rank 2 has not made call 5") and second.startswith("rank 0 has not made call 10")


def test_a_receive_that_is_posted_ahead_is_no_call_that_is_missing() -> None:
    def message(waits: bool, count: int, made: int) -> Last:
        return replace(last(count, waits=waits, ranks=(0, 1)), message=True, op="recv", made=made)

    assert missing_calls({0: [message(True, 9, 9)], 1: [message(False, 7, 11)]}) == []
    (said,) = missing_calls({0: [message(True, 9, 9)], 1: [message(False, 7, 8)]})
    assert said.startswith(
        "rank 1 has not made call 9 on tp (recv of 2.1 MB from rank 0 to rank 1): rank 0 waits in it"
    )


def test_ranks_that_made_different_calls_as_the_same_are_told_apart() -> None:
    calls = {0: [last(7, waits=True)], 1: [last(7, waits=True, op="all_gather")]}
    assert missing_calls(calls) == [
        "ranks made different calls as call 7 on tp: all_reduce of 2.1 MB on rank 0, all_gather on rank 1."
    ]


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 3, 5), (0, 1, 4, 5), (3, 1), (2, 0)])
def test_a_heartbeat_carries_calls_unchanged(ranks: tuple[int, ...]) -> None:
    calls = [last(3, waits=True, ranks=ranks)]
    assert unpacked(packed(calls)) == calls


def recorded(spec: str) -> list[tuple[str, str, tuple[int, ...], int]]:
    """(axis, op, ranks, count) of two steps."""
    _torch.record_calls()
    training = build(spec, num_hidden_layers=2)
    before = len(ring.calls)
    training.train(1)
    new = list(ring.calls)[before:]
    assert all(call.ended is not None for call in new if call.waited is not None)
    return [(call.meeting.axis, call.op, call.meeting.ranks, call.place.partition(":")[0]) for call in new]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("tp=2", {("tp", "all_reduce")}),
        ("dp_shard=2", {("dp_shard", "all_gather"), ("dp_shard", "reduce_scatter"), ("dp_shard", "all_reduce")}),
        ("pp=2", {("pp", "send"), ("pp", "recv")}),
        ("cp=2", {("cp", "send"), ("cp", "recv")}),
    ],
)
def test_a_step_leaves_its_calls_by_axis_alike_on_both_ends(spec: str, wanted: set[tuple[str, str]]) -> None:
    found = pool(2).run(recorded, spec)
    # The world of the pool has been in meshes of other tests, whose names it has as well.
    kinds = {(axis, op) for calls in found for axes, op, _, _ in calls for axis in axes.split("/")}
    assert wanted <= kinds, kinds
    if spec in ("tp=2", "dp_shard=2"):
        assert [call[:3] for call in found[0]] == [call[:3] for call in found[1]]
    assert all(place.endswith(".py") for calls in found for *_, place in calls), found


def stuck(folder: str) -> tuple[str, list[str]]:
    """Rank 1 makes one call less, for a while."""
    _torch.record_calls()
    files = CallFiles(folder)
    mesh = mk.init_mesh("dp_shard=2", device_type="cpu")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3), group=mesh.group)
    work = dist.all_reduce(torch.ones(1000), group=mesh.group, async_op=True) if rank == 0 else None
    if work is not None:
        call = list(ring.calls)[-1]
        call.waited = time.monotonic()  # as inside of wait
    files.write(rank, f"step 3, of rank {rank}")
    said = waits_in(last_calls(), rank)
    time.sleep(1)
    if work is None:
        dist.all_reduce(torch.ones(1000), group=mesh.group)
    else:
        work.wait()
    return said, read_calls(folder).splitlines()


def test_files_of_the_rings_tell_who_was_where(tmp_path: Path) -> None:
    (said, lines), (nothing, _) = pool(2).run(stuck, str(tmp_path))
    assert "dp_shard" in said and said.endswith(" (all_reduce of 4 KB), with rank 1") and nothing == ""
    assert lines[0].startswith("rank 1 has not made call ") and lines[0].endswith(": rank 0 waits in it."), lines
    assert any("rank 1 on" in line and "step 3, of rank 1" in line for line in lines)
    assert any("test_calls.py" in line and "is waited for" in line for line in lines)


def test_a_folder_without_rings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mk.MeshkitError, match=r"has no rank-\*.json"):
        read_calls(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(mk.MeshkitError, match="cannot be written"):
        CallFiles(tmp_path / "file" / "folder")


def test_files_of_a_job_before_are_no_part_of_this_one(tmp_path: Path) -> None:
    """It had a rank more, and its rank 1 was killed in this life before it wrote anything."""
    before = CallFiles(tmp_path)
    for rank in (0, 1, 2):
        before.write(rank, "step 9")
    assert "rank 2 on" in read_calls(tmp_path) and "Left out" not in read_calls(tmp_path)
    CallFiles(tmp_path).write(0, "step 1")
    said = read_calls(tmp_path)
    assert "step 1" in said and "step 9" not in said
    assert "Left out, since they were written before this job began: the files of ranks 1-2." in said


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rank": 0}', '{"rank": 0, "calls": [{"id": 1}], "host": "", "location": ""}']
)
def test_a_file_that_is_no_ring_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(mk.MeshkitError, match=r"rank-0\.json is not what run_main\(main, calls=FOLDER\) writes"):
        read_calls(tmp_path)


def cost(calls: int) -> float:
    """Seconds of a call's record."""
    mesh = mk.init_mesh("dp_shard=2", device_type="cpu")
    _torch.record_calls()
    dist.all_reduce(torch.ones(1), group=mesh.group)
    meeting = list(ring.calls)[-1].meeting
    began = time.perf_counter()
    for _ in range(calls):
        ring.begin(meeting, "all_reduce", 8)
    each_s = (time.perf_counter() - began) / calls
    meeting.count -= calls
    return each_s


@pytest.mark.alone
def test_a_call_is_recorded_in_some_microseconds() -> None:
    assert min(pool(2).run(cost, 5000)) < 20e-6
