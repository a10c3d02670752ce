"""Guessing game, a reference environment of several turns: find a letter by being told whether it comes later or earlier."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from meshkit.algos.environments._protocol import Action, Observation

LETTERS = string.ascii_lowercase


class GuessingGame:
    """The prompt `c-q>` gives the range, the row's `secret` is in it; each turn is a letter, answered `+` (later) or `-`.

    The reward is 1 when the secret is said; any other text ends the episode with 0. Fifteen letters take four turns.
    """

    def reset(self, fields: Mapping[str, Any], seed: int) -> Observation:
        self.secret = fields["secret"]
        return Observation()

    def step(self, action: Action) -> Observation:
        guess = action.text
        if guess == self.secret:
            return Observation(reward=1.0, done=True)
        if len(guess) != 1 or guess not in LETTERS:
            return Observation(done=True)
        return Observation(text="+" if self.secret > guess else "-")
