"""Scoring of rollouts by a reward function, on one rank or on a mesh. A reward that fails gives no score, and a reason.

On a mesh each rollout is scored once, every rank is told of every failure, and no rank waits for one that raised.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Literal, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.rollout import Rollout
from meshkit.errors import DataError, RewardError
from meshkit.mesh import Mesh

Score = float | np.ndarray | None
"""a number; [N] one per token of the answer; None (or NaN) where the answer cannot be scored"""


class Reward(Protocol):
    """A function of a rollout. If it raises, the rollout has no score, and the error is the reason."""

    def __call__(self, rollout: Rollout, /) -> Score: ...


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """An answer without a score."""

    kind: Literal["raised", "timed out", "not finite", "no score"]
    text: str
    """for a person: what was raised, after how long"""


Value = float | np.ndarray | Unscored
"""what becomes of a score: a finite number, finite numbers [N], or the reason why there is none"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """One entry for each answer, in order."""

    values: tuple[Value, ...]
    parts: Mapping[str, Scores] = field(default_factory=dict)
    """of a weighted sum, before their weights"""

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
        """The reason of the first answer that has no score, for people to read."""
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
    """Score each answer by `reward`, one after the other, in this process; those of an `async` function at the same time.

    timeout_s: of each answer. It interrupts Python code and waits for files, sockets or processes; a long computation in C is
    interrupted only when it returns. `RewardPool` has no such limit.
    Raises: DataError for a timeout outside of the main thread, where Python has no timer.
    """
    if inspect.iscoroutinefunction(reward):
        returned = asyncio.run(_call_at_once(answers, reward, timeout_s))
    else:
        returned = [_call(answer, reward, timeout_s) for answer in answers]
    return Scores(values=tuple(returned))


def weighted_sum(parts: Mapping[str, tuple[Scores, float]]) -> Scores:
    """Scores times weights, added up by answer. An answer that lacks a part has no score, and the reason names the part.

    A number and a vector add up to the vector with the number at its last token.
    Raises: DataError for no parts or parts of different numbers of answers.
    """
    counts = {name: len(scores.values) for name, (scores, _) in parts.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"weighted_sum of parts with {counts} answers. Give at least one, all of the same answers.")
    rows = zip(*(scores.values for scores, _ in parts.values()), strict=True)
    weights = [weight for _, weight in parts.values()]
    return Scores(
        values=tuple(_add(dict(zip(parts, row, strict=True)), weights) for row in rows),
        parts={name: scores for name, (scores, _) in parts.items()},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshScores:
    """Scores of this data rank's answers, and totals over the whole step, which all ranks have."""

    local: Scores
    """of this data rank's answers"""
    rollouts: list[Rollout]
    """this data rank's, with their rewards: each score, a vector's sum; NaN where there is none"""
    answers: int
    """of the whole step"""
    tokens: int
    """of them"""
    mean: float
    """score of the step's answers that have one; NaN if none has"""
    parts: dict[str, float]
    """of a weighted sum the mean of each part, before its weight"""
    truncated: int
    """answers of the whole step that were cut off"""
    unscored: dict[str, int]
    """of the whole step, by kind"""
    first_unscored: str | None
    """of the lowest data rank that has one"""

    def scalars(self) -> dict[str, float]:
        """For a logger: mean reward, mean tokens of an answer, the share that was cut off, and the number without a score, by
        kind."""
        unscored = {f"unscored/{kind}": count for kind, count in self.unscored.items()}
        means = {"answer_tokens": self.tokens, "truncated": self.truncated}
        return {
            "reward": self.mean,
            **{f"reward/{name}": mean for name, mean in self.parts.items()},
            **{name: total / max(self.answers, 1) for name, total in means.items()},
            **unscored,
        }

    @staticmethod
    def joined(parts: Sequence[MeshScores]) -> MeshScores:
        """Of several calls in one step, in order. No communication."""
        if len(parts) == 1:
            return parts[0]
        unscored = sum((Counter(part.unscored) for part in parts), Counter())
        scored = [part.answers - sum(part.unscored.values()) for part in parts]
        # A mean over all answers with a score, not of means: rounds may have different numbers of them. `count` leaves out
        # the NaN of a round without any.
        totals = [part.mean * count for part, count in zip(parts, scored, strict=True) if count]
        return MeshScores(
            local=Scores(values=tuple(value for part in parts for value in part.local.values)),
            rollouts=[rollout for part in parts for rollout in part.rollouts],
            answers=sum(part.answers for part in parts),
            tokens=sum(part.tokens for part in parts),
            mean=sum(totals) / sum(scored) if totals else math.nan,
            parts={
                name: _mean_of_means([(part.parts[name], part.answers) for part in parts]) for name in parts[0].parts
            },
            truncated=sum(part.truncated for part in parts),
            unscored=dict(unscored),
            first_unscored=next((part.first_unscored for part in parts if part.first_unscored), None),
        )


