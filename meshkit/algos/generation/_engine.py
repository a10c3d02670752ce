"""Who writes answers: a run by `generate`, or another engine with the weights that the run has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from meshkit.algos.generation._request import Completion, Prompt, Sampling


class Engine(Protocol):
    """`partial(generate, run)`, `VllmEngine(run)`, or your own: answers to a data rank's prompts with the weights of now.

    Returns `samples` answers to each prompt, in the order of (prompt, sample), on every rank of the data rank. Every rank
    calls it, those without prompts too.
    """

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> list[Completion]: ...
