"""kill -9 of one rank at any moment loses no completed checkpoint."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from meshkit.checkpoint import Checkpointer
from tests.checkpoint.training import build
from tests.world import RankError, World, pool

KILLS = 10
SAVE_EVERY = 2
WAIT_S = 60.0  # for anything; none takes a tenth of it


def train_for_ever(folder: str) -> None:
    """The recipe's loop: resume, train, save now and then; it ends when it is killed."""
    training = build("dp_shard=2")
    checkpointer = Checkpointer(folder, keep=2)
    step = checkpointer.resume(training.run, training.optimizer, **training.holders)
    while True:
        training.train(1, noise=0.1)
        step += 1
        if step % SAVE_EVERY == 0:
            checkpointer.save(step, training.run, training.optimizer, **training.holders)


def whole_after(folder: str) -> tuple[int, dict[str, Tensor]]:
    training = build("dp_shard=2", seed=1)
    step = Checkpointer(folder).load(training.run, training.optimizer, **training.holders)
    return step, training.whole_state()


def whole_of_straight_run(steps: int) -> dict[str, Tensor]:
    training = build("dp_shard=2")
    training.train(steps, noise=0.1)
    return training.whole_state()


def wait_for(condition: Callable[[], bool], world: World) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        assert world.alive
        time.sleep(0.002)


def test_ten_kills_lose_no_completed_checkpoint_and_change_no_value(tmp_path: Path) -> None:
    rng = random.Random(0)
    checkpointer = Checkpointer(tmp_path)
    cut_short = 0
    for kill in range(KILLS):
        done = checkpointer.latest() or 0
        world = World(2)
        errors: list[str] = []
        runner = threading.Thread(target=run_until_killed, args=(world, str(tmp_path), errors))
        runner.start()
        # Every other kill falls inside a save, the rest at random after the first completed one.
        wait_for(lambda done=done: (checkpointer.latest() or 0) > done, world)
        time.sleep(rng.uniform(0, 0.2))
        if kill % 2 == 0:
            wait_for(lambda: any(tmp_path.glob(".incomplete-*")), world)
            time.sleep(rng.uniform(0, 0.02))
        seen = checkpointer.steps()
        os.kill(world._processes[rng.randrange(2)].pid, signal.SIGKILL)
        runner.join(WAIT_S)
        assert not runner.is_alive()
        assert "ended by signal 9" in errors[0]
        assert max(checkpointer.steps()) >= max(seen)
        cut_short += any(tmp_path.glob(".incomplete-*"))
    assert cut_short >= 3  # the drill did hit saves
    step, loaded = pool(2).run(whole_after, str(tmp_path))[0]
    assert step == checkpointer.latest()
    straight = pool(2).run(whole_of_straight_run, step)[0]
    assert all(torch.equal(loaded[name], value) for name, value in straight.items())


def run_until_killed(world: World, folder: str, errors: list[str]) -> None:
    try:
        world.run(train_for_ever, folder, timeout_s=WAIT_S)
    except RankError as error:
        errors.append(str(error))
