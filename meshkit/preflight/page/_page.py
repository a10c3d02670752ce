"""Page: an explanation and a memory estimate of every rank. Ranks that hold and send the same share one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from meshkit.mesh import DENSE_AXES, EXPERT_AXES, MeshSpec, axes_of
from meshkit.parallel.pipeline import Schedule
from meshkit.preflight._arguments import coordinate_of, refuse_sizes, spec_of
from meshkit.preflight._format import format_axes
from meshkit.preflight._resolved_run import resolved_run
from meshkit.preflight.estimate import (
    Build,
    Estimate,
    Kernels,
    MakeOptimizer,
    estimate,
)
from meshkit.preflight.explain import Explanation, explain_resolved
from meshkit.resolve import Resolved
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import Strategy

EACH = (
    64  # the largest world in which every rank is explained; in a larger one, the first rank of each pipeline stage is
)


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks that hold and send the same, with the explanation and the estimate of the first of them."""

    ranks: tuple[int, ...]
    explanation: Explanation
    estimate: Estimate | None
    """None on a page without memory"""

    @property
    def sent_bytes(self) -> int:
        """In one optimizer step, on all axes."""
        return sum(row.bytes for row in self.explanation.traffic)

    @property
    def ranks_text(self) -> str:
        first, *others = self.ranks
        return f"{first} and {len(others)} like it" if others else str(first)


