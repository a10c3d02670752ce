from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from meshkit.algos.preference import parse_losses
from meshkit.errors import PlanError
from meshkit.models import Llama, config_from_pretrained, load_pretrained
from meshkit.preflight.estimate.recipe import load_script
from tests.recipes.launch import ROOT, command_line, read_losses, run
from tests.recipes.pairs import write_pairs
from tests.recipes.test_reward_model import seen_last

RECIPE = "examples/dpo.py"
TOL_FP32_SUM = 2e-5  # relative; another mesh sums in another order, and steps amplify it
TOL_STORED = 1e-4  # relative; fp32 numbers in the file
TOL_FP32 = 1e-5
WAIT_S = 300


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pairs(tmp_path_factory.mktemp("pairs"), chats=True)


def flags(pairs: tuple[Path, Path], out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": pairs[0],
        "tokenizer": pairs[1],
        "held-out": 0.2,
        "out": out,
        "sft-steps": 2,
        "steps": 4,
        "seq-len": 128,
        "global-batch": 6,
        "lr-kind": "constant",  # or the first part of a run would depend on how long the whole is to be
        "warmup-steps": 2,
        "eval-every": 2,
    }
    return command_line(chosen, **changes)


def train(ranks: int, *given: str) -> str:
    status, output = run(ranks, RECIPE, *given, timeout_s=WAIT_S)
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def whole(pairs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, straight through both phases."""
    out = tmp_path_factory.mktemp("whole")
    train(1, *flags(pairs, out))
    return out


def test_a_run_continued_on_another_mesh_is_one_run_and_transformers_reads_it(
    pairs: tuple[Path, Path], whole: Path, tmp_path: Path
) -> None:
    """Both phases with cp, the second half of the last one with tp."""
    train(2, *flags(pairs, tmp_path, mesh="cp=2", steps=2, microbatches=2))
    output = train(2, *flags(pairs, tmp_path, mesh="tp=2", loss_chunk=50))
    assert "resume from step 2" in output
    losses = read_losses(whole)
    assert sorted(losses) == [1, 2, 3, 4] and losses[1] == pytest.approx(math.log(2))  # the reference is the model
    assert read_losses(tmp_path) == pytest.approx(losses, rel=TOL_FP32_SUM)
    assert read_losses(tmp_path / "sft") == pytest.approx(read_losses(whole / "sft"), rel=TOL_FP32_SUM)
    ours, theirs = seen_last(whole), seen_last(tmp_path)
    for name in ("train/margin", "held_out/accuracy", "held_out/margin", "held_out/chosen_log_prob"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5)
    folder = tmp_path / "model-4"
    reference, model = LlamaForCausalLM.from_pretrained(folder), Llama(config_from_pretrained(folder))
    load_pretrained(model, folder)
    ids = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(ids) - reference(input_ids=ids).logits).abs().max() < TOL_FP32
    assert (folder / "chat_template.jinja").exists()
    assert "is there already; give more --steps" in train(1, *flags(pairs, tmp_path))


def test_a_stored_reference_is_the_live_one_and_no_other(pairs: tuple[Path, Path], whole: Path, tmp_path: Path) -> None:
    begin = {"pretrained": whole / "sft-model", "reference": "stored", "reference_file": tmp_path / "reference"}
    train(2, *flags(pairs, tmp_path / "pp", mesh="pp=2", microbatches=2, **begin))
    assert read_losses(tmp_path / "pp") == pytest.approx(read_losses(whole), rel=TOL_STORED)
    status, output = run(1, RECIPE, *flags(pairs, tmp_path / "cut", **{**begin, "seq_len": 96}), timeout_s=WAIT_S)
    assert status != 0
    assert "truncation was drop at 128 and is drop at 96" in output, output


def test_a_moving_reference_goes_on_where_it_was(pairs: tuple[Path, Path], whole: Path, tmp_path: Path) -> None:
    """With a mix of losses and weights of WPO: stopped after a move, on another mesh, it is one run."""
    given = {"pretrained": whole / "sft-model", "reference": "moving", "reference_every": 2}
    given |= {"loss": "sigmoid beta=0.5, sft weight=0.1"}
    train(1, *flags(pairs, tmp_path / "one", **given), "--wpo")
    train(2, *flags(pairs, tmp_path / "two", mesh="tp=2", steps=3, **given), "--wpo")
    train(1, *flags(pairs, tmp_path / "two", **given), "--wpo")
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(tmp_path / "one"), rel=TOL_FP32_SUM)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks transformers
def test_adapters_train_against_the_model_without_them(pairs: tuple[Path, Path], whole: Path, tmp_path: Path) -> None:
    begin = whole / "sft-model"
    few = {"lora_rank": 4, "lora_base": "int8", "lora_dropout": 0.1}
    train(2, *flags(pairs, tmp_path, pretrained=begin, mesh="dp_shard=2", lr=1e-2, steps=3, **few))
    losses = read_losses(tmp_path)
    assert losses[1] == pytest.approx(math.log(2)) and losses[3] < losses[1]
    base = LlamaForCausalLM.from_pretrained(begin)
    ids = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = base(input_ids=ids).logits
        after = PeftModel.from_pretrained(base, tmp_path / "adapter-3")(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss": "hinge", "reference": "none"}, "--loss hinge compares with a reference, but --reference is none"),
        ({"lora_dropout": 0.1}, "lora_base and lora_dropout are of adapters, and there are none without lora_rank"),
        ({"loss": "aot"}, "--loss aot sorts the pairs of a step"),
        ({"reference": "moving", "lora_rank": 4}, "--reference moving needs two whole models"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(change: dict, match: str) -> None:
    recipe = load_script(ROOT / RECIPE)
    config = recipe.Config(**change)
    with pytest.raises(PlanError, match=match):
        recipe.refuse(config, parse_losses(config.loss))
