"""Files that were changed after they were written: what is loaded is what was saved, or it is refused in one line.

Over every kind of file that meshkit reads: bits flipped, pieces zeroed, files cut short, made longer, deleted, renamed,
swapped with others, and replaced by a pickle that would run a command.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.sharding import local_tensor
from meshkit.data import (
    CHATML_TOKENS,
    TokenWriter,
    chatml,
    load_chat,
    load_tokenizer,
    open_tokens,
    save_chat_template,
    save_tokenizer,
    train_tokenizer,
    verify_tokens,
)
from meshkit.errors import MeshkitError
from meshkit.models import Llama
from tests.checkpoint.training import CONFIG, build
from tests.depth import DEEP
from tests.world import pool

TRIES = {"checkpoint": 200, "tokens": 250, "export": 250, "tokenizer": 200, "strategy": 100}
TIMES = 5 if DEEP else 1
RAN = "this-ran"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {RAN}",)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def lengthen(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 100)))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def rename(path: Path, draw: random.Random) -> None:
    others = [other for other in path.parent.iterdir() if other != path and other.is_file()]
    os.replace(path, draw.choice([*others, path.with_name("other"), path.with_name("model.safetensors")]))


def swap(path: Path, draw: random.Random) -> None:
    others = [other for other in path.parent.iterdir() if other != path and other.is_file()]
    if not others:
        flip(path, draw)
        return
    other = draw.choice(others)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def run_code(path: Path, draw: random.Random) -> None:
    path.write_bytes(pickle.dumps(Evil()))


CHANGES = [flip, flip, flip, zero, cut, cut, lengthen, delete, rename, swap, run_code]


def outcomes(folder: str, load: Callable[[], Any], tries: int, seed: int) -> tuple[list[str], int]:
    """(what was loaded wrong or failed otherwise than by a refusal, how often it was refused)"""
    root, draw = Path(folder), random.Random(seed)
    sound = root.with_name(f"{root.name}-sound")
    shutil.copytree(root, sound)
    truth, wrong, refused = load(), list[str](), 0
    for number in range(tries):
        path = draw.choice(sorted(each for each in root.rglob("*") if each.is_file() and each.name != ".lease"))
        change = draw.choice(CHANGES)
        change(path, draw)
        what = f"{number}: {change.__name__} of {path.name}"
        try:
            if load() != truth:
                wrong.append(f"{what}: loaded other values")
        except MeshkitError as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > 1500:
                wrong.append(f"{what}: {error}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        for each in sorted(root.iterdir()):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        shutil.copytree(sound, root, dirs_exist_ok=True)
    return wrong, refused


def checkpoint(folder: str, tries: int) -> tuple[list[str], int]:
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    training = build("dp_shard=1", **shape)
    training.train(2)
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(
            2, training.run, training.optimizer, **training.holders, config={"a": 1}, extra={"b": torch.ones(2)}
        )

    def load() -> Any:
        with torch.no_grad():
            for param in training.run.parameters():
                local_tensor(param).fill_(7)
                for value in training.optimizer.state[param].values():
                    local_tensor(value).fill_(7)
        reader = Checkpointer(folder)
        reader._ranks = groups[0] if groups else None  # one group for all tries
        reader.load(training.run, training.optimizer, **training.holders)
        groups.append(reader._ranks_of(training.run))
        return training.local_state(), reader.config(2), str(reader.extra(2))

    groups: list[Any] = []
    return outcomes(folder, load, tries, seed=1)


def test_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((wrong, refused),) = pool(1).run(checkpoint, str(tmp_path / "run"), TIMES * TRIES["checkpoint"])
    assert not wrong
    assert refused > 0.8 * TIMES * TRIES["checkpoint"]
    assert not list(Path.cwd().rglob(RAN)) and not Path(RAN).exists()


def tokens(folder: Path) -> Callable[[], Any]:
    draw = np.random.default_rng(0)
    with TokenWriter(folder / "a.tokens", vocab_size=300, tokenizer="t" * 64) as writer:
        for length in draw.integers(1, 200, 40):
            writer.add(draw.integers(0, 300, length), text_bytes=int(length))

    def load() -> Any:
        opened = open_tokens(folder / "a.tokens")
        verify_tokens(opened)
        content = opened.ids.tolist(), opened.offsets.tolist()
        return content, opened.vocab_size, opened.fingerprint, opened.text_bytes, opened.documents

    return load


def export(folder: Path) -> Callable[[], Any]:
    torch.manual_seed(0)
    mk.models.save_pretrained(Llama(CONFIG), CONFIG, folder, max_shard_bytes=8000)

    def load() -> Any:
        config = mk.models.config_from_pretrained(folder)
        assert isinstance(config, mk.models.LlamaConfig)
        model = mk.models.load_pretrained(Llama(config), folder)
        return config, {name: value.tolist() for name, value in model.state_dict().items()}

    return load


def tokenizer(folder: Path) -> Callable[[], Any]:
    made = train_tokenizer(["to be or not to be"] * 3, vocab_size=270, extra_special_tokens=CHATML_TOKENS)
    save_tokenizer(made, folder)
    save_chat_template(chatml(made).template, folder)

    def load() -> Any:
        alone, chat = load_tokenizer(folder), load_chat(folder)
        template = chat.template.source, dict(chat.template.special_tokens)
        return alone.backend.to_str(), alone.bos_id, alone.eos_id, alone.vocab_size, template

    return load


@pytest.mark.parametrize("make", [tokens, export, tokenizer], ids=lambda make: make.__name__)
def test_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Callable[[], Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "files"
    folder.mkdir()
    tries = TIMES * TRIES[make.__name__]
    wrong, refused = outcomes(str(folder), make(folder), tries, seed=2)
    assert not wrong
    assert refused > 0.5 * tries
    assert not Path(RAN).exists()


def test_of_a_strategy_which_has_no_digest_since_people_write_it(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    memory = mk.MemoryPolicy(recompute="selective", loss=mk.strategy.ChunkedLoss(tokens=64))
    mk.Strategy(mesh="pp=2 dp_shard=2 tp=2", microbatches=8, memory=memory).write(folder / "a.toml")

    def load() -> bool:
        return isinstance(mk.Strategy.read(folder / "a.toml"), mk.Strategy)

    wrong, refused = outcomes(str(folder), load, TIMES * TRIES["strategy"], seed=3)
    assert not wrong
    assert refused > 0.3 * TIMES * TRIES["strategy"]
