"""Ranks of a checkpoint learn of one error together, whatever it is, and a wait that was too long harms nobody else."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import meshkit as mk
from meshkit.checkpoint import Checkpointer, SaveOnSignal, _dcp
from meshkit.errors import DataError, MeshError, MeshkitError
from meshkit.mesh import main_rank_first
from tests.checkpoint.training import build, refusal
from tests.world import pool, run_ranks


class TwoArguments(MeshkitError):
    """Its bytes do not come out as they went in."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def odd_error(kind: str) -> Exception:
    class Local(MeshkitError):
        pass

    if kind == "two arguments":
        return TwoArguments("the", "loader")
    if kind == "local class":
        return Local("the loader")
    error = DataError("the loader")
    vars(error)["lock"] = threading.Lock()
    return error


class Fails:
    """A loader whose state fails once, on one rank."""

    def __init__(self, kind: str, rank: int) -> None:
        self._kind, self._fails = kind, dist.get_rank() == rank

    def state_dict(self) -> dict[str, Any]:
        if self._fails:
            self._fails = False
            raise odd_error(self._kind)
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def refused(folder: str, kind: str, rank: int) -> tuple[str, list[int]]:
    training, loader = build("dp_shard=3"), Fails(kind, rank)
    with Checkpointer(folder, timeout=timedelta(seconds=60)) as checkpointer:
        text = refusal(lambda: checkpointer.save(1, training.run, training.optimizer, loader=loader))
        checkpointer.save(1, training.run, training.optimizer, loader=loader)
    return text, checkpointer.steps()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["two arguments", "local class", "with a lock"])
def test_an_error_that_has_no_bytes_is_the_same_on_every_rank(tmp_path: Path, kind: str, rank: int) -> None:
    ((text, steps),) = {(text, *map(tuple, rest)) for text, *rest in pool(3).run(refused, str(tmp_path), kind, rank)}
    assert f"on rank {rank}: the loader" in text or text == "TwoArguments: the loader"
    assert [*steps] == [1]


def after_a_late_save(folder: str) -> list[str]:
    training, signals = build("dp_shard=3"), SaveOnSignal()
    late, other = Checkpointer(f"{folder}/late", timeout=timedelta(seconds=2)), Checkpointer(f"{folder}/other")
    write = _dcp._Writer.write_data

    slow = mock.patch.object(_dcp._Writer, "write_data", lambda *args: (slow.stop(), time.sleep(4), write(*args))[-1])
    if dist.get_rank() == 1:
        slow.start()
    told = []
    late.save(1, training.run, training.optimizer)
    told.append(refusal(late.wait))
    told.append(str(signals.should_stop(training.run.mesh)))
    for checkpointer in (other, Checkpointer(f"{folder}/new")):
        with checkpointer:
            checkpointer.save(1, training.run, training.optimizer)
        told.append(str(checkpointer.steps()))
    return told


def test_a_save_that_is_too_late_is_lost_alone(tmp_path: Path) -> None:
    for failed, *rest in run_ranks(3, after_a_late_save, str(tmp_path)):
        assert (
            "step 1 was not saved: DistError: between hosts: another rank is gone, or did not come within 2 s" in failed
        )
        assert rest == ["False", "[1]", "[1]"]


def first_fails() -> list[str]:
    told = []
    for number in range(2):
        try:
            with main_rank_first():
                if number == 0 and dist.get_rank() == 0:
                    raise OSError("no disk")
            told.append("done")
        except (OSError, MeshError) as error:
            told.append(str(error))
    return told


def test_what_fails_on_the_first_rank_is_told_to_the_others() -> None:
    first, *others = pool(3).run(first_fails)
    assert first == ["no disk", "done"]
    assert others == [["main_rank_first: on rank 0: OSError: no disk", "done"]] * 2


def open_connections() -> set[str]:
    """Sockets and pipes of this process by name, so that one of another test which closes meanwhile does not count."""
    names = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed again
            names.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in names if name.startswith(("socket:", "pipe:"))}


def connections_left(folder: str) -> list[int]:
    training, left = build("dp_shard=2"), []
    _ = training.run.mesh.host
    before: set[str] = set()
    for number in range(4):
        with Checkpointer(f"{folder}/{number}", memory=mk.checkpoint.InMemory(folder=f"{folder}/ram")) as checkpointer:
            checkpointer.save_in_memory(1, training.run, training.optimizer)
            checkpointer.save(1, training.run, training.optimizer)
        before = before or open_connections()  # what the first one opened for all stays
        left.append(len(open_connections() - before))
    return left


def test_closed_checkpointers_leave_no_connections(tmp_path: Path) -> None:
    assert pool(2).run(connections_left, str(tmp_path)) == [[0, 0, 0, 0]] * 2
