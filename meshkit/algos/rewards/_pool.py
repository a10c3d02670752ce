"""Reward workers (process pool): several rewards at a time, each with a time limit; a worker that hangs is killed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from meshkit.algos.rewards._score import Reward, Scores, Unscored, Value, attempt
from meshkit.algos.rollout import Rollout
from meshkit.core.workers import CallFailed, WorkerDied, Workers


class RewardPool:
    """`workers` processes that score answers with `reward`, which must be picklable: a function or object of a module.

    timeout_s: of each answer; a worker that takes longer, or dies, is replaced, while the others go on.
    Use it as a context manager, in a script with an `if __name__ == "__main__":` guard, since workers import the module of
    the reward.
    """

    def __init__(self, reward: Reward, *, workers: int = 4, timeout_s: float = 10.0) -> None:
        self._workers = Workers(partial(attempt, reward=reward), count=workers, timeout_s=timeout_s)

    def score(self, answers: Sequence[Rollout]) -> Scores:
        """The reward of each answer, in order."""
        futures = [self._workers.submit(answer) for answer in answers]
        return Scores(values=tuple(_outcome(each) for each in futures))

    def close(self) -> None:
        """Kill the workers."""
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _outcome(future: Future[Any]) -> Value:
    try:
        value: Value = future.result()
    except TimeoutError as error:
        return Unscored(kind="timed out", text=f"no score {error}")
    except (WorkerDied, CallFailed) as error:
        return Unscored(kind="raised", text=str(error))
    return value
