"""What a Session owns: where a run goes on, when it evaluates and saves, how it leaves, what its lines hold."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.errors import CorruptionError, StepError
from meshkit.preflight.waits import recording
from meshkit.recipes import Session, StepFlags
from tests.world import RankError, run_ranks


def tiny_run(mesh: mk.Mesh) -> tuple[mk.Run, torch.optim.Optimizer]:
    torch.manual_seed(0)
    run = mk.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, plan=mk.Plan())
    return run, mk.adamw(run, lr=1e-2)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(step))}


def squares(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().sum()


def count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.tensor(len(batch["x"]))


def train(out: str, flags: dict[str, Any], signal_at: int | None = None, **more: Any) -> dict[str, Any]:
    """One call of a recipe: what it did, and said."""
    mesh = mk.init_mesh("dp_shard=-1")
    run, optimizer = tiny_run(mesh)
    config = StepFlags(**{"out": Path(out), "warmup_steps": 0, "lr": 1e-2, "lr_kind": "constant", **flags})
    scheduler = config.lr_schedule(optimizer)
    made, evaluated, saved = [], [], []
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        Session(run, config, optimizer=optimizer, scheduler=scheduler, **more) as session,
    ):
        for step in session.steps():
            loss = run.forward_backward(batch_of(step), loss=squares, count=count)
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm)
            session.stop_clock(tokens=8)
            if session.evaluates(step):
                session.log(held_out=step)
                evaluated.append(step)
            if step == signal_at and mesh.rank == mesh.spec.world_size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if session.saves(step):
                saved.append(step)
            made.append(step)
    return {
        "made": made,
        "evaluated": evaluated,
        "saved": saved,
        "start": session.start,
        "finished": session.finished,
        "stopped": session.stopped,
        "said": said.getvalue(),
    }


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def checkpoints(out: Path) -> list[int]:
    return mk.Checkpointer(out / "checkpoints").steps()


def test_evaluation_and_checkpoints_come_at_their_steps_and_at_the_last(tmp_path: Path) -> None:
    (told,) = run_ranks(1, train, str(tmp_path), {"steps": 7, "eval_every": 3, "save_every": 2, "keep": 3})
    assert told["made"] == [1, 2, 3, 4, 5, 6, 7] and told["finished"] and not told["stopped"]
    assert told["evaluated"] == [3, 6, 7] and told["saved"] == [2, 4, 6, 7]
    assert checkpoints(tmp_path) == [4, 6, 7]  # the newest of --keep
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == told["made"]
    assert [row["step"] for row in rows if "held_out" in row] == told["evaluated"]
    assert {"loss", "grad_norm", "lr", "skipped_steps", "step_s", "tokens_per_s"} <= set(rows[0])


def test_0_steps_between_them_leaves_the_last_alone(tmp_path: Path) -> None:
    (told,) = run_ranks(1, train, str(tmp_path), {"steps": 3, "eval_every": 0, "save_every": 0})
    assert told["evaluated"] == told["saved"] == checkpoints(tmp_path) == [3]


def test_a_run_that_goes_on_is_one_that_never_stopped(tmp_path: Path) -> None:
    run_ranks(1, train, str(tmp_path / "whole"), {"steps": 6})
    run_ranks(1, train, str(tmp_path / "parts"), {"steps": 4})
    (told,) = run_ranks(1, train, str(tmp_path / "parts"), {"steps": 6})
    assert told["start"] == 4 and told["made"] == [5, 6] and "resume from step 4" in told["said"]
    whole, parts = ([(row["loss"], row["lr"]) for row in lines(tmp_path / out)] for out in ("whole", "parts"))
    assert whole == parts
    (told,) = run_ranks(1, train, str(tmp_path / "parts"), {"steps": 6})
    assert told["made"] == [] and not told["finished"] and not told["stopped"]
    assert "has its 6 steps; give more --steps to go on" in told["said"]


def test_a_signal_on_one_rank_ends_all_after_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    first, last = run_ranks(2, train, str(tmp_path), {"steps": 9, "save_every": 100}, 3)
    assert first["made"] == last["made"] == [1, 2, 3]
    assert first["stopped"] and last["stopped"] and not first["finished"]
    assert "a signal on another rank: saved step 3; start again to go on" in first["said"] and not last["said"]
    assert checkpoints(tmp_path) == [3] and [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def train_recorded(out: str, flags: dict[str, Any]) -> list[list[str]]:
    """As on a GPU: (where the host waits) in each step."""
    mesh = mk.init_mesh("dp_shard=-1")
    run, _ = tiny_run(mesh)
    config = StepFlags(**{"out": Path(out), "warmup_steps": 0, "lr": 1e-2, "lr_kind": "constant", **flags})
    waits = []
    with recording(run) as seen, contextlib.redirect_stdout(io.StringIO()):
        optimizer = mk.adamw(run, lr=1e-2)
        with Session(run, config, optimizer=optimizer) as session:
            for step in session.steps():
                waits.append([str(wait) for wait in seen.take().waits])
                loss = run.forward_backward(batch_of(step), loss=squares, count=count)
                norm = mk.clip_grad_norm(run, config.clip)
                if session.guard.allows(run, norm, step=step):
                    optimizer.step()
                optimizer.zero_grad()
                session.log(loss=loss, grad_norm=norm)
                session.stop_clock(tokens=8)
    return waits[2:]


def test_to_log_the_host_does_not_wait_for_the_device(tmp_path: Path) -> None:
    flags = {"steps": 6, "eval_every": 10, "save_every": 10}
    (waits,) = run_ranks(1, train_recorded, str(tmp_path / "recorded"), flags)
    for step in waits:
        assert len(step) == 1 and "faults/nan_guard.py" in step[0], step
    run_ranks(1, train, str(tmp_path / "plain"), flags)
    kept = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in lines(tmp_path / of)]
        for of in ("recorded", "plain")
    ]
    assert len(kept[0]) == 6 and kept[0] == kept[1]


def test_a_session_that_does_not_write_leaves_nothing(tmp_path: Path) -> None:
    (told,) = run_ranks(1, in_folder, str(tmp_path), {"steps": 2, "save_every": 1})
    assert told["made"] == [1, 2] and told["saved"] == [] and told["finished"]
    assert not list(tmp_path.iterdir())


def in_folder(out: str, flags: dict[str, Any]) -> dict[str, Any]:
    return train(out, flags, writes=False)


def forget_the_clock(out: str) -> str:
    run, _ = tiny_run(mk.init_mesh("dp_shard=-1"))
    with Session(run, StepFlags(out=Path(out), steps=2)) as session, pytest.raises(StepError) as error:
        for _ in session.steps():
            pass
    return str(error.value)


def test_a_step_without_an_end_of_its_time_is_refused(tmp_path: Path) -> None:
    (text,) = run_ranks(1, forget_the_clock, str(tmp_path))
    assert "step 1: its time has no end. Call session.stop_clock(tokens=...)" in text


def in_the_place_of_a_file(out: str) -> str:
    run, _ = tiny_run(mk.init_mesh("dp_shard=-1"))
    file = Path(out) / "file"
    file.touch()
    with pytest.raises(mk.errors.DataError) as error:
        Session(run, StepFlags(out=file))
    return str(error.value)


def test_an_out_that_is_a_file_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (text,) = run_ranks(1, in_the_place_of_a_file, str(tmp_path))
    assert "is a file. Give a folder." in text


class State:
    """As a dataflow: a state that all ranks make together."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def train_two(out: str, steps: int) -> tuple[list[int], int, list[float]]:
    """Two runs on one mesh, and a state: (steps made, state at the beginning, both models' sums at the beginning)."""
    mesh = mk.init_mesh("dp_shard=-1")
    runs, state = {name: tiny_run(mesh) for name in ("actor", "critic")}, State()
    parts = {name: (run, optimizer, None) for name, (run, optimizer) in runs.items()}
    made, config = [], StepFlags(out=Path(out), steps=steps, save_every=2, eval_every=1)
    with Session(mesh, config, parts=parts, loader=state) as session:
        begun = state.value, [run.model[0].weight.sum().item() for run, _ in runs.values()]
        for step in session.steps():
            for scale, (run, _) in enumerate(runs.values(), start=1):
                with torch.no_grad():
                    run.model[0].weight.fill_(scale * step)
            state.value = 10 * step
            session.stop_clock(tokens=1)
            made.append(step)
    return made, *begun


