"""`--strategy FILE.toml`: the file's choices are what runs, and a flag that says otherwise is refused, never ignored."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import meshkit as mk
from meshkit.errors import DataError, PlanError
from meshkit.preflight.estimate.recipe import Recipe, load_script
from meshkit.recipes import PairFlags, ParallelFlags, RampFlags, TrainFlags
from meshkit.recipes.flags import STRATEGY_FIELDS
from meshkit.strategy import (
    ActivationOffload,
    ChunkedLoss,
    ContextPolicy,
    MemoryPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    PipelinePolicy,
    Precision,
    Strategy,
)
from tests.recipes.launch import ROOT, read_losses, run, run_alone, write_corpus

RECIPE = "examples/llama_pretrain.py"

UNLIKE_FLAGS = Strategy(
    mesh="pp=2 tp=2",
    zero=2,
    sequence=False,
    memory=MemoryPolicy(
        recompute="full",
        offload=ActivationOffload(),
        loss=ChunkedLoss(tokens=64),
        precision=Precision(),
        optimizer=OptimizerPolicy(offload=OptimizerOffload()),
    ),
    pipeline=PipelinePolicy(schedule="zbv"),
    microbatches=4,
    compile=True,
)
"""no choice is the default of its flag, but for Adam's moments: the host keeps them in fp32"""


@dataclass(frozen=True, kw_only=True)
class Config(TrainFlags, ParallelFlags):
    pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    UNLIKE_FLAGS.write(tmp_path / "run.toml")
    return tmp_path / "run.toml"


def test_a_warm_up_that_is_longer_than_the_run_is_refused_before_anything_is_made() -> None:
    with pytest.raises(DataError, match="--warmup-steps 15 does not fit into --steps 4. Give 0 to 4."):
        Config.parse(["--steps", "4", "--warmup-steps=15"])
    assert Config.parse(["--steps", "4", "--warmup-steps", "4"]).warmup_steps == 4
    assert Config.parse(["--steps", "4"]).warmup_steps == 4, "nobody asked for the default"


def test_every_flag_of_a_strategy_has_its_place_in_it() -> None:
    names = {field.name for field in dataclasses.fields(ParallelFlags)} - {"strategy", "config"}
    assert names | {"microbatches"} == set(STRATEGY_FIELDS)


def test_the_file_is_what_runs(file: Path) -> None:
    config = Config.parse(["--strategy", str(file)])
    assert config.parallel() == UNLIKE_FLAGS
    assert (config.mesh, config.microbatches, config.sequence) == ("pp=2 tp=2", 4, False)
    assert dataclasses.replace(config, lr=1.0).parallel() == UNLIKE_FLAGS
    assert config.parallel(plan=mk.models.LLAMA_PLAN).plan == mk.models.LLAMA_PLAN


@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh", "dp_shard=-1"],
        ["--mesh=tp=2"],
        ["--zero", "3"],
        ["--sequence"],
        ["--schedule", "1f1b"],
        ["--recompute", "none"],
        ["--loss-chunk", "65"],
        ["--loss_chunk", "65"],
        ["--offload", "none"],
        ["--precision", "fp32"],
        ["--no-optimizer-offload"],
        ["--adam-states", "4bit"],
        ["--no-compile"],
        ["--microbatches", "1"],
    ],
    ids=" ".join,
)
def test_a_flag_that_says_otherwise_is_refused_even_at_its_default(file: Path, flags: list[str]) -> None:
    name = flags[0].partition("=")[0].replace("--no-", "--").replace("_", "-")
    with pytest.raises(PlanError, match=f"{name} makes .*, but in --strategy .*run.toml it is .*two places"):
        Config.parse(["--strategy", str(file), *flags])


def test_a_flag_that_says_the_same_may_stand_beside_the_file(file: Path) -> None:
    same = ["--mesh", "tp=2 pp=2", "--recompute", "full", "--no-sequence", "--precision", "bf16", "--loss-chunk", "64"]
    assert Config.parse(["--strategy", str(file), *same]).parallel() == UNLIKE_FLAGS


