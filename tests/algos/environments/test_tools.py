"""Tools and reference environments: by hand, and a demonstration of each reference task is played as it says."""

from __future__ import annotations

import numpy as np
import pytest

from meshkit.algos.environments import Action, Calculator, Environment, GuessingGame, Observation, run_python
from meshkit.data import calculator_tasks, guessing_tasks
from meshkit.sandbox import SandboxLimits

LIMITS = SandboxLimits(wall_s=30.0, cpu_s=5)


def said(environment: Environment, text: str) -> Observation:
    found = environment.step(Action(ids=np.zeros(1, np.int64), text=text))
    assert isinstance(found, Observation)
    return found


@pytest.mark.parametrize(
    ("kind", "tasks"), [(Calculator, calculator_tasks(count=200)), (GuessingGame, guessing_tasks(count=200))]
)
def test_demonstrations_are_what_the_environment_answers(kind: type[Environment], tasks: object) -> None:
    rewards = []
    for row in tasks.train:  # type: ignore[attr-defined]
        for texts in row.fields["demonstrations"]:
            environment = kind()
            environment.reset(row.fields, 0)
            for turn, answer in zip(texts[::2], [*texts[1::2], None], strict=True):
                found = said(environment, turn)
                if answer is not None:
                    assert not found.done and found.text == answer
            rewards.append(found.reward)
    assert 0.1 < np.mean(rewards) < 0.9  # right now and then


def test_the_guessing_game_by_halves_takes_four_turns() -> None:
    for secret in "bcdefghijklmnop":
        game, low, high = GuessingGame(), ord("b"), ord("p")
        game.reset({"secret": secret}, 0)
        for _ in range(4):
            found = said(game, chr((low + high) // 2))
            if found.done:
                break
            low, high = ((low + high) // 2 + 1, high) if found.text == "+" else (low, (low + high) // 2 - 1)
        assert found == Observation(reward=1.0, done=True)
    assert said(game, "bc") == Observation(done=True)


def test_the_calculator_computes_and_its_answer_is_checked() -> None:
    desk = Calculator()
    desk.reset({"completion": "3901"}, 0)
    assert said(desk, "=47*83").text == "=3901>"
    assert said(desk, "=2**99").text == said(desk, "=1/0").text == "=>"
    assert said(desk, "3901") == Observation(reward=1.0, done=True)
    assert said(desk, "3900") == Observation(done=True)


def test_python_runs_in_the_sandbox_and_says_what_it_printed() -> None:
    desk = Calculator(tool=lambda text: run_python(text, limits=LIMITS))
    desk.reset({"completion": "1"}, 0)
    assert said(desk, "=print(sum(range(10)))").text == "=45\n>"
    assert "Operation not permitted" in run_python("import os\nos.kill(os.getppid(), 9)", limits=LIMITS)
    assert run_python("raise ValueError('no')", limits=LIMITS) == "error: ValueError: no in line 1 of the program"
    assert len(run_python("print('\U0001f600' * 10_000)", limits=LIMITS)) == 1_000
    assert run_python("x = 1", limits=LIMITS) == ""