@dataclass(frozen=True, kw_only=True)
class Page:
    """Every rank of a mesh in one optimizer step. `html(page)` draws it.

    rank_groups: every rank is in exactly one of them. device_bytes: memory of a device, None if it was not given.
    """

    title: str
    spec: MeshSpec
    rows: int
    seq_len: int
    microbatches: int
    parameters: int
    rank_groups: tuple[RankGroup, ...]
    device_bytes: int | None = None

    @cached_property
    def group_of_rank(self) -> tuple[int, ...]:
        """Index in `rank_groups` of each rank."""
        index_of = {rank: index for index, rank_group in enumerate(self.rank_groups) for rank in rank_group.ranks}
        return tuple(index_of[rank] for rank in range(self.spec.world_size))

    @cached_property
    def coordinates(self) -> list[dict[str, int]]:
        """Coordinate of each rank on the dense axes larger than 1."""
        sizes = self.spec.sizes()
        every = (coordinate_of(self.spec, rank) for rank in range(self.spec.world_size))
        return [{axis: index for axis, index in coordinate.items() if sizes[axis] > 1} for coordinate in every]

    @property
    def fullest(self) -> RankGroup | None:
        """The ranks with the highest peak of memory; None without estimates."""
        peaks = [
            (rank_group.estimate.peak_bytes, rank_group)
            for rank_group in self.rank_groups
            if rank_group.estimate is not None
        ]
        return max(peaks, key=lambda pair: pair[0])[1] if peaks else None

    @property
    def memory_scale(self) -> int:
        """Bytes of the longest memory bar: the highest peak, or the memory of a device if that is more."""
        peaks = [rank_group.estimate.peak_bytes for rank_group in self.rank_groups if rank_group.estimate is not None]
        return max(1, self.device_bytes or 0, *peaks)

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline schedule; None without pp."""
        return self.rank_groups[0].explanation.schedule

    @cached_property
    def axes(self) -> dict[str, list[list[int]]]:
        """Groups of ranks by axis: dense and expert axes larger than 1, and joined axes on which something is sent."""
        spec = self.spec
        names = [axis for axis in DENSE_AXES if getattr(spec, axis) > 1]
        if spec.ep * spec.etp > 1:
            names += [axis for axis in EXPERT_AXES if getattr(spec, axis) > 1 and axis not in DENSE_AXES]
        joined = {message.axis for rank_group in self.rank_groups for message in rank_group.explanation.messages}
        names += sorted(joined - set(names))
        return {name: spec.groups(*axes_of(name)) for name in names}

    @property
    def axes_text(self) -> str:
        spec = self.spec
        return format_axes({**spec.sizes(), "ep": spec.ep, "etp": spec.etp}, omit=1) or "one device"

    def coordinate_text(self, rank: int) -> str:
        """`pp 1, tp 0`"""
        return ", ".join(f"{axis} {index}" for axis, index in self.coordinates[rank].items()) or "the only one"

    @property
    def is_complete(self) -> bool:
        """Whether every rank was explained."""
        return self.spec.world_size <= EACH


def explain_page(
    model: nn.Module | Build,
    spec: MeshSpec | str | None = None,
    strategy: Strategy | None = None,
    *,
    rows: int,
    seq_len: int,
    microbatches: int | None = None,
    world_size: int | None = None,
    title: str = "",
    memory_bars: bool = True,
    device_bytes: int | None = None,
    kernels: Kernels = "cuda",
    optimizer: MakeOptimizer | None = None,
    loss: Loss = next_token_loss,
    **choices: Any,
) -> Page:
    """Explain and estimate every rank of a run, for a page: `save_html(explain_page(...), "run.html")`.

    model, spec, strategy and choices by keyword, rows, seq_len, microbatches, world_size, kernels, optimizer, loss: as
    `estimate` takes them. device_bytes: memory of a device. memory_bars: False leaves out the estimates, which take most of
    the time.
    Each rank is explained, and those that differ are estimated, in a world of up to 64 ranks; in a larger one the first rank
    of each pipeline stage stands for all of its stage, and the page says so.
    Raises: MeshError and PlanError as the real run would, and MeshError where there is a process group.
    """
    chosen = Strategy.of(strategy, choices)
    sizes = spec_of(spec, chosen, world_size)
    refuse_sizes(rows, seq_len, microbatches)
    with resolved_run(model, sizes, strategy, choices, kernels=kernels, verb="explain_page") as resolved:
        count = (resolved.strategy.microbatches or 1) if microbatches is None else microbatches
        explanations = _explanations(resolved, rows=rows, seq_len=seq_len, microbatches=count)
        full_model = resolved.program.model
        parameters, name = sum(param.numel() for param in full_model.parameters()), type(full_model).__name__

    # Each estimate is a fake world of its own, in which this process is another rank: one after the other.
    def estimated(rank: int) -> Estimate | None:
        if not memory_bars:
            return None
        return estimate(
            model,
            sizes,
            strategy,
            rows=rows,
            seq_len=seq_len,
            microbatches=microbatches,
            coordinate=coordinate_of(sizes, rank),
            kernels=kernels,
            optimizer=optimizer,
            loss=loss,
            **choices,
        )

    return Page(
        title=title or name,
        spec=sizes,
        rows=rows,
        seq_len=seq_len,
        microbatches=count,
        parameters=parameters,
        rank_groups=tuple(
            RankGroup(ranks=ranks, explanation=explanation, estimate=estimated(ranks[0]))
            for ranks, explanation in explanations
        ),
        device_bytes=device_bytes,
    )


def _explanations(resolved: Resolved, **step: Any) -> list[tuple[tuple[int, ...], Explanation]]:
    """(ranks, explanation of each of them)"""
    spec = resolved.spec
    world = spec.world_size
    places = [coordinate_of(spec, rank) for rank in range(world)]
    # One rank is explained for all with equal coordinates on these axes: replicas are equal, and in a large world the ranks
    # of a stage are taken to be.
    axes = ("pp", "dp_shard", "cp", "tp") if world <= EACH else ("pp",)
    first: dict[tuple[int, ...], Explanation] = {}
    groups: dict[tuple[Any, ...], tuple[list[int], Explanation]] = {}
    for rank, coordinate in enumerate(places):
        class_key = tuple(coordinate[axis] for axis in axes)
        if class_key not in first:
            first[class_key] = explain_resolved(resolved, coordinate=coordinate, **step)
        explanation = first[class_key]
        # Ranks with equal parameters and messages are one group: the page shows differences, not 64 times the same.
        key = (str(explanation.params), frozenset(explanation.messages.items()))
        groups.setdefault(key, ([], explanation))[0].append(rank)
    return [(tuple(ranks), explanation) for ranks, explanation in groups.values()]
