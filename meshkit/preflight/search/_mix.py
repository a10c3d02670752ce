"""Mixed recompute (a budget of activation checkpointing): two modes in one model, the heavier in as few blocks as fit.

Blocks that are alike save as many bytes for as many seconds each, so of a knapsack over the blocks of a rank their number is
left to choose. A rank of pp has as much room as its own states and its microbatches in flight by the schedule's table leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshkit.preflight.search._pricing import Pricing
from meshkit.strategy import BlockOverride, RecomputeMode, Strategy


def mixed_recompute(pricing: Pricing, strategy: Strategy, heavier: RecomputeMode, device_bytes: int) -> Strategy | None:
    """The strategy with `heavier` in the first blocks of each rank of pp, in as few as fit: by bisection for all ranks at
    once, since what one keeps is no other's. Without a mixture where one of the two modes is all of it; None where nothing
    fits.

    Raises: as `resolve` does.
    """
    resolved = pricing.resolved(strategy)
    cut = resolved.cut
    of_rank = (
        [list(resolved.blocks)]
        if cut is None
        else [
            [name for stage in cut.stages_of(rank) for name in cut.stages.blocks[stage]]
            for rank in range(resolved.spec.pp)
        ]
    )

    def mixed(counts: Sequence[int]) -> Strategy:
        names = [name for blocks, count in zip(of_rank, counts, strict=True) for name in blocks[:count]]
        return replace(strategy, overrides={name: BlockOverride(recompute=heavier) for name in names})

    def fits(counts: Sequence[int]) -> list[bool]:
        return [rank.peak_bytes <= device_bytes for rank in pricing.peak(mixed(counts)).ranks]

    every = [len(blocks) for blocks in of_rank]
    if not all(fits(every)):
        return None
    # Of each rank: the most that do not fit, and the fewest that do.
    below = [-1] * len(every)
    enough = every
    trial = [0] * len(every)
    while any(high - low > 1 for low, high in zip(below, enough, strict=True)):
        fit = fits(trial)
        enough = [count if ok else high for count, ok, high in zip(trial, fit, enough, strict=True)]
        below = [low if ok else count for count, ok, low in zip(trial, fit, below, strict=True)]
        trial = [(low + high) // 2 if high - low > 1 else high for low, high in zip(below, enough, strict=True)]
    if enough == every:
        return replace(strategy, memory=replace(strategy.memory, recompute=heavier))
    return mixed(enough) if any(enough) else strategy
