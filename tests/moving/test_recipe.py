"""`--move-at` and `--move-to`: in a job that runs through, and in one that is killed and started again."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.data import Loader
from meshkit.recipes import Session, TrainFlags
from tests.checkpoint.training import CONFIG, ROWS, SEQ_LEN, refusal, tokens
from tests.world import RankError, run_ranks

STEPS = 6
TOL_FP64 = 1e-10  # only the order of summation differs


def train(out: str, flags: dict[str, Any], killed_in: int = 0) -> tuple[str, list[float], dict[str, Any], str]:
    """One start of a recipe: (its mesh in the end, losses, parameters, what it said)."""
    mesh = mk.init_mesh("dp_shard=2")
    with torch.device("meta"):
        model = mk.models.Llama(CONFIG).double()
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    optimizer = mk.adamw(run, lr=1e-2)
    config = TrainFlags(out=Path(out), steps=STEPS, warmup_steps=2, save_every=2, seq_len=SEQ_LEN, **flags)
    scheduler = config.lr_schedule(optimizer)
    loader = Loader(tokens(), seq_len=SEQ_LEN, global_batch=ROWS, seed=0, rank=mesh.data_rank, ranks=mesh.data_ranks)
    losses = []
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session,
    ):
        for step in session.steps():
            loss = run.forward_backward(next(loader))
            if step == killed_in and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss))
            session.stop_clock(tokens=ROWS * SEQ_LEN)
    sizes = {axis: size for axis, size in run.mesh.spec.sizes().items() if size > 1}
    whole = {name: full_tensor(param).clone() for name, param in run.named_parameters()}
    return repr(sizes), losses, whole, said.getvalue()


def test_a_killed_job_moves_when_it_is_started_again(tmp_path: Path) -> None:
    """It was killed after the move, and in the step before it; in the end it is the job that never moved."""
    mk.Strategy(mesh="tp=2").write(tmp_path / "later.toml")
    never = run_ranks(2, train, str(tmp_path / "never"), {})[0]
    for killed_in in (0, 3, 6):
        out = str(tmp_path / f"killed-{killed_in}")
        flags = {"move_at": 3, "move_to": tmp_path / "later.toml", "memory_every": int(killed_in == 6)}
        if killed_in:
            with pytest.raises(RankError):
                run_ranks(2, train, out, flags, killed_in)
        moved = run_ranks(2, train, out, flags)[0]
        assert moved[0] == "{'tp': 2}"
        assert f"move before step {6 if killed_in == 6 else 4}" in moved[3]
        assert moved[1] == pytest.approx(never[1][-len(moved[1]) :], abs=TOL_FP64)
        for name, value in never[2].items():
            torch.testing.assert_close(moved[2][name], value, rtol=0, atol=TOL_FP64)


def refused(out: str, flags: dict[str, Any]) -> str:
    return refusal(lambda: train(out, flags))


def test_what_cannot_be_moved_to_is_refused_when_the_job_starts(tmp_path: Path) -> None:
    for name, strategy in {
        "mesh": mk.Strategy(mesh="tp=4"),
        "parts": mk.Strategy(microbatches=3),
        "stages": mk.Strategy(mesh="pp=2"),
    }.items():
        strategy.write(tmp_path / f"{name}.toml")
    cases = [
        ({"move_at": 3}, "--move-at 3 with no --move-to"),
        (
            {"move_at": STEPS, "move_to": tmp_path / "mesh.toml"},
            f"and --steps {STEPS}. Give a step from 1 to {STEPS - 1}",
        ),
        ({"move_at": 3, "move_to": tmp_path / "none.toml"}, "there is no file"),
        ({"move_at": 3, "move_to": tmp_path / "mesh.toml"}, "mesh tp=4 needs a multiple of 4"),
        ({"move_at": 3, "move_to": tmp_path / "parts.toml"}, "has microbatches=3"),
        ({"move_at": 3, "move_to": tmp_path / "stages.toml"}, "2 stages need at least 2 blocks"),
    ]
    for number, (flags, said) in enumerate(cases):
        for text in run_ranks(2, refused, str(tmp_path / str(number)), flags):
            assert said in text
