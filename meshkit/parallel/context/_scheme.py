"""Choice of the context-parallel scheme and load balancing: from a mask and a policy to a layout, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from meshkit.mask import Mask
from meshkit.parallel.context._assign import Runs, assign, cut, received, work
from meshkit.parallel.context._blocks import blocks_of, pairs_of, striped
from meshkit.parallel.context._layout import KVExchange, Layout
from meshkit.parallel.context._traffic import Shape, across_nodes, choice_traffic, total, traffic
from meshkit.strategy import Balance, ContextPolicy

BALANCED = 1.05  # work of the busiest rank over the mean that "auto" accepts to send less


@dataclass(frozen=True)
class Choice:
    """A layout and why it was chosen. imbalance: work of the busiest group of ranks over the mean."""

    layout: Layout
    balance: Balance | Literal["striped"]
    imbalance: float
    reason: str

    def __str__(self) -> str:
        return f"{self.scheme}, tokens {self.balance}, work max/mean {self.imbalance:.3f}; {self.reason}"

    @property
    def scheme(self) -> str:
        """The name for people: `ring`, `ulysses`, `ulysses=2 × group_cast`."""
        return _scheme(self.layout)


def _scheme(layout: Layout) -> str:
    if layout.sparse is not None:
        return str(layout.sparse)
    if layout.groups == 1:
        return "ulysses"
    return (f"ulysses={layout.ulysses} × " if layout.ulysses > 1 else "") + layout.exchange


@lru_cache(maxsize=256)
def choose(mask: Mask, ranks: int, policy: ContextPolicy, shape: Shape, *, multiple: int = 1) -> Choice:
    """The layout of one stream of tokens that sends the fewest bytes. Pure: every rank computes the same.

    multiple: each rank's tokens are padded to a multiple of it, and to at least one.
    """
    policy.refuse_misfit(ranks)
    if policy.sparse is not None:
        return _choose_sparse(mask, ranks, policy, shape, multiple)
    # By bytes of the busiest sender and not of all: the others wait for it. On a tie the first candidate, which splits heads
    # least.
    candidates = list(_candidates(mask, ranks, policy, shape, multiple))
    sent_bytes = [_bytes(layout, shape) for layout, _, _ in candidates]
    best = min(range(len(candidates)), key=sent_bytes.__getitem__)
    names = [f"{_scheme(layout)} {size:,}" for (layout, _, _), size in zip(candidates, sent_bytes, strict=True)]
    reason = f"bytes a layer: {names[best]}"
    if len(candidates) > 1:
        reason += f", the fewest; {', '.join(name for name in names if name != names[best])}"
    if policy.scheme == "double_ring" and ranks > 1:
        two, one = (candidates[best][0], replace(candidates[best][0], exchange="ring"))
        cards = [max(across_nodes(each, rank, shape, node=policy.node) for rank in range(ranks)) for each in (two, one)]
        reason += (
            f"; {cards[0]:,} over each network card of a node of {policy.node} ranks, {cards[1]:,} over one in a ring"
        )
    return Choice(*candidates[best], reason)


def _choose_sparse(mask: Mask, ranks: int, policy: ContextPolicy, shape: Shape, multiple: int) -> Choice:
    """Whole blocks in turn. Work and bytes are the most that can be chosen."""
    assert policy.sparse is not None
    documents, runs = striped(mask, ranks, policy.sparse.block)
    lengths = tuple(padded_length(sum(after - first for first, after in piece), multiple) for piece in runs)
    layout = Layout(mask, tuple(runs), lengths, "group_cast", sparse=policy.sparse, documents=documents)
    loads = []
    for rank in range(ranks):
        shown = pairs_of(layout, rank).candidates.sum(1).tolist()
        sizes = blocks_of(layout).size[blocks_of(layout).of(rank)].tolist()
        loads.append(sum(policy.sparse.most_blocks(count) * size for count, size in zip(shown, sizes, strict=True)))
    seen = min(1.0, sum(loads) * policy.sparse.block / max(mask.area, 1))
    reason = f"at most {seen:.0%} of the pairs are seen"
    if ranks > 1:
        choices = max(total(choice_traffic(layout, rank, shape)) for rank in range(ranks))
        reason += (
            f"; bytes a layer: {choices:,} to choose, at most {_bytes(layout, shape) - choices:,} of chosen blocks, as if "
            "all that the mask shows a rank were chosen"
        )
    return Choice(layout, "striped", _imbalance(loads), reason)


def choose_for_rows(
    mask: Mask,
    rows: int,
    tokens: int,
    ranks: int,
    policy: ContextPolicy,
    shape: Shape,
    *,
    multiple: int = 1,
    window: int | None = None,
    attends: bool = True,
) -> tuple[Choice, int]:
    """(the layout of `rows` rows of `tokens` tokens, the number of rows that it splits alike).

    A mask of one row's tokens splits all rows alike. A mask of more tokens lays the rows end to end as a single stream.
    window: of all layers, by which work and bytes are counted; the layout's mask is the one given. attends: whether any
    layer has attention; recurrent mixers work alike on all tokens, so for them alone "auto" leaves tokens in their order.
    """
    # Rows that are split alike share one layout, and each of its messages carries all of them.
    alike = rows if mask.tokens == tokens else 1
    if not attends and policy.balance == "auto" and not policy.slack:
        policy = replace(policy, balance="contiguous")
    choice = choose(mask.windowed(window), ranks, policy, replace(shape, rows=alike), multiple=multiple)
    return replace(choice, layout=replace(choice.layout, mask=mask)), alike


def _candidates(
    mask: Mask, ranks: int, policy: ContextPolicy, shape: Shape, multiple: int
) -> Iterator[tuple[Layout, Balance, float]]:
    for exchange, ulysses in _shapes_of(ranks, policy, shape):
        groups = ranks // ulysses
        runs, balance = _balanced(mask, groups, policy, exchange)
        # Balanced over groups only: the ranks of a group exchange tokens for heads, so each works on all of the group's.
        pieces = tuple(piece for group_runs in runs for piece in cut(group_runs, ulysses))
        lengths = tuple(padded_length(sum(after - first for first, after in piece), multiple) for piece in pieces)
        node = policy.node // ulysses if exchange == "double_ring" and ranks > 1 else 1
        layout = Layout(mask, pieces, lengths, exchange, ulysses, policy.kv_heads_per_gather, node)
        yield layout, balance, _imbalance(work(mask, runs))


def _shapes_of(ranks: int, policy: ContextPolicy, shape: Shape) -> Iterator[tuple[KVExchange, int]]:
    """(exchange, ulysses) of every scheme that the policy allows."""
    match policy.scheme:
        case "auto" if policy.ulysses is None:
            for ulysses in range(1, ranks + 1):
                # "auto" passes over uneven heads: the rank with one more would make all others wait.
                even = shape.heads % ulysses == 0 and (shape.kv_heads % ulysses == 0 or ulysses % shape.kv_heads == 0)
                if ranks % ulysses == 0 and (even or ulysses == 1):
                    yield "group_cast", ulysses
        case "auto":
            yield "group_cast", policy.ulysses or 1
        case "ulysses":
            yield "group_cast", ranks
        case _:
            yield policy.scheme, policy.ulysses or 1


def _balanced(mask: Mask, groups: int, policy: ContextPolicy, exchange: KVExchange) -> tuple[list[Runs], Balance]:
    """The assignment to groups: among the balanced ones that with the least traffic, else the best balanced."""
    if policy.balance != "auto":
        return assign(mask, groups, balance=policy.balance, slack=policy.slack), policy.balance
    if groups == 1:
        return assign(mask, groups, balance="contiguous"), "contiguous"
    if exchange != "group_cast":  # every group receives all keys anyway, so the order of tokens changes no traffic
        kinds: tuple[Balance, ...] = ("zigzag", "per_document") if len(mask.components) > 1 else ("zigzag",)
    else:
        kinds = ("contiguous", "zigzag", "locality")
    assignments = [(assign(mask, groups, balance=kind, slack=policy.slack), kind) for kind in kinds]
    loads = [_imbalance(work(mask, runs)) for runs, _ in assignments]
    balanced = [pair for pair, load in zip(assignments, loads, strict=True) if load <= max(BALANCED, 1 + policy.slack)]
    if not balanced:
        return assignments[loads.index(min(loads))]
    if exchange != "group_cast":
        return balanced[0]
    return min(balanced, key=lambda pair: sum(received(mask, pair[0])))


def _imbalance(loads: list[int]) -> float:
    return max(loads) * len(loads) / max(sum(loads), 1)


def padded_length(tokens: int, multiple: int) -> int:
    # At least one token, so that no rank runs its model on empty tensors.
    return max(ceil(tokens / multiple), 1) * multiple


def _bytes(layout: Layout, shape: Shape) -> int:
    """Bytes that the busiest sender sends for one layer, forward and backward."""
    return max(sum(map(total, traffic(layout, rank, shape))) for rank in range(layout.ranks))
