"""What is on the page: an explanation and an estimate of every rank. Ranks that hold and send the same share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from meshkit.mesh import DENSE_AXES, EXPERT_AXES, MeshSpec
from meshkit.parallel.pipeline import Schedule
from meshkit.preflight.estimate import (
    Build,
    Estimate,
    Kernels,
    MakeOptimizer,
    axes_said,
    built_by,
    estimate,
    place_of,
    pretended_mesh,
    sized,
)
from meshkit.preflight.explain import Explanation, default_device, explain_resolved
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import Strategy

EACH = 64  # ranks of a world in which each is looked at; in a larger one, the first of each pipeline stage


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Ranks that hold and send the same, as the first of them was found to."""

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

    alike: every rank is in exactly one of these. device_bytes: what a device has, if that was said.
    """

    title: str
    spec: MeshSpec
    rows: int
    seq_len: int
    microbatches: int
    parameters: int
    alike: tuple[Alike, ...]
    device_bytes: int | None = None

    @cached_property
    def of_rank(self) -> tuple[int, ...]:
        """Rank by rank, its place in `alike`."""
        found = {rank: index for index, one in enumerate(self.alike) for rank in one.ranks}
        return tuple(found[rank] for rank in range(self.spec.world_size))

    @cached_property
    def places(self) -> list[dict[str, int]]:
        """Rank by rank, its place on the dense axes larger than 1."""
        sizes = self.spec.sizes()
        every = (place_of(self.spec, rank) for rank in range(self.spec.world_size))
        return [{axis: at for axis, at in place.items() if sizes[axis] > 1} for place in every]

    @property
    def fullest(self) -> Alike | None:
        """Those with the highest peak."""
        found = [(one.estimate.peak_bytes, one) for one in self.alike if one.estimate is not None]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    @property
    def memory_scale(self) -> int:
        """What the longest bar of memory stands for: the highest peak, or more if a device has more."""
        peaks = [one.estimate.peak_bytes for one in self.alike if one.estimate is not None]
        return max(1, self.device_bytes or 0, *peaks)

    @property
    def schedule(self) -> Schedule | None:
        """With pp."""
        return self.alike[0].explanation.schedule

    @cached_property
    def axes(self) -> dict[str, list[list[int]]]:
        """Groups of ranks, by axis: those larger than 1 of both views, and the joined ones on which something is sent."""
        spec = self.spec
        names = [axis for axis in DENSE_AXES if getattr(spec, axis) > 1]
        if spec.ep * spec.etp > 1:
            names += [axis for axis in EXPERT_AXES if getattr(spec, axis) > 1 and axis not in DENSE_AXES]
        joined = {message.axis for one in self.alike for message in one.explanation.messages}
        names += sorted(joined - set(names))
        return {name: spec.groups(*parts_of(name)) for name in names}

    @property
    def axes_text(self) -> str:
        spec = self.spec
        return axes_said({**spec.sizes(), "ep": spec.ep, "etp": spec.etp}, 1) or "one device"

    def place_text(self, rank: int) -> str:
        """`pp 1, tp 0`"""
        return ", ".join(f"{axis} {at}" for axis, at in self.places[rank].items()) or "the only one"

    @property
    def is_complete(self) -> bool:
        """Was each rank looked at?"""
        return self.spec.world_size <= EACH


def parts_of(axis: str) -> list[str]:
    """`dp_shard_cp` as [dp_shard, cp]."""
    return [name for name in dict.fromkeys(DENSE_AXES + EXPERT_AXES) if f"_{name}_" in f"_{axis}_"]


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
    """What every rank of a run will hold and send, to be looked at: `save_html(explain_page(...), "run.html")`.

    model, spec, strategy and choices by keyword, rows, seq_len, microbatches, world_size, kernels, optimizer, loss: as
    `estimate` takes them. device_bytes: what a device has. memory_bars: False leaves the
    estimates out, which take most of the time.
    Each rank is explained, and those that differ are estimated, in a world of up to 64 ranks; in a larger one the first rank
    of each pipeline stage stands for all of its stage, and the page says so.
    Raises: MeshError and PlanError as the real run would, and MeshError where there is a process group.
    """
    chosen = Strategy.of(strategy, choices)
    sizes = sized(spec, chosen, world_size)
    with resolved_run(model, sizes, strategy, choices, kernels=kernels) as resolved:
        count = (resolved.strategy.microbatches or 1) if microbatches is None else microbatches
        found = _explanations(resolved, rows=rows, seq_len=seq_len, microbatches=count)
        whole = resolved.program.model
        parameters, name = sum(param.numel() for param in whole.parameters()), type(whole).__name__

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
            coordinate=place_of(sizes, rank),
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
        alike=tuple(
            Alike(ranks=ranks, explanation=explanation, estimate=estimated(ranks[0])) for ranks, explanation in found
        ),
        device_bytes=device_bytes,
    )


@contextmanager
def resolved_run(
    model: nn.Module | Build, spec: MeshSpec, strategy: Strategy | None, choices: dict[str, Any], *, kernels: Kernels
) -> Iterator[Resolved]:
    """What `explain` prints. A function that makes its own run makes it in a world that is not there."""
    if isinstance(model, nn.Module):
        yield resolve(read_program(model), Strategy.of(strategy, choices), spec, device_type=default_device())
        return
    build = built_by(model, strategy, choices, asked="explain_page")
    with pretended_mesh(spec, place_of(spec, 0), kernels=kernels) as mesh:
        yield build(mesh).resolved


def _explanations(resolved: Resolved, **step: Any) -> list[tuple[tuple[int, ...], Explanation]]:
    """(ranks, what each of them holds and sends)"""
    spec = resolved.spec
    world = spec.world_size
    places = [place_of(spec, rank) for rank in range(world)]
    # Who stands for a rank: replicas are equal, and in a large world so are the ranks of a stage.
    axes = ("pp", "dp_shard", "cp", "tp") if world <= EACH else ("pp",)
    first: dict[tuple[int, ...], Explanation] = {}
    alike: dict[tuple[Any, ...], tuple[list[int], Explanation]] = {}
    for rank, place in enumerate(places):
        seat = tuple(place[axis] for axis in axes)
        if seat not in first:
            first[seat] = explain_resolved(resolved, coordinate=place, **step)
        said = first[seat]
        key = (str(said.params), frozenset(said.messages.items()))
        alike.setdefault(key, ([], said))[0].append(rank)
    return [(tuple(ranks), said) for ranks, said in alike.values()]