def score_on_mesh(mesh: Mesh, answers: Sequence[Rollout], scorer: Scorer, *, fail_fast: bool = False) -> MeshScores:
    """Score the answers of each data rank on the first of its ranks, and give the scores to the others (tp, cp, pp).

    answers: of this data rank, the same on its ranks; may be none. scorer: `partial(score, reward=...)`, a pool's `score`, or
    a function that adds several up. If it raises, which `score` does not, every rank raises.
    fail_fast: raise for an answer without a score, too. Give rewards a time limit: the other ranks wait in a collective.
    Wire: one all-gather of the pickled scores over the mesh.
    Raises: RewardError, on every rank and with the same text.
    """
    # [Note: gather the error, then raise]
    # A rank that raised before the collective would leave the others waiting in it until its timeout. So what went wrong is
    # sent along with the data, and afterwards every rank raises the same text, which `run_main` then prints once.
    scores, failure = None, None
    # One scorer for each data rank: its ranks of pp, cp and tp have the same answers, and unit tests are dear.
    if all(mesh[axis].get_local_rank() == 0 for axis in ("pp", "cp", "tp")):
        try:
            scores = scorer(answers)
            if len(scores.values) != len(answers):
                failure = f"RewardError: {len(scores.values)} scores for {len(answers)} answers"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    counts = sum(len(answer.ids) for answer in answers), sum(answer.truncated for answer in answers)
    by_rank: list[tuple[int, Scores | None, str | None, tuple[int, int]]]
    by_rank = [(0, None, None, (0, 0))] * mesh.spec.world_size
    dist.all_gather_object(by_rank, (mesh.data_rank, scores, failure, counts), group=mesh.group)
    for rank, (_, _, text, _) in enumerate(by_rank):
        if text is not None:
            raise RewardError(f"scoring failed on rank {rank}: {text}. Mend the scorer.")
    by_data_rank = dict(sorted((data_rank, scores) for data_rank, scores, _, _ in by_rank if scores is not None))
    unscored: Counter[str] = Counter()
    for each in by_data_rank.values():
        unscored.update(each.unscored)
    first = next(
        (
            f"data rank {data_rank}, {each.first_unscored}"
            for data_rank, each in by_data_rank.items()
            if each.first_unscored
        ),
        None,
    )
    totals = np.concatenate([each.totals for each in by_data_rank.values()])
    # By data rank, whose ranks all give the same number.
    tokens, truncated = map(sum, zip(*{data_rank: counts for data_rank, _, _, counts in by_rank}.values(), strict=True))
    if fail_fast and first is not None:
        raise RewardError(
            f"{sum(unscored.values())} of {len(totals)} answers have no score; the first: {first}. "
            "Mend the reward, or pass fail_fast=False to leave such answers out."
        )
    local_scores = by_data_rank[mesh.data_rank]
    return MeshScores(
        local=local_scores,
        rollouts=[
            replace(each, reward=reward) for each, reward in zip(answers, local_scores.totals.tolist(), strict=True)
        ],
        answers=len(totals),
        tokens=tokens,
        mean=_mean([totals]),
        parts={name: _mean([each.parts[name].totals for each in by_data_rank.values()]) for name in local_scores.parts},
        truncated=truncated,
        unscored=dict(unscored),
        first_unscored=first,
    )


