"""Mixtures (data blending): samples of several token files by weights, the same sequence on any number of data ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.data._cursor import Cursor, permute
from meshkit.data.batch_growth import GlobalBatch
from meshkit.data.text.tokens import Tokens
from meshkit.errors import DataError

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]]
"""by source; or of the step that comes next, counted from 0, the same on every rank"""


@dataclass(frozen=True)
class Mixture:
    """Token files, each with the share of samples that come from it: what `Loader` takes in place of one.

    sources: by name, encoded by one tokenizer. weights: of each, at least 0; they need not add up to 1. A function of the
    step changes them while a run goes on. After any number of samples, each source has given its share of them to within one.
    Raises: DataError for no sources, for other vocabularies, and for weights that are none.
    """

    sources: Mapping[str, Tokens]
    weights: Weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", dict(self.sources))
        if not self.sources:
            raise DataError("Mixture(sources={}): there is nothing to mix. Give token files by name.")
        sizes = {name: tokens.vocab_size for name, tokens in self.sources.items()}
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
            raise DataError(f"Mixture: vocabularies differ: {said}. Encode all sources by one tokenizer.")
        self.shares(0)

    def shares(self, step: int) -> dict[str, float]:
        """Of the samples of a step, by source; they add up to 1. Raises: DataError for weights that are none."""
        weights = self.weights(step) if callable(self.weights) else self.weights
        if not isinstance(weights, Mapping) or weights.keys() != self.sources.keys():
            said = sorted(weights) if isinstance(weights, Mapping) else type(weights).__name__
            raise DataError(
                f"Mixture(weights=): {said} at step {step}. Give a number for each of {sorted(self.sources)}."
            )
        numbers = [each for each in weights.values() if isinstance(each, int | float)]
        total = float(sum(numbers))
        if len(numbers) < len(weights) or not (math.isfinite(total) and total > 0 and min(numbers) >= 0):
            raise DataError(
                f"Mixture(weights=): {dict(weights)} at step {step}. Give numbers of at least 0, one of them more."
            )
        return {name: weights[name] / total for name in self.sources}


class MixedCursor(Cursor):
    """How many samples of each source were taken, of an endless sequence of each."""

    def __init__(
        self,
        mixture: Mixture,
        *,
        per_epoch: Mapping[str, int],
        global_batch: GlobalBatch,
        seq_len: int,
        seed: int,
        max_steps: int | None,
        identity: Mapping[str, Any],
    ) -> None:
        super().__init__(
            per_epoch=sum(per_epoch.values()),
            global_batch=global_batch,
            seq_len=seq_len,
            seed=seed,
            max_steps=max_steps,
            identity=identity,
        )
        self._mixture, self._of_source = mixture, dict(per_epoch)
        self._taken = dict.fromkeys(per_epoch, 0)
        self._wanted = dict.fromkeys(per_epoch, 0.0)  # of `_taken`, what weights have asked for so far

    @property
    def epochs(self) -> dict[str, float]:
        return {name: taken / self._of_source[name] for name, taken in self._taken.items()}

    def picks(self, rows: range) -> list[tuple[str, int]]:
        self.refuse_more()
        counts, _ = self._next()
        # Slots of the step go to the sources in turn, and rows to slots at random: each rank has some of all.
        begins, first = {}, 0
        for name, count in counts.items():
            begins[name] = first
            first += count
        found = []
        for row in rows:
            slot = permute(row, self.global_batch, seed=self._seed, epoch=self.steps)
            name = next(name for name in reversed(begins) if begins[name] <= slot and counts[name])
            epoch, index = divmod(self._taken[name] + slot - begins[name], self._of_source[name])
            found.append((name, permute(index, self._of_source[name], seed=self._seed, epoch=epoch)))
        return found

    def advance(self) -> None:
        counts, self._wanted = self._next()
        self._taken = {name: self._taken[name] + count for name, count in counts.items()}
        super().advance()

    def _next(self) -> tuple[dict[str, int], dict[str, float]]:
        """(samples of each source in the next step, all that are wanted with it)."""
        batch, shares = self.global_batch, self._mixture.shares(self.steps)
        wanted = {name: self._wanted[name] + batch * share for name, share in shares.items()}
        lacks = {name: wanted[name] - taken for name, taken in self._taken.items()}
        counts = {name: max(0, math.floor(lack)) for name, lack in lacks.items()}
        while (left := batch - sum(counts.values())) != 0:
            if left > 0:
                counts[max(counts, key=lambda name: (shares[name] > 0, lacks[name] - counts[name]))] += 1
            else:
                counts[min((name for name in counts if counts[name]), key=lambda name: lacks[name] - counts[name])] -= 1
        return counts, wanted

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": dict(self._taken), "wanted": dict(self._wanted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        taken, wanted = state.get("taken"), state.get("wanted")
        super().load_state_dict(state)
        assert isinstance(taken, Mapping) and isinstance(wanted, Mapping), "the identity is that of a mixture"
        self._taken = {name: int(taken[name]) for name in self._of_source}
        self._wanted = {name: float(wanted[name]) for name in self._of_source}
