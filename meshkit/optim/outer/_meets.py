"""Who meets: what an outer optimizer asks of its replicas, which are an axis of its mesh, or jobs at a meeting place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshkit.mesh import Mesh
from meshkit.optim.outer._exchange import Exchange, Layout
from meshkit.optim.outer._hand_on import Snapshot
from meshkit.optim.outer._policy import Policy, Wire
from meshkit.optim.outer._refusals import refuse_different_values, refuse_other_mesh
from meshkit.step import Run

AXIS = "dp_replicate"


class CameLate(Exception):
    """The other replicas have gone on without this one: on all its ranks."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a rank brings to a meeting; it stays as it is until that has ended. payloads, weight, errors: as `Exchange` takes
    them. whole: how many of the payloads, the last ones, travel whole whatever the wire. key: which meeting of the run it is.
    last: of those after this step."""

    payloads: Sequence[Tensor]
    weight: Tensor
    errors: Sequence[Tensor] | None
    step: int
    wire: Wire
    dtype: torch.dtype
    key: str
    last: bool
    whole: int = 0

    def layout(self, replicas: int) -> Layout:
        return Layout(self.sizes, replicas, self.wire, self.dtype, self.whole)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(payload.numel() for payload in self.payloads)


@dataclass(frozen=True, kw_only=True)
class Met:
    """A meeting that counts. step: after which it was. replicas: that were there, by slot. waited_s: from when the first was
    there until all were, or had been waited for. stood_s: how long this one stood still for it."""

    step: int
    replicas: tuple[int, ...]
    waited_s: float
    stood_s: float


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How a replica begins: with the others' state; by itself, where it has the newest; or, where no replica has finite
    values, from its own outer parameters."""

    snapshot: Snapshot | None = None
    goes_back: bool = False


class Meeting(Protocol):
    """Under way. steps, finite: as `Exchange` has them."""

    steps: list[int]
    finite: Tensor

    def turn(self) -> None:
        """What travels beside steps is halfway."""

    def finish(self) -> list[Tensor]:
        """The means, the same bits on every replica; errors are written. Raises: CameLate; MeetingError."""


class Replicas(Protocol):
    """Those of a run. last: the last meeting, where it is not always of all. hands_on: whether some may come later."""

    last: Met | None
    hands_on: bool

    @property
    def most(self) -> int:
        """How many there may be."""

    def check(self, run: Run, policy: Policy) -> None:
        """Raises: PlanError, AgreementError for what does not fit together."""

    def compare(self, run: Run, tensors: Mapping[str, Tensor], trained: set[str], facts: Mapping[str, str]) -> None:
        """tensors: of the model, before the first step; those that are trained are averaged. facts: what those must have
        alike of whom one may get the other's state. Raises: PlanError."""

    def begin(self, sent: Sent) -> Meeting | None:
        """None where this rank brings nothing, as on a stage without the fragment's blocks, and nobody waits for it."""

    def join(self, newest: tuple[int, int], *, can_go_back: bool) -> Joined:
        """Return once this replica counts.

        newest: (next meeting, steps) of its own; the greater is the newer. can_go_back: to outer parameters, from values that
        are not finite. Raises: MeetingError.
        """

    def hand_on(self, make: Callable[[], Snapshot]) -> None:
        """After each meeting: whoever has come gets a copy of the state."""


class MeshAxis:
    """Replicas that are ranks of one world, on its axis dp_replicate."""

    hands_on = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.last: Met | None = None

    @property
    def most(self) -> int:
        return self._mesh[AXIS].size()

    def check(self, run: Run, policy: Policy) -> None:
        refuse_other_mesh(run, self._mesh, type(policy).__name__)
        self._mesh.agreement.meet("OuterOptimizer", facts={"policy": policy})

    def compare(self, run: Run, tensors: Mapping[str, Tensor], trained: set[str], facts: Mapping[str, str]) -> None:
        refuse_different_values(run, self._mesh, tensors, trained)

    def begin(self, sent: Sent) -> Exchange | None:
        if not sum(sent.sizes):
            return None
        layout = sent.layout(self.most)
        return Exchange(
            self._mesh[AXIS].get_group(),
            layout,
            sent.payloads,
            weight=sent.weight,
            step=sent.step,
            errors=sent.errors,
        )

    def join(self, newest: tuple[int, int], *, can_go_back: bool) -> Joined:
        return Joined()

    def hand_on(self, make: Callable[[], Snapshot]) -> None:
        pass
