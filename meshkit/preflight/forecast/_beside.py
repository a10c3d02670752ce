"""A forecast beside a measured step: computing, and what is waited for on each axis; where they differ most."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import fsum

from meshkit.core import _torch
from meshkit.core.calls import SIZE, ring
from meshkit.errors import PlanError

COMPUTING = "computing"


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A real step of this rank. by_axis: seconds of computing, and of waiting for the messages of each axis; empty where the
    host does not see them, on CUDA, and where a step has more calls than are kept.
    """

    seconds: float
    by_axis: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def measure_step(*, on_host: bool) -> Iterator[list[MeasuredStep]]:
    """Around a step. Yields a list, which then holds it. on_host: whether a rank waits for its messages on the host, as with
    gloo.
    """
    _torch.record_calls()
    found: list[MeasuredStep] = []
    began = time.monotonic()
    yield found
    seconds = time.monotonic() - began
    calls = [call for call in ring.calls if call.began >= began]
    if not on_host or len(calls) == SIZE:
        found.append(MeasuredStep(seconds=seconds))
        return
    waits: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        if call.waited is not None and call.ended is not None:
            waits[call.meeting.axis] += call.ended - call.waited
    found.append(MeasuredStep(seconds=seconds, by_axis={COMPUTING: seconds - fsum(waits.values()), **waits}))


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a forecast says, as a step is measured: seconds, and by_axis those of computing and of waiting on each axis.

    The bubble of a pipeline is waited for on pp.
    """

    seconds: float
    by_axis: Mapping[str, float]
    device: str
    level: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Told:
        """Raises: PlanError for what no forecast wrote."""
        try:
            return Told(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PlanError(
                f"this is no forecast's file: {error}. `python -m meshkit forecast --save` writes one."
            ) from error

    def beside(self, measured: MeasuredStep) -> str:
        """A sentence: both steps, and the largest difference by name."""
        off = self.seconds / measured.seconds - 1
        said = (
            f"forecast {self.seconds:.3g} s a step, measured {measured.seconds:.3g} s: the forecast is {off:+.0%} off"
        )
        if not measured.by_axis:
            return said
        names = dict.fromkeys((*self.by_axis, *measured.by_axis))
        name = max(names, key=lambda name: abs(self.by_axis.get(name, 0.0) - measured.by_axis.get(name, 0.0)))
        what = name if name == COMPUTING else f"waiting on {name}" if name else "waiting beside the mesh"
        return (
            f"{said}; most in {what}, forecast {self.by_axis.get(name, 0.0):.3g} s, measured "
            f"{measured.by_axis.get(name, 0.0):.3g} s"
        )
