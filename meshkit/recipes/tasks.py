"""Tasks of reinforcement learning: prompts, and how rollouts are checked; from files, or a reference task and small model.

Reinforcement learning on a reference task shows in minutes on a CPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from meshkit.algos.environments import episode_scores
from meshkit.algos.rewards import Scores, Unscored
from meshkit.algos.rollout import Rollout
from meshkit.data import (
    Record,
    TaskSplits,
    addition_tasks,
    calculator_tasks,
    countdown_tasks,
    guessing_tasks,
    read_records,
    reversal_tasks,
    split_records,
)
from meshkit.errors import DataError, RewardError
from meshkit.models import LlamaConfig

from .environments import environment_of
from .rewards import Rewards

# Small enough that rollouts of a step take seconds on two cores, and large enough to learn the tasks.
SMALL_MODEL = LlamaConfig(
    vocab_size=64,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=24,
    max_position_embeddings=256,
)


@dataclass(frozen=True, kw_only=True)
class ReferenceTask:
    """Rows to learn from, how they are checked, and how long a small model learns them before it is rewarded."""

    rows: Callable[..., TaskSplits]
    reward: str
    """of VERIFIERS"""
    max_new_tokens: int
    sft_steps: int
    sft_lr: float
    environment: str = ""
    """which gives the reward in its place"""
    turns: int = 1


REFERENCE_TASKS = {
    "addition": ReferenceTask(rows=addition_tasks, reward="exact", max_new_tokens=4, sft_steps=440, sft_lr=1e-3),
    "reversal": ReferenceTask(
        rows=partial(reversal_tasks, shortest=3, longest=5),
        reward="exact",
        max_new_tokens=6,
        sft_steps=110,
        sft_lr=1e-3,
    ),
    "countdown": ReferenceTask(rows=countdown_tasks, reward="countdown", max_new_tokens=10, sft_steps=800, sft_lr=3e-3),
    "calculator": ReferenceTask(
        rows=calculator_tasks,
        reward="exact",
        max_new_tokens=7,
        sft_steps=300,
        sft_lr=1e-3,
        environment="calculator",
        turns=3,
    ),
    "guessing": ReferenceTask(
        rows=guessing_tasks,
        reward="exact",
        max_new_tokens=2,
        sft_steps=600,
        sft_lr=1e-3,
        environment="guessing",
        turns=4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Rows have a `prompt`, and a `completion` or what else the reward reads."""

    train: list[Record]
    held_out: list[Record]
    rewards: Rewards
    max_new_tokens: int
    """of an answer; with an environment of a turn"""
    environment: str = ""
    """gives the reward in place of `rewards`"""
    turns: int = 1

    def refuse_failing_reward(self) -> None:
        """Raises: RewardError if the reward raises for the first row's completion, or for "" where the row has none;
        DataError for an environment that is not there."""
        if self.environment:
            environment_of(self.environment)
            return
        row = self.train[0]
        text = str(row.fields.get("completion", ""))
        rollout = Rollout(ids=np.zeros(1, np.int64), text=text, fields=row.fields)
        (value,) = self.score([rollout]).values
        if isinstance(value, Unscored) and value.kind == "raised":
            raise RewardError(
                f"{row.source}: --reward cannot score {text!r}, {value.text}. The row has {', '.join(row.fields)}. Choose "
                "another --reward, or give --data what it reads."
            )

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        return episode_scores(rollouts) if self.environment else self.rewards.score(rollouts)

    def __str__(self) -> str:
        example = self.train[0].fields["prompt"]
        return f"{len(self.train):,} prompts, {len(self.held_out):,} held out, like {example!r}"


def load_tasks(
    task: str,
    data: Sequence[str | os.PathLike[str]] = (),
    *,
    held_out: float = 0.05,
    evaluated: int | None = None,
    seed: int = 0,
    reward: Sequence[str] = (),
    reward_timeout_s: float = 10.0,
    reward_workers: int = 0,
    max_new_tokens: int | None = None,
    environment: str = "",
    turns: int | None = None,
) -> Tasks:
    """The rows of the files, or without any those of the task; of the held-out part the first `evaluated`.

    task: of REFERENCE_TASKS. reward: see `Rewards.read`; default that of the task, "exact" for files. max_new_tokens: default
    that of the task, 256 for files. environment, turns: default those of the task.
    Raises: DataError for files that cannot be read or split, and for a reward beside an environment.
    """
    reference_task = REFERENCE_TASKS[task]
    names = reward or ("exact" if data else reference_task.reward,)
    own = not data and not environment
    if reward and (environment or (own and reference_task.environment)):
        raise DataError(f"--reward {reward[0]}: an environment gives the reward. Leave one of the two out.")
    rewards = Rewards.read(names, timeout_s=reward_timeout_s, workers=reward_workers)
    rows = (
        split_records(read_records(data), held_out=held_out)
        if data
        else reference_task.rows(held_out=held_out, seed=seed)
    )
    return Tasks(
        train=rows.train,
        held_out=rows.held_out[:evaluated],
        rewards=rewards,
        max_new_tokens=max_new_tokens or (256 if data else reference_task.max_new_tokens),
        environment=reference_task.environment if own else environment,
        turns=turns or (reference_task.turns if own else 8 if environment else 1),
    )


def small_model(vocab_size: int | None = None) -> LlamaConfig:
    """SMALL_MODEL for this vocabulary."""
    return dataclasses.replace(SMALL_MODEL, vocab_size=vocab_size or SMALL_MODEL.vocab_size)
