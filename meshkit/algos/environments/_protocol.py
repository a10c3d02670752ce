"""Environment protocol (Gym's `reset` and `step`): actions are what the policy writes in a turn, as token ids and as text."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Action:
    """What the policy wrote in its turn. ids: [N] int64, with the id that ended it. text: without that.

    truncated: it was cut off at `max_new_tokens`.
    """

    ids: np.ndarray
    text: str
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment answers. text: what the policy reads next; ids: in its place, as they are.

    reward: of the turn that it answers. done: the episode has ended, and nobody reads the text.
    """

    text: str = ""
    ids: tuple[int, ...] | None = None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode. Both methods may be `async`; of those of workers the object must be picklable, for it travels."""

    def reset(self, fields: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin. fields: of the prompt's row. seed: the same for all samples of a prompt, which begin with the same text.

        The text comes after the prompt, and may be "".
        """

    def step(self, action: Action) -> Observation | Awaitable[Observation]:
        """Answer a turn."""
