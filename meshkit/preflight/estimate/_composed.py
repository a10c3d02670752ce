"""Composed: what `compose` says of every rank of pp, as an estimate has it for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshkit.mesh import MeshSpec
from meshkit.preflight._format import format_axes, format_bytes, table_lines

Source = Literal["composed", "traced"]


@dataclass(frozen=True, kw_only=True)
class ComposedRank:
    """Peak of one rank of pp in an optimizer step.

    where: the part of the step that runs at the peak. at_peak: bytes then, by group as `Estimate.at_peak` has them; what lies
    on the host is no part of peak_bytes. live: microbatches of stages whose activations it keeps at a time, at most.
    offloaded_bytes: of activations that wait on the host, or on the disk, at a time, at most. host_bytes: of the host's
    memory, for them, or what is staged of them, and for states of the optimizer.
    """

    pp_rank: int
    peak_bytes: int
    where: str
    at_peak: dict[str, int]
    live: int = 1
    offloaded_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Composed:
    """Peaks of all ranks of pp. source: "composed" of traced blocks, or "traced" whole, with `why` that was needed.

    within: the relative error, either way, that the peak of a rank may have against `estimate`'s.
    """

    spec: MeshSpec
    ranks: tuple[ComposedRank, ...]
    source: Source
    why: str = ""
    within: float = 0.005

    @property
    def worst(self) -> ComposedRank:
        """The rank of pp with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.worst.peak_bytes

    @property
    def where(self) -> str:
        return self.worst.where

    @property
    def at_peak(self) -> dict[str, int]:
        return self.worst.at_peak

    def fits(self, device_bytes: int) -> bool:
        return self.peak_bytes <= device_bytes

    def __str__(self) -> str:
        offloads = any(rank.offloaded_bytes for rank in self.ranks)
        rows = [("rank of pp", "peak", "in the", *(["offloaded"] if offloads else []))]
        rows += [
            (
                str(rank.pp_rank),
                format_bytes(rank.peak_bytes),
                rank.where.removeprefix("the "),
                *([format_bytes(rank.offloaded_bytes)] if offloads else []),
            )
            for rank in self.ranks
        ]
        axes = format_axes({**self.spec.sizes(), "ep": self.spec.ep, "etp": self.spec.etp}, omit=1) or "one device"
        how = f"{self.source}: {self.why}" if self.why else f"{self.source}, within {self.within:.1%}"
        return "\n".join([f"{axes}; {how}", *table_lines(rows, right=(1,))])
