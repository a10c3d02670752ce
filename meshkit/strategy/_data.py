"""Choices of data parallelism: ranks to shard over (ZeRO, HSDP, MiCS, hpZ, PaRO), and quantized wires of FSDP (ZeRO++)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshkit.errors import PlanError

GatherWire = Literal["int8", "fp8", "int4"]
ReduceWire = Literal["int8", "int4"]
Collectives = Literal["flat", "hierarchical"]
CHUNK_BYTES = 2**22
Level = Literal["none", "node", "all", "replicas"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Shardings:
    """A row of the table of shardings: over which data ranks each part of the training state is sharded during a step.

    "none": whole on every rank. "node": over cp and those ranks of dp_shard that are in one node (dp_intra). "all": over
    dp_shard and cp. "replicas": over dp_replicate too. The ranks outside of a level hold what those of it hold together.
    states are also where the masters of parameters are.
    Source: Rajbhandari et al. 2020 (ZeRO-1, 2, 3); Zhang et al. 2022 (MiCS); Wang et al. 2023 (hpZ); Wu et al. 2023 (PaRO);
    Xu et al. 2025 (three levels on Frontier).
    """

    parameters: Level = "all"
    gradients: Level = "all"
    states: Level = "all"

    @property
    def frees_parameters(self) -> bool:
        """Whether whole parameters are freed after use and gathered again, else they stay from the first use in a step."""
        return self.parameters != "none"

    @property
    def reduces_every_microbatch(self) -> bool:
        """Whether the gradients of each microbatch are reduced, else whole ones add up and are reduced once a step."""
        return self.gradients != "none"


ZERO = {1: Shardings("none", "none"), 2: Shardings("none", "all"), 3: Shardings("all", "all")}
"""The rows that ZeRO stages name."""


@dataclass(frozen=True, kw_only=True)
class DataPolicy:
    """Over which ranks the training state is sharded, and in how many bits parameters and gradients travel between them.

    parameters, gradients, states: "none", "node", "all" or "replicas", see `Shardings`; the first two are sharded as far as
    states at most. Default: states "all" and the others as states, or with pp "none". With none of the three,
    `Strategy(zero=...)` says it.
    gather: of parameters, "int8", "fp8" or "int4": blocks of 128 with a scale each; None sends the compute dtype. The shards
    themselves stay exact, so rounding does not add up from step to step. reduce: of gradients, "int8" or "int4"; None sends
    the reduction dtype. feedback: error feedback: what rounding took of a gradient is added to the next one.
    collectives: "hierarchical" lets what goes over several nodes in one hop go in two, inside of a node and across, see
    `parallel.hierarchical`; "flat" leaves it to one ring. chunk_bytes: of a rank's part, in hierarchical ones: while a chunk
    is inside of nodes the next is on its way across.
    """

    parameters: Level | None = None
    gradients: Level | None = None
    states: Level | None = None
    gather: GatherWire | None = None
    reduce: ReduceWire | None = None
    feedback: bool = True
    collectives: Collectives = "flat"
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        for name, kinds in (("gather", GatherWire), ("reduce", ReduceWire)):
            value = getattr(self, name)
            if value is not None and value not in get_args(kinds):
                raise PlanError(
                    f"DataPolicy({name}={value!r}): there is no such wire. Choose one of {', '.join(get_args(kinds))}, or "
                    "None, which sends the dtype itself."
                )
        for name in ("parameters", "gradients", "states"):
            value = getattr(self, name)
            if value is not None and value not in LEVELS:
                raise PlanError(
                    f"DataPolicy({name}={value!r}): there are no such ranks to shard over. Choose one of {', '.join(LEVELS)}."
                )
        if self.states == "none":
            raise PlanError(
                "DataPolicy(states='none'): whole copies of everything are what the axis dp_replicate holds. Give the mesh "
                "dp_replicate in place of dp_shard."
            )
        states = self.states or "all"
        for name in ("parameters", "gradients"):
            value = getattr(self, name)
            if value is not None and LEVELS.index(value) > LEVELS.index(states):
                raise PlanError(
                    f"DataPolicy({name}={value!r}, states={states!r}): a rank updates its states with {name} of the same "
                    f"part, so {name} cannot be sharded further. Use states={value!r}, or {name}={states!r}."
                )
        if not isinstance(self.feedback, bool):
            raise PlanError(f"DataPolicy(feedback={self.feedback!r}): give True or False.")
        if not self.feedback and self.reduce is None:
            raise PlanError(
                "DataPolicy(feedback=False) without reduce: no gradient is rounded, so there is nothing to feed back. Leave "
                "feedback away, or give reduce."
            )
        self._refuse_collectives()

    def _refuse_collectives(self) -> None:
        if self.collectives not in get_args(Collectives):
            raise PlanError(
                f"DataPolicy(collectives={self.collectives!r}): choose one of {', '.join(get_args(Collectives))}."
            )
        if isinstance(self.chunk_bytes, bool) or not isinstance(self.chunk_bytes, int) or self.chunk_bytes < 1:
            raise PlanError(
                f"DataPolicy(chunk_bytes={self.chunk_bytes!r}): a chunk has a whole number of bytes, at least 1."
            )
        if self.chunk_bytes != CHUNK_BYTES and not self.is_hierarchical:
            raise PlanError(
                f"DataPolicy(chunk_bytes={self.chunk_bytes}) is of hierarchical collectives, and these are flat. Give "
                "collectives='hierarchical', or leave chunk_bytes away."
            )
        wires = {name: value for name in ("gather", "reduce") if (value := getattr(self, name)) is not None}
        if wires and self.is_hierarchical:
            name, value = next(iter(wires.items()))
            raise PlanError(
                f"DataPolicy({name}={value!r}, collectives='hierarchical'): rounded messages go in one hop. Leave one of "
                "them away."
            )

    @property
    def is_hierarchical(self) -> bool:
        return self.collectives == "hierarchical"

    @property
    def shards(self) -> bool:
        """Whether it says over which ranks something is sharded."""
        return (self.parameters, self.gradients, self.states) != (None, None, None)
