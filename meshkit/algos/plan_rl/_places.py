"""Alternatives (sub-meshes and layouts): where a mesh may lie and how, priced, and those that can be best kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshkit.algos.dataflow import Call
from meshkit.algos.plan_rl._costs import Costs, works_of
from meshkit.algos.plan_rl._problem import Alternative
from meshkit.errors import MeshkitError, PlanError
from meshkit.mesh import MeshSpec
from meshkit.strategy import RecomputeMode

Place = tuple[int, int]
"""(first unit, units)"""


@dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """What a search tries. unit_ranks: of which meshes take whole numbers; default a node, on one node a rank. pp: sizes;
    tp are the powers of two inside of a node. recompute: of calls that train. layouts: how many are kept of each size of a
    mesh, the fastest of those of which none is both faster and smaller. keep: layouts that are kept anyway.
    """

    unit_ranks: int | None = None
    pp: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[RecomputeMode, ...] = ("none", "full")
    layouts: int = 4
    keep: tuple[str, ...] = ()


def counts(units: int) -> list[int]:
    """Sizes of sub-meshes: all up to eight units; beyond, powers of two and what they leave of the world."""
    if units <= 8:
        return list(range(1, units + 1))
    powers = [2**power for power in range(units.bit_length()) if 2**power <= units]
    return sorted({units, *powers, *(units - power for power in powers if power < units)})


def axes_of(spec: MeshSpec) -> str:
    """As --mesh says it."""
    return " ".join(f"{axis}={size}" for axis, size in spec.sizes().items() if size != 1) or "dp_shard=1"


def specs(ranks: int, node_ranks: int, *, pp: Sequence[int], trains: bool) -> Iterable[MeshSpec]:
    """All of so many ranks: parameters of training sharded over data ranks, of the others sharded or replicated."""
    tp = 1
    while tp <= node_ranks:
        for stages in pp:
            if ranks % (tp * stages) == 0:
                data = ranks // (tp * stages)
                yield MeshSpec(pp=stages, dp_shard=data, tp=tp)
                if data > 1 and not trains:
                    yield MeshSpec(pp=stages, dp_replicate=data, tp=tp)
        tp *= 2


@dataclass(frozen=True)
class _Priced:
    spec: str
    recompute: str
    seconds: Mapping[str, float]
    static_bytes: Mapping[str, float]
    active_bytes: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        return sum(self.static_bytes.values()) + self.active_bytes


def alternatives(
    calls: Sequence[Call],
    costs: Costs,
    *,
    units: int,
    unit_ranks: int,
    space: PlanSpace,
    places: Mapping[str, frozenset[Place]] | None = None,
) -> dict[str, list[Alternative]]:
    """Of every mesh that calls name. places: of a mesh those that it may have; default all.

    Raises: PlanError where no layout of a mesh can run its calls, with the last refusal.
    """
    node_ranks = costs.cluster.tiers[0].ranks
    meshes = list(dict.fromkeys(call.on for call in calls))
    allowed = {
        mesh: (places or {}).get(mesh)
        or frozenset((first, count) for count in counts(units) for first in range(units - count + 1))
        for mesh in meshes
    }
    priced: dict[str, dict[int, list[_Priced]]] = {}
    for mesh in meshes:
        priced[mesh] = {}
        trains = any(work.kind == "train" for _, work in works_of(calls, mesh))
        refused = ""
        for count in sorted({count for _, count in allowed[mesh]}):
            found = []
            for spec in specs(count * unit_ranks, node_ranks, pp=space.pp, trains=trains):
                for recompute in space.recompute if trains else ("none",):
                    try:
                        found.append(_price(calls, mesh, costs, spec, recompute))
                    except MeshkitError as error:
                        refused = str(error)
            priced[mesh][count] = [
                each for each in found if costs.device_bytes is None or each.bytes <= costs.device_bytes
            ]
        if not any(priced[mesh].values()):
            raise PlanError(f"plan_rl: no layout runs the calls of mesh {mesh!r}: {refused or 'memory is too small'}")
    common = {count: _common(calls, priced, count) for count in range(1, units + 1)}
    return {
        mesh: [
            Alternative(
                first=first,
                count=count,
                layout=each.spec,
                seconds=each.seconds,
                static_bytes=each.static_bytes,
                active_bytes=each.active_bytes,
                core_s={name: costs.core_s(seconds, count * unit_ranks) for name, seconds in each.seconds.items()},
                choices="" if each.recompute == "none" else each.recompute,
            )
            for first, count in sorted(allowed[mesh])
            for each in _kept(priced[mesh][count], space.layouts, {*space.keep, *common[count]})
        ]
        for mesh in meshes
    }


def _price(calls: Sequence[Call], mesh: str, costs: Costs, spec: MeshSpec, recompute: RecomputeMode) -> _Priced:
    seconds = {call.name: 0.0 for call in calls if call.on == mesh}
    static: dict[str, float] = {}
    active = 0.0
    for call, work in works_of(calls, mesh):
        cost = costs.of(work, spec, recompute=recompute)
        seconds[call.name] += cost.seconds
        static[work.model] = max(static.get(work.model, 0.0), cost.static_bytes)
        active = max(active, cost.active_bytes)
    return _Priced(axes_of(spec), recompute, seconds, static, active)


def _common(calls: Sequence[Call], priced: Mapping[str, Mapping[int, list[_Priced]]], count: int) -> set[str]:
    """For each model on several meshes, and for all, the layout that suits them together best: it needs no weight sync."""
    shared: dict[str, dict[str, None]] = {"": dict.fromkeys(priced)}
    for call in calls:
        for work in call.works:
            shared.setdefault(work.model, {})[call.on] = None
    best = set()
    for meshes in shared.values():
        lists = [priced[mesh].get(count, []) for mesh in meshes]
        layouts = set.intersection(*({each.spec for each in of} for of in lists))
        total = {
            layout: sum(min(each.total_s for each in of if each.spec == layout) for of in lists) for layout in layouts
        }
        if len(meshes) > 1 and total:
            best.add(min(total, key=lambda layout: (total[layout], layout)))
    return best


def _kept(priced: Sequence[_Priced], most: int, anyway: set[str]) -> list[_Priced]:
    """The fastest of those of which none is faster and smaller, and of `anyway` each the same way."""
    front: list[_Priced] = []
    for each in sorted(priced, key=lambda each: (each.total_s, each.bytes)):
        if all(each.bytes < other.bytes for other in front):
            front.append(each)
    # The fastest, and the smallest, which leaves most room for others.
    kept = front[: most - 1] + front[most - 1 :][-1:]
    for layout in anyway:
        same = [each for each in priced if each.spec == layout]
        if same:
            kept += _kept(same, 2, set())
    return list({(each.spec, each.recompute): each for each in kept}.values())
