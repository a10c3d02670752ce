"""What a file of the reference's log-probabilities holds is what the reference says, and it is of nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import meshkit as mk
from meshkit.algos.preference import folder_fingerprint, stored_reference
from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.data import ExampleLoader
from meshkit.data.examples import Pair
from meshkit.errors import DataError
from meshkit.models import LLAMA_PLAN
from tests.algos.preference.test_objective import CONFIG, PAIRS, TOKENS, alone, build, pairs
from tests.laws.parity.cases import mesh_for
from tests.world import pool

TOL_FP32 = 1e-6  # relative: the file has fp32 numbers


def stored_and_live(axes: str, folder: str) -> tuple[list[list[float]], float]:
    """(values of each example's learnt tokens, largest difference from live ones in a batch of the loader)."""
    mesh = mesh_for(axes)
    run = mk.parallelize(build(CONFIG, 0), mesh, plan=LLAMA_PLAN, sequence=True)
    given = {"made_of": {"model": "seed 0"}, "seq_len": TOKENS, "rows": 2}
    first = stored_reference(run, pairs(), Path(folder) / "reference", **given)
    again = stored_reference(run, pairs(), Path(folder) / "reference", **given)
    values = [[side.token_values[REFERENCE] for pair in made for side in pair] for made in (first, again)]
    assert all(np.array_equal(one, two) for one, two in zip(*values, strict=True))
    assert all(isinstance(pair, Pair) for pair in again)
    loader = ExampleLoader(
        again, seq_len=TOKENS, global_batch=PAIRS, seed=0, rank=mesh.data_rank, ranks=mesh.data_ranks, packing="step"
    )
    batch = next(loader)
    live = token_values(run, {name: value for name, value in batch.items() if name != REFERENCE})
    difference = (live - batch[REFERENCE]).abs().max().item() if live.numel() else 0.0
    return [value.tolist() for value in values[0]], difference


@pytest.mark.parametrize("axes", ["dp_shard=2", "cp=2", "pp=2"])
def test_stored_values_are_the_live_ones_and_those_of_one_device(axes: str, tmp_path: Path) -> None:
    model, expected = build(CONFIG, 0), []
    for example in (side for pair in pairs() for side in pair):
        given = alone(example)
        log_probs = model(given["input_ids"])[0].log_softmax(-1)
        picked = log_probs.gather(-1, given["labels"][0].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        expected.append(torch.where(given["labels"][0] == -100, 0.0, picked).tolist())
    for found, difference in pool(2).run(stored_and_live, axes, str(tmp_path)):
        assert difference < TOL_FP32 * 100
        for own, theirs in zip(found, expected, strict=True):
            assert own[0] == 0 and own[1:] == pytest.approx(theirs, rel=TOL_FP32)


def refused(folder: str) -> list[str]:
    run = mk.parallelize(build(CONFIG, 0), mesh_for("dp_shard=2"), plan=LLAMA_PLAN)
    path, given = Path(folder) / "reference", {"seq_len": TOKENS}
    stored_reference(run, pairs(), path, made_of={"model": "a", "template": "t"}, **given)
    told = []
    for units, made_of in (
        (pairs(), {"model": "b", "template": "t"}),
        (pairs()[1:], {"model": "a", "template": "u"}),
        (pairs()[1:], {"model": "a", "template": "t"}),
    ):
        with pytest.raises(DataError) as error:
            stored_reference(run, units, path, made_of=made_of, **given)
        told.append(str(error.value))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path.write_bytes(b"nothing")
    with pytest.raises(DataError) as error:
        stored_reference(run, pairs(), path, made_of={}, **given)
    return [*told, str(error.value)]


def test_a_file_of_something_else_is_refused_on_every_rank(tmp_path: Path) -> None:
    for model, template, examples, damaged in pool(2).run(refused, str(tmp_path)):
        assert "holds the reference of something else: model was a and is b. Name another file" in model
        assert "template was t and is u" in template and "examples" not in template
        assert "examples was" in examples
        assert "is damaged" in damaged and "Remove it, to compute the reference again" in damaged


def test_a_fingerprint_is_of_the_weights() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        found = []
        for value in (0.0, 1.0, 0.0):
            save_file({"w": torch.full((3,), value)}, folder / "model.safetensors")
            found.append(folder_fingerprint(folder))
        assert found[0] == found[2] != found[1]
