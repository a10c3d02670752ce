"""Shared by all drawings of a schedule: names, colours, scales."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import floor, log10

from meshkit.parallel.pipeline._simulate import Simulation
from meshkit.parallel.pipeline._table import Row, Schedule

# Okabe and Ito's palette, which colour-blind readers tell apart; black digits are readable on every shade of it.
COLOURS = {"F": (86, 180, 233), "B": (213, 94, 0), "I": (230, 159, 0), "W": (0, 158, 115)}
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def heading_of(schedule: Schedule) -> str:
    counts = [(schedule.world, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "microbatch")]
    if schedule.stages == schedule.world:
        del counts[1]
    words = [
        f"{count} {noun if count == 1 else noun + ('es' if noun.endswith('h') else 's')}" for count, noun in counts
    ]
    return ", ".join([schedule.name, *words])


def chunks_of(schedule: Schedule) -> list[int]:
    """The chunk of every stage: how many earlier stages its rank has."""
    return [schedule.placement[:stage].count(rank) for stage, rank in enumerate(schedule.placement)]


def shades_of(schedule: Schedule) -> int:
    return 1 + max(chunks_of(schedule), default=0)


def shade(op: str, chunk: int, shades: int) -> str:
    # Paler than 0.62 of white, the four colours could hardly be told apart.
    white = 0.2 if shades == 1 else 0.62 * (1 - chunk / (shades - 1))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in COLOURS[op])


def scale_of(simulation: Simulation, room: Callable[[Row], float]) -> float:
    """Units of length per second that give every row the room it asks for, but no row more than about three times that."""
    longest = max((event.end_s - event.start_s for event in chain(*simulation.events)), default=0.0)
    if not longest:
        return 1.0
    return max(room(row) / max(end_s - start_s, longest / 3) for row, start_s, end_s in chain(*simulation.events))


def tick_step(at_least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(at_least))
    # 1e-9: a step that is `at_least` itself must not be passed over by rounding.
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= at_least * (1 - 1e-9))


def digits(value: float) -> str:
    return f"{value:.6g}"
