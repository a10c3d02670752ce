"""Goodput of a run: kinds of checkpoint one inside the other, each at its best interval; a ledger that adds up to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf

from meshkit.errors import PlanError
from meshkit.preflight._format import table_lines
from meshkit.preflight.goodput._faults import Checkpoints, Faults
from meshkit.preflight.goodput._interval import best_interval_s, daly_s, young_s
from meshkit.preflight.goodput._jitter import expected_max
from meshkit.preflight.goodput._renewal import Spent, spent
from meshkit.preflight.goodput._spares import Alternative, best_spares, shrink, spares

MOST_STEPS = 10**15  # between saves
LEAST_WORK = 1e-6  # a smaller share of the wall clock is no run


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One kind of checkpoint with its interval in whole steps, and what it costs of the wall clock of the run.

    interval_s: seconds of steps between two saves, jitter included; steps: their number. best_steps, young_steps,
    daly_steps: the best interval, exact and by the two closed forms.
    """

    checkpoints: Checkpoints
    mtbf_s: float
    """of failures after which this kind is loaded"""
    restart_s: float
    """from a failure to the first step: detect, restart and load"""
    steps: int
    interval_s: float
    best_steps: float
    young_steps: float
    daly_steps: float
    spent: Spent
    """of the whole run; `work` is that of all inner kinds"""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Shares of the wall clock. `str()` is the printed form.

    share: goodput, in which ranks do what a job without failures, saves and jitter does. effective: the share of steps that
    count, with their jitter, which is what reports call effective training time.
    """

    ranks: int
    step_s: float
    faults: Faults
    jitter_factor: float
    """E[max of n]: a step takes so many times its mean"""
    saved: tuple[Saved, ...]
    """from the kind that most failures are met with to the last"""
    alternatives: tuple[Alternative, ...]

    @property
    def mtbf_s(self) -> float:
        return 1 / self.faults.rate_per_s(self.ranks)

    @property
    def effective(self) -> float:
        return self.saved[0].spent.work

    @property
    def share(self) -> float:
        return self.effective / self.jitter_factor

    @property
    def ledger(self) -> dict[str, float]:
        """What the wall clock is spent on; adds up to 1."""
        return {
            "useful": self.share,
            "jitter": self.effective - self.share,
            **{f"saves {kind.checkpoints.name}": kind.spent.saving for kind in self.saved},
            "lost work": sum(kind.spent.lost for kind in self.saved),
            "restarts": sum(kind.spent.restarts for kind in self.saved),
        }

    def __str__(self) -> str:
        return "\n".join([*_heading(self), "", *_ledger(self), "", *_intervals(self), "", *_alternatives(self)])


def goodput(
    *,
    step_s: float,
    ranks: int,
    faults: Faults,
    checkpoints: Sequence[Checkpoints],
    multiple: int | None = None,
) -> Goodput:
    """Useful over wall of a job of `ranks` ranks whose mean step takes `step_s` without jitter.

    checkpoints: from the most frequent kind to the last, which is loaded after the failures that no earlier one survives.
    multiple: ranks of one copy of the model, for shrinking. A kind without an interval gets the best one in whole steps.
    Kinds are composed as if the inner one's losses slowed its steps evenly; a single kind is exact.
    Raises: PlanError for no checkpoints, a kind that adds nothing, failures that nothing survives, and saves that come before
    the last one is written.
    """
    if not 1e-6 <= step_s < inf or ranks < 1:
        raise PlanError(
            f"step_s={step_s:g}, ranks={ranks}: give the seconds of a step, from 1e-6 up, and at least one rank."
        )
    _refuse(checkpoints)
    factor = 1 + faults.jitter * expected_max(ranks)
    rate = faults.rate_per_s(ranks)
    saved: list[Saved] = []
    before, pace = 0.0, 1.0
    for kind in checkpoints:
        met = rate * (kind.survives - before)
        saved.append(_saved(kind, faults, met, step_s * factor, pace))
        # What lies between two saves of an outer kind is the inner one's whole life.
        outer = saved[-1].spent
        saved[:-1] = [replace(inner, spent=_scaled(inner.spent, outer.work)) for inner in saved[:-1]]
        before, pace = kind.survives, saved[0].spent.work
    result = Goodput(
        ranks=ranks, step_s=step_s, faults=faults, jitter_factor=factor, saved=tuple(saved), alternatives=()
    )
    found = [spares(result.share, faults, ranks, 0), best_spares(result.share, faults, ranks)]
    if multiple is not None:
        restart_s = saved[0].restart_s
        found.append(shrink(result.share, faults, ranks, multiple=multiple, restart_s=restart_s))
    return replace(result, alternatives=tuple(found))


def _refuse(checkpoints: Sequence[Checkpoints]) -> None:
    if not checkpoints:
        raise PlanError("goodput without checkpoints: a job that fails begins anew. Give at least on_storage(...).")
    before = 0.0
    for kind in checkpoints:
        if kind.survives <= before:
            raise PlanError(
                f"checkpoints {kind.name} survive {kind.survives:.0%} of the failures, and an earlier kind {before:.0%}: "
                "they are never loaded. Order them from the most frequent to the last, or leave this one out."
            )
        before = kind.survives
    if before < 1:
        raise PlanError(
            f"after {1 - before:.0%} of the failures there is nothing to load: the last kind needs survives=1, as "
            "on_storage(...)."
        )


def _saved(kind: Checkpoints, faults: Faults, rate_per_s: float, step_s: float, pace: float) -> Saved:
    """step_s: with jitter. pace: the share of the wall clock between two saves of this kind in which steps count."""
    restart_s = faults.detect_s + (faults.restart_s if kind.restart_s is None else kind.restart_s) + kind.load_s
    mtbf_s = 1 / rate_per_s
    wall_s = step_s / pace  # of one step that counts

    def cost(steps: int) -> Spent:
        return spent(
            interval_s=steps * wall_s,
            blocking_s=kind.blocking_s,
            write_s=kind.write_s,
            restart_s=restart_s,
            rate_per_s=rate_per_s,
        )

    best = best_interval_s(kind.blocking_s, mtbf_s) / wall_s
    least = max(1, ceil(kind.write_s / wall_s - 1e-9))
    if kind.interval_s is not None:
        steps = max(1, round(kind.interval_s / step_s))
        if steps < least:
            raise PlanError(
                f"a save {kind.name} every {steps * step_s:.3g} s, but each takes {kind.write_s:.3g} s to be written: the "
                f"next would wait for it. Give an interval of at least {least * step_s:.3g} s, or faster storage."
            )
    else:
        below = floor(min(best, MOST_STEPS))
        steps = max((max(least, below), max(least, below + 1)), key=lambda steps: cost(steps).work)
    if cost(steps).work < LEAST_WORK:
        raise PlanError(
            f"no run gets on here: a failure comes every {format_seconds(mtbf_s)}, and {steps:,} steps with a save "
            f"{kind.name} and a restart take {format_seconds(steps * step_s + kind.blocking_s + kind.write_s + restart_s)}."
        )
    return Saved(
        checkpoints=kind,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        steps=steps,
        interval_s=steps * step_s,
        best_steps=best,
        young_steps=young_s(kind.blocking_s, mtbf_s) / wall_s,
        daly_steps=daly_s(kind.blocking_s, mtbf_s) / wall_s,
        spent=cost(steps),
    )


def _scaled(inner: Spent, share: float) -> Spent:
    return Spent(
        work=inner.work * share, saving=inner.saving * share, lost=inner.lost * share, restarts=inner.restarts * share
    )


# The printed form


def _heading(found: Goodput) -> list[str]:
    return [
        f"goodput {found.share:.2%} on {found.ranks:,} ranks: a failure every {format_seconds(found.mtbf_s)}",
        f"effective training time {found.effective:.2%}; a step takes {found.step_s:.4g} s"
        + (f", {found.step_s * found.jitter_factor:.4g} s with its slowest rank" if found.jitter_factor > 1 else ""),
    ]


def _ledger(found: Goodput) -> list[str]:
    return table_lines([(name, f"{share:.2%}") for name, share in found.ledger.items()], right=(1,))


def _intervals(found: Goodput) -> list[str]:
    lines = []
    for kind in found.saved:
        one = kind.spent.lost + kind.spent.restarts
        lines.append(
            f"a checkpoint {kind.checkpoints.name} every {format_seconds(kind.interval_s)} ({_steps(kind.steps)}) costs "
            f"{kind.spent.saving:.2%}, its failures {one:.2%}: one every {format_seconds(kind.mtbf_s)}, "
            f"{format_seconds(kind.restart_s)} to the next step"
        )
        step_s = kind.interval_s / kind.steps
        words = {"best": kind.best_steps, "Young": kind.young_steps, "Daly": kind.daly_steps}
        said = ", ".join(f"{word} {format_seconds(steps * step_s)}" for word, steps in words.items())
        limit = (
            "" if kind.best_steps * step_s >= kind.checkpoints.write_s else "; a save must be written before the next"
        )
        lines.append(f"  intervals: {said}{limit}")
    return lines


def _alternatives(found: Goodput) -> list[str]:
    rows = [("a host is lost for good", "of all devices held", "")]
    rows += [(alternative.name, f"{alternative.share:.2%}", alternative.note) for alternative in found.alternatives]
    return table_lines(rows, right=(1,))


def _steps(steps: int) -> str:
    return "each step" if steps == 1 else f"{steps:,} steps"


def format_seconds(seconds: float) -> str:
    """840 as 14 min."""
    for unit_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s"
