"""How many sequences a step takes as training goes on: few while the gradient is clear, more as its noise grows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshkit.errors import DataError

GlobalBatch = int | Callable[[int], int]
"""Sequences of a step, or what says it of the tokens that were taken before."""


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """`first` sequences, then linearly more over the first `tokens` tokens, up to `last`: always whole multiples of `first`.

    So a step of n times as many sequences is n times as many microbatches of the same size, and needs no more memory.
    Source: Brown et al. 2020 (GPT-3), appendix B. Raises: DataError for sizes that do not grow.
    """

    first: int
    last: int
    tokens: int

    def __post_init__(self) -> None:
        _check(self.first, self.last)
        if self.tokens < 1:
            raise DataError(f"BatchRamp: tokens={self.tokens}. Give the tokens over which the batch grows, at least 1.")

    def __call__(self, tokens: int) -> int:
        grown = self.first + (self.last - self.first) * min(tokens, self.tokens) // self.tokens
        return grown // self.first * self.first


class MeasuredBatch:
    """As many sequences as the gradient noise scale has tokens, from `first` to `last`, in whole multiples of `first`.

    `measured` gives it what `metrics.GradientNoise` says; it never shrinks. What it was told is part of the loader's state,
    so a resumed run goes on with the batch that it had. Every rank must be told the same number, as norms over a mesh are.
    Raises: DataError for sizes that do not grow.
    """

    def __init__(self, *, first: int, last: int) -> None:
        _check(first, last)
        self.first, self.last, self.size = first, last, first

    def __call__(self, tokens: int) -> int:
        return self.size

    def measured(self, noise_tokens: float, *, seq_len: int) -> int:
        """From the next step on. noise_tokens: of the scale; of inf, where noise hides the gradient, nothing follows.

        Returns the sequences of a step. Raises: DataError for nan and numbers below 0.
        """
        if math.isnan(noise_tokens) or noise_tokens < 0:
            raise DataError(
                f"MeasuredBatch: a noise scale of {noise_tokens} tokens. Give that of GradientNoise.scale()."
            )
        if math.isfinite(noise_tokens):
            grown = int(noise_tokens / seq_len) // self.first * self.first
            self.size = max(self.size, min(grown, self.last // self.first * self.first))
        return self.size

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: DataError for a size that this one cannot have."""
        size = int(state["size"])
        if size % self.first or not self.first <= size <= self.last:
            raise DataError(
                f"the saved data position has a batch of {size} sequences, but this run has multiples of {self.first} up to "
                f"{self.last}. Give the sizes of the saved run."
            )
        self.size = size


def check_batch(global_batch: GlobalBatch) -> None:
    """Raises: DataError for one of no sequences."""
    if isinstance(global_batch, int) and global_batch < 1:
        raise DataError(f"global_batch={global_batch}: a step needs at least 1 sample. Give global_batch >= 1.")


def sequences_after(tokens: int, global_batch: GlobalBatch) -> int:
    """Of the step after so many tokens. Raises: DataError for what is no number of sequences."""
    if isinstance(global_batch, int):
        return global_batch
    size = global_batch(tokens)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError(
            f"global_batch: {global_batch!r} said {size!r} sequences after {tokens:,} tokens. It must say a whole number of "
            "at least 1."
        )
    return size


def _check(first: int, last: int) -> None:
    if not 1 <= first <= last:
        raise DataError(f"a batch that grows from {first} to {last} sequences. Give first >= 1 and last >= first.")
