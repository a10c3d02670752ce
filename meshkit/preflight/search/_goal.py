"""Goals of a search (objective): what is least of a forecast, and the least that it can be for seconds that are known."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Literal, get_args

from meshkit.cluster import Cluster
from meshkit.core.import_file import import_function
from meshkit.errors import PlanError
from meshkit.preflight.forecast import Forecast

Named = Literal["time", "cost", "energy", "fewest ranks"]
Goal = Named | Callable[[Forecast], float]


def parse_goal(text: str) -> Goal:
    """A name, or `file.py:function`. Raises: PlanError for another text, and for a file that has no such function."""
    for name in get_args(Named):
        if text == name:
            return name  # type: ignore[no-any-return]
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        names = ", ".join(get_args(Named))
        raise PlanError(f'--goal {text!r}: choose one of {names}, or give "file.py:function" with a file that exists.')
    return import_function(text, asked="--goal")


def refuse_goal(goal: object, cluster: Cluster) -> None:
    """Raises: PlanError for one that there is not, and for joules of a cluster that says no watts."""
    if not callable(goal) and goal not in get_args(Named):
        names = ", ".join(f'"{name}"' for name in get_args(Named))
        raise PlanError(f"search(goal={goal!r}): choose one of {names}, or give a function of a Forecast.")
    if goal == "energy" and not cluster.device.power:
        raise PlanError(
            f'search(goal="energy"): cluster {cluster.name!r} says no watts. Give [[device.power]] with mhz and watts, and '
            "device.idle_watts, in its file."
        )


def cost(goal: Goal, told: Forecast) -> float:
    """The least is best. Raises: PlanError for a function that returns no number."""
    if goal == "cost":
        return told.seconds * told.ranks
    if goal == "energy":
        assert told.joules is not None, "a cluster without watts is refused"
        return told.joules
    if not callable(goal):
        return told.seconds
    value = goal(told)
    if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value):
        raise PlanError(f"search(goal=...): the function returned {value!r}. Return a number; the least is best.")
    return float(value)


def least_cost(goal: Goal, cluster: Cluster, ranks: int, step_s: float, busy_s: float) -> float:
    """Of strategies whose step takes step_s at least, in which a rank computes for busy_s at least, on average."""
    if goal == "cost":
        return step_s * ranks
    if goal == "energy":
        return cluster.device.joules(step_s, busy_s) * ranks
    return 0.0 if callable(goal) else step_s
