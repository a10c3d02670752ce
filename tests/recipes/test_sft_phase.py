"""An SFT phase that a signal ends and another mesh takes up again makes the steps of one that never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.algos.sft import sft_steps
from meshkit.models import LLAMA_PLAN
from meshkit.recipes import TrainFlags, sft_phase
from tests.algos.preference.test_objective import CONFIG, TOKENS, build, pairs
from tests.laws.parity.cases import mesh_for
from tests.recipes.launch import read_losses
from tests.world import pool, run_ranks

TOL_FP64_SUM = 1e-10  # another mesh sums in another order
SIZES = {"steps": 4, "global_batch": 3, "seq_len": TOKENS, "seed": 0, "lr_kind": "cosine", "warmup_steps": 2}


def learner(axes: str) -> tuple[mk.Run, torch.optim.Optimizer]:
    run = mk.parallelize(build(CONFIG, 0).double(), mesh_for(axes), plan=LLAMA_PLAN, sequence=True)
    return run, mk.adamw(run, lr=1e-2)


def phase(axes: str, folder: str, stop_after: int | None = None) -> bool:
    """Ended after the given step by a signal on the last rank."""
    run, optimizer = learner(axes)
    updates = 0

    def count(*_: object) -> None:
        nonlocal updates
        updates += 1
        if updates == stop_after and run.mesh.rank == run.mesh.spec.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    optimizer.register_step_post_hook(count)
    return sft_phase(run, optimizer, [pair.chosen for pair in pairs()], TrainFlags(out=Path(folder), **SIZES))


def straight() -> list[float]:
    losses: list[float] = []
    run, optimizer = learner("")
    chosen = [pair.chosen for pair in pairs()]
    sft_steps(run, optimizer, chosen, each=lambda step, scalars: losses.append(scalars["loss"]), **SIZES)
    return losses


def test_a_phase_that_is_left_goes_on_where_it_was_on_another_mesh(tmp_path: Path) -> None:
    expected = dict(enumerate(pool(1).run(straight)[0], 1))
    assert run_ranks(2, phase, "dp_shard=2", str(tmp_path), 2) == [False, False]
    assert read_losses(tmp_path) == pytest.approx({1: expected[1], 2: expected[2]}, rel=TOL_FP64_SUM)
    assert run_ranks(2, phase, "tp=2", str(tmp_path)) == [True, True]
    assert read_losses(tmp_path) == pytest.approx(expected, rel=TOL_FP64_SUM)
    assert run_ranks(1, phase, "", str(tmp_path)) == [True]  # nothing is left to do
