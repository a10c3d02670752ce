"""Preference pairs with answers to other prompts, so that a reward model must read the prompt (RRM)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal, NamedTuple

import numpy as np

from meshkit.errors import DataError


class Answer(NamedTuple):
    """One of the answers of a pair of the data, by its index."""

    pair: int
    side: Literal["chosen", "rejected"]


@dataclass(frozen=True)
class CrossPromptPair:
    """To the prompt of pair `prompt`, `better` is better than `worse`; with `tie` neither is, for both are off the topic."""

    prompt: int
    better: Answer
    worse: Answer
    tie: bool

    @property
    def preference(self) -> float:
        """The probability that `better` is better, as `bradley_terry` takes it."""
        return 0.5 if self.tie else 1.0


def cross_prompt_pairs(pairs: int, *, seed: int) -> Iterator[CrossPromptPair]:
    """14 pairs for each of `pairs` prompts, besides the original one; two other prompts j and k lend their answers.

    8 where an answer to the prompt, chosen or rejected, is better than one of the four to j and k, and 6 ties: every two of
    those four. j and k follow the prompt on one random round through all prompts, so they always differ from it.
    Raises: DataError for fewer than 3 pairs.
    Source: Liu et al. 2024 (2409.13156), the list of augmented triplets; the paper then drops those that a first reward model
    already gets right.
    """
    if pairs < 3:
        raise DataError(
            f"cross_prompt_pairs: {pairs} pairs; a prompt borrows answers from two others. Give at least 3."
        )
    order = np.random.default_rng(seed).permutation(pairs).tolist()
    following = {prompt: (order[n + 1 - pairs], order[n + 2 - pairs]) for n, prompt in enumerate(order)}
    sides: tuple[Literal["chosen", "rejected"], ...] = ("chosen", "rejected")
    for prompt in range(pairs):
        own = [Answer(prompt, side) for side in sides]
        others = [Answer(other, side) for other in following[prompt] for side in sides]
        for better, worse in product(own, others):
            yield CrossPromptPair(prompt, better, worse, tie=False)
        for better, worse in combinations(others, 2):
            yield CrossPromptPair(prompt, better, worse, tie=True)
