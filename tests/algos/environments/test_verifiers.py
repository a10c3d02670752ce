"""Environments of the `verifiers` package, with the package where it is installed; its rollout and its rubric decide."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import numpy as np
import pytest

from meshkit.algos.environments import EnvironmentPool, Player, VerifiersEnvironment, episode_scores, verifiers_rows
from meshkit.algos.rollout import Prompt, Rollout, Sampling
from meshkit.errors import DataError
from tests.algos.environments.test_play import OneRank

INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="verifiers is not installed")


def doubling() -> Any:
    """Asks for the double of what was said until it is above 20; the reward is the number of right answers over the turns."""
    import verifiers as vf
    from datasets import Dataset

    class Doubling(vf.MultiTurnEnv):
        async def setup_state(self, state: Any) -> None:
            state["right"] = 0

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            said = int(messages[-1].content)
            before = int(messages[-2].content)
            state["right"] += said == 2 * before
            if said > 20:
                state["final_env_response"] = [{"role": "user", "content": "end"}]
                return state["final_env_response"]
            return [{"role": "user", "content": str(said)}]

    async def share_right(state: Any) -> float:
        return state["right"] / len(state["trajectory"])

    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": str(n)}], "answer": "", "example_id": n} for n in (3, 5)]
    )
    return Doubling(dataset=rows, rubric=vf.Rubric(funcs=[share_right]), max_turns=6)


def doubles(prompts: list[Prompt], *, samples: int, decode: Any = None, **options: Any) -> list[Rollout]:
    """An engine that doubles the last number that it read; the second sample of each prompt adds one in its first turn."""
    found = []
    for prompt in prompts:
        for sample in range(samples):
            number = 2 * int(prompt.ids[-1]) + (sample == 1)
            found.append(Rollout(ids=np.array([number]), log_probs=np.zeros(1), text=str(number), key=prompt.key))
    return found


@needs_it
def test_its_rollout_asks_the_policy_and_its_rubric_scores() -> None:
    environment = doubling()
    rows = verifiers_rows(environment)
    prompts = [
        Prompt(ids=np.array([int(row.fields["prompt"][0]["content"])]), key=key, fields=row.fields)
        for key, row in enumerate(rows)
    ]
    one: Any = OneRank()
    pool = EnvironmentPool(timeout_s=30.0)
    play = Player(
        mesh=one,
        engine=doubles,
        environment=partial(VerifiersEnvironment, environment),
        encode=lambda text: [int(text)] if text else [],
        turns=8,
        pool=pool,
    )
    found = play(prompts, sampling=Sampling(max_new_tokens=1), samples=2)
    pool.close()
    assert [each.fields["failure"] for each in found] == [""] * 4
    # 3: 6, 12, 24. 3: 7, 14, 28. 5: 10, 20, 40. 5: 11, 22.
    assert [each.ids[each.wrote].tolist() for each in found] == [[6, 12, 24], [7, 14, 28], [10, 20, 40], [11, 22]]
    assert [each.ids[~each.wrote].tolist() for each in found] == [[6, 12], [7, 14], [10, 20], [11]]
    assert not any(each.truncated for each in found)
    np.testing.assert_allclose(episode_scores(found).totals, [1, 2 / 3, 1, 1 / 2])


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(DataError, match=r'verifiers is not installed. `pip install "verifiers<0.2"`'):
        VerifiersEnvironment(object())
