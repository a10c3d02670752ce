"""Law 4: a seed gives the same weights on every mesh."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.initialize import constant, fill, normal, uniform
from meshkit.models import LLAMA_PLAN, Llama
from tests.laws.parity.cases import Cell, build, mesh_for
from tests.world import pool


def digest(text: str, tied: bool) -> str:
    with torch.device("meta"):
        model = build_meta(tied)
    run = mk.parallelize(model, mesh_for(text), plan=LLAMA_PLAN)
    assert all(torch.isnan(full_tensor(param)).all() for param in run.parameters())  # a forgotten init would be seen
    mk.init_weights(run.model, seed=5)
    values = b"".join(full_tensor(param).numpy().tobytes() for param in run.parameters())
    return hashlib.sha256(values).hexdigest()


def build_meta(tied: bool) -> Llama:
    return Llama(build(Cell(mesh="", tied=tied, vocab=61, qwen=True)).config)


@pytest.mark.parametrize("tied", [False, True])
def test_every_mesh_draws_the_same_bits(tied: bool) -> None:
    one = set(pool(1).run(digest, "tp=1", tied))
    for text in ("dp_shard=4", "tp=4", "dp_shard=2 tp=2", "dp_replicate=4"):
        assert set(pool(4).run(digest, text, tied)) == one, text


def test_draws_have_the_stated_distribution() -> None:
    weight = torch.empty(400, 500, dtype=torch.float64)
    fill(weight, normal(0.02), seed=0, name="a")
    error = 0.02 / weight.numel() ** 0.5
    assert abs(weight.mean()) < 5 * error
    assert abs(weight.std() / 0.02 - 1) < 0.01
    assert abs((weight.abs() < 0.02).double().mean() - 0.6827) < 0.005
    assert abs((weight[:-1] * weight[1:]).mean()) < 5 * 0.02 * error  # neighbours are independent
    fill(weight, uniform(3.0), seed=0, name="a")
    assert weight.min() >= -3 and weight.max() < 3 and abs(weight.mean()) < 0.02
    fill(weight, constant(2.0), seed=0, name="a")
    assert (weight == 2).all()


def test_names_and_seeds_draw_different_numbers() -> None:
    values = []
    for seed, name in ((0, "a"), (0, "b"), (1, "a")):
        weight = torch.empty(8, 8)
        fill(weight, normal(1.0), seed=seed, name=name)
        values.append(weight)
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_a_parameter_on_meta_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="'embed_tokens.weight' is still on meta"):
        with torch.device("meta"):
            model = build_meta(False)
        mk.init_weights(model, seed=0)


def test_an_init_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="'layers.*.nope' matches no parameter"):
        mk.init_weights(build(Cell(mesh="")), seed=0, plan=mk.Plan(init={"layers.*.nope": normal(1.0)}))


def given_the_run(folder: str) -> list[str]:
    """What verbs of a module say of the run around it."""
    run, said = mk.parallelize(build(Cell(mesh="")), mesh_for("tp=1")), []
    for verb in (
        lambda: mk.init_weights(run, seed=0),  # type: ignore[arg-type]  # the mistake
        lambda: mk.models.load_pretrained(run, folder),  # type: ignore[arg-type]  # the mistake
        lambda: mk.models.save_pretrained(run, run.model.config, folder),  # type: ignore[arg-type]  # the mistake
    ):
        with pytest.raises(mk.errors.PlanError) as error:
            verb()
        said.append(str(error.value))
    return said


def test_a_run_where_its_module_is_wanted_is_told_what_to_give(tmp_path: Path) -> None:
    for said in pool(1).run(given_the_run, str(tmp_path)):
        assert len(said) == 3 and all(
            text.endswith("(model=a Run): give Module. run.model is one.") for text in said[1:]
        )
        assert said[0] == "init_weights(module=a Run): give Module. run.model is one."