def _mean(totals: Sequence[np.ndarray]) -> float:
    """Of those that are numbers; NaN where there is none."""
    joined = np.concatenate(totals)
    scored = joined[~np.isnan(joined)]
    return float(scored.mean()) if len(scored) else math.nan


def _mean_of_means(means: Sequence[tuple[float, int]]) -> float:
    """Of (mean, answers) those that are numbers; NaN where there is none."""
    scored = [(mean, answers) for mean, answers in means if not math.isnan(mean)]
    total = sum(answers for _, answers in scored)
    return sum(mean * answers for mean, answers in scored) / total if total else math.nan


def attempt(answer: Rollout, reward: Reward) -> Value:
    """What the reward says of the answer, checked; or what it raised."""
    try:
        return _checked(answer, reward(answer))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # SystemExit of a reward's own exit() must not end the rank. KeyboardInterrupt and _TimeIsUp pass.
        return _raised(reward, error)


def _checked(answer: Rollout, returned: Score | Tensor) -> Value:
    """The result of a reward as a finite float or a finite vector [N] of fp64, or the reason why it is neither."""
    if returned is None:
        return Unscored(kind="no score", text="the reward returned None")
    try:
        # numpy takes no tensor that has a gradient, is in bf16, or on a device.
        numbers = returned.detach().cpu().double() if isinstance(returned, Tensor) else returned
        values = np.asarray(numbers, dtype=np.float64)
    except Exception:  # whatever the conversion of a strange object raises
        text = f"the reward returned {_shown(returned)}, which is neither a number nor a vector"
        return Unscored(kind="raised", text=text)
    if values.ndim and values.shape != (len(answer.ids),):
        return Unscored(
            kind="raised", text=f"the reward returned shape {values.shape} for an answer of {len(answer.ids)} tokens"
        )
    if not np.isfinite(values).all():
        return Unscored(kind="not finite", text=f"the reward returned {_shown(returned)}")
    return values if values.ndim else float(values)


def _raised(reward: Callable[..., object], error: BaseException) -> Unscored:
    """The reason of an answer whose reward raised."""
    name = getattr(reward, "__name__", type(reward).__name__)
    return Unscored(kind="raised", text=f"{name}: {type(error).__name__}: {_shown(error, str)}")


def _shown(value: object, text: Callable[[object], str] = reprlib.repr) -> str:
    """A text for people, also of objects of other people whose own raises."""
    try:
        return text(value)
    except Exception:
        return f"a {type(value).__name__}"


class _TimeIsUp(BaseException):
    """Not an Exception: a reward's own `except Exception` must not catch it."""


def _call(answer: Rollout, reward: Reward, timeout_s: float | None) -> Value:
    if timeout_s is None:
        return attempt(answer, reward)
    try:
        with _alarm(timeout_s):
            return attempt(answer, reward)
    except _TimeIsUp:
        return Unscored(kind="timed out", text=f"no score within {timeout_s} s")


async def _call_at_once(
    answers: Sequence[Rollout], reward: Callable[[Rollout], Coroutine[None, None, Score]], timeout_s: float | None
) -> list[Value]:
    """Of a coroutine that blocks instead of awaiting, nothing is interrupted."""

    async def one(answer: Rollout) -> Value:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _checked(answer, await reward(answer))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # A TimeoutError may be the reward's own, as of a server that it asks.
            if isinstance(error, TimeoutError) and limit.expired():
                return Unscored(kind="timed out", text=f"no score within {timeout_s} s")
            return _raised(reward, error)

    return list(await asyncio.gather(*map(one, answers)))


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        raise DataError("score(timeout_s=) needs the main thread. Call it there, or use a RewardPool.")

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    # Repeated every 0.1 s: code that swallows the first one, as a bare `except:` does, meets another.
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s, 0.1)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        # Once more: the timer may have rung within the line above, which then did not stop it. It would ring in training.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:  # the timer of whoever calls goes on; one that would have rung meanwhile rings now
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 1e-3), interval_s)


def _add(values: Mapping[str, Value], weights: Sequence[float]) -> Value:
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
        # A new array (np.sum makes one): the parts' vectors stay theirs.
        total[-1] += numbers
    return total
