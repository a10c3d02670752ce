"""A signal that reaches one rank stops all of them after the same step, with a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from meshkit.checkpoint import Checkpointer, SaveOnSignal
from tests.checkpoint.training import build
from tests.world import pool


def train_until_signal(folder: str, number: signal.Signals, struck: int) -> tuple[int, str | None, bool]:
    """(step of the checkpoint, the signal this rank saw, whether the old handlers are back)."""
    before = [signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1)]
    training = build("dp_shard=-1")
    with Checkpointer(folder) as checkpointer, SaveOnSignal() as signals:
        for step in range(1, 6):
            training.train(1)
            if step == 3 and dist.get_rank() == struck:
                os.kill(os.getpid(), number)
            if signals.should_stop(training.run.mesh):
                checkpointer.save(step, training.run, training.optimizer, **training.holders)
                break
    after = [signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1)]
    return checkpointer.latest() or 0, signals.received, before == after


@pytest.mark.parametrize(
    ("ranks", "number", "struck"), [(2, signal.SIGUSR1, 1), (4, signal.SIGTERM, 2), (1, signal.SIGTERM, 0)]
)
def test_a_signal_on_one_rank_stops_all_after_the_same_step(
    tmp_path: Path, ranks: int, number: signal.Signals, struck: int
) -> None:
    results = pool(ranks).run(train_until_signal, str(tmp_path), number, struck)
    assert results == [(3, number.name if rank == struck else None, True) for rank in range(ranks)]


def no_signal(folder: str) -> list[bool]:
    training = build("dp_shard=-1")
    with SaveOnSignal() as signals:
        return [signals.should_stop(training.run.mesh) for _ in range(3)]


def test_without_a_signal_nobody_stops(tmp_path: Path) -> None:
    assert pool(2).run(no_signal, str(tmp_path)) == [[False] * 3] * 2
