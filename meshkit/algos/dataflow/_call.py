"""What a dataflow is made of: calls that work on samples, and syncs that carry parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshkit.errors import PlanError

Sample = dict[str, Any]
"""fields by name, on the host: numbers, texts, numpy arrays, and whatever pickles"""

Stage = Literal["rollout", "train"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function of a model (or of none) on the ranks of one mesh.

    on: the name of the mesh. Every rank of it calls `function` with the samples of its data rank, and ranks of one data
    rank get the same. needs: the fields it reads; they are brought from the mesh where they were made. gives: the fields
    it adds. `function` returns the samples, in order, each with what it gives; it may return more for one sample that it
    was given, or none, if each carries the field `source` of that sample on, as a copy of the sample does.
    A call that gives nothing may return None.
    stage: "rollout" may run ahead of training, by the flow's `staleness`; what changes parameters is "train".
    """

    name: str
    on: str
    function: Callable[[list[Sample]], list[Sample] | None]
    needs: Sequence[str] = ()
    gives: Sequence[str] = ()
    stage: Stage = "rollout"

    def __post_init__(self) -> None:
        if SOURCE in self.gives:
            raise PlanError(
                f"call {self.name!r} gives {SOURCE!r}, by which a flow finds where a sample belongs. Rename it."
            )


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Parameters from the model of one mesh to that of another, after the calls of a train stage.

    Every rank of either mesh calls `function`: a `reallocate` of the two models.
    """

    name: str
    source: str
    destination: str
    function: Callable[[], object]


SOURCE = "source"
"""the field that says which of the iteration's first samples a sample comes from"""
