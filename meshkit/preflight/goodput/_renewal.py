"""Failures as a renewal process: what one kind of checkpoint, or several, leave of the wall clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Shares of the wall clock for one kind of checkpoint; the four add up to 1.

    work: between saves, steps that count (or, of an outer kind, all that happens between two of its saves).
    """

    work: float
    saving: float
    lost: float
    restarts: float


def spent(*, interval_s: float, blocking_s: float, write_s: float, restart_s: float, rate_per_s: float) -> Spent:
    """Exact for failures at a constant rate, also during saves and restarts.

    Between two checkpoints that can be loaded lies one interval and one save. The first try of it takes L = interval +
    blocking; a failure costs restarts until R + L + write pass without another: what was written and could not be loaded
    yet is lost, too. So the mean is E = (1 - e^-rL) e^(r (R + L + write)) / r, which is Daly's for write = 0.
    """
    whole_s = interval_s + blocking_s
    per_s = rate_per_s * exp(-rate_per_s * (restart_s + whole_s + write_s)) / -expm1(-rate_per_s * whole_s)
    work, saving = interval_s * per_s, blocking_s * per_s
    # Failures come at the same rate throughout, and each begins a restart, that ends after R or with the next failure.
    restarts = -expm1(-rate_per_s * restart_s)
    return Spent(work=work, saving=saving, lost=max(0.0, 1.0 - work - saving - restarts), restarts=restarts)
