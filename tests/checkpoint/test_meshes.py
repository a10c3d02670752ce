"""A checkpoint of any mesh loads onto any other: every parameter and every moment, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from meshkit.checkpoint import Checkpointer
from meshkit.checkpoint._state import parts_to_write
from meshkit.core.model_state import model_tensors
from meshkit.models import Llama
from tests.checkpoint.training import CONFIG, build, saved_run
from tests.depth import DEEP, thin
from tests.world import pool

MESHES = [
    (4, "dp_shard=2 tp=2"),
    (4, "tp=4"),
    (4, "dp_replicate=2 tp=2"),
    (4, "cp=2 tp=2"),
    (3, "cp=3"),
    (2, "dp_shard=2"),
    (1, ""),
]
TOL_FP64_SUM = 1e-9  # an AdamW step on; only the order of summation differs


def save(folder: str, spec: str, tied: bool) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """(whole state at the save, loss of the next step, whole state after it)."""
    training = build(spec, tie_word_embeddings=tied)
    training.train(2)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, training.run, training.optimizer, **training.holders)
    return training.whole_state(), training.train(1), training.whole_state()


def load(folder: str, spec: str, tied: bool) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    training = build(spec, tie_word_embeddings=tied, seed=1, lr=0.5)
    Checkpointer(folder).load(training.run, training.optimizer, **training.holders)
    return training.whole_state(), training.train(1), training.whole_state()


def others_of(at: int) -> list[tuple[int, str]]:
    """The meshes that load what mesh `at` saved; by default three of the seven, so that each loads what three saved."""
    return MESHES if DEEP else [MESHES[(at + step) % len(MESHES)] for step in (0, 1, 3)]


@pytest.mark.parametrize(("at", "tied"), thin([(0, False), *((at, True) for at in range(len(MESHES)))], 4))
def test_every_mesh_continues_what_any_mesh_saved(tmp_path: Path, at: int, tied: bool) -> None:
    ranks, spec = MESHES[at]
    saved, losses, later = pool(ranks).run(save, str(tmp_path), spec, tied)[0]
    assert len(saved) == 4 * len(list(Llama(CONFIG).parameters())) + (0 if tied else 4)  # a moment per name and key
    for other_ranks, other_spec in others_of(at):
        for loaded, other_losses, other_later in pool(other_ranks).run(load, str(tmp_path), other_spec, tied):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
            assert other_losses == pytest.approx(losses, rel=TOL_FP64_SUM)
            for name, value in later.items():
                torch.testing.assert_close(other_later[name], value, rtol=0, atol=TOL_FP64_SUM)


def test_keys_are_the_names_of_the_model_on_one_device(tmp_path: Path) -> None:
    pool(4).run(saved_run, str(tmp_path), "dp_shard=2 tp=2")
    names = [name for name, _ in Llama(CONFIG).named_parameters()]
    shapes = {name: param.shape for name, param in Llama(CONFIG).named_parameters()}
    entries = FileSystemReader(tmp_path / "step-00000002").read_metadata().state_dict_metadata
    expected = {f"model.{name}" for name in names}
    expected |= {f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    expected |= {f"rng.{rank}.cpu" for rank in range(4)}
    assert entries.keys() == expected
    for name, shape in shapes.items():
        assert entries[f"model.{name}"].size == entries[f"optimizer.{name}.exp_avg"].size == shape


def elements_to_write(spec: str) -> tuple[int, int]:
    """(elements of the model that this rank copies and writes, elements of the model)."""
    model = build(spec, num_hidden_layers=4).run.model
    parts = parts_to_write(model_tensors(model))
    return sum(part.tensor.numel() for part in parts.values()), sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("spec", ["dp_replicate=4", "dp_replicate=2 tp=2", "dp_shard=2 tp=2"])
def test_each_element_is_copied_and_written_by_one_rank_and_the_work_is_shared(spec: str) -> None:
    written, totals = zip(*pool(4).run(elements_to_write, spec), strict=True)
    assert sum(written) == totals[0]
    assert max(written) < 0.5 * totals[0]
