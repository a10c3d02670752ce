"""A world whose groups are of the device alone, as NCCL: what hosts tell each other goes beside, all else on the device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.checkpoint import SaveOnSignal
from meshkit.core import _torch
from tests.checkpoint import test_in_memory as in_memory
from tests.device.world import run
from tests.recipes.small import RECIPES, flags_of, step_of, write_inputs

HOW = in_memory.How(ranks_of_host=2)


def kept(folder: str, spec: str) -> tuple[str, dict[str, torch.Tensor], list[float]]:
    saved, losses, _ = in_memory.save(folder, spec, HOW)
    return mk.init_mesh(spec).device.type, {name: value.cpu() for name, value in saved.items()}, losses


def resumed(folder: str, spec: str) -> tuple[int, dict[str, torch.Tensor], list[float]]:
    step, loaded, losses, _ = in_memory.resume(folder, spec, HOW)
    return step, {name: value.cpu() for name, value in loaded.items()}, losses


def test_memory_of_a_lost_host_comes_from_another_by_way_of_the_device(tmp_path: Path) -> None:
    told = run(4, kept, str(tmp_path), "dp_shard=2 tp=2")
    assert {device for (device, *_), races in told} == {"late"}
    (_, saved, losses), _ = told[0]
    shutil.rmtree(in_memory.ram_of(tmp_path, "host-1"))
    for (step, loaded, other_losses), races in run(4, resumed, str(tmp_path), "dp_shard=2 tp=2"):
        assert step == 2 and not races
        assert in_memory.equal(saved, loaded)
        assert other_losses == losses


def asked() -> tuple[list[str], bool]:
    mesh = mk.init_mesh("dp_shard=2")
    with SaveOnSignal() as signals:
        signals.received = "SIGTERM" if dist.get_rank() else None
        return [*map(str, _torch.world()._device_types)], signals.should_stop(mesh)


def test_the_world_has_no_group_for_tensors_of_the_host() -> None:
    assert run(2, asked) == [((["late"], True), [])] * 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.gate
@pytest.mark.turns(8)
@pytest.mark.parametrize("mesh", ["tp", "pp", "ep", "cp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_send_nothing_of_the_host(recipe: str, mesh: str, inputs: Path, tmp_path: Path) -> None:
    # In fp32: packed rows in bf16 have a kernel of CUDA's alone.
    flags = [*flags_of(recipe, mesh, inputs, tmp_path / "out"), "--precision", "fp32"]
    assert run(2, step_of, recipe, flags) == [(None, [])] * 2
