"""In-memory checkpoints: whole or not there, on any mesh bit for bit what was saved, also when a host is gone."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import meshkit as mk
from meshkit.checkpoint import Checkpointer, InMemory
from meshkit.checkpoint.in_memory import Keeper, partners
from meshkit.models import LLAMA_PLAN, Llama
from tests.checkpoint.test_meshes import MESHES, TOL_FP64_SUM, others_of
from tests.checkpoint.training import CONFIG, build, refusal
from tests.depth import thin
from tests.world import pool

Whole = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class How:
    ranks_of_host: int | None = None
    copies: int = 1
    noise: float = 0.0


def keeping(folder: str, copies: int = 1) -> Checkpointer:
    return Checkpointer(folder, memory=InMemory(copies=copies, folder=f"{folder}/ram"))


def on_hosts(ranks_of_host: int | None) -> None:
    """This process is on the host of its rank, by name."""
    host = "host-0" if ranks_of_host is None else f"host-{dist.get_rank() // ranks_of_host}"
    socket.gethostname = lambda: host


def save(folder: str, spec: str, how: How = How()) -> tuple[Whole, list[float], Whole]:
    """Saved after each step, and never closed, as by a kill. (whole state then, loss of the next step, whole state after)."""
    training = build(spec, num_hidden_layers=2)
    on_hosts(how.ranks_of_host)
    checkpointer = keeping(folder, how.copies)
    assert checkpointer.resume(training.run, training.optimizer, **training.holders) == 0
    for step in (1, 2):
        training.train(1, noise=how.noise)
        checkpointer.save_in_memory(step, training.run, training.optimizer, **training.holders)
    checkpointer.wait_in_memory()
    return training.whole_state(), training.train(1, noise=how.noise), training.whole_state()


def resume(folder: str, spec: str, how: How = How()) -> tuple[int, Whole, list[float], Whole]:
    training = build(spec, num_hidden_layers=2, seed=1, lr=0.5)
    on_hosts(how.ranks_of_host)
    training.train(1)  # other moments
    step = keeping(folder, how.copies).resume(training.run, training.optimizer, **training.holders)
    return step, training.whole_state(), training.train(1, noise=how.noise), training.whole_state()


def ram_of(folder: Path, host: str) -> Path:
    with mock.patch("socket.gethostname", lambda: host):
        return Keeper(InMemory(folder=folder / "ram"), folder).folder


def equal(one: Whole, other: Whole) -> bool:
    return one.keys() == other.keys() and all(torch.equal(other[name], value) for name, value in one.items())


@pytest.mark.parametrize("at", thin(range(len(MESHES)), 3))
def test_every_mesh_goes_on_from_what_any_mesh_kept(tmp_path: Path, at: int) -> None:
    ranks, spec = MESHES[at]
    saved, losses, later = pool(ranks).run(save, str(tmp_path), spec)[0]
    for other_ranks, other_spec in others_of(at):
        copy = tmp_path / f"{other_ranks} {other_spec}"  # a resumed job clears what nobody will load any more
        shutil.copytree(tmp_path / "ram", copy)
        for step, loaded, other_losses, other_later in pool(other_ranks).run(resume, str(tmp_path), other_spec):
            assert step == 2
            assert equal(saved, loaded)
            assert other_losses == pytest.approx(losses, rel=TOL_FP64_SUM)
            for name, value in later.items():
                torch.testing.assert_close(other_later[name], value, rtol=0, atol=TOL_FP64_SUM)
        shutil.rmtree(tmp_path / "ram")
        copy.rename(tmp_path / "ram")


@pytest.mark.parametrize("spec", ["dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2", "pp=2 dp_shard=2"])
def test_on_the_same_mesh_going_on_is_bit_for_bit_never_having_stopped(tmp_path: Path, spec: str) -> None:
    told = pool(4).run(save, str(tmp_path), spec, How(noise=0.1))
    again = pool(4).run(resume, str(tmp_path), spec, How(noise=0.1))
    for (saved, losses, later), (step, loaded, other_losses, other_later) in zip(told, again, strict=True):
        assert step == 2
        assert equal(saved, loaded)
        assert losses == other_losses  # with draws of each rank's generator
        assert equal(later, other_later)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_costs_nothing_where_another_has_its_copy(tmp_path: Path, lost: int) -> None:
    saved, losses, _ = pool(4).run(save, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2))[0]
    shutil.rmtree(ram_of(tmp_path, f"host-{lost}"))
    for step, loaded, other_losses, _ in pool(4).run(resume, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2)):
        assert step == 2
        assert equal(saved, loaded)
        assert other_losses == losses


def test_on_fewer_ranks_after_a_lost_host(tmp_path: Path) -> None:
    saved, *_ = pool(4).run(save, str(tmp_path), "dp_shard=4", How(ranks_of_host=2))[0]
    shutil.rmtree(ram_of(tmp_path, "host-1"))
    for step, loaded, *_ in pool(2).run(resume, str(tmp_path), "dp_shard=2", How(ranks_of_host=2)):
        assert step == 2
        assert equal(saved, loaded)


def test_more_hosts_lost_than_copies_is_as_if_nothing_was_kept(tmp_path: Path) -> None:
    pool(4).run(save, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2, copies=0))
    shutil.rmtree(ram_of(tmp_path, "host-1"))
    told = pool(4).run(resume, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2, copies=0))
    assert {step for step, *_ in told} == {0}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_not_loaded_but_a_copy_or_the_step_before(tmp_path: Path) -> None:
    saved, *_ = pool(4).run(save, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2))[0]
    newest = [
        next(ram_of(tmp_path, host).glob("rank-00000.*.1.data"))  # of step 2
        for host in ("host-0", "host-1")
    ]
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "ram", kept)
    flip(newest[0])
    step, loaded, *_ = pool(4).run(resume, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2))[0]
    assert step == 2
    assert equal(saved, loaded)
    shutil.rmtree(tmp_path / "ram")
    kept.rename(tmp_path / "ram")
    for path in newest:
        flip(path)
    told = pool(4).run(resume, str(tmp_path), "dp_shard=2 tp=2", How(ranks_of_host=2))
    assert {step for step, *_ in told} == {1}


@pytest.mark.parametrize("change", ["truncated", "header", "other rank", "half written"])
def test_what_is_not_whole_is_not_loaded(tmp_path: Path, change: str) -> None:
    pool(2).run(save, str(tmp_path), "dp_shard=2")
    data, header = (next(ram_of(tmp_path, "host-0").glob(f"rank-00001.*.1.{kind}")) for kind in ("data", "json"))
    if change == "truncated":
        data.write_bytes(data.read_bytes()[:-64])
    elif change == "header":
        header.write_bytes(header.read_bytes().replace(b'"step": 2', b'"step": 9'))
    elif change == "other rank":
        shutil.copy(next(data.parent.glob("rank-00000.*.1.data")), data)
    else:
        header.unlink()
    assert {step for step, *_ in pool(2).run(resume, str(tmp_path), "dp_shard=2")} == {1}


def go_on(folder: str, spec: str) -> list[int]:
    """Steps that a second and a third life resume at, the second of which went on for a step that one rank did not end."""
    training = build(spec, num_hidden_layers=2)
    on_hosts(None)
    second = keeping(folder)
    steps = [second.resume(training.run, training.optimizer, **training.holders)]
    training.train(1)
    second.save_in_memory(3, training.run, training.optimizer, **training.holders)
    second.wait_in_memory()
    if dist.get_rank() == 1:
        for path in Path(folder, "ram").glob("*/rank-00001.*.json"):
            if '"step": 3' in path.read_text():
                path.unlink()
    dist.barrier()
    steps.append(keeping(folder).resume(training.run, training.optimizer, **training.holders))
    steps.append(len([*Path(folder, "ram").glob("*/*.data")]))
    return steps


def test_what_was_loaded_stays_until_something_newer_is_whole_on_every_rank(tmp_path: Path) -> None:
    pool(2).run(save, str(tmp_path), "dp_shard=2")
    (host,) = (tmp_path / "ram").iterdir()
    slots = len([*host.glob("*.data")])
    assert pool(2).run(go_on, str(tmp_path), "dp_shard=2") == [[2, 2, slots // 2]] * 2  # no more than was loaded


def on_disk_too(folder: str, spec: str) -> list[object]:
    training = build(spec, num_hidden_layers=2)
    on_hosts(None)
    seen: list[object] = []
    with keeping(folder) as checkpointer:
        for step in (1, 2, 3):
            training.train(1)
            if step == 2:
                checkpointer.save(step, training.run, training.optimizer, **training.holders)
            checkpointer.save_in_memory(step, training.run, training.optimizer, **training.holders)
        checkpointer.wait()
        again = keeping(folder)
        again._lease = checkpointer._lease  # of the same job
        seen.append(again.resume(training.run, training.optimizer, **training.holders))  # memory is newer
        # Going back by hand: what is newer in memory is not the run's any more.
        seen.append(again.load(training.run, training.optimizer, step=2, **training.holders))
        seen.append(keeping(folder).resume(training.run, training.optimizer, **training.holders))
    seen.append([path.name for path in Path(folder, "ram").iterdir()])  # a clean end gives the memory back
    return seen


def test_the_newest_of_memory_and_disk_and_what_was_given_up_is_never_loaded(tmp_path: Path) -> None:
    assert pool(2).run(on_disk_too, str(tmp_path), "dp_shard=2") == [[3, 2, 2, []]] * 2


def test_another_folder_of_the_same_name_has_no_memory(tmp_path: Path) -> None:
    pool(2).run(save, str(tmp_path), "dp_shard=2")
    (tmp_path / ".in-memory.json").unlink()  # with the folder: somebody begins anew
    assert {step for step, *_ in pool(2).run(resume, str(tmp_path), "dp_shard=2")} == {0}


def refused(folder: str, what: str) -> str:
    training = build("dp_shard=2")
    on_hosts(None)
    training.train(1)
    state = (training.run, training.optimizer)
    if what == "again":
        checkpointer = keeping(folder)
        checkpointer.save_in_memory(2, *state)
        return refusal(lambda: checkpointer.save_in_memory(2, *state))
    if what == "none":
        return refusal(lambda: Checkpointer(folder).save_in_memory(1, *state))
    reserve = os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        os.posix_fallocate = full if dist.get_rank() == 1 else reserve
        return refusal(lambda: keeping(folder).save_in_memory(1, *state))
    finally:
        os.posix_fallocate = reserve


def test_refusals_are_the_same_on_every_rank(tmp_path: Path) -> None:
    (none,) = {*pool(2).run(refused, str(tmp_path), "none")}
    assert none == (
        "CheckpointError: save_in_memory(): this Checkpointer keeps nothing there. Give it memory=InMemory()."
    )
    (again,) = {*pool(2).run(refused, str(tmp_path), "again")}
    assert again == (
        "CheckpointError: save_in_memory(step=2): step 2 is there already. Steps increase from save to save."
    )
    (full,) = {*pool(2).run(refused, str(tmp_path), "full")}
    assert full.startswith("CheckpointError: InMemory: ")
    assert "No space left in " in full
    with pytest.raises(mk.MeshkitError, match=r"InMemory\(copies=-1\): keep 0 or more"):
        InMemory(copies=-1)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.integers(0, 5))
def test_copies_are_on_other_hosts_each_on_one_of_its_own(hosts: list[str], copies: int) -> None:
    rounds = partners(hosts, copies)
    assert len(rounds) == min(copies, len({*hosts}) - 1)
    for rank, host in enumerate(hosts):
        keepers = [hosts[row[rank]] for row in rounds]
        assert host not in keepers
        assert len({*keepers}) == len(keepers)


def reserved(folder: str, spec: str) -> tuple[int, int]:
    """Bytes that this rank's slots take, and by the policy."""
    training = build(spec, num_hidden_layers=2)
    on_hosts(None)
    checkpointer = keeping(folder)
    for step in (1, 2):
        training.train(1)
        checkpointer.save_in_memory(step, training.run, training.optimizer)
    checkpointer.wait_in_memory()
    taken = sum(path.stat().st_size for path in Path(folder, "ram").glob(f"*/rank-{dist.get_rank():05d}.*.data"))
    return taken, InMemory(copies=0).bytes_of(training.run, training.optimizer)


def test_the_estimate_is_what_the_slots_take(tmp_path: Path) -> None:
    spec = "dp_replicate=2 dp_shard=2"
    for rank, (taken, told) in enumerate(pool(4).run(reserved, str(tmp_path), spec)):
        assert taken == told
        model = Llama(replace(CONFIG, num_hidden_layers=2)).double()
        coordinate = {"dp_replicate": rank // 2, "dp_shard": rank % 2}
        shape = {"rows": 1, "seq_len": 8, "coordinate": coordinate, "kernels": "cpu"}
        estimated = mk.estimate(model, spec, plan=LLAMA_PLAN, in_memory=InMemory(copies=2), **shape)
        assert estimated.in_memory_bytes == 3 * taken
        assert "checkpoints there" in str(estimated)
