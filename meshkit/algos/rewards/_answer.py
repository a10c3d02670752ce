"""What a reward is given, and what it may return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Score = float | np.ndarray | None
"""a number; [N] one per token of the answer; None (or NaN) where the answer cannot be scored"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """One completion with what its task knows."""

    text: str
    """without the end token"""
    ids: np.ndarray
    """[N] int64 as they were sampled, the end token included; never text encoded again"""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """the row its prompt comes from: `completion`, `numbers`, `tests`"""
    truncated: bool = False
    """whether it was stopped by its length"""


class Reward(Protocol):
    """A function of an answer. May raise: the answer then has no score, and says why."""

    def __call__(self, answer: Answer) -> Score: ...
