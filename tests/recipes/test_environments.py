"""Environments in the recipe of GRPO: one run on every mesh, sound at a learning rate of 0, and a class of a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from meshkit.algos.environments import Action
from meshkit.errors import DataError
from meshkit.recipes.environments import environment_of
from meshkit.recipes.tasks import load_tasks
from tests.recipes.launch import command_line, run

RECIPE = "examples/grpo.py"
TOL_CURVE = 1e-4  # relative; fp32 sums in another order
GAME = '''
from meshkit.algos.environments import Observation


class Parrot:
    """Wants the prompt's first letter said three times, and answers each time."""

    def reset(self, fields, seed):
        self.letter, self.turns = fields["prompt"][0], 0
        return Observation()

    def step(self, action):
        self.turns += 1
        return Observation(text=">", reward=float(action.text == self.letter), done=self.turns == 3)
'''


def flags(out: Path, **changes: object) -> list[str]:
    chosen = {
        "task": "calculator",
        "out": out,
        "sft-steps": 20,
        "steps": 2,
        "warmup-steps": 0,
        "lr": 1e-4,
        "prompts": 6,
        "samples": 4,
        "eval-every": 2,
        "eval-prompts": 8,
    }
    return command_line(chosen, **changes)


def curve(out: Path) -> list[tuple[float, ...]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row[name] for name in ("loss", "reward", "answer_tokens", "entropy")) for row in rows]


def test_a_run_in_turns_is_the_same_on_every_mesh(tmp_path: Path) -> None:
    status, output = run(1, RECIPE, *flags(tmp_path / "one"), timeout_s=280)
    assert status == 0, output
    for mesh in ("tp=2", "dp_shard=2"):
        out = tmp_path / mesh
        out.mkdir()
        (out / "sft-model").symlink_to(tmp_path / "one" / "sft-model")
        status, output = run(2, RECIPE, *flags(out, mesh=mesh, turn_groups=2), timeout_s=280)
        assert status == 0, output
        for found, expected in zip(curve(out), curve(tmp_path / "one"), strict=True):
            assert found == pytest.approx(expected, rel=TOL_CURVE, abs=1e-6)


def test_the_selftest_passes_on_episodes(tmp_path: Path) -> None:
    status, output = run(2, RECIPE, *flags(tmp_path / "out", task="guessing", mesh="tp=2"), "--selftest", timeout_s=280)
    assert status == 0, output
    assert "selftest passed: ratios are 1" in output


def test_an_environment_of_a_file_plays_in_the_recipe_and_travels(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    word = f"{tmp_path / 'game.py'}:Parrot"
    more = {"environment": word, "task": "reversal", "turns": 5, "max_new_tokens": 2}
    status, output = run(1, RECIPE, *flags(tmp_path / "out", **more), timeout_s=280)
    assert status == 0, output
    made = environment_of(word)()
    made.reset({"prompt": "abc>"}, 0)
    made.step(Action(ids=[1], text="a"))
    again = pickle.loads(pickle.dumps(made))
    assert again.step(Action(ids=[1], text="a")).done is False
    assert again.step(Action(ids=[1], text="a")).done is True
    assert made.inner.turns == 1


def test_environments_that_do_not_exist_and_rewards_beside_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='--environment chess: neither one of calculator, guessing nor "file.py:Class"'):
        environment_of("chess")
    (tmp_path / "empty.py").write_text("Parrot = 1\n")
    with pytest.raises(DataError, match="the file has no class 'Parrot' with reset and step"):
        environment_of(f"{tmp_path / 'empty.py'}:Parrot")
    with pytest.raises(DataError, match="--reward exact: an environment gives the reward"):
        load_tasks("guessing", reward=("exact",))


def test_an_environment_that_is_not_there_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    status, output = run(1, RECIPE, *flags(tmp_path / "out", environment="nofile.py:Game"), timeout_s=120)
    assert status != 0
    assert 'neither one of calculator, guessing nor "file.py:Class" of a file that exists' in output
    assert "fine-tuning" not in output and not list((tmp_path / "out").glob("**/*.safetensors"))
