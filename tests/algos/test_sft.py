"""Steps that are left and taken up again are the steps of a run that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.algos.sft import sft_phase, sft_steps
from meshkit.models import LLAMA_PLAN
from tests.algos.preference.test_objective import CONFIG, TOKENS, build, pairs
from tests.laws.parity.cases import mesh_for
from tests.recipes.launch import read_losses
from tests.world import pool

TOL_FP64_SUM = 1e-10  # another mesh sums in another order
GIVEN = {"steps": 4, "global_batch": 3, "seq_len": TOKENS, "seed": 0, "lr_kind": "cosine", "warmup_steps": 2}


def learner(axes: str) -> tuple[mk.Run, torch.optim.Optimizer]:
    run = mk.parallelize(build(CONFIG, 0).double(), mesh_for(axes), plan=LLAMA_PLAN, sequence=True)
    return run, mk.adamw(run, lr=1e-2)


def left_and_continued(folder: str) -> tuple[list[bool], dict[int, float]]:
    """Left by one after 2 of 4 steps, on dp; taken up by tp, with the phase of a recipe."""
    chosen, seen, out = [pair.chosen for pair in pairs()], {}, Path(folder)
    first = {"each": lambda step, scalars: seen.update({step: scalars["loss"]}), "leave": lambda: len(seen) == 2}
    with mk.Checkpointer(out / "checkpoints") as checkpoints:
        left = sft_steps(*learner("dp_shard=2"), chosen, checkpoints=checkpoints, **first, **GIVEN)
    run, optimizer = learner("tp=2")
    return [left, sft_phase(run, optimizer, chosen, out, **GIVEN)], seen


def straight() -> list[float]:
    seen: list[float] = []
    run, optimizer = learner("")
    chosen = [pair.chosen for pair in pairs()]
    assert sft_steps(run, optimizer, chosen, each=lambda step, scalars: seen.append(scalars["loss"]), **GIVEN)
    return seen


def test_a_phase_that_is_left_goes_on_where_it_was_on_another_mesh(tmp_path: Path) -> None:
    whole = pool(1).run(straight)[0]
    for done, seen in pool(2).run(left_and_continued, str(tmp_path)):
        assert done == [False, True]
        assert seen == pytest.approx({1: whole[0], 2: whole[1]}, rel=TOL_FP64_SUM)
    assert read_losses(tmp_path) == pytest.approx({3: whole[2], 4: whole[3]}, rel=TOL_FP64_SUM)
