"""A fuzz of what users give: random bad flags and files over all recipes and commands. Each is refused, soon, in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch

import meshkit as mk
from meshkit import __main__ as command_line
from meshkit.data import CHATML_TOKENS, chatml, save_chat_template, save_tokenizer, train_tokenizer
from meshkit.errors import MeshkitError
from meshkit.models import Llama
from meshkit.recipes.ranges import _ranges
from tests.depth import DEEP
from tests.recipes.launch import ROOT
from tests.recipes.test_bad_input import RECIPES, config_of, outside
from tests.tiny import tiny_config
from tests.world import pool

FLAGS, FILES, COMMANDS = (900, 900, 300) if DEEP else (140, 110, 60)
LIMIT_S = 10.0
LONGEST = 1500

# --------------------------------------------------------------------------------------------------- bad values and files


def bad_values(kind: Any, name: str, hint: Any, draw: random.Random) -> list[str]:
    """For a flag of this type: none of them can be meant."""
    nonsense = ["", "a\0b", "x" * 500, "\ud800", "--", "é=ß", "nan nan", "[" * 500]
    if name in _ranges(kind):
        allowed = _ranges(kind)[name]
        too_large = [] if allowed.infinite else ["9" * 5000]  # to a float that is infinite
        return ["", "abc", "1e", *too_large, "0x10", "a\0b", *map(str, outside(allowed))]
    if getattr(hint, "__origin__", None) is not None and "Literal" in str(hint) and "tuple" not in str(hint):
        return [value for value in nonsense if value != "--"]
    if name == "mesh":
        return [
            "tp=0",
            "tp=-2",
            "tp",
            "=2",
            "tp=2 tp=2",
            "zz=2",
            "tp=1.5",
            "tp=" + "9" * 50,
            "tp=9" * 99,
            "a\0b",
            "tp=nan",
            "dp_shard=3",
        ]
    return []


def fifo(path: Path, sound: bytes) -> None:
    os.mkfifo(path)


def directory(path: Path, sound: bytes) -> None:
    path.mkdir()


def empty(path: Path, sound: bytes) -> None:
    path.write_bytes(b"")


def truncated(path: Path, sound: bytes) -> None:
    path.write_bytes(sound[: len(sound) // 3])


def wrong_encoding(path: Path, sound: bytes) -> None:
    path.write_bytes('{"text": "é"}\n'.encode("utf-16"))


def deep_json(path: Path, sound: bytes) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")


def null_bytes(path: Path, sound: bytes) -> None:
    path.write_bytes(bytes(5000))


def wrong_types(path: Path, sound: bytes) -> None:
    path.write_text(json.dumps(shallow(sound, lambda value: [7] if isinstance(value, str) else "seven")))


def huge_numbers(path: Path, sound: bytes) -> None:
    path.write_text(json.dumps(shallow(sound, lambda value: 10**400)))


def negative_numbers(path: Path, sound: bytes) -> None:
    path.write_text(json.dumps(shallow(sound, lambda value: -1)))


def missing_keys(path: Path, sound: bytes) -> None:
    path.write_text("{}\n")


def a_number(path: Path, sound: bytes) -> None:
    path.write_text("7\n")


def link_to_itself(path: Path, sound: bytes) -> None:
    path.symlink_to(path)


def shallow(sound: bytes, change: Callable[[Any], Any]) -> dict[str, Any]:
    try:
        content = json.loads(sound.splitlines()[0] if b'"text"' in sound[:20] else sound)
    except ValueError:
        content = {"text": "a", "messages": "b", "prompt": "c"}
    return {key: change(value) for key, value in content.items()}


MAKERS = [fifo, directory, empty, truncated, wrong_encoding, deep_json, null_bytes, wrong_types, huge_numbers]
MAKERS += [negative_numbers, missing_keys, a_number, link_to_itself]

TEXT = {"llama_pretrain", "moe_pretrain", "long_context"}
ROWS = {"sft", "dpo", "reward_model", "rejection_sampling", "grpo", "ppo"}


def sound_folder(folder: Path) -> None:
    """A small model with its tokenizer and template, as another program would have written it: without digests."""
    torch.manual_seed(0)
    made = train_tokenizer(["to be or not to be"] * 3, vocab_size=270, extra_special_tokens=CHATML_TOKENS)
    config = tiny_config(vocab_size=made.vocab_size)
    mk.models.save_pretrained(Llama(config), config, folder)
    save_tokenizer(made, folder)
    save_chat_template(chatml(made).template, folder)
    (folder / "meshkit_digests.json").unlink()


def file_case(folder: Path, draw: random.Random) -> tuple[str, list[str], str]:
    """(recipe, its flags, what is bad)"""
    maker = draw.choice(MAKERS)
    recipe = draw.choice(RECIPES)
    kind = draw.choice(["data", "pretrained", "pretrained", "tokenizer", "strategy", "out"])
    hints = {field.name for field in fields(config_of(recipe))}
    model = folder / "model"
    flags = ["--out", str(folder / "out")]
    if kind == "data" and "data" in hints:
        suffix = ".jsonl" if recipe in ROWS else draw.choice([".jsonl", ".parquet", ".txt"])
        if suffix == ".txt" and maker not in (fifo, directory, empty, wrong_encoding, link_to_itself):
            maker = wrong_encoding
        maker(folder / f"a{suffix}", b'{"text": "to be or not to be"}\n')
        return (
            recipe,
            [*flags, "--data", str(folder / f"a{suffix}"), "--pretrained", str(model)],
            f"{kind} {maker.__name__}",
        )
    if kind == "strategy":
        maker(folder / "a.toml", b'mesh = "tp=2"\nmicrobatches = 8\n')
        if maker is empty:
            (folder / "a.toml").write_text("mesh = 7\n")
        return recipe, [*flags, "--strategy", str(folder / "a.toml")], f"{kind} {maker.__name__}"
    if kind == "out":
        (folder / "out").mkdir()
        maker(folder / "out" / "file", b"")
        return (
            recipe,
            [
                "--out",
                str(folder / "out" / "file" / "x\0" if maker is directory else folder / "out" / "file" / "x"),
                "--pretrained",
                str(folder / "none"),
            ],
            f"{kind} {maker.__name__}",
        )
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    name = draw.choice(names[2:] if kind == "tokenizer" else names)
    if name == "tokenizer_config.json" and maker is truncated:
        maker = a_number
    sound = (model / name).read_bytes()
    (model / name).unlink()
    maker(model / name, sound)
    flag = "--tokenizer" if kind == "tokenizer" and "tokenizer" in hints else "--pretrained"
    data = ["--data", str(folder / "rows.jsonl")] if recipe in ROWS | TEXT else []
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"text": "to be", "prompt": f"a{n}", "completion": " b", "chosen": " b", "rejected": " c"})
            + "\n"
            for n in range(40)
        )
    )
    return (
        recipe,
        [*flags, flag, str(model), *data, "--cache", str(folder / "cache")]
        if "cache" in hints
        else [*flags, flag, str(model), *data],
        f"{flag} {name} {maker.__name__}",
    )


# --------------------------------------------------------------------------------------------------------- how it goes


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict(act: Callable[[], Any]) -> str:
    """ "" where `act` ended as it should; else what happened."""
    output = io.StringIO()
    try:
        with at_most(LIMIT_S), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            act()
    except SystemExit as ended:
        said = output.getvalue()
        if ended.code != 2:
            return f"ended with {ended.code}: {said[-300:]}"
        if "Traceback" in said:
            return said[-800:]
        # One line of ours, or one box of tyro's for what it cannot read.
        lines = said.splitlines()
        fits = len(lines) == 1 and len(lines[0]) < LONGEST
        fits = fits or ("For full helptext" in said and len(lines) < 150)
        return "" if fits else f"said {said[-500:]!r}"
    except MeshkitError as error:
        if "\n" in str(error) or len(str(error)) > LONGEST:
            return f"{len(str(error))} characters in {str(error).count(chr(10)) + 1} lines: {str(error)[:300]}"
        return "" if error.exit_code == 2 else f"exit code {error.exit_code}: {error}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f"{frame.filename}:{frame.lineno}" for frame in frames if "meshkit/" in frame.filename]
        return f"{type(error).__name__}: {str(error)[:200]} at {ours[-1:] or frames[-1:]}"
    return f"was taken: {output.getvalue()[-200:]}"


def run_main(recipe: str, flags: list[str]) -> None:
    module = sys.modules[config_of(recipe).__module__]
    with mock.patch.object(sys, "argv", [f"{recipe}.py", *flags]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.main()


def fuzz_files(count: int, seed: int) -> list[str]:
    draw, wrong = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory() as root:
        sound_folder(Path(root) / "sound")
        for number in range(count):
            folder = Path(root) / str(number)
            shutil.copytree(Path(root) / "sound", folder / "model")
            recipe, flags, what = file_case(folder, draw)
            if said := verdict(lambda recipe=recipe, flags=flags: run_main(recipe, flags)):  # type: ignore[misc]
                wrong.append(f"{number} {recipe} {what}: {said}")
            shutil.rmtree(folder)
    return wrong


def test_bad_files_of_recipes_are_refused_in_a_line() -> None:
    (wrong,) = pool(1).run(fuzz_files, FILES, 1)
    assert not wrong, "\n".join(wrong)


def test_bad_flags_of_recipes_are_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(2)
    cases = [
        (recipe, name, value)
        for recipe in RECIPES
        for kind in [config_of(recipe)]
        for name, hint in get_type_hints(kind).items()
        for value in bad_values(kind, name, hint, draw)
    ]
    wrong = []
    for recipe, name, value in draw.sample(cases, min(FLAGS, len(cases))):
        arguments = [f"--{name.replace('_', '-')}", value]

        def act(recipe: str = recipe, name: str = name, arguments: list[str] = arguments) -> None:
            config = config_of(recipe).parse(arguments)
            if name == "mesh":
                mk.mesh.MeshSpec.parse(config.mesh).resolve(8)

        if said := verdict(act):
            wrong.append(f"{recipe} --{name} {value[:40]!r}: {said}")
    assert not wrong, "\n".join(wrong)
    assert not list(tmp_path.iterdir())


def command_case(folder: Path, draw: random.Random) -> list[str]:
    maker = draw.choice(MAKERS)
    match draw.choice(["numbers", "times", "csv", "script", "flags"]):
        case "numbers":
            flag = draw.choice(["--ranks", "--microbatches", "--chunks", "--max-live"])
            name = draw.choice(["interleaved", "1f1b", "zbv", "auto", "hanayo", "gpipe"])
            return ["draw", name, flag, draw.choice(["0", "-1", "abc", "1e9", "9" * 30, "nan", "", "9" * 5000, "1.5"])]
        case "times":
            words = [
                "F",
                "F=",
                "=1",
                "F=a",
                "F=nan",
                "F=-1",
                "Z=1",
                "F=1:2:3:4:5:6",
                "hop=1:2",
                "F=1e999",
                "F=\0",
                "F=0,I=0,W=0,hop=-1",
            ]
            return ["draw", "1f1b", "--times", draw.choice(words)]
        case "csv":
            maker(folder / "a.csv", b"meshkit schedule,1f1b\nmicrobatches,2\n")
            return ["draw", str(folder / "a.csv")]
        case "script":
            maker(folder / "a.py", b"import meshkit as mk\nclass Config(")
            return [draw.choice(["estimate", "explain"]), str(folder / "a.py")]
    flags = [
        ["--mesh", "tp=0"],
        ["--mesh", "zz=1"],
        ["--mesh", "tp=3"],
        ["--rank", "99"],
        ["--world", "-1"],
        ["--world", "3"],
    ]
    flags += [["--device-memory", each] for each in ("", "80", "GiB", "1.1.1GB", "-5GB", "nan", "9" * 400 + "GB")]
    flags += [
        ["--lr", "nan"],
        ["--seq-len", "0"],
        ["--nothing", "1"],
        ["--model", "x"],
        ["--strategy", str(folder / "none.toml")],
    ]
    flag = draw.choice([each for each in flags if each != ["--device-memory", "80"]])
    return [
        draw.choice(["estimate", "explain"]),
        str(ROOT / "examples/llama_pretrain.py"),
        "--mesh",
        "dp_shard=2",
        *flag,
    ]


def test_bad_commands_are_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw, wrong = random.Random(3), list[str]()
    for number in range(COMMANDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = command_case(folder, draw)
        with mock.patch.object(sys, "argv", ["meshkit", *arguments]):
            if said := verdict(command_line.main):
                wrong.append(f"{[each[:40] for each in arguments]}: {said}")
    assert not wrong, "\n".join(wrong)
