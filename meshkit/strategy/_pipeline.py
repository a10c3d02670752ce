"""Choices of pipeline parallelism: the schedule (1F1B, zero bubble, ...), and how many blocks each stage has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PipelinePolicy:
    """How the stages of `pp` run.

    schedule: a name of `meshkit.schedules` ("1f1b", "zb-h1", ...), the path of a CSV table, a function
    (ranks, microbatches) -> Schedule, or a `Schedule`, which is a table. stages: blocks of each stage; None shares them by
    parameters.
    """

    schedule: str | Callable[..., Any] | Any = "1f1b"
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.stages is not None:
            object.__setattr__(self, "stages", tuple(self.stages))
