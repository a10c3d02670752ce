"""Choices of pipeline parallelism: the schedule (1F1B, zero bubble, ...), and how many blocks each stage has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class PipelinePolicy:
    """How the stages of `pp` run.

    schedule: a name of `meshkit.schedules` ("1f1b", "zb-h1", ...), the path of a CSV table, a function
    (ranks, microbatches) -> Schedule, or a `Schedule`, which is a table. stages: blocks of each stage, of which the first
    and the last may have none: embedding and head are stages then. None shares them by parameters.
    """

    schedule: str | Callable[..., Any] | Any = "1f1b"
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # A `Schedule` is told by its placement: its class is in `parallel`, which is above this room.
        if not (isinstance(self.schedule, str) or callable(self.schedule) or hasattr(self.schedule, "placement")):
            raise PlanError(
                f"PipelinePolicy(schedule={self.schedule!r}): give the name of a schedule, the path of a CSV table, a "
                "function (ranks, microbatches), or a Schedule."
            )
        stages = self.stages
        if stages is None:
            return
        if not isinstance(stages, Sequence) or not all(type(count) is int for count in stages):
            raise PlanError(
                f"PipelinePolicy(stages={stages!r}): the blocks of each stage are whole numbers, for example (2, 2)."
            )
        object.__setattr__(self, "stages", tuple(stages))
