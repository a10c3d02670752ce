"""Answers to scores. What cannot be scored has none, and a reason; nothing that a reward does ends the run by itself."""

from __future__ import annotations

import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal, Protocol

import numpy as np

from meshkit.algos.rollout import Rollout
from meshkit.errors import DataError

Score = float | np.ndarray | None
"""a number; [N] one per token of the answer; None (or NaN) where the answer cannot be scored"""


class Reward(Protocol):
    """A function of a rollout. May raise: the rollout then has no score, and says why."""

    def __call__(self, rollout: Rollout, /) -> Score: ...


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """An answer without a score."""

    kind: Literal["raised", "timed out", "not finite", "no score"]
    text: str
    """for a person: what was raised, after how long"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """One entry for each answer, in order."""

    values: tuple[float | np.ndarray | Unscored, ...]

    @property
    def totals(self) -> np.ndarray:
        """[answers] fp64: each score, a vector's sum; NaN where there is none."""
        return np.array(
            [math.nan if isinstance(value, Unscored) else float(np.sum(value)) for value in self.values],
            dtype=np.float64,
        )

    @property
    def unscored(self) -> dict[str, int]:
        """How many answers have no score, by kind; kinds that did not happen are left out."""
        return dict(Counter(value.kind for value in self.values if isinstance(value, Unscored)))

    @property
    def first_unscored(self) -> str | None:
        """What went wrong with the first answer that has no score, to be shown."""
        return next((f"{value.kind}: {value.text}" for value in self.values if isinstance(value, Unscored)), None)

    def per_token(self, answers: Sequence[Rollout]) -> list[np.ndarray]:
        """[N] fp64 of each answer: a vector as it is, a number at the last token, NaN at it where there is no score."""
        rewards = []
        for value, answer in zip(self.values, answers, strict=True):
            reward = np.zeros(len(answer.ids))
            if isinstance(value, np.ndarray):
                reward += value
            elif len(reward):
                reward[-1] = math.nan if isinstance(value, Unscored) else value
            rewards.append(reward)
        return rewards


Scorer = Callable[[Sequence[Rollout]], Scores]


def score(answers: Sequence[Rollout], reward: Reward, *, timeout_s: float | None = None) -> Scores:
    """`reward` of each answer, one after the other, in this process.

    timeout_s: of each answer. It interrupts Python code and what waits for a file, a socket or another process; code in C
    that computes for long is only interrupted when it returns. `RewardPool` has no such limit.
    Raises: DataError for a timeout outside of the main thread, where Python has no timer.
    """
    return Scores(values=tuple(checked(answer, _call(answer, reward, timeout_s)) for answer in answers))


def weighted_sum(parts: Mapping[str, tuple[Scores, float]]) -> Scores:
    """Scores times weights, added up by answer; one that lacks any part has no score, and says which part.

    A number and a vector add up to the vector with the number at its last token.
    Raises: DataError for no parts or parts of different numbers of answers.
    """
    counts = {name: len(scores.values) for name, (scores, _) in parts.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"weighted_sum of parts with {counts} answers. Give at least one, all of the same answers.")
    rows = zip(*(scores.values for scores, _ in parts.values()), strict=True)
    weights = [weight for _, weight in parts.values()]
    return Scores(values=tuple(_add(dict(zip(parts, row, strict=True)), weights) for row in rows))


def checked(answer: Rollout, found: Score | Unscored) -> float | np.ndarray | Unscored:
    """What a reward returned, as a finite float or a finite vector [N] of fp64, or why it is neither."""
    if isinstance(found, Unscored):
        return found
    if found is None:
        return Unscored(kind="no score", text="the reward returned None")
    try:
        values = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        return Unscored(kind="raised", text=f"the reward returned {found!r}, which is neither a number nor a vector")
    if values.ndim and values.shape != (len(answer.ids),):
        return Unscored(
            kind="raised", text=f"the reward returned shape {values.shape} for an answer of {len(answer.ids)} tokens"
        )
    if not np.isfinite(values).all():
        return Unscored(kind="not finite", text=f"the reward returned {found!r}")
    return values if values.ndim else float(values)


def attempt(answer: Rollout, reward: Reward) -> Score | Unscored:
    """The reward, or what it raised."""
    try:
        return reward(answer)
    except (Exception, SystemExit) as error:
        name = getattr(reward, "__name__", type(reward).__name__)
        return Unscored(kind="raised", text=f"{name}: {type(error).__name__}: {error}")


class _TimeIsUp(BaseException):
    """Not an Exception: a reward's own `except Exception` must not catch it."""


def _call(answer: Rollout, reward: Reward, timeout_s: float | None) -> Score | Unscored:
    if timeout_s is None:
        return attempt(answer, reward)
    try:
        with _alarm(timeout_s):
            return attempt(answer, reward)
    except _TimeIsUp:
        return Unscored(kind="timed out", text=f"no score within {timeout_s} s")


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        raise DataError("score(timeout_s=) needs the main thread. Call it there, or use a RewardPool.")

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: code that swallows the first one meets a second.
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _add(
    values: Mapping[str, float | np.ndarray | Unscored], weights: Sequence[float]
) -> float | np.ndarray | Unscored:
    for name, value in values.items():
        if isinstance(value, Unscored):
            return Unscored(kind=value.kind, text=f"{name}: {value.text}")
    terms = [weight * value for value, weight in zip(values.values(), weights, strict=True)]  # type: ignore[operator]
    numbers = sum(term for term in terms if not isinstance(term, np.ndarray))
    vectors = [term for term in terms if isinstance(term, np.ndarray)]
    if not vectors:
        return float(numbers)
    total: np.ndarray = np.sum(vectors, axis=0)
    if len(total):
        total[-1] += numbers
    return total
