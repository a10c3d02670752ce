"""A full disk says so: files that lead to /dev/full, and a limit of a file's size, as any user, in a container or not."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.checkpoint import Checkpointer, _folder
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.data import TokenWriter
from meshkit.errors import CheckpointError, DataError
from meshkit.models import Llama
from tests.checkpoint.training import CONFIG, build, refusal
from tests.world import pool

WORDS = r"No space left in .*: [\d,]+ bytes needed, .*[\d,]+ bytes"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Python ignores the signal of the limit, so that a write fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_room_for(name: str) -> Iterator[None]:
    """The save's file of this name leads to /dev/full, where a write fails with ENOSPC."""
    make = _folder.make_temporary

    def made(folder: Path, step: int) -> Path:
        temporary = make(folder, step)
        (temporary / name).symlink_to("/dev/full")
        return temporary

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder, "make_temporary", made)
        yield


def save_without_room(folder: str, name: str | None) -> tuple[str, list[str], list[int]]:
    """(what the save says, what is in the folder then, the steps after the next save)"""
    training = build("dp_shard=2")
    with Checkpointer(folder, asynchronous=False) as checkpointer:

        def save(step: int) -> None:
            checkpointer.save(step, training.run, training.optimizer, **training.holders)

        checkpointer.resume(training.run, None)  # makes the group, which has a file of its own
        training.train(1)
        with no_room_for(name) if name else files_of_at_most(4096):
            said = refusal(lambda: save(1))
        left = sorted(entry.name for entry in Path(folder).iterdir() if "step" in entry.name)
        torch.distributed.barrier()
        save(2)
    return said, left, checkpointer.steps()


@pytest.mark.parametrize("name", ["__1_0.distcp", "__0_0.distcp", ".metadata.tmp", "index.json", "state.json", None])
def test_a_save_says_how_much_room_there_is_on_every_rank_and_leaves_nothing(tmp_path: Path, name: str | None) -> None:
    results = pool(2).run(save_without_room, str(tmp_path), name)
    assert len({said for said, *_ in results}) == 1
    said, left, after = results[0]
    assert re.match(r"CheckpointError: writing \S+step-00000001.*: No space left in .*[\d,]+ bytes", said), said
    assert "\n" not in said
    if name is None or name.endswith(".distcp"):
        assert re.search(WORDS, said)
    assert not left
    assert after == [2]


def test_a_token_file_says_it_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    for count in (10, 1 << 20):  # while it is closed, and while it is written
        (tmp_path / f"a.tokens.{os.getpid()}.partial").symlink_to("/dev/full")
        with (
            pytest.raises(DataError, match=f"writing .*a.tokens so far: {WORDS}"),
            TokenWriter(path, vocab_size=300, tokenizer="t") as writer,
        ):
            writer.add(np.zeros(count, dtype=np.int64))
        assert not list(tmp_path.iterdir())


def export(folder: str) -> str:
    torch.manual_seed(0)
    run = mk.parallelize(Llama(CONFIG), mk.init_mesh("dp_shard=2"), plan=mk.models.LLAMA_PLAN)
    with files_of_at_most(4096):
        return refusal(lambda: mk.models.save_pretrained(run.model, CONFIG, folder, max_shard_bytes=8000))


def test_an_export_says_it_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    results = pool(2).run(export, str(tmp_path / "out"))
    assert len(set(results)) == 1
    assert re.search(rf"out was not written: writing model-00001\S+safetensors: {WORDS}", results[0]), results[0]
    assert not list(tmp_path.iterdir())


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="writing: No space left"),
        telling_of_a_full_disk(CheckpointError, "writing", tmp_path),
        open("/dev/full", "wb", 0) as full,
    ):
        full.write(b"x")
    with pytest.raises(FileNotFoundError), telling_of_a_full_disk(CheckpointError, "writing", tmp_path):
        (tmp_path / "none").read_bytes()
