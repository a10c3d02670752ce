"""Flags in a file: what a run writes down is what it was given, and mistakes in a file are told by its name."""

from __future__ import annotations

import dataclasses
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import DataError, PlanError
from meshkit.recipes.files import RECIPES, recipe_file, train
from meshkit.strategy import MemoryPolicy, Strategy

PARSED = sorted(name for name in RECIPES if name != "own")  # which is four flags of its own
CHANGED: dict[str, list[str]] = {
    "pretrain": ["--data", "a.jsonl", "b.jsonl", "--no-sequence", "--lr=1e-05", "--clip", "inf", "--loss-chunk", "3"],
    "sft": ["--lora-rank", "4", "--no-packing"],
    "dpo": ["--loss", "sigmoid beta=0.5, sft weight=0.1"],
    "reward": ["--margin"],
    "grpo": ["--reward", "mine.py:score", "--temperature", "0.25"],
    "ppo": ["--sampler-mesh", "tp=1", "--sampler-ranks", "1"],
}


def config_of(recipe: str) -> Any:
    return importlib.import_module(f"examples.{Path(RECIPES[recipe]).stem}").Config


@pytest.mark.parametrize("recipe", PARSED)
def test_flags_written_and_read_are_the_flags(recipe: str, tmp_path: Path) -> None:
    config = config_of(recipe).parse(["--out", str(tmp_path / "out"), "--seed", "-3", *CHANGED.get(recipe, [])])
    config.write(tmp_path)
    again = config_of(recipe).parse(["--config", str(tmp_path / "config.toml")])
    assert dataclasses.replace(again, config=None) == config
    # Once more from itself, and a flag beside it wins.
    again.write(tmp_path)
    changed = config_of(recipe).parse([f"--config={tmp_path / 'config.toml'}", "--seed", "5"])
    assert dataclasses.replace(changed, config=None) == dataclasses.replace(config, seed=5)


def test_a_strategy_file_stays_the_place_of_its_choices(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    Strategy(mesh="tp=2", memory=MemoryPolicy(recompute="full"), microbatches=4).write(file)
    config = config_of("sft").parse(["--strategy", str(file), "--out", str(tmp_path)])
    config.write(tmp_path)
    again = config_of("sft").parse(["--config", str(tmp_path / "config.toml")])
    assert dataclasses.replace(again, config=None) == config
    assert again.parallel() == config.parallel() and again.microbatches == 4


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stepz = 3", r"mine\.toml has 'stepz', which is no flag here\. Did you mean steps\?"),
        ("[model]\nsteps = 3", r"has 'model', which is no flag here|model is a table"),
        ("steps = ", r"mine\.toml is not TOML: .* Correct it"),
        ("config = 'other.toml'", "has 'config', which is no flag here"),
        ("steps = 2\nwarmup-steps = 3", "--warmup-steps 3 does not fit into --steps 2"),
    ],
)
def test_a_mistake_in_the_file_is_told(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(DataError, match=match):
        config_of("dpo").parse(["--config", str(file)])


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.toml does not exist\. Give a TOML file of flags"):
        config_of("sft").parse(["--config", str(tmp_path / "none.toml")])


def test_a_recipe_that_is_none_is_told() -> None:
    with pytest.raises(PlanError, match="there is no recipe 'gpro'. Choose one of pretrain, moe"):
        recipe_file("gpro")
    with pytest.raises(PlanError, match="train needs the name of a recipe and got --nproc-per-node 2"):
        train(["--nproc-per-node", "2"])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("pretran --out sft", "train needs the name of a recipe and got pretran --out sft"),
        ("--nproc-per-node 2 pretran --out sft", "needs the name of a recipe and got --nproc-per-node 2 pretran"),
        ("--nproc-per-node two sft", r"torchrun says: Unsupported nproc_per_node value: two\. Correct its options"),
        ("--nproc-per-node 0 sft", "torchrun says: --nproc-per-node 0 --nnodes 1:1 makes no rank"),
        ("--nnodes few sft", "torchrun says: invalid literal"),
        ("--steps 2 sft", "torchrun says: unrecognized arguments: --steps"),
    ],
)
def test_the_recipe_is_the_first_word_after_the_options(words: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        train(words.split())


def test_a_value_of_an_option_is_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: launched.append(words))
    monkeypatch.setattr(runpy, "run_path", lambda *args, **kwargs: {})
    monkeypatch.setattr(sys, "argv", ["meshkit"])
    train(["--log-dir", "sft", "--nproc-per-node=2", "grpo", "--out", "dpo"])
    assert launched[0][3:] == ["--log-dir", "sft", "--nproc-per-node=2", str(recipe_file("grpo")), "--out", "dpo"]


def test_a_tilde_is_the_home_in_a_flag_and_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `--out=~/runs` as it is: the folder was made in the home, and the run wrote to one called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text("out = '~/runs'\ntokenizer = '~/words'")
    config = config_of("sft").parse(["--config=~/mine.toml", "--pretrained=~/model"])
    assert config_of("dpo").parse(["--out", str(tmp_path)]).cache == tmp_path / ".cache" / "meshkit"
    assert config.out == tmp_path / "runs" and config.tokenizer == tmp_path / "words"
    assert config.pretrained == tmp_path / "model"
    with pytest.raises(DataError, match=r"--reference-file ~nobody-here/a: no user is called nobody-here\. Give"):
        config_of("dpo").parse(["--reference-file=~nobody-here/a"])


def test_a_folder_does_not_hide_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshkit import __main__ as program

    read: list[str] = []
    monkeypatch.setattr(program, "command", lambda words: read.append(words[0]))
    monkeypatch.setattr(sys, "argv", ["meshkit", "estimate", "sft"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft").mkdir()
    program.main()
    (tmp_path / "sft").rmdir()
    (tmp_path / "sft").write_text("")  # a script of one's own
    sys.argv = ["meshkit", "estimate", "sft"]
    program.main()
    assert read == [str(recipe_file("sft")), "sft"]
