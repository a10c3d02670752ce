"""Inference engine: who writes rollouts, how tokens are sampled (`Sampling`), when a rollout ends (`Stopping`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, Protocol, SupportsIndex

from meshkit.algos.rollout._count import is_count
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.errors import DataError

Reason = Literal["stop", "length"]

COLDEST = 1e-6  # temperature; logits that are divided by less overflow sooner or later

BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8; a token has at least one byte, except special tokens, which have no text
MARGIN = 8  # tokens: for special ones, and for those that decode to other text at the beginning


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: divides the logits; 0 takes the most probable token. Then filters, in this order: top_k keeps the k most
    probable tokens; top_p the fewest of them whose probabilities add up to at least p; min_p those with at least the fraction
    min_p of the largest probability. Tokens as probable as the last one kept are kept too.
    An answer ends with the first of stop_ids, which is part of it, with the token that completes one of stop_strings, or
    after max_new_tokens.
    Raises: DataError for values out of range.
    Source: Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for fits, name, wanted in (
            (is_count(self.max_new_tokens), "max_new_tokens", "a whole number of at least 1"),
            (_is_temperature(self.temperature), "temperature", f"0, which is greedy, or a number from {COLDEST:g} on"),
            (
                self.top_k is None or is_count(self.top_k),
                "top_k",
                "a whole number of at least 1, or None for all tokens",
            ),
            (0 < self.top_p <= 1, "top_p", "above 0, and 1 for all tokens"),
            (0 <= self.min_p <= 1, "min_p", "from 0, for all tokens, to 1"),
            (_are_ids(self.stop_ids), "stop_ids", "a tuple of ids, which are whole numbers"),
            ("" not in self.stop_strings, "stop_strings", "strings of at least one character"),
        ):
            if not fits:
                raise DataError(f"Sampling({name}={getattr(self, name)!r}): it must be {wanted}.")

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value) and (value == 0 or value >= COLDEST)


def _are_ids(values: object) -> bool:
    return isinstance(values, Collection) and all(isinstance(each, SupportsIndex) for each in values)


class Engine(Protocol):
    """Answers to a data rank's prompts with the present weights: `partial(generate, run)`, `VllmEngine(run)`, or your own.

    Returns `samples` rollouts of each prompt, in the order of (prompt, sample), on every rank of the data rank. Every rank
    calls it, also one without prompts. decode: ids to text, for `Rollout.text` and stop_strings.
    """

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> list[Rollout]: ...


def refuse_odd_calls(verb: str, prompts: Sequence[Prompt], samples: int, vocabulary: int) -> None:
    """Raises: DataError for calls that no engine can answer."""
    if not is_count(samples):
        raise DataError(f"{verb}(samples={samples!r}): ask for a whole number of answers to each prompt, at least 1.")
    for prompt in prompts:
        odd = prompt.ids[(prompt.ids < 0) | (prompt.ids >= vocabulary)]
        if len(odd):
            raise DataError(
                f"{verb}: Prompt(key={prompt.key}) has the id {odd[0]}, but the vocabulary ends at {vocabulary - 1}. "
                "Use the tokenizer of the model."
            )


@dataclass(frozen=True)
class Stopping:
    """When an answer ends, and its text."""

    sampling: Sampling
    decode: Callable[[list[int]], str] | None

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Sampling):
            raise DataError(
                f"generate(sampling={self.sampling!r}): say how tokens are drawn, as Sampling(max_new_tokens=64)."
            )
        if self.sampling.stop_strings and self.decode is None:
            raise DataError(
                f"generate: stop_strings={self.sampling.stop_strings} are found in text. Give decode=, for example "
                "tokenizer.decode."
            )

    def reason(self, ids: Sequence[int]) -> Reason | None:
        """Why the answer ends with the last of its ids, or None."""
        if ids[-1] in self.sampling.stop_ids or self._has_string(ids):
            return "stop"
        # After the test of "stop": an answer that ends with its last allowed token has ended by itself.
        return "length" if len(ids) == self.sampling.max_new_tokens else None

    def ends_after(self, ids: Sequence[int]) -> tuple[int, Reason | None]:
        """(the number of ids after which an answer that goes on so ends, why); all of them and None if it goes on.

        In a time that grows as their number does, and at most that of max_new_tokens.
        """
        stops = frozenset(self.sampling.stop_ids)
        for count, id in enumerate(ids[: self.sampling.max_new_tokens], 1):
            if id in stops or self._has_string(ids[max(0, count - self._tail) : count]):
                return count, "stop"
        if len(ids) >= self.sampling.max_new_tokens:
            return self.sampling.max_new_tokens, "length"
        return len(ids), None

    def text(self, ids: Sequence[int]) -> str:
        """The answer's text, without the id that ended it; "" without `decode`."""
        if self.decode is None:
            return ""
        ends = bool(len(ids)) and ids[-1] in self.sampling.stop_ids
        return self.decode([int(id) for id in ids[: len(ids) - ends]])

    def _has_string(self, ids: Sequence[int]) -> bool:
        if self.decode is None or not self.sampling.stop_strings:
            return False
        # Decode only the tail that the last token may have completed: all ids at each token would take quadratic time.
        text = self.decode(list(ids[-self._tail :]))
        return any(string in text for string in self.sampling.stop_strings)

    @property
    def _tail(self) -> int:
        return BYTES_OF_A_CHARACTER * max(map(len, self.sampling.stop_strings), default=0) + MARGIN
