"""RLPlan: the plan that was found, as a table, as flags, and as TOML that `read_meshes` makes the meshes of."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from meshkit.algos.plan_rl._period import seconds_of, units_of
from meshkit.algos.plan_rl._problem import Alternative
from meshkit.algos.plan_rl._search import Found
from meshkit.errors import PlanError
from meshkit.mesh import Mesh, init_mesh


@dataclass(frozen=True, kw_only=True)
class RLPlan:
    """Print it. found: choice, order, steady state and bound. unit_ranks: of a unit of places. priced_s: of costs alone."""

    found: Found
    cluster: str
    unit_ranks: int
    priced_s: float = 0.0
    run_beside: tuple[str, str] | None = None

    @property
    def period_s(self) -> float:
        """From one iteration to the next."""
        return self.found.steady.period_s

    @property
    def gap(self) -> float:
        """By how much that may be above the least, as a share of it."""
        return self.found.gap

    @property
    def world(self) -> int:
        return self.found.problem.units * self.unit_ranks

    def ranks(self, mesh: str) -> range:
        chosen = self.found.choice[mesh]
        return range(chosen.first * self.unit_ranks, (chosen.first + chosen.count) * self.unit_ranks)

    @property
    def flags(self) -> str:
        """Of a script whose flags are --mesh, --sampler-mesh, --sampler-ranks and --staleness.

        Raises: PlanError for a plan that such flags cannot say.
        """
        if self.run_beside is None:
            raise PlanError("a plan with a mesh for each call has no flags. Write its TOML, and read_meshes of it.")
        learner, sampler = (self.found.choice[mesh] for mesh in self.run_beside)
        flags = [f'--mesh "{learner.layout}"']
        if learner.choices:
            flags.append(f"--recompute {learner.choices}")
        if sampler.place != learner.place:
            flags.append(f'--sampler-mesh "{sampler.layout}"')
            if (sampler.first, sampler.count) != (learner.first, learner.count):
                flags.append(f"--sampler-ranks {sampler.count * self.unit_ranks}")
        if self.found.problem.staleness:
            flags.append(f"--staleness {self.found.problem.staleness}")
        return " ".join(flags)

    def to_toml(self) -> str:
        problem, starts = self.found.problem, self.found.steady.starts
        seconds = seconds_of(problem, self.found.choice)
        calls = {call.name: call for call in problem.calls}
        table: dict[str, Any] = {
            "cluster": self.cluster,
            "period_s": self.period_s,
            "bound_s": self.found.bound_s,
            "staleness": problem.staleness,
            "mesh": [
                {
                    "name": mesh,
                    "axes": each.layout,
                    "first_rank": self.ranks(mesh).start,
                    "ranks": len(self.ranks(mesh)),
                }
                | ({"recompute": each.choices} if each.choices else {})
                for mesh, each in self.found.choice.items()
            ],
            "call": [
                {"name": name, "on": calls[name].on, "start_s": starts[name], "seconds": seconds[name]}
                for name in self.found.order
                if name in calls
            ],
            "sync": [
                {"name": name, "start_s": starts[name], "seconds": seconds[name]}
                for name in self.found.order
                if name in seconds and name not in calls
            ],
        }
        return tomli_w.dumps(table)

    def write(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def __str__(self) -> str:
        problem, choice = self.found.problem, self.found.choice
        seconds, units = seconds_of(problem, choice), units_of(problem, choice)
        on = {call.name: choice[call.on] for call in problem.calls}
        rows = [("call", "ranks", "layout", "from", "seconds")]
        for name in self.found.order:
            if name in seconds:
                rows.append(
                    (
                        name,
                        _ranks_text(units[name], self.unit_ranks),
                        _layout_text(on.get(name)),
                        f"{self.found.steady.starts[name]:.4g} s",
                        f"{seconds[name]:.4g} s",
                    )
                )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        found = self.found
        memory = "" if problem.device_bytes is None else f", {problem.peak_bytes(choice) / 2**30:.1f} GiB at most"
        return "\n".join(
            [
                f"an iteration every {self.period_s:.4g} s on {self.world} ranks of {self.cluster}{memory}",
                f"at most {self.gap:.2%} above the least, which is at least {found.bound_s:.4g} s",
                *table,
                f"priced in {self.priced_s:.1f} s, searched in {found.took_s:.1f} s, {found.syncs_seen} weight syncs planned",
            ]
        )


def read_meshes(path: str | os.PathLike[str]) -> dict[str, Mesh]:
    """The meshes of a plan's TOML, by name, for a `Flow`. Collective: every rank of the world calls it.

    Raises: PlanError for a file that is no plan; MeshError for a world of other ranks.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        rows = [(row["name"], row["axes"], row["first_rank"], row["ranks"]) for row in table["mesh"]]
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PlanError(f"{path} is no plan of plan_rl: {error}. Write one by `plan.write`.") from error
    return {name: init_mesh(axes, ranks=range(first, first + ranks)) for name, axes, first, ranks in rows}


def _ranks_text(units: frozenset[int], unit_ranks: int) -> str:
    """0-7, or 0-7 16-23."""
    parts, first = [], min(units)
    for unit in sorted(units):
        if unit + 1 not in units:
            last = (unit + 1) * unit_ranks - 1
            parts.append(f"{first * unit_ranks}-{last}" if last > first * unit_ranks else str(last))
            first = min((each for each in units if each > unit), default=unit)
    return " ".join(parts)


def _layout_text(chosen: Alternative | None) -> str:
    if chosen is None:
        return ""
    return chosen.layout + (f", recompute {chosen.choices}" if chosen.choices else "")
