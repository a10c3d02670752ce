"""Batch size from the gradient noise scale (critical batch): steps and tokens to one loss, as hours and GPU-hours.

With batch B and critical batch C, a loss takes S (1 + C / B) steps and E (1 + B / C) tokens; E = S C. At B = C both are twice
their least. Source: McCandlish et al. 2018 (arXiv 1812.06162), equation 2.11; C is near the simple noise scale S / |G|².
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from meshkit.errors import PlanError
from meshkit.preflight._format import table_lines
from meshkit.preflight.scaling._curve import StepForecast, format_hours


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """One forecast, with the steps, tokens and hours in which it gets to the loss of the reference.

    on_front: no other choice is both faster and cheaper.
    """

    forecast: StepForecast
    steps: float
    tokens: float
    hours: float
    gpu_hours: float
    on_front: bool


@dataclass(frozen=True, kw_only=True)
class BatchAdvice:
    """Choices by hours; `fastest` and `cheapest` are among them. `str()` is the printed form."""

    critical_tokens: float
    least_steps: float
    least_tokens: float
    choices: tuple[BatchChoice, ...]

    @property
    def fastest(self) -> BatchChoice:
        return self.choices[0]

    @property
    def cheapest(self) -> BatchChoice:
        return min(self.choices, key=lambda choice: choice.gpu_hours)

    def __str__(self) -> str:
        rows = [("batch, tokens", "ranks", "steps", "tokens", "hours", "GPU-hours", "")]
        for choice in self.choices:
            marks = [word for word, best in (("fastest", self.fastest), ("cheapest", self.cheapest)) if choice is best]
            if not marks and not choice.on_front:
                marks = ["another is faster and cheaper"]
            rows.append(
                (
                    f"{choice.forecast.tokens:,}",
                    f"{choice.forecast.ranks:,}",
                    f"{choice.steps:,.0f}",
                    f"{choice.tokens:.4g}",
                    format_hours(choice.hours),
                    format_hours(choice.gpu_hours),
                    " and ".join(marks),
                )
            )
        return "\n".join(
            [
                f"critical batch {self.critical_tokens:,.4g} tokens: there a loss takes twice the fewest steps "
                f"({self.least_steps:,.4g}) and twice the fewest tokens ({self.least_tokens:.4g})",
                *table_lines(rows, right=range(6)),
            ]
        )


def batch_advice(
    critical_tokens: float,
    forecasts: Iterable[StepForecast],
    *,
    reference_batch: float,
    reference_tokens: float,
) -> BatchAdvice:
    """What each batch costs on the way to the loss that `reference_tokens` reach with a batch of `reference_batch` tokens.

    critical_tokens: `GradientNoise.scale().tokens`. It grows while the loss falls: advice holds for a while.
    Learning rates are supposed to be tuned to each batch.
    Raises: PlanError for numbers that are none, and for no forecasts.
    """
    numbers = {
        "critical_tokens": critical_tokens,
        "reference_batch": reference_batch,
        "reference_tokens": reference_tokens,
    }
    for name, value in numbers.items():
        if not 0 < value < inf:
            raise PlanError(f"{name}={value:g}: batch advice needs a number of tokens above 0.")
    least_tokens = reference_tokens / (1 + reference_batch / critical_tokens)
    least_steps = least_tokens / critical_tokens
    found = []
    for forecast in forecasts:
        steps = least_steps * (1 + critical_tokens / forecast.tokens)
        hours = steps * forecast.step_s / 3600
        found.append((hours, hours * forecast.ranks, steps, forecast))
    if not found:
        raise PlanError("batch advice without forecasts: give a StepForecast for each batch that could be run.")
    found.sort(key=lambda each: each[:2])
    choices = []
    cheapest = inf
    for hours, gpu_hours, steps, forecast in found:
        choices.append(
            BatchChoice(
                forecast=forecast,
                steps=steps,
                tokens=steps * forecast.tokens,
                hours=hours,
                gpu_hours=gpu_hours,
                on_front=gpu_hours < cheapest,
            )
        )
        cheapest = min(cheapest, gpu_hours)
    return BatchAdvice(
        critical_tokens=critical_tokens, least_steps=least_steps, least_tokens=least_tokens, choices=tuple(choices)
    )
