"""Bad flags and files of recipes: each is refused in one line that names it, with exit code 2, and none waits for ever."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from meshkit.errors import DataError, StepError
from meshkit.recipes import TrainFlags
from meshkit.recipes.ranges import Range, _ranges
from tests.recipes.launch import ROOT, run_alone

RECIPES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "bring_your_own_model")
OF_ANY_NUMBER = {"seed"}


@cache
def config_of(recipe: str) -> Any:
    name = f"example_{recipe}"
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{recipe}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Config


def outside(wanted: Range) -> list[float]:
    below = [] if math.isinf(wanted.low) else [wanted.low if wanted.open else wanted.low - 1, wanted.low - 1000]
    above = [] if math.isinf(wanted.high) else [wanted.high + 1]
    return [math.nan, -math.inf, *([] if wanted.infinite else [math.inf]), *below, *above]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_has_a_range(recipe: str) -> None:
    kind = config_of(recipe)
    numbers = {name for name, hint in get_type_hints(kind).items() if hint in (int, float, int | None, float | None)}
    assert numbers - set(_ranges(kind)) == OF_ANY_NUMBER


def test_what_is_outside_of_a_range_is_refused_by_name_and_defaults_are_inside() -> None:
    tried = 0
    for kind in map(config_of, RECIPES):
        kind()
        for name, wanted in _ranges(kind).items():
            flag = name.replace("_", "-")
            for value in outside(wanted):
                with pytest.raises(DataError, match=f"^--{flag} .*: give a number that is {wanted}.$"):
                    kind(**{name: value})
                tried += 1
    assert tried > 1000


def test_a_range_stays_where_a_recipe_changes_the_default() -> None:
    kind = config_of("sft")
    assert next(field.default for field in fields(kind) if field.name == "steps") == 240
    with pytest.raises(DataError, match="--steps 0: give a number that is at least 1"):
        kind(steps=0)


def test_a_config_with_names_of_a_function_is_made_and_keeps_the_ranges_that_it_inherits() -> None:
    class Local:
        pass

    @dataclass(frozen=True, kw_only=True)
    class Config(TrainFlags):
        own: Local | None = None
        lr: float = 0.5

    assert Config().lr == 0.5
    for wrong in (-1, "3"):
        with pytest.raises(DataError, match=f"--lr {wrong}"):
            Config(lr=wrong)  # type: ignore[arg-type]  # as a notebook might


@pytest.mark.parametrize(
    "flags",
    [("--lr", "nan"), ("--clip", "-1"), ("--weight-decay", "-inf"), ("--save-every", "-1"), ("--loss-chunk", "-3")],
    ids=" ".join,
)
def test_the_command_line_says_it_and_ends_with_2(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config_of("llama_pretrain").parse([*flags])
    assert ended.value.code == 2
    assert f"{flags[0]} " in "".join(capsys.readouterr())


def pipe(path: Path) -> None:
    os.mkfifo(path)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")


def text(path: Path) -> None:
    path.write_text("x")


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("recipe", "flag", "name", "make", "said"),
    [
        ("llama_pretrain", "--data", "a.txt", pipe, "a pipe or a device, whose reader may wait for ever"),
        ("llama_pretrain", "--data", "a.jsonl", deep, "line 1: JSON that is nested too deeply to be read"),
        ("sft", "--data", "a.jsonl", deep, "line 1: JSON that is nested too deeply to be read"),
        ("dpo", "--data", "a.jsonl", pipe, "no such file or folder"),
        ("llama_pretrain", "--out", "a", text, "is a file. Give a folder."),
        ("llama_pretrain", "--out", "a/b", text, "which is a file. Give a folder."),
        ("llama_pretrain", "--cache", "a", text, "is a file. Give a folder."),
        ("llama_pretrain", "--cache", "/proc/x", nothing, "the system does not make it"),
        ("llama_pretrain", "--strategy", "a.toml", nothing, "there is no file"),
        ("llama_pretrain", "--mesh", "tp=0", nothing, "an axis size is a whole number of at least 1"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(
    tmp_path: Path, recipe: str, flag: str, name: str, make: Callable[[Path], None], said: str
) -> None:
    make((tmp_path / name).parents[0] if name == "a/b" else tmp_path / name) if make is not text else text(
        tmp_path / "a"
    )
    script = ROOT / f"examples/{recipe}.py"
    status, output = run_alone(script, tmp_path, "--out", "out", flag, name, timeout_s=60)
    assert status == 2, output
    assert said in output
    assert "Traceback" not in output


def test_a_run_that_fails_ends_with_1() -> None:
    assert (StepError.exit_code, DataError.exit_code) == (1, 2)
