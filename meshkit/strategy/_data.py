"""Choices of data parallelism: quantized wires of FSDP (ZeRO++): parameters gathered and gradients reduced in a few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshkit.errors import PlanError

GatherWire = Literal["int8", "fp8", "int4"]
ReduceWire = Literal["int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class DataPolicy:
    """In how many bits parameters and gradients travel over the ranks that share them.

    gather: of parameters, "int8", "fp8" or "int4": blocks of 128 with a scale each; None sends the compute dtype. The shards
    themselves stay exact, so rounding does not add up from step to step. reduce: of gradients, "int8" or "int4"; None sends
    the reduction dtype. feedback: error feedback: what rounding took of a gradient is added to the next one.
    """

    gather: GatherWire | None = None
    reduce: ReduceWire | None = None
    feedback: bool = True

    def __post_init__(self) -> None:
        for name, kinds in (("gather", GatherWire), ("reduce", ReduceWire)):
            value = getattr(self, name)
            if value is not None and value not in get_args(kinds):
                raise PlanError(
                    f"DataPolicy({name}={value!r}): there is no such wire. Choose one of {', '.join(get_args(kinds))}, or "
                    "None, which sends the dtype itself."
                )
        if not isinstance(self.feedback, bool):
            raise PlanError(f"DataPolicy(feedback={self.feedback!r}): give True or False.")
        if not self.feedback and self.reduce is None:
            raise PlanError(
                "DataPolicy(feedback=False) without reduce: no gradient is rounded, so there is nothing to feed back. Leave "
                "feedback away, or give reduce."
            )
