"""What a rank has of a tensor (SPMD types), and the errors of a proof: the words of `prove`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from meshkit.errors import PlanError

Kind = Literal["invariant", "replicated", "varying", "partial", "distributed"]


class Unproved(PlanError):
    """A plan that could not be shown to compute what one device computes. module: where it stops. before: the module that ran
    before it. wrong: it is shown to compute something else, and not only hard to follow."""

    def __init__(self, text: str, module: str = "", before: str = "", *, wrong: bool = True) -> None:
        super().__init__(text)
        self.module, self.before, self.wrong = module, before, wrong


@dataclass(frozen=True)
class Held:
    """What a rank has of a parameter or input: all of it, or some indices along a dim."""

    kind: Kind = "invariant"
    dim: int = 0
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Slice:
    """A tensor against the single-device model's: `indices` along `dim`; all of it if None."""

    dim: int = 0
    indices: Tensor | None = None


class Uneven(Unproved):
    """Blocks return tensors in different states, so that those that were left out (`fold`) may not be like those kept."""
