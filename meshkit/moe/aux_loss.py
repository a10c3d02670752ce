"""Auxiliary losses of mixture-of-experts routers (load balancing, z-loss), their token counts, and the bias that balances.

Losses are sums over tokens, like `next_token_loss`: they are added to it, and the step divides the sum by its tokens.
Dims: R rows (or 1, where a whole batch is balanced), E experts, N tokens, K experts that a token chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.errors import PlanError

# ------------------------------------------------------------------------------------------------------ collecting


@dataclass(frozen=True)
class Collected:
    """What routers have reported.

    losses: by kind, summed over the layers. counts: tokens of each expert, [E] int64 for each router, summed over its calls.
    dropped: for each call of a layer with a capacity, the (token, choice) pairs that exceeded it, and the number of all
    pairs. most_rows: for each call with `ExpertPolicy.max_rows`, the most rows that a rank had for the experts of one.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)
    dropped: list[tuple[Tensor, int]] = field(default_factory=list)
    most_rows: list[Tensor] = field(default_factory=list)

    def total(self) -> Tensor | float:
        """The sum of all losses; 0.0 if there are none."""
        return sum(self.losses.values(), 0.0)

    def named_counts(self, model: nn.Module) -> dict[str, Tensor]:
        """The counts by the names that the routers have in the model."""
        return {name: self.counts[module] for name, module in model.named_modules() if module in self.counts}


_collected: ContextVar[Collected | None] = ContextVar("collected", default=None)


@contextmanager
def collect() -> Iterator[Collected]:
    """Collect what routers report inside. Reports go to the innermost block; outside of every block they are ignored.

    A forward that runs again in backward (recompute) reports nothing, wherever the backward is called from.
    """
    collected = Collected()
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


@contextmanager
def collect_nothing() -> Iterator[None]:
    """Inside, reports are ignored: of a forward that is only read."""
    token = _collected.set(None)
    try:
        yield
    finally:
        _collected.reset(token)


@torch.compiler.disable(reason="collecting changes Python objects")  # type: ignore[untyped-decorator]  # torch's
def report(router: nn.Module, counts_E: Tensor, losses: Mapping[str, Tensor]) -> None:
    """A router calls this once in each forward. In a compiled block it is a graph break."""
    collected = _collected.get()
    if collected is None or _torch.in_backward():
        return
    earlier = collected.counts.get(router)  # a module may be called several times in one forward
    collected.counts[router] = counts_E if earlier is None else earlier + counts_E
    for name, loss in losses.items():
        collected.losses[name] = collected.losses[name] + loss if name in collected.losses else loss


def report_dropped(dropped: Tensor, pairs: int) -> None:
    """Experts with a capacity call this once in each forward. dropped: pairs that exceeded it. pairs: all of them."""
    collected = _collected.get()
    if collected is not None and not _torch.in_backward():
        collected.dropped.append((dropped, pairs))


def report_rows(most: Tensor) -> bool:
    """An exchange of padded rows calls this once in each forward. Whether somebody looks at it, or has already."""
    collected = _collected.get()
    if collected is not None and not _torch.in_backward():
        collected.most_rows.append(most)
    return collected is not None or _torch.in_backward()


# ---------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLosses:
    """Which losses a router reports, and their coefficients; 0 is none.

    balance: the load-balancing loss, see `balance_loss`. per: the tokens that are to be spread evenly over the experts.
    "sequence": those of each row. "batch": those of one call, so the loss depends on the split into microbatches. "global":
    those of the optimizer step, estimated by the counts of the previous step (the router's buffer `last_counts`), which are 0
    at first: then there is no loss. z: see `z_loss`.
    """

    balance: float = 0.0
    per: Literal["sequence", "batch", "global"] = "sequence"
    z: float = 0.0

    def __post_init__(self) -> None:
        if self.per not in ("sequence", "batch", "global"):
            raise PlanError(f"AuxiliaryLosses: per={self.per!r} is not known. Choose sequence, batch or global.")
        for name, why in (("balance", "rewards imbalance"), ("z", "is negative")):
            if getattr(self, name) < 0:
                raise PlanError(f"AuxiliaryLosses: {name}={getattr(self, name)} {why}. Use at least 0.")


def balance_loss(counts_RE: Tensor, sums_RE: Tensor) -> Tensor:
    """The load-balancing loss: the sum over rows of T E / (K T^2) sum_e counts_e sums_e.

    It is T for a balanced row, up to T E / K for the worst, and 0 for one without tokens. T K is the sum of the counts.
    counts: tokens that chose expert e, without a gradient. sums: the probability of e summed over tokens; a token's
    probabilities add up to 1. The loss is linear in the sums: where ranks hold different tokens of a row, each takes the sums
    of its own tokens and the counts of all, and their losses add up to the row's.
    Source: Fedus et al. 2022, section 2.2; per sequence DeepSeek-V3 2024, section 2.1.2.
    """
    counts_RE = counts_RE.to(sums_RE.dtype)
    chosen_R1 = counts_RE.sum(-1, keepdim=True).clamp(min=1)
    return counts_RE.shape[-1] * (counts_RE / chosen_R1 * sums_RE).sum()


def z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """The sum over tokens of logsumexp(logits)^2, which keeps logits small. Source: Zoph et al. 2022, section 3.2.

    logits: [..., E]. real: bool, broadcast to [..., 1]: the tokens that take part; default: all.
    """
    squares = logits.logsumexp(-1, keepdim=True).square()
    return squares.sum() if real is None else (squares * real).sum()


# --------------------------------------------------------------------------------------------------------- balance


@torch.no_grad()
def update_bias(bias_E: Tensor, counts_E: Tensor, *, speed: float) -> None:
    """Auxiliary-loss-free load balancing: raise the bias of experts with fewer tokens than the mean by `speed`, lower that of
    experts with more, in place.

    counts: of the optimizer step, over all ranks. The mean of the change is subtracted from it, as torchtitan does: a
    constant changes no choice, so the mean of the bias stays as it is (0, or that of a loaded checkpoint) over any number of
    steps. Subtracting the mean of the bias itself would change a loaded one at the first step.
    Raises: PlanError for a negative speed.
    Source: Wang et al. 2024 (auxiliary-loss-free), algorithm 1; DeepSeek-V3 2024, section 2.1.2, has speed=1e-3.
    """
    if speed < 0:
        raise PlanError(f"update_bias: speed={speed} moves tokens to the experts that have most. Use at least 0.")
    counts = counts_E.to(bias_E.dtype)
    change = speed * (counts.mean() - counts).sign()
    bias_E += change - change.mean()


class Balance(NamedTuple):
    """How evenly experts are used (load balance); scalars, on the device of the counts."""

    max_over_mean: Tensor  # 1 is even, E is everything to one expert
    entropy: Tensor  # of the shares, over log E: 1 is even, 0 is everything to one expert
    unused: Tensor  # experts without a token


def balance(counts_E: Tensor) -> Balance:
    """Statistics of one router's counts, of at least one token."""
    shares = counts_E / counts_E.sum()
    entropy = torch.special.entr(shares).sum() / math.log(max(len(counts_E), 2))
    return Balance(max_over_mean=shares.max() * len(counts_E), entropy=entropy, unused=(counts_E == 0).sum())
