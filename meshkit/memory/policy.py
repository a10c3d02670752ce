"""How memory is spent, as data: what is recomputed, and which dtype computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from meshkit.errors import PlanError

Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Compute and reduction dtypes. Parameters and optimizer state keep the dtype they are built in (fp32 masters)."""

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, dtype in (("compute", self.compute), ("reduce", self.reduce)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise PlanError(
                    f"Precision({name}={dtype!r}) is not a floating-point dtype. Use torch.bfloat16, for example."
                )


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """recompute: "none" keeps every activation; "full" keeps each block's input and runs its forward again in backward;
    "selective" keeps the results of matrix products, attention and collectives, and runs the cheap rest again.
    precision: None computes in the parameters' own dtype; `Precision()` is bf16 over fp32 masters.
    """

    recompute: Recompute = "none"
    precision: Precision | None = None

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            choices = ", ".join(repr(choice) for choice in get_args(Recompute))
            raise PlanError(f"MemoryPolicy(recompute={self.recompute!r}): choose one of {choices}.")
