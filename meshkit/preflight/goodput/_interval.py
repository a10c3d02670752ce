"""The best checkpoint interval: Young's first order, Daly's higher order, and the exact one.

delta is what a save blocks, M the mean time between failures; an interval is the work between two saves. The time until a
checkpoint can be loaded, and the restart, multiply the cost of any interval alike, so the best one does not depend on them.
"""

from __future__ import annotations

from math import exp, expm1, sqrt


def young_s(blocking_s: float, mtbf_s: float) -> float:
    """sqrt(2 delta M). Source: Young 1974."""
    return sqrt(2 * blocking_s * mtbf_s)


def daly_s(blocking_s: float, mtbf_s: float) -> float:
    """sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta; M from delta = 2M on.

    Source: Daly 2006, equation 37.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    part = sqrt(blocking_s / (2 * mtbf_s))
    return young_s(blocking_s, mtbf_s) * (1 + part / 3 + part**2 / 9) - blocking_s


def best_interval_s(blocking_s: float, mtbf_s: float) -> float:
    """The interval u M with (1 - u) e^u = e^(-delta / M), where the exact cost has its least.

    It is M (1 + W(-e^(-1 - delta / M))) with Lambert's W; Newton's steps need no library.
    """
    if blocking_s == 0:
        return 0.0
    ratio = blocking_s / mtbf_s
    u = min(sqrt(2 * ratio), 1 - exp(-1 - ratio))
    for _ in range(60):
        # 1 - e^-ratio in place of its difference from 1: of small ratios the digits are in it.
        value = (1 - u) * expm1(u) - u - expm1(-ratio)
        step = value / (u * exp(u))
        u += step
        if abs(step) <= 1e-15 * u:
            break
    return u * mtbf_s
