"""The problem of a searched plan, as data: calls, where the mesh of each may lie, what that costs. No model, no cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshkit.algos.dataflow import Call
from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One way to lay a mesh: `count` units of ranks from `first` on, in `layout`, the axes as a mesh says them.

    seconds: of each call of the mesh. static_bytes: of a rank, by model: parameters, and of one that trains gradients and
    optimizer state. active_bytes: of a rank while a call runs, the most of its calls. core_s: seconds of host cores, of each
    call, where ranks compute on the cores of a host. choices: what else its strategy says, as recompute.
    """

    first: int
    count: int
    layout: str
    seconds: Mapping[str, float]
    static_bytes: Mapping[str, float] = field(default_factory=dict)
    active_bytes: float = 0.0
    core_s: Mapping[str, float] = field(default_factory=dict)
    choices: str = ""

    @property
    def units(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def place(self) -> tuple[int, int, str]:
        """Where the parameters are: alternatives that agree in it hold one copy of a model."""
        return self.first, self.count, self.layout


Choice = Mapping[str, Alternative]
"""by mesh"""
MoveSeconds = Callable[[str, Alternative, Alternative], float]
"""(model, from, to)"""


def no_seconds(model: str, source: Alternative, destination: Alternative) -> float:
    """Moves that cost nothing."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a plan is chosen from.

    calls: of an iteration, in an order in which they can run. meshes: the alternatives of each name in `on`. units: groups of
    ranks of which a mesh takes whole ones, as nodes. device_bytes: of a rank; None does not look at memory. staleness: as of
    the flow. move_s: seconds of a weight sync between two alternatives that differ in place; least_s: at most that, cheap.
    cores: of all hosts, where ranks compute on them; 0 without. apart: for two meshes the pairs of places that may be chosen
    together, as (first, count) of each.
    """

    calls: Sequence[Call]
    meshes: Mapping[str, Sequence[Alternative]]
    units: int
    device_bytes: float | None = None
    staleness: int = 0
    move_s: MoveSeconds = no_seconds
    least_s: MoveSeconds = no_seconds
    cores: float = 0.0
    apart: Mapping[tuple[str, str], frozenset[tuple[tuple[int, int], tuple[int, int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.calls:
            if not self.meshes.get(call.on):
                raise PlanError(
                    f"call {call.name!r}: mesh {call.on!r} has no alternative that can run it. Give more ranks or memory."
                )

    @property
    def homes(self) -> dict[str, str]:
        """Of each model the mesh that has its parameters: where it is trained, else of the first call."""
        homes: dict[str, str] = {}
        for trains in (True, False):
            for call in self.calls:
                for work in call.works:
                    if (work.kind == "train") or not trains:
                        homes.setdefault(work.model, call.on)
        return homes

    @property
    def copies(self) -> list[tuple[str, str]]:
        """(model, mesh) of those that are held by another mesh than the model's home, too."""
        homes = self.homes
        uses = dict.fromkeys((work.model, call.on) for call in self.calls for work in call.works)
        return [(model, mesh) for model, mesh in uses if homes[model] != mesh]

    @property
    def syncs(self) -> list[tuple[str, str]]:
        """The copies of models that are trained, which get new weights in every iteration."""
        trained = {work.model for call in self.calls for work in call.works if work.kind == "train"}
        return [(model, mesh) for model, mesh in self.copies if model in trained]

    def slower(self, factors: Mapping[str, float]) -> Problem:
        """Calibrated: the seconds of calls times these factors, as `flow.seconds` of one run over its forecast says them."""
        meshes = {
            mesh: [
                replace(each, seconds=_times(each.seconds, factors), core_s=_times(each.core_s, factors)) for each in of
            ]
            for mesh, of in self.meshes.items()
        }
        return replace(self, meshes=meshes)

    def refusal(self, choice: Choice) -> str:
        """Why the choice is none, "" if it is one."""
        for (one, other), pairs in self.apart.items():
            if ((choice[one].first, choice[one].count), (choice[other].first, choice[other].count)) not in pairs:
                return f"meshes {one} and {other} cannot lie so"
        if self.device_bytes is not None and (most := self.peak_bytes(choice)) > self.device_bytes:
            return f"needs {most / 2**30:,.1f} GiB of {self.device_bytes / 2**30:,.1f}"
        return ""

    def peak_bytes(self, choice: Choice) -> float:
        """Of the fullest rank: what all meshes keep on it, and what the call that needs most adds."""
        kept, active = [0.0] * self.units, [0.0] * self.units
        homes, copies = self.homes, set(self.copies)
        for mesh, chosen in choice.items():
            for model, size in chosen.static_bytes.items():
                if (model, mesh) in copies and choice[homes[model]].place == chosen.place:
                    continue
                for unit in chosen.units:
                    kept[unit] += size
            for unit in chosen.units:
                active[unit] = max(active[unit], chosen.active_bytes)
        return max(map(sum, zip(kept, active, strict=True)))


def _times(seconds: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    return {name: value * factors.get(name, 1.0) for name, value in seconds.items()}
