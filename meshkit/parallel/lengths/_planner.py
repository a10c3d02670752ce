"""The planner of dynamic context parallelism: a step's documents, a rule, and the plan that follows. A pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NoReturn, get_args

import numpy as np

from meshkit.errors import DataError, PlanError
from meshkit.parallel.lengths._by_length import spread_by_length
from meshkit.parallel.lengths._costs import LengthCosts
from meshkit.parallel.lengths._plan import LengthPlan, Numbers, Pace, Placed
from meshkit.parallel.lengths._rules import bytescale, flexsp, zeppelin
from meshkit.strategy import Rule

GROWTH = 1.1  # of ByteScale's capacity where none is given, until its units fit


@dataclass(frozen=True)
class Documents:
    """Tokens and visible pairs of each document of an optimizer step."""

    lengths: tuple[int, ...]
    areas: tuple[float, ...]

    @staticmethod
    def causal(lengths: Sequence[int]) -> Documents:
        return Documents(tuple(lengths), tuple(length * (length + 1) / 2 for length in lengths))


def plan_lengths(
    documents: Documents,
    *,
    ranks: int,
    costs: LengthCosts,
    microbatches: int = 1,
    tokens_per_rank: int | None = None,
    pace: Pace = "microbatch",
    rule: Rule = "by_length",
) -> LengthPlan:
    """Which of `ranks` ranks computes how much of which document in which microbatch. Pure: every rank computes the same.

    microbatches: all ranks run so many; some may have nothing to do in some. tokens_per_rank: the most that a rank may hold
    in a microbatch; None is no limit. pace: "microbatch": ranks wait for each other in every microbatch, so each is
    balanced by itself, and documents of about the same length share one. "pipeline": all of them are given the same work
    besides. "step": ranks wait at its end only, so the step is balanced as a whole, and while some work on a long document,
    others do short ones of several microbatches.
    Raises: DataError where the documents do not fit, with a number of microbatches in which their tokens would.
    """
    if rule not in get_args(Rule):
        raise PlanError(f"rule={rule!r} is not known. Choose one of {', '.join(get_args(Rule))}.")
    lengths, areas = np.asarray(documents.lengths, dtype=float), np.asarray(documents.areas, dtype=float)
    most = int(lengths.sum()) if tokens_per_rank is None else tokens_per_rank
    if lengths.sum() > most * ranks * microbatches or most < 1 <= len(lengths):
        _refuse(documents, ranks, microbatches, tokens_per_rank)
    placed: Placed | None
    if rule == "bytescale":
        # Without a limit a unit is what a rank has on average, or as little more as the microbatches allow: all ranks run as
        # many as were asked for, and other data ranks and the end of the step count them.
        mean = max(lengths.sum() / (ranks * microbatches), lengths.max(initial=1) / ranks)
        capacity = ceil(mean) if tokens_per_rank is None else most
        units = bytescale(lengths, areas, ranks=ranks, costs=costs, tokens_per_rank=capacity)
        while tokens_per_rank is None and units is not None and units[1] > microbatches:
            capacity = ceil(capacity * GROWTH)
            units = bytescale(lengths, areas, ranks=ranks, costs=costs, tokens_per_rank=capacity)
        placed, needed = (None, 0) if units is None else units
        if needed > microbatches:
            raise DataError(
                f"groups='bytescale': this step needs microbatches={needed}, but has {microbatches}. Give so many, or more "
                "tokens_per_rank."
            )
    elif rule == "by_length" and pace == "step":
        placed = spread_by_length(
            lengths, areas, ranks=ranks, microbatches=microbatches, costs=costs, tokens_per_rank=most
        )
    else:
        microbatch_of = _microbatches(lengths, areas, ranks, microbatches, costs, most, alike=pace == "pipeline")
        placed = _one_by_one(_RULES[rule], lengths, areas, ranks, microbatch_of, costs, most)
    if placed is None:
        _refuse(documents, ranks, microbatches, tokens_per_rank)
    return LengthPlan(
        rule=rule,
        lengths=documents.lengths,
        areas=documents.areas,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        pace=pace,
        microbatch_of=tuple(microbatch for microbatch, _ in placed),
        shares=tuple(shares for _, shares in placed),
    )


def _by_length(
    lengths: Numbers, areas: Numbers, *, ranks: int, costs: LengthCosts, tokens_per_rank: int
) -> Placed | None:
    return spread_by_length(lengths, areas, ranks=ranks, microbatches=1, costs=costs, tokens_per_rank=tokens_per_rank)


_RULES: dict[str, Callable[..., Placed | None]] = {"by_length": _by_length, "flexsp": flexsp, "zeppelin": zeppelin}


def _microbatches(
    lengths: Numbers,
    areas: Numbers,
    ranks: int,
    microbatches: int,
    costs: LengthCosts,
    tokens_per_rank: int,
    *,
    alike: bool,
) -> list[list[int]]:
    """The documents of each microbatch: of about equally many tokens and like lengths, or with alike of about equal work."""
    if not alike:
        # Long documents side by side are cut less: none has to be on all ranks to take as long as short ones.
        by_length = np.argsort(-lengths, kind="stable")
        middles = np.cumsum(lengths[by_length]) - lengths[by_length] / 2
        of_order = np.minimum(middles * microbatches // max(lengths.sum(), 1), microbatches - 1).astype(int)
        filled = np.bincount(of_order, weights=lengths[by_length], minlength=microbatches)
        if filled.max(initial=0) <= tokens_per_rank * ranks:
            return [by_length[of_order == microbatch].tolist() for microbatch in range(microbatches)]
    work = costs.pair_s * areas + costs.token_s * lengths
    used_s, used = np.zeros(microbatches), np.zeros(microbatches)
    members: list[list[int]] = [[] for _ in range(microbatches)]
    for index in np.argsort(-work, kind="stable").tolist():
        fits = used + lengths[index] <= tokens_per_rank * ranks
        microbatch = int(np.where(fits, used_s, np.inf).argmin())  # where none fits, its rule finds no place
        members[microbatch].append(index)
        used_s[microbatch] += work[index]
        used[microbatch] += lengths[index]
    return members


def _one_by_one(
    rule: Callable[..., Placed | None],
    lengths: Numbers,
    areas: Numbers,
    ranks: int,
    microbatches: Sequence[Sequence[int]],
    costs: LengthCosts,
    tokens_per_rank: int,
) -> Placed | None:
    """Each microbatch placed by itself; None where one does not fit."""
    placed: Placed = [(0, ())] * len(lengths)
    for microbatch, members in enumerate(microbatches):
        if not members:
            continue
        part = rule(lengths[members], areas[members], ranks=ranks, costs=costs, tokens_per_rank=tokens_per_rank)
        if part is None:
            return None
        for index, (_, shares) in zip(members, part, strict=True):
            placed[index] = microbatch, shares
    return placed


def _refuse(documents: Documents, ranks: int, microbatches: int, tokens_per_rank: int | None) -> NoReturn:
    tokens = sum(documents.lengths)
    most = max(tokens_per_rank or 0, 1)
    least = max(-(-tokens // (most * ranks)), microbatches + 1)
    raise DataError(
        f"{tokens} tokens in documents of up to {max(documents.lengths, default=0)} do not fit into "
        f"microbatches={microbatches} of {ranks} ranks with tokens_per_rank={tokens_per_rank}. Give at least "
        f"microbatches={least}, or more tokens_per_rank."
    )
