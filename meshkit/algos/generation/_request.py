"""What is asked of a generator and what it answers, in token ids: nothing is decoded and encoded again on the way.

Dims: P tokens of a prompt, N tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshkit.errors import DataError

Reason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """ids: int64 [P]. key: with the number of the sample and the call's seed, what its sampling depends on."""

    ids: np.ndarray
    key: int

    def __post_init__(self) -> None:
        ids = np.asarray(self.ids)
        if not ids.size:
            raise DataError(
                f"Prompt(key={self.key}): no ids. Begin with at least one, for example the tokenizer's bos."
            )
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"Prompt(key={self.key}): ids are {ids.dtype} {list(ids.shape)}. Give whole numbers [P].")
        object.__setattr__(self, "ids", ids.astype(np.int64))


def refuse_odd_calls(asked: str, prompts: Sequence[Prompt], samples: int, vocabulary: int) -> None:
    """What no engine can answer. Raises: DataError."""
    if samples < 1:
        raise DataError(f"{asked}(samples={samples}): ask for at least 1 answer to each prompt.")
    for prompt in prompts:
        odd = prompt.ids[(prompt.ids < 0) | (prompt.ids >= vocabulary)]
        if len(odd):
            raise DataError(
                f"{asked}: Prompt(key={prompt.key}) has the id {odd[0]}, but the vocabulary ends at {vocabulary - 1}. "
                "Use the tokenizer of the model."
            )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: divides the logits; 0 takes the most probable token. Of what remains, in this order: top_k keeps so many of
    the most probable tokens; top_p the fewest of them whose probabilities add up to at least that; min_p those of at least
    that part of the most probable one's. Tokens as probable as the last one that is kept are kept too.
    An answer ends with the first of stop_ids, which is part of it, with the token that completes one of stop_strings, or
    after max_new_tokens.
    Raises: DataError for values that no answer could follow.
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
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1"),
            (self.temperature >= 0, "temperature", "at least 0, which is greedy"),
            (self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None for all tokens"),
            (0 < self.top_p <= 1, "top_p", "above 0, and 1 for all tokens"),
            (0 <= self.min_p <= 1, "min_p", "from 0, for all tokens, to 1"),
            ("" not in self.stop_strings, "stop_strings", "strings of at least one character"),
        ):
            if not fits:
                raise DataError(f"Sampling({name}={getattr(self, name)!r}): it must be {wanted}.")

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One answer.

    ids: int64 [N], with the id that ended it. log_probs: [N], fp32 or as wide as the model, of log_softmax(logits /
    temperature) over the whole vocabulary, which is what training computes; at temperature 0 of temperature 1.
    reason: "stop" or, after max_new_tokens, "length".
    """

    prompt: Prompt
    sample: int
    ids: np.ndarray
    log_probs: np.ndarray
    reason: Reason
