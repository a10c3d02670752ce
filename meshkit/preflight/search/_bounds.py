"""Lower bounds of seconds that hold for a strategy before it is resolved, of parts that were traced once.

Each is a sum of terms that the forecast has too, and leaves others away: FSDP's messages with pp, hops, launches and the
optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from meshkit.errors import MeshkitError
from meshkit.parallel.pipeline import Cut, Schedule, Times, simulate
from meshkit.preflight.forecast import PartSeconds
from meshkit.strategy import Strategy

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Seconds:
    """Of one microbatch: kernels, and messages that block them."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0

    @staticmethod
    def of(part: PartSeconds) -> Seconds:
        return Seconds(part.seconds("forward"), part.seconds("backward"), part.seconds("weight"))

    @staticmethod
    def sum(parts: Sequence[Seconds]) -> Seconds:
        return Seconds(
            sum(each.forward_s for each in parts),
            sum(each.backward_s for each in parts),
            sum(each.weight_s for each in parts),
        )

    def part(self, share: float) -> Seconds:
        return Seconds(share * self.forward_s, share * self.backward_s, share * self.weight_s)

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.weight_s


@dataclass(frozen=True)
class Microbatch:
    """blocks, around: seconds by name, of blocks and of the modules around them; "" is what runs outside of all modules."""

    blocks: Mapping[str, Seconds]
    around: Mapping[str, Seconds]

    @cached_property
    def sum(self) -> Seconds:
        return Seconds.sum([*self.blocks.values(), *self.around.values()])

    @property
    def total_s(self) -> float:
        return self.sum.total_s

    def least_s(self, strategy: Strategy, *, share: float = 1.0) -> float:
        """With stages cut anywhere: a rank of pp computes the mean of all at least.

        share: of these seconds, that the microbatch takes.
        """
        return share * self.total_s * (strategy.microbatches or 1) / strategy.mesh_for().pp


@dataclass(frozen=True)
class Gathers:
    """Seconds of FSDP's gathers and reductions of a step without pp: those of each microbatch, and those of once a step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_once_s: float = 0.0
    backward_once_s: float = 0.0

    def least_s(self, microbatch: Microbatch, microbatches: int, share: float, again_s: float = 0.0) -> float:
        """What computes beside a message takes as long as the longer of the two, at least, in forward and in backward.

        again_s: what backward runs again besides, before it has its share.
        """
        seconds = microbatch.sum.part(share)
        forward_s, backward_s = seconds.forward_s, seconds.backward_s + seconds.weight_s + share * again_s
        least = 0.0
        for computed_s, each_s, once_s in (
            (forward_s, self.forward_s, self.forward_once_s),
            (backward_s, self.backward_s, self.backward_once_s),
        ):
            busy_s = max(computed_s, each_s)
            least += (microbatches - 1) * busy_s + max(computed_s, each_s + once_s)
        return least


@dataclass(frozen=True)
class Stages:
    """Stages of a pipeline. blocks: their names by stage; ends: what runs around them in the first and the last."""

    blocks: tuple[tuple[str, ...], ...]
    ends: tuple[tuple[str, ...], tuple[str, ...]]
    placement: tuple[int, ...]
    splits_backward: bool

    @staticmethod
    def of(cut: Cut, counts: Sequence[int] | None = None) -> Stages:
        """counts: blocks of each stage, where they are not the cut's own."""
        blocks = cut.stages.blocks
        if counts is not None:
            names = [name for stage in blocks for name in stage]
            ends = [0, *accumulate(counts)]
            blocks = tuple(tuple(names[a:b]) for a, b in pairwise(ends))
        return Stages(blocks, (cut.stages.head, (*cut.stages.tail, "")), cut.placement, cut.splits_backward)

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(map(len, self.blocks))]

    def sums(self, of_blocks: Array) -> Array:
        """By stage."""
        return np.diff(np.concatenate([[0.0], of_blocks.cumsum()])[self._ends])

    def least(self, of_blocks: Array) -> Array:
        """By stage, of those that are not 0."""
        found = (of_blocks[a:b][of_blocks[a:b] > 0] for a, b in pairwise(self._ends))
        return np.array([each.min(initial=np.inf) if len(each) else 0.0 for each in found])

    def seconds(self, microbatch: Microbatch) -> list[Seconds]:
        """By stage, of what is known to run there."""
        inside = [[microbatch.blocks[name] for name in stage] for stage in self.blocks]
        for stage, names in zip((0, -1), self.ends, strict=True):
            inside[stage] += [microbatch.around[name] for name in names if name in microbatch.around]
        return [Seconds.sum(each) for each in inside]

    def least_s(self, microbatch: Microbatch, microbatches: int, again_s: Array | None = None) -> float:
        """A rank waits for the forward of all stages before its first, does all of its own, and is followed by their
        backward.

        again_s: what backward of each rank of pp runs again besides.

        Weights' gradients of its last microbatches may run beside what follows where they have rows of their own.
        """
        seconds = self.seconds(microbatch)
        least = forward = backward = 0.0
        begun: set[int] = set()
        of_rank: dict[int, list[Seconds]] = {}
        for stage, rank in enumerate(self.placement):
            of_rank.setdefault(rank, []).append(seconds[stage])
        for stage, rank in enumerate(self.placement):
            own = seconds[stage]
            if rank not in begun:
                begun.add(rank)
                all_of = Seconds.sum(of_rank[rank])
                if again_s is not None:
                    all_of = replace(all_of, backward_s=all_of.backward_s + float(again_s[rank]))
                if self.splits_backward:
                    through = forward + backward + microbatches * (all_of.forward_s + all_of.backward_s)
                    least = max(least, forward + microbatches * all_of.total_s, through)
                else:
                    least = max(least, forward + backward + microbatches * all_of.total_s)
            forward += own.forward_s
            backward += own.backward_s + (0.0 if self.splits_backward else own.weight_s)
        return least

    def simulated_s(self, microbatch: Microbatch, table: Schedule) -> float:
        """By the schedule's own table, with messages that take no time."""
        seconds = self.seconds(microbatch)
        times = Times(
            f_s=tuple(each.forward_s for each in seconds),
            i_s=tuple(each.backward_s for each in seconds),
            w_s=tuple(each.weight_s for each in seconds),
            hop_s=0.0,
        )
        return simulate(table, times).makespan_s


def table_of(cut: Cut, ranks: int, microbatches: int) -> Schedule | None:
    """None where there is none."""
    try:
        return cut.table(ranks, microbatches)
    except MeshkitError:
        return None