def test_mesh_and_microbatches_that_a_file_leaves_open_are_the_flags(tmp_path: Path) -> None:
    Strategy(zero=2).write(tmp_path / "run.toml")
    config = Config.parse(["--strategy", str(tmp_path / "run.toml"), "--mesh", "tp=2", "--microbatches", "3"])
    assert (config.mesh, config.microbatches) == ("tp=2", 3)
    assert config.parallel() == Strategy(zero=2)


def test_a_config_made_by_keyword_is_refused_too(file: Path) -> None:
    with pytest.raises(PlanError, match="--recompute makes memory.recompute 'selective'"):
        Config(strategy=file, recompute="selective").parallel()
    with pytest.raises(PlanError, match="there is no file nowhere.toml"):
        Config(strategy=Path("nowhere.toml")).parallel()


def test_a_choice_of_the_recipe_and_another_one_of_the_file_is_refused(tmp_path: Path) -> None:
    Strategy(context=ContextPolicy(scheme="ring")).write(tmp_path / "run.toml")
    config = Config.parse(["--strategy", str(tmp_path / "run.toml")])
    assert config.parallel(context=ContextPolicy(scheme="ring")).context.scheme == "ring"
    with pytest.raises(PlanError, match="chooses context, and so does this recipe, otherwise.*out of the file"):
        config.parallel(context=ContextPolicy())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recipe_runs_the_file_as_it_runs_the_flags(ranks: int, tmp_path: Path) -> None:
    """To the bit. One process without torchrun, and two ranks."""
    corpus = write_corpus(tmp_path / "text.jsonl")
    Strategy(
        mesh=f"tp={ranks}",
        sequence=True,
        microbatches=2,
        memory=MemoryPolicy(recompute="full", loss=ChunkedLoss(tokens=64)),
    ).write(tmp_path / "run.toml")
    by_flags = {"mesh": f"tp={ranks}", "microbatches": 2, "recompute": "full", "loss-chunk": 64}
    losses = []
    for name, choices in {"file": {"strategy": tmp_path / "run.toml"}, "flags": by_flags}.items():
        status, output = train(ranks, corpus, tmp_path / name, choices)
        assert status == 0, output
        losses.append(read_losses(tmp_path / name))
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_a_refused_flag_ends_a_recipe_with_its_text(file: Path, tmp_path: Path) -> None:
    status, output = train(2, tmp_path, tmp_path / "out", {"strategy": file, "recompute": "none"})
    assert status != 0
    assert "PlanError" in output and "--recompute makes memory.recompute 'none'" in output, output


def train(ranks: int, corpus: Path, out: Path, choices: dict[str, Any]) -> tuple[int, str]:
    sizes = {
        "steps": 3,
        "warmup-steps": 1,
        "seq-len": 32,
        "global-batch": 4,
        "eval-every": 100,
        "save-every": 100,
        "sample-tokens": 2,
    }
    flags = {"data": corpus, "out": out, "cache": corpus.parent / "cache", **sizes, **choices}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return run_alone(ROOT / RECIPE, ROOT, *words) if ranks == 1 else run(ranks, RECIPE, *words)


def test_estimate_reads_the_file_as_the_recipe_does(file: Path) -> None:
    script = ROOT / RECIPE
    recipe = Recipe.read(load_script(script), ["--strategy", str(file)], script=script)
    assert recipe.spec(None).world_size == 4
    assert recipe.microbatches == 4
    with pytest.raises(PlanError, match="--compile makes"):
        Recipe.read(load_script(script), ["--strategy", str(file), "--no-compile"], script=script)


def test_a_batch_that_grows_has_more_microbatches_of_the_same_size() -> None:
    config = RampFlags(global_batch=8, microbatches=2, last_batch=32, ramp_tokens=4000)
    sizes = [config.batch_ramp()(tokens) for tokens in (0, 2000, 4000)]
    assert sizes == [8, 16, 32]
    assert [config.microbatches_of(size) for size in sizes] == [2, 4, 8]
    assert RampFlags(global_batch=8).batch_ramp()(10**9) == 8


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    config = Config(out="runs/mine", strategy=str(tmp_path / "run.toml"))
    assert config.out == Path("runs/mine") and config.strategy == tmp_path / "run.toml"
    assert PairFlags(data=("a.jsonl",)).data == (Path("a.jsonl"),)
