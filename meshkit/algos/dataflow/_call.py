"""Nodes of a dataflow: calls, which work on samples, and syncs, which move parameters (weight sync)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from meshkit.algos.dataflow._work import Work
from meshkit.errors import DataError, PlanError

Sample = dict[str, Any]
"""fields by name, on the host: numbers, texts, numpy arrays, and whatever pickles"""

Stage = Literal["rollout", "train"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function of a model (or of none) on the ranks of one mesh.

    on: the name of the mesh. Every rank of it calls `function` with the samples of its data rank; ranks of one data rank get
    the same samples. needs: the fields it reads, which are sent from the mesh where they were made. gives: the fields it
    adds. `function` returns the samples in order, each with these fields. It may return several samples for one, or none, if
    each keeps the field `source` of the sample it comes from, as a copy does. A call that gives nothing may return None.
    stage: "rollout" may run ahead of training, by the flow's `staleness`; a call that changes parameters is "train".
    works: what it does with which models, one after the other, for `plan_rl`; a flow does not read it.
    """

    name: str
    on: str
    function: Callable[[list[Sample]], list[Sample] | None]
    needs: Sequence[str] = ()
    gives: Sequence[str] = ()
    stage: Stage = "rollout"
    works: Sequence[Work] = ()

    def __post_init__(self) -> None:
        # `Flow` itself writes this field.
        if SOURCE in self.gives:
            raise PlanError(
                f"call {self.name!r} gives {SOURCE!r}, by which a flow finds where a sample belongs. Rename it."
            )


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Weight sync: parameters from the model of one mesh to that of another, after the calls of a train stage.

    Every rank of either mesh calls `function`: a `reallocate` of the two models.
    """

    name: str
    source: str
    destination: str
    function: Callable[[], object]


SOURCE = "source"
"""the field with the index of the first sample, among those of the iteration, that a sample comes from"""


def run_call(call: Call, given: Sequence[Sample], what: str) -> list[Sample] | None:
    """What the call returns for these samples; None from one that gives nothing.

    Raises: DataError for samples that are not those it was given, or lack what it gives.
    """
    # Copies: a function may change its samples, and another call on this mesh reads the stored ones if it returns None.
    returned = call.function([dict(sample) for sample in given])
    if returned is None and not call.gives:
        return None
    if returned is None:
        raise DataError(f"{what}: returned nothing, but gives {', '.join(call.gives)}. Return the samples.")
    sources = {sample[SOURCE] for sample in given}
    for sample in returned:
        missing = [name for name in (SOURCE, *call.gives) if name not in sample]
        if missing or sample[SOURCE] not in sources:
            raise DataError(
                f"{what}: returned a sample "
                + (f"without {', '.join(missing)}." if missing else "of another rank.")
                + f" Return the samples it was given, each with {', '.join(call.gives)}."
            )
    return returned


def to_tensors(sample: Sample) -> Sample:
    """Checkpoints hold tensors, not arrays."""
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def to_arrays(sample: Sample) -> Sample:
    """With tensors as arrays of NumPy, which share their memory: tensors of the host."""
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in sample.items()}