def test_several_runs_and_a_state_go_on_from_the_newest_step_that_all_have(tmp_path: Path) -> None:
    ((made, _, _),) = run_ranks(1, train_two, str(tmp_path), 4)
    assert made == [1, 2, 3, 4]
    for file in sorted((tmp_path / "checkpoints" / "critic" / "step-00000004").iterdir()):
        file.unlink()  # the critic has lost its newest
    (tmp_path / "checkpoints" / "critic" / "step-00000004").rmdir()
    ((made, value, sums),) = run_ranks(1, train_two, str(tmp_path), 5)
    assert made == [3, 4, 5] and value == 20 and sums == [16 * 2.0, 16 * 4.0]


def make(step: int, session: Session, run: mk.Run, optimizer: torch.optim.Optimizer, *, flips: bool) -> None:
    """A step; flips: with a bit of a weight changed before the optimizer's."""
    run.forward_backward(batch_of(step), loss=squares, count=count)
    mk.clip_grad_norm(run, 1.0)
    if flips:
        flip_a_bit(next(run.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    session.stop_clock(tokens=8)


def flipped(out: str) -> str:
    """A run in which a bit flips between steps 3 and 4, before there is a checkpoint; it compares every fourth."""
    mesh = mk.init_mesh("dp_shard=-1")
    run, optimizer = tiny_run(mesh)
    config = StepFlags(out=Path(out), warmup_steps=0, lr_kind="constant", steps=8, save_every=20, corruption_every=4)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        Session(run, config, optimizer=optimizer, scheduler=config.lr_schedule(optimizer)) as session,
        pytest.raises(CorruptionError) as raised,
    ):
        for step in session.steps():
            make(step, session, run, optimizer, flips=step == 4 and mesh.rank == 1)
    return str(raised.value)


def test_a_flipped_bit_before_the_first_checkpoint_ends_the_run(tmp_path: Path) -> None:
    for said in run_ranks(2, flipped, str(tmp_path)):
        assert "step 4: silent data corruption since step 0: 0.weight changed on rank 1 while nothing wrote it" in said
    assert checkpoints(tmp_path) == []


class Rows:
    """A loader whose position is state."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> dict[str, torch.Tensor]:
        self.at += 1
        return batch_of(self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def flip_a_bit(tensor: torch.Tensor) -> None:
    raw = local_tensor(tensor).reshape(-1).view(torch.uint8).numpy()
    raw[3] ^= 64


def struck(out: str, at: tuple[int, ...], often: bool = False) -> tuple[list[int], str, list[torch.Tensor]]:
    """Nine steps, of which some have a bit flipped in a weight, the first time they are made, or always: (steps made, what
    was said, weights and moments)."""
    mesh = mk.init_mesh("dp_shard=-1")
    run, optimizer = tiny_run(mesh)
    config = StepFlags(
        out=Path(out), warmup_steps=3, lr=1e-2, lr_kind="cosine", steps=9, save_every=2, corruption_every=10
    )
    scheduler, loader, made, told = config.lr_schedule(optimizer), Rows(), [], list[Any]()
    torch.manual_seed(7 + mesh.rank)
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        mock.patch("meshkit.recipes.session.send_alert", lambda text, kind: told.append((kind, text))),
        Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session,
    ):
        for step in session.steps():
            noise = 1 + torch.rand(1)  # from the generator, whose state is saved
            batch = {"x": next(loader)["x"] * noise}
            loss = run.forward_backward(batch, loss=squares, count=count)
            norm = mk.clip_grad_norm(run, config.clip)
            if step in at and (often or step not in made) and mesh.rank == 1:
                flip_a_bit(next(run.parameters()))
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm)
            session.stop_clock(tokens=8)
            made.append(step)
    assert [kind for kind, _ in told] == (["corrupt"] * len(at) if mesh.rank == 0 else [])
    state: list[Any] = list(run.parameters())
    state += [each for param in run.parameters() for each in optimizer.state[param].values()]
    return made, said.getvalue(), [local_tensor(each).clone() for each in state]


def test_a_run_with_a_flipped_bit_goes_back_and_equals_one_without(tmp_path: Path) -> None:
    calm = run_ranks(2, struck, str(tmp_path / "calm"), ())
    hit = run_ranks(2, struck, str(tmp_path / "hit"), (4, 7))
    assert hit[0][0] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 7, 8, 9]
    assert "step 4: silent data corruption since step 2: 0.weight changed on rank 1" in hit[0][1]
    assert "Going back to step 6, rollback 2 of at most 3." in hit[0][1]
    for (_, _, mine), (_, _, again) in zip(calm, hit, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, again, strict=True))
    names = ("step", "loss", "lr", "grad_norm", "skipped_steps")
    whole, gone_back = ([[row[name] for name in names] for row in lines(tmp_path / out)] for out in ("calm", "hit"))
    assert whole == gone_back
    assert checkpoints(tmp_path / "hit") == checkpoints(tmp_path / "calm")


def test_a_rank_that_is_wrong_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="step 4: silent data corruption since step 2"):
        run_ranks(2, struck, str(tmp_path), (4,), True)
    assert checkpoints(tmp_path) == [2]


def ended_in_its_fifth(out: str) -> None:
    """A run that keeps each step in memory, saves none, and ends in its fifth."""
    mesh = mk.init_mesh("dp_shard=-1")
    run, optimizer = tiny_run(mesh)
    config = StepFlags(out=Path(out), warmup_steps=0, lr_kind="constant", steps=8, save_every=100, memory_every=1)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(RuntimeError, match="enough"),
        Session(run, config, optimizer=optimizer, scheduler=config.lr_schedule(optimizer)) as session,
    ):
        for step in session.steps():
            if step == 5:
                raise RuntimeError("enough")
            make(step, session, run, optimizer, flips=False)


def test_a_run_goes_on_from_memory_which_is_then_on_disk_too(tmp_path: Path) -> None:
    run_ranks(2, ended_in_its_fifth, str(tmp_path))
    assert not [*(tmp_path / "checkpoints").glob("step-*")]
    flags = {"steps": 8, "save_every": 100, "memory_every": 1}
    for told in run_ranks(2, train, str(tmp_path), flags):
        assert told["start"] == 4 and told["made"] == [5, 6, 7, 8]
        assert "resume from step 4 in memory" in told["said"] or not told["said"]
    steps = sorted(each.name for each in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000008"]


def refused_of_parts(out: str, flag: str) -> str:
    mesh = mk.init_mesh("dp_shard=-1")
    run, optimizer = tiny_run(mesh)
    config = StepFlags(out=Path(out), **{flag: 1})  # type: ignore[arg-type]
    with pytest.raises(mk.MeshkitError) as raised:
        Session(mesh, config, parts={"actor": (run, optimizer, None)})
    return str(raised.value)


@pytest.mark.parametrize("flag", ["memory_every", "corruption_every"])
def test_what_looks_after_one_run_is_refused_of_several(tmp_path: Path, flag: str) -> None:
    (said,) = {*run_ranks(2, refused_of_parts, str(tmp_path), flag)}
    assert said == f"--{flag.replace('_', '-')} 1: this recipe trains several runs, and it is of one. Leave it out."


def flipped_in_memory(out: str) -> None:
    """A bit flips after step 4; --memory-every keeps each step, and the guard compares every hundredth."""
    mesh = mk.init_mesh("dp_replicate=2")
    run, optimizer = tiny_run(mesh)
    flags = {"steps": 8, "save_every": 100, "corruption_every": 100, "memory_every": 1}
    config = StepFlags(out=Path(out), warmup_steps=0, lr_kind="constant", **flags)  # type: ignore[arg-type]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(CorruptionError, match="step 5: silent data corruption since step 4"),
        Session(run, config, optimizer=optimizer, scheduler=config.lr_schedule(optimizer)) as session,
    ):
        for step in session.steps():
            make(step, session, run, optimizer, flips=step == 5 and mesh.rank == 1)


def test_what_is_kept_in_memory_was_compared_and_nobody_goes_on_from_a_corrupt_run(tmp_path: Path) -> None:
    run_ranks(2, flipped_in_memory, str(tmp_path))
    assert checkpoints(tmp_path) == []
    for told in run_ranks(2, train, str(tmp_path), {"steps": 2, "save_every": 100, "memory_every": 1}):
        assert told["start"] == 0
