"""When an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshkit.algos.generation._request import Reason, Sampling
from meshkit.errors import DataError

BYTES_OF_A_CHARACTER = 4  # UTF-8; a token is a byte at least, but for those that are no text at all
MARGIN = 8  # of those, and of tokens that are other text at the beginning


@dataclass(frozen=True)
class Stopping:
    sampling: Sampling
    decode: Callable[[list[int]], str] | None

    def __post_init__(self) -> None:
        if self.sampling.stop_strings and self.decode is None:
            raise DataError(
                f"generate: stop_strings={self.sampling.stop_strings} are found in text. Give decode=, for example "
                "tokenizer.decode."
            )

    def reason(self, ids: Sequence[int]) -> Reason | None:
        """Why the answer ends with the last of its ids, or None."""
        if ids[-1] in self.sampling.stop_ids or self._has_string(ids):
            return "stop"
        return "length" if len(ids) == self.sampling.max_new_tokens else None

    def _has_string(self, ids: Sequence[int]) -> bool:
        if self.decode is None or not self.sampling.stop_strings:
            return False
        # Only what the last token may have completed is decoded: all of it for each token would be quadratic.
        longest = max(map(len, self.sampling.stop_strings))
        text = self.decode(list(ids[-(BYTES_OF_A_CHARACTER * longest + MARGIN) :]))
        return any(string in text for string in self.sampling.stop_strings)
