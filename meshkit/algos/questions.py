"""What a recipe asks about and how answers are checked: files of prompts, or one of the reference tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshkit.algos.reference_tasks import REFERENCE_TASKS, VERIFIERS
from meshkit.algos.rewards import Answer, Reward, Scores, score
from meshkit.data import Record, read_records, split_records


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Rows have a `prompt`, and a `completion` or what else the reward reads."""

    train: list[Record]
    held_out: list[Record]
    reward: Reward
    reward_timeout_s: float
    """of each answer"""
    max_new_tokens: int

    def score(self, answers: Sequence[Answer]) -> Scores:
        return score(answers, self.reward, timeout_s=self.reward_timeout_s)

    def __str__(self) -> str:
        like = self.train[0].fields["prompt"]
        return f"{len(self.train):,} prompts, {len(self.held_out):,} held out, like {like!r}"


def questions(
    task: str,
    data: Sequence[Path] = (),
    *,
    held_out: float = 0.05,
    evaluated: int | None = None,
    seed: int = 0,
    reward: str | None = None,
    reward_timeout_s: float = 10.0,
    max_new_tokens: int | None = None,
) -> Questions:
    """The rows of the files, or without any those of the task; of the held-out part the first `evaluated`.

    task: of REFERENCE_TASKS. reward: of VERIFIERS; default that of the task, "exact" for files. max_new_tokens: default that
    of the task, 256 for files. Raises: DataError for files that cannot be read or split.
    """
    known = REFERENCE_TASKS[task]
    rows = split_records(read_records(data), held_out=held_out) if data else known.rows(held_out=held_out, seed=seed)
    return Questions(
        train=rows.train,
        held_out=rows.held_out[:evaluated],
        reward=VERIFIERS[reward or ("exact" if data else known.reward)],
        reward_timeout_s=reward_timeout_s,
        max_new_tokens=max_new_tokens or (256 if data else known.max_new_tokens),
    )
