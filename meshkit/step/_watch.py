"""StepWatch: what looks at the microbatches and the gradients of a run from outside, as a guard against corruption does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class StepWatch(Protocol):
    """Called by `Run.forward_backward` and `clip_grad_norm`, on every rank in the same order."""

    def begin(self, microbatches: int) -> int | None:
        """A step begins. Returns the microbatch that is to run again at its end, the same on every rank, or None."""

    def around(self, microbatch: int, place: int) -> AbstractContextManager[None]:
        """Around the forward and backward of a microbatch; on pp around each of them. place: its turn along the stages."""

    def again(self) -> AbstractContextManager[None]:
        """Around the second run of a microbatch, which must leave no trace."""

    def reduced(self) -> None:
        """Gradients are summed over ranks, and nothing writes them up to the optimizer's step, but inside of `writing`."""

    def writing(self) -> AbstractContextManager[None]:
        """Inside, gradients are written."""

    def measured(self, squares: Tensor) -> None:
        """squares: the sum of squares of this rank's gradients, fp64 []."""
