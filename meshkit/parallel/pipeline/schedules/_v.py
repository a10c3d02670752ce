"""The V-shaped zero-bubble schedules ZBV, V-Half and V-Min: two stages per rank, stage s on rank s or 2p-1-s.

The last stage is on rank 0 again, so a rank with a long wait for one of its stages has a short one for the other, and
all ranks need equal memory. Below, p is the number of ranks, and the unit of activations is one microbatch in both stages of
a rank.
"""

from __future__ import annotations

from meshkit.parallel.pipeline._table import Schedule

from ._greedy import (
    Plan,
    Rule,
    backward_first,
    backward_first_deep,
    depth_first,
    forward_first,
    in_turn,
    list_schedule,
    repeat_block,
    unit_costs,
)
from ._placement import at_least_one, schedule_of, soonest, wave

PERIOD = 6  # slots of a building block: F, I and W of two stages


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble within the memory of 1F1B.

    Bubble rate: (p-1) / (6m+p-1) for F = I = W and m >= p, which is only the wait of the last rank for its first input.
    Activations: p microbatches on every rank.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6. Found by greedy list scheduling
    under that limit, forward first, not by the paper's handcrafted phases, which need m >= 2p-1.
    """
    at_least_one("zbv", ranks=ranks, microbatches=microbatches)
    plan = depth_first(wave(ranks, 2), microbatches)
    return _squeezed("zbv", ranks, microbatches, plan, ranks, forward_first)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the memory of 1F1B, and less than half of its bubble.

    Bubble: 6 ((p-1) // 2) - 1 of a stage's F = I = W, for p > 2 and m >= p; 1F1B's is 6 (p-1).
    Activations: (p+2) // 2 microbatches on every rank.
    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), V-Half; squeezed and reordered
    (section 4) by list scheduling under the limit of memory.
    """
    at_least_one("v_half", ranks=ranks, microbatches=microbatches)
    plan = half_block(ranks, microbatches)
    return _squeezed("v-half", ranks, microbatches, plan, (ranks + 2) // 2, in_turn)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of the memory of 1F1B, and about two thirds of its bubble.

    Bubble: about 4 (p-1) of a stage's F = I = W; 1F1B's is 6 (p-1). It grows with m if F, I and W are not alike.
    Activations: (p+4) // 3 microbatches on every rank.
    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), V-Min; squeezed and reordered
    (section 4) by list scheduling under the limit of memory.
    """
    at_least_one("v_min", ranks=ranks, microbatches=microbatches)
    plan = min_block(ranks, microbatches)
    return _squeezed("v-min", ranks, microbatches, plan, (ranks + 4) // 3, in_turn, backward_first, backward_first_deep)


def half_block(ranks: int, microbatches: int) -> Plan:
    """V-Half's building block: a hop takes 2 slots on the way down and 1 on the way up, forward as backward."""
    shift = 0 if ranks % 2 else 3  # keeps the slots of a rank apart, modulo the period
    starts = {}
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        starts["F", down] = 2 * rank
        starts["F", up] = 3 * ranks - rank - 2
        starts["I", up] = 3 * ranks + shift + 2 * rank - 1
        starts["I", down] = 6 * ranks + shift - rank - 2
    return repeat_block(wave(ranks, 2), microbatches, starts, PERIOD)


def min_block(ranks: int, microbatches: int) -> Plan:
    """V-Min's building block: every hop takes 1 slot."""
    shift = 0 if ranks % 3 else 2  # keeps the slots of a rank apart, modulo the period
    starts = {}
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        starts["F", down] = rank
        starts["F", up] = 2 * ranks - rank - 1
        starts["I", up] = 2 * ranks + shift + rank
        starts["I", down] = 4 * ranks + shift - rank - 1
    return repeat_block(wave(ranks, 2), microbatches, starts, PERIOD)


def _squeezed(name: str, ranks: int, microbatches: int, plan: Plan, live: int, *rules: Rule) -> Schedule:
    """List-schedule the plan, W in its gaps, with at most `live` microbatches of both stages; of the rules the best."""
    placement = wave(ranks, 2)
    # A rank counts each of its two stages by itself.
    max_live = [2 * live] * ranks
    costs = unit_costs(len(placement))
    return soonest(
        *(
            schedule_of(
                name,
                microbatches,
                placement,
                list_schedule(placement, microbatches, plan, costs=costs, rule=rule, max_live=max_live),
            )
            for rule in rules
        )
    )
