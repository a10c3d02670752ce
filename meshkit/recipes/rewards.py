"""Rewards of a recipe by their names: verifiers, functions of your own files, and weighted sums of several."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshkit.algos.rewards import (
    Reward,
    RewardPool,
    Scores,
    UnitTests,
    arithmetic,
    countdown,
    exact_match,
    score,
    weighted_sum,
)
from meshkit.algos.rollout import Rollout
from meshkit.core.import_file import import_file
from meshkit.errors import DataError

VERIFIERS: dict[str, Reward] = {
    "exact": exact_match,
    "arithmetic": arithmetic,
    "countdown": countdown,
    "unit-tests": UnitTests(),
}
"""by the names that recipes have for them"""


@dataclass(frozen=True)
class FileReward:
    """`file.py:function`, imported where it is first called, so that workers of a pool can too."""

    file: str
    name: str

    @cached_property
    def function(self) -> Any:
        """Raises: DataError for a file that cannot be imported, or has no such function."""
        try:
            module = import_file(Path(self.file))
        except ImportError as error:
            raise DataError(f"--reward {self.file}: cannot be imported: {error}.") from error
        function = getattr(module, self.name, None)
        if not callable(function):
            raise DataError(f"--reward {self.file}:{self.name}: the file has no function {self.name!r}.")
        return function

    def __reduce__(self) -> tuple[type[FileReward], tuple[str, str]]:
        return FileReward, (self.file, self.name)  # not what was imported: a worker imports it again

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, rollout: Rollout, /) -> Any:
        return self.function(rollout)


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Rewards with their weights, by name. timeout_s: of each answer and reward. workers: processes that score at once on a
    rank; 0: the rank itself, one answer after the other, those of an `async` function at once."""

    weights: Mapping[str, float]
    timeout_s: float = 10.0
    workers: int = 0

    @staticmethod
    def read(words: Sequence[str], *, timeout_s: float = 10.0, workers: int = 0) -> Rewards:
        """Of --reward: names of VERIFIERS or `file.py:function`, each perhaps with a weight, as `exact=0.5`; else 1.

        Raises: DataError for names that are not known or come twice, for weights that are no numbers, and for bad files.
        """
        weights: dict[str, float] = {}
        for word in words:
            name, _, weight = word.partition("=")
            if name in weights:
                raise DataError(f"--reward {name} is given twice. Give it once, with the sum of the weights.")
            try:
                weights[name] = float(weight) if weight else 1.0
            except ValueError:
                raise DataError(f"--reward {word}: {weight!r} is no weight. Write a number, as {name}=0.5.") from None
            if not math.isfinite(weights[name]):
                raise DataError(f"--reward {word}: of {weight} times a score nothing is learnt. Write a finite number.")
        rewards = Rewards(weights=weights, timeout_s=timeout_s, workers=workers)
        rewards._functions  # noqa: B018  # raises
        return rewards

    def by_name(self, name: str) -> Reward:
        """Raises: DataError for one that is not there."""
        if name in VERIFIERS:
            return VERIFIERS[name]
        file, _, function = name.rpartition(":")
        if not file.endswith(".py") or not Path(file).is_file():
            near = difflib.get_close_matches(name, VERIFIERS, 1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise DataError(
                f'--reward {name}: neither one of {", ".join(VERIFIERS)} nor "file.py:function" of a file that exists.{meant}'
            )
        reward = FileReward(file, function)
        if inspect.iscoroutinefunction(reward.function):
            return reward.function  # type: ignore[no-any-return]
        return reward

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """The weighted sum, with its parts where there are several."""
        parts = {name: (self._score(name, rollouts), weight) for name, weight in self.weights.items()}
        if list(self.weights.values()) == [1.0]:
            return next(iter(parts.values()))[0]
        return weighted_sum(parts)

    def _score(self, name: str, rollouts: Sequence[Rollout]) -> Scores:
        reward = self._functions[name]
        if not self.workers or inspect.iscoroutinefunction(reward):
            return score(rollouts, reward, timeout_s=self.timeout_s)
        return self._pools[name].score(rollouts)

    @cached_property
    def _functions(self) -> dict[str, Reward]:
        """Kept, since a file may load a model, or count."""
        return {name: self.by_name(name) for name in self.weights}

    @cached_property
    def _pools(self) -> dict[str, RewardPool]:
        """Their processes end with this one."""
        options = {"workers": self.workers, "timeout_s": self.timeout_s}
        return {name: RewardPool(reward, **options) for name, reward in self._functions.items()}  # type: ignore[arg-type]
