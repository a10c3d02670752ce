"""One job at a time in a folder: the second is refused, and a dead one's lease is taken over at once."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from meshkit.checkpoint import Checkpointer, _lease
from meshkit.checkpoint._lease import LEASE, Holder, take
from meshkit.errors import CheckpointError
from tests.checkpoint.training import build, refusal
from tests.world import CONTEXT, fork, pool


def hold(folder: str, connection: Any, start: float = 0.0) -> None:
    """Try to take the folder at a time, say how it went, and keep it until told."""
    time.sleep(max(0.0, start - time.time()))
    try:
        lease = take(Path(folder))
        connection.send("held")
    except CheckpointError as error:
        lease = None
        connection.send(str(error))
    connection.poll(60)
    if lease is not None:
        lease.release()


def holding(folder: Path, start: float = 0.0) -> tuple[Any, Any]:
    here, there = CONTEXT.Pipe()
    return fork(hold, str(folder), there, start, daemon=True), here


def hear(connection: Any) -> str:
    assert connection.poll(60)
    said: str = connection.recv()
    return said


def test_the_second_job_is_refused_with_host_pid_and_start_and_takes_over_once_the_first_is_killed(
    tmp_path: Path,
) -> None:
    process, connection = holding(tmp_path)
    assert hear(connection) == "held"
    began = time.monotonic()
    with pytest.raises(
        CheckpointError,
        match=rf"held by another job: pid {process.pid} on {re.escape(os.uname().nodename)}, which began at 20",
    ):
        take(tmp_path)
    process.kill()
    while (
        True
    ):  # a killed process is there until it has no memory any more, and then a zombie until somebody asks for it
        try:
            lease = take(tmp_path)
            break
        except CheckpointError:
            assert time.monotonic() - began < 20
            time.sleep(0.05)
    process.join(10)
    lease.release()
    assert not list(tmp_path.iterdir())


def test_of_many_that_find_a_dead_lease_one_takes_it(tmp_path: Path) -> None:
    process, connection = holding(tmp_path)
    assert hear(connection) == "held"
    process.kill()
    process.join(10)
    start = time.time() + 0.5
    jobs = [holding(tmp_path, start) for _ in range(6)]
    heard = [hear(connection) for _, connection in jobs]
    assert sorted(said == "held" for said in heard) == [False] * 5 + [True]
    for process, connection in jobs:
        connection.send("go")
        process.join(20)
    assert not list(tmp_path.iterdir())


def written(folder: Path, **changes: Any) -> Path:
    """The lease of a holder like this process, but for the changes."""
    path = folder / LEASE
    path.write_text(json.dumps(asdict(replace(_lease._own(), **changes))))
    return path


@pytest.mark.parametrize("changes", [{"started": 1}, {"pid": 2**22 + 1}])
def test_a_process_that_has_the_number_of_a_dead_one_is_not_the_holder(tmp_path: Path, changes: dict[str, int]) -> None:
    written(tmp_path, **changes)
    lease = take(tmp_path)
    found = json.loads((tmp_path / LEASE).read_text())
    assert found["pid"] == os.getpid() and all(found[key] != value for key, value in changes.items())
    lease.release()


def test_a_holder_on_another_machine_is_judged_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lease, "SILENT_S", 2.0)
    monkeypatch.setattr(_lease, "BEAT_S", 0.2)
    path = written(tmp_path, machine="another", host="host-b")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.2):
            os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        with pytest.raises(
            CheckpointError, match=r"held by another job: pid \d+ on host-b, .* another machine after 2 s"
        ):
            take(tmp_path)
    finally:
        ended.set()
        thread.join(10)
    began = time.monotonic()
    take(tmp_path).release()  # silent now: waited for, and no longer than that
    assert time.monotonic() - began < 10
    path = written(tmp_path, machine="another", host="host-b")
    os.utime(path, (0, 0))
    began = time.monotonic()
    take(tmp_path).release()
    assert time.monotonic() - began < 1.5


def test_a_lease_that_nobody_can_read_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lease, "SILENT_S", 0.5)
    for content in (b"", b"\0" * 99, b"[1]", b'{"pid": 1}'):
        (tmp_path / LEASE).write_bytes(content)
        lease = take(tmp_path)
        assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()
        lease.release()


def test_the_holder_beats_and_a_second_user_of_the_same_process_shares_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lease, "BEAT_S", 0.05)
    first, second = take(tmp_path), take(tmp_path)
    os.utime(tmp_path / LEASE, (0, 0))
    until = time.monotonic() + 20
    while not (tmp_path / LEASE).stat().st_mtime:
        assert time.monotonic() < until
        time.sleep(0.02)
    first.release()
    second.check()
    written(tmp_path, machine="another", host="host-b", token="theirs")
    with pytest.raises(CheckpointError, match=r"is not this job's any more: it is held by pid \d+ on host-b"):
        second.check()
    second.release()
    assert (tmp_path / LEASE).exists()  # the other job's


def forked(folder: str, connection: Any) -> None:
    lease = take(Path(folder))
    child = os.fork()
    if not child:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    connection.send((Path(folder) / LEASE).exists())


def test_a_forked_child_leaves_the_lease_of_its_parent(tmp_path: Path) -> None:
    here, there = CONTEXT.Pipe()
    process = fork(forked, str(tmp_path), there, daemon=True)
    assert here.poll(60) and here.recv() is True
    process.join(20)


def two_jobs(folder: str, how: str) -> str:
    training = build("dp_shard=2")
    with Checkpointer(folder) as checkpointer:
        if how == "save":
            return refusal(lambda: checkpointer.save(1, training.run, training.optimizer, **training.holders))
        if how == "overtaken":
            checkpointer.resume(training.run, training.optimizer, **training.holders)
            if training.run.mesh.rank == 0:
                written(Path(folder), token="theirs", host="host-b")
            return refusal(lambda: checkpointer.save(1, training.run, training.optimizer, **training.holders))
        return refusal(lambda: checkpointer.resume(training.run, training.optimizer, **training.holders))


def test_every_rank_of_the_second_job_says_who_holds_the_folder(tmp_path: Path) -> None:
    lease = take(tmp_path)
    for how in ("save", "resume"):
        said = set(pool(2).run(two_jobs, str(tmp_path), how))
        assert len(said) == 1
        assert f"{tmp_path} is held by another job: pid {os.getpid()} on " in said.pop()
    lease.release()
    assert pool(2).run(two_jobs, str(tmp_path), "save") == ["no error"] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001"]
    assert pool(2).run(two_jobs, str(tmp_path / "new"), "overtaken")[0].startswith("CheckpointError: ")


def test_a_folder_that_cannot_be_written_is_read_without_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshkit.checkpoint._checkpointer.take", refuse)  # root may write anywhere
    assert Checkpointer(tmp_path)._held_latest() is None
    assert isinstance(_lease._own(), Holder)
