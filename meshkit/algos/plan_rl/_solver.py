"""CP-SAT over places, layouts and orders (cyclic job-shop scheduling with alternatives): the choice whose period is least.

One optional interval per call and unit, no overlap per unit, memory of each unit with what is static and active. Rules
between iterations have the period times a constant in them, so all is linear. Seconds of weight syncs are constraints on
pairs of alternatives: `least_s` from the start, `move_s` of the pairs that were looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from meshkit.algos.dataflow import Call
from meshkit.algos.plan_rl._period import (
    Rule,
    crossing_rules,
    fixed_rules,
    needs_of,
    order_rules,
    stage_rules,
    sync_name,
)
from meshkit.algos.plan_rl._problem import Alternative, Choice, Problem
from meshkit.errors import PlanError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

TICKS = 2_000  # of the period of the first plan: seconds are whole numbers of them. Finer ones take longer to prove
MIB = 2**20  # the unit of bytes
Pair = tuple[str, str, Alternative, Alternative]
"""(model, mesh of the copy, the home's alternative, the copy's)"""


def solver_module() -> Any:
    """Raises: PlanError without ortools."""
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError as missing:
        raise PlanError(
            'plan_rl needs ortools, which is in the optional extra `plans`. Install it with: pip install "meshkit[plans]"'
        ) from missing
    return cp_model


@dataclass(frozen=True, kw_only=True)
class Solved:
    """order: calls and syncs by start. bound_s: no choice has a smaller period, as far as moves are known."""

    choice: Choice
    order: tuple[str, ...]
    bound_s: float


@dataclass
class Solver:
    """The model of a problem. most_s: the period of a plan that is known. looked_at: pairs whose move_s is a constraint."""

    problem: Problem
    most_s: float
    looked_at: dict[tuple[Any, ...], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cp = solver_module()
        self._model: cp_model.CpModel = self._cp.CpModel()
        problem, model = self.problem, self._model
        self.tick_s = self.most_s / TICKS
        horizon = (problem.staleness + 2) * TICKS
        self._period = model.new_int_var(0, TICKS + 1, "period")
        self._alternatives: dict[str, list[tuple[Alternative, Any]]] = {
            mesh: [(each, model.new_bool_var(f"{mesh}@{each.place}{each.choices}")) for each in alternatives]
            for mesh, alternatives in problem.meshes.items()
        }
        for chosen in self._alternatives.values():
            model.add_exactly_one(literal for _, literal in chosen)
        self._covers = {
            (mesh, unit): self._some(
                [literal for each, literal in self._alternatives[mesh] if unit in each.units], f"{mesh} on {unit}"
            )
            for mesh in problem.meshes
            for unit in range(problem.units)
        }
        self._starts = {call.name: model.new_int_var(0, horizon, f"start {call.name}") for call in problem.calls}
        self._seconds = {call.name: self._seconds_of(call) for call in problem.calls}
        self._ends = {call.name: self._end(call.name, horizon) for call in problem.calls}
        self._same: dict[tuple[str, str], list[tuple[Alternative, Any]]] = {}
        self._present: dict[tuple[str, str], Any] = {}
        for pair in problem.copies:
            self._add_copy(*pair, horizon)
        self._overlaps = {
            frozenset(pair): self._overlap(*pair) for pair in combinations(dict.fromkeys(problem.meshes), 2)
        }
        self._add_rules()
        self._add_units()
        self._add_memory()
        self._add_apart()
        model.minimize(self._period)

    # ---------------------------------------------------------------------------------------------------- variables

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.tick_s)

    def _some(self, literals: Sequence[Any], name: str) -> Any:
        """A literal: one of those, of which at most one is true."""
        some = self._model.new_bool_var(name)
        self._model.add(sum(literals) == some)
        return some

    def _seconds_of(self, call: Call) -> Any:
        chosen = self._alternatives[call.on]
        # A call that takes longer than a whole known plan is in no better one.
        most = TICKS + 1
        for each, literal in chosen:
            if self._ticks(each.seconds[call.name]) > most:
                self._model.add(literal == 0)
        seconds = self._model.new_int_var(0, most, f"seconds {call.name}")
        possible = [(min(most, self._ticks(each.seconds[call.name])), literal) for each, literal in chosen]
        self._model.add(seconds == sum(ticks * literal for ticks, literal in possible))
        return seconds

    def _end(self, name: str, horizon: int) -> Any:
        end = self._model.new_int_var(0, horizon + TICKS + 1, f"end {name}")
        self._model.add(end == self._starts[name] + self._seconds[name])
        return end

    def _add_copy(self, model_name: str, mesh: str, horizon: int) -> None:
        """Whether the copy is the home's own, and the sync of one that is not."""
        problem, model = self.problem, self._model
        home = problem.homes[model_name]
        by_place: dict[Any, tuple[list[Any], list[Any]]] = {}
        for index, of in enumerate((home, mesh)):
            for each, literal in self._alternatives[of]:
                by_place.setdefault(each.place, ([], []))[index].append(literal)
        same, any_of = [], {each.place: each for each, _ in self._alternatives[mesh]}
        for place, (at_home, here) in by_place.items():
            if at_home and here:
                both = model.new_bool_var(f"{model_name} once at {place}")
                model.add(both <= sum(at_home))
                model.add(both <= sum(here))
                model.add(both >= sum(at_home) + sum(here) - 1)
                same.append((any_of[place], both))
        self._same[model_name, mesh] = same
        if (model_name, mesh) not in problem.syncs:
            return
        name = sync_name(model_name, mesh)
        present = model.new_bool_var(name)
        model.add(present == 1 - sum(both for _, both in same))
        self._present[model_name, mesh] = present
        self._starts[name] = model.new_int_var(0, horizon, f"start {name}")
        self._seconds[name] = model.new_int_var(0, TICKS + 1, f"seconds {name}")
        self._ends[name] = self._end(name, horizon)
        model.add(self._seconds[name] == 0).only_enforce_if(present.Not())
        homes = list({each.place: each for each, _ in self._alternatives[home]}.values())
        for each, literal in self._alternatives[mesh]:
            moves = [problem.least_s(model_name, other, each) for other in homes if other.place != each.place]
            if moves and (least := int(min(moves) / self.tick_s)):
                model.add(self._seconds[name] >= min(least, TICKS + 1)).only_enforce_if([literal, present])

    def look_at(self, pairs: Iterable[Pair]) -> bool:
        """Make `move_s` of these pairs constraints. Returns whether one was not yet."""
        is_new = False
        for model_name, mesh, source, destination in pairs:
            key = model_name, mesh, source.place, destination.place
            if key in self.looked_at:
                continue
            is_new = True
            self.looked_at[key] = None
            ticks = min(TICKS + 1, self._ticks(self.problem.move_s(model_name, source, destination)))
            ends = [
                sum(literal for each, literal in self._alternatives[of] if each.place == at.place)
                for of, at in ((self.problem.homes[model_name], source), (mesh, destination))
            ]
            self._model.add(self._seconds[sync_name(model_name, mesh)] >= ticks * (sum(ends) - 1))
        return is_new

    def _overlap(self, one: str, other: str) -> Any:
        """A literal that is true where two meshes share a unit."""
        overlap = self._model.new_bool_var(f"{one} and {other} share ranks")
        for unit in range(self.problem.units):
            self._model.add(overlap >= self._covers[one, unit] + self._covers[other, unit] - 1)
        return overlap

    # ---------------------------------------------------------------------------------------------------- constraints

    def _add(self, rules: Iterable[Rule], enforced: Sequence[Any] = ()) -> None:
        for rule in rules:
            added = self._model.add(self._starts[rule.after] + rule.lag * self._period >= self._ends[rule.before])
            if enforced:
                added.only_enforce_if(list(enforced))

    def _shared(self, one: str, other: str) -> list[Any]:
        """Literals that together say that two meshes share ranks."""
        return [] if one == other else [self._overlaps[frozenset((one, other))]]

    def _add_rules(self) -> None:
        problem = self.problem
        self._add(fixed_rules(problem))
        after = _closure(needs_of(problem.calls))
        for one, other in combinations(problem.calls, 2):
            shared = self._shared(one.on, other.on)
            if one.stage != other.stage:
                rollout, train = (one, other) if one.stage == "rollout" else (other, one)
                self._add(stage_rules(problem, rollout, train), shared)
            elif (one.name, other.name) in after:
                self._add(order_rules(one.name, other.name), shared)
            else:
                self._add_either(one.name, other.name, shared)
        for (model_name, mesh), present in self._present.items():
            home = problem.homes[model_name]
            for call in problem.calls:
                rules = list(crossing_rules(problem, call, sync_name(model_name, mesh)))
                if call.on in (home, mesh):
                    # Of no seconds where the two are one, whose calls follow each other so anyway.
                    self._add(rules)
                    continue
                for end in (home, mesh):
                    self._add(rules, [present, *self._shared(call.on, end)])
        for (one_sync, one_present), (other_sync, other_present) in combinations(self._present.items(), 2):
            ends = [(problem.homes[model_name], mesh) for model_name, mesh in (one_sync, other_sync)]
            for one_end in ends[0]:
                for other_end in ends[1]:
                    shared = [one_present, other_present, *self._shared(one_end, other_end)]
                    self._add_either(sync_name(*one_sync), sync_name(*other_sync), shared)

    def _add_either(self, one: str, other: str, shared: Sequence[Any]) -> None:
        first = self._model.new_bool_var(f"{one} before {other}")
        self._add(order_rules(one, other), [first, *shared])
        self._add(order_rules(other, one), [first.Not(), *shared])

    def _add_units(self) -> None:
        """No overlap, and the seconds of each unit, and of each mesh with its syncs, fit into the period."""
        model, problem = self._model, self.problem
        for unit in range(problem.units):
            intervals = [
                model.new_optional_interval_var(
                    self._starts[call.name],
                    self._seconds[call.name],
                    self._ends[call.name],
                    self._covers[call.on, unit],
                    f"{call.name} on {unit}",
                )
                for call in problem.calls
            ]
            model.add_no_overlap(intervals)
            busy = [
                min(TICKS + 1, self._ticks(each.seconds[call.name])) * literal
                for call in problem.calls
                for each, literal in self._alternatives[call.on]
                if unit in each.units
            ]
            model.add(sum(busy) <= self._period)
        for mesh in problem.meshes:
            syncs = [sync for sync in problem.syncs if mesh in (sync[1], problem.homes[sync[0]])]
            names = [call.name for call in problem.calls if call.on == mesh] + [sync_name(*sync) for sync in syncs]
            model.add(sum(self._seconds[name] for name in names) <= self._period)
        if problem.cores:
            busy = [
                min(TICKS + 1, self._ticks(each.core_s.get(call.name, 0.0) / problem.cores)) * literal
                for call in problem.calls
                for each, literal in self._alternatives[call.on]
            ]
            model.add(sum(busy) <= self._period)

    def _add_memory(self) -> None:
        problem = self.problem
        if problem.device_bytes is None:
            return
        copies, most = set(problem.copies), int(problem.device_bytes / MIB)
        for unit in range(problem.units):
            kept: list[Any] = []
            for mesh, chosen in self._alternatives.items():
                for each, literal in chosen:
                    if unit in each.units:
                        kept.append(round(sum(each.static_bytes.values()) / MIB) * literal)
                for model_name, of in copies:
                    if of == mesh:
                        kept += [
                            -round(each.static_bytes[model_name] / MIB) * both
                            for each, both in self._same[model_name, mesh]
                            if unit in each.units
                        ]
            for chosen in self._alternatives.values():
                active = [round(each.active_bytes / MIB) * literal for each, literal in chosen if unit in each.units]
                self._model.add(sum(kept) + sum(active) <= most)

    def _add_apart(self) -> None:
        for (one, other), pairs in self.problem.apart.items():
            for each, literal in self._alternatives[one]:
                fitting = [
                    there
                    for second, there in self._alternatives[other]
                    if ((each.first, each.count), (second.first, second.count)) in pairs
                ]
                self._model.add_bool_or([literal.Not(), *fitting])

    # ---------------------------------------------------------------------------------------------------- solving

    def hint(self, choice: Choice) -> None:
        """Begin the next search at this choice."""
        self._model.clear_hints()
        for mesh, chosen in self._alternatives.items():
            for each, literal in chosen:
                self._model.add_hint(literal, each == choice[mesh])

    def solve(self, *, limit_s: float, gap: float, workers: int) -> Solved | None:
        """The best found in the time. None where there is no choice better than what is known, which then is optimal.

        Raises: PlanError where nothing was found in the time.
        """
        cp, solver = self._cp, self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(limit_s, 0.1)
        solver.parameters.relative_gap_limit = gap
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        status = solver.solve(self._model)
        if status == cp.INFEASIBLE:
            return None
        if status == cp.UNKNOWN:
            raise PlanError(
                f"plan_rl: nothing was found in {limit_s:.0f} s. Give more time, fewer layouts, or larger units."
            )
        choice = {
            mesh: next(each for each, literal in chosen if solver.value(literal))
            for mesh, chosen in self._alternatives.items()
        }
        position = {name: index for index, name in enumerate(self._starts)}
        order = sorted(self._starts, key=lambda name: (solver.value(self._starts[name]), position[name]))
        rounding = len(self._starts) + 1  # each second is at most half a tick too long
        bound_s = max(0.0, solver.best_objective_bound - rounding) * self.tick_s
        return Solved(choice=choice, order=tuple(order), bound_s=bound_s)


def _closure(pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """(before, after) of all that come one after the other, through others too. The pairs are in an order that can run."""
    before: dict[str, set[str]] = {}
    for first, then in pairs:
        before.setdefault(then, set()).update({first, *before.get(first, ())})
    return {(first, then) for then, firsts in before.items() for first in firsts}
