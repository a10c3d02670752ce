"""Dynamic groups of context parallelism: the documents of a step, planned by their lengths, as one layout a microbatch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshkit.mask import Interval, Mask
from meshkit.parallel.context._assign import intervals_of, merged, visible_before
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._scheme import padded_length
from meshkit.parallel.context._traffic import Shape
from meshkit.parallel.lengths import Documents, LengthCosts, LengthPlan, Pace, document_runs, plan_lengths
from meshkit.strategy import ContextPolicy, Rule


@dataclass(frozen=True)
class Microbatch:
    """The documents [first, after) of the step's tokens that run together, and who has which of their tokens, counted over
    the documents end to end."""

    documents: tuple[Interval, ...]
    layout: Layout


def costs_of(model: nn.Module, policy: ContextPolicy, shape: Shape, *, layers: int, chosen: int) -> LengthCosts:
    """Of one of `layers` layers, from the policy's rates: attention has 14 FLOPs a visible pair for each feature of its
    heads, 4 forward and 10 backward, and everything else 6 a weight of a matrix and token.

    model: with all of its weights, without values is enough. chosen: of the experts that a stack of matrices holds, so many
    compute a token.
    """
    weights = 0
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for param in model.parameters():
        if param.ndim == 2 and id(param) not in tables:
            weights += param.numel()
        elif param.ndim == 3:
            weights += param.numel() // len(param) * min(chosen, len(param))
    rates = policy.rates
    return LengthCosts(
        pair_s=14 * shape.heads * shape.head_dim / rates.flops_per_s,
        token_s=6 * max(weights, 1) / layers / rates.flops_per_s,
        key_bytes=2 * shape.kv_heads * shape.head_dim * (2 * shape.itemsize + shape.sum_itemsize),
        near_bytes_per_s=rates.link_bytes_per_s,
        far_bytes_per_s=rates.network_bytes_per_s,
        node=policy.node,
    )


def plan_step(
    mask: Mask,
    ranks: int,
    microbatches: int,
    rule: Rule,
    policy: ContextPolicy,
    costs: LengthCosts,
    *,
    pace: Pace,
    window: int | None = None,
) -> tuple[LengthPlan, list[Interval]]:
    """(the plan of a step, its documents). Pure: every rank computes the same.

    mask: of all rows of the step, end to end. window: of all layers, by which work is counted.
    """
    documents = intervals_of(mask)
    before = visible_before(mask.windowed(window))
    described = Documents(
        tuple(after - first for first, after in documents),
        tuple(float(before[after] - before[first]) for first, after in documents),
    )
    return (
        plan_lengths(
            described,
            ranks=ranks,
            costs=costs,
            microbatches=microbatches,
            tokens_per_rank=policy.tokens_per_rank,
            pace=pace,
            rule=rule,
        ),
        documents,
    )


def microbatches_of(
    mask: Mask, plan: LengthPlan, documents: list[Interval], *, multiple: int = 1
) -> Iterator[Microbatch | None]:
    """The microbatches of a plan; None for one without documents. multiple: each rank's tokens are padded to it."""
    bands_of: list[list[Any]] = [[] for _ in documents]
    firsts = [first for first, _ in documents]
    for band in mask.bands:
        bands_of[bisect_right(firsts, band.q0) - 1].append(band)
    for microbatch in range(plan.microbatches):
        members = [index for index, of in enumerate(plan.microbatch_of) if of == microbatch]
        if not members:
            yield None
            continue
        bands, start = [], 0
        runs: list[list[Interval]] = [[] for _ in range(plan.ranks)]
        for index in members:
            first, after = documents[index]
            bands += [band.moved(start - first, start - first) for band in bands_of[index]]
            for rank, pieces in document_runs(plan.shares[index]):
                runs[rank] += [(start + low, start + high) for low, high in pieces]
            start += after - first
        held = tuple(merged(each) for each in runs)
        lengths = tuple(padded_length(sum(after - first for first, after in each), multiple) for each in held)
        layout = Layout(Mask(start, tuple(bands)), held, lengths, "group_cast")
        yield Microbatch(tuple(documents[index] for index in members), layout)
