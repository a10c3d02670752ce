"""What mixture-of-experts layers say besides their output: auxiliary losses, and how many tokens each expert got.

Losses are sums over tokens, like `next_token_loss`: add them to it, and the step divides all of it by its tokens.
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
    """losses: each kind summed over the layers. counts: [E] int64 for each router, summed over its calls. dropped: (token,
    choice) pairs beyond the capacity of their expert, and all pairs, for each call of a layer with a capacity.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)
    dropped: list[tuple[Tensor, int]] = field(default_factory=list)

    def total(self) -> Tensor | float:
        """All losses in one; 0.0 if there are none."""
        return sum(self.losses.values(), 0.0)

    def named_counts(self, model: nn.Module) -> dict[str, Tensor]:
        """The counts by the names that the routers have in the model."""
        return {name: self.counts[module] for name, module in model.named_modules() if module in self.counts}


_collected: ContextVar[Collected | None] = ContextVar("collected", default=None)


@contextmanager
def collect() -> Iterator[Collected]:
    """Collect what the routers report inside; outside of it, nothing is. The innermost block gets it.

    A forward that a backward repeats (recompute) reports nothing, wherever the backward is called from.
    """
    collected = Collected()
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


@torch.compiler.disable(reason="collecting changes Python objects")  # type: ignore[untyped-decorator]  # torch's
def report(router: nn.Module, counts_E: Tensor, losses: Mapping[str, Tensor]) -> None:
    """What a router calls, once in each forward. In a compiled block it is a graph break."""
    collected = _collected.get()
    if collected is None or _torch.in_backward():
        return
    before = collected.counts.get(router)
    collected.counts[router] = counts_E if before is None else before + counts_E
    for name, loss in losses.items():
        collected.losses[name] = collected.losses[name] + loss if name in collected.losses else loss


def report_dropped(dropped: Tensor, pairs: int) -> None:
    """What experts with a capacity call, once in each forward."""
    collected = _collected.get()
    if collected is not None and not _torch.in_backward():
        collected.dropped.append((dropped, pairs))


# ---------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLosses:
    """Which losses a router reports, and their coefficients; 0 is none.

    balance: see `balance_loss`. per: whose tokens are to be spread evenly. "sequence": those of each row. "batch": those of
    one call, so the loss depends on the split into microbatches. "global": those of the optimizer step, as the counts of the
    step before (the router's buffer `last_counts`) tell; at first they are 0, which is no loss. z: see `z_loss`.
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
    """Sum over rows of T E / (K T^2) sum_e counts_e sums_e, which is T for a balanced row and up to T E / K for the worst.

    counts: tokens that chose e, without a gradient. sums: over tokens, of the probability of e, which add up to 1 for each
    token. The loss is linear in the sums: ranks that hold a part of the tokens each and the counts of all of them get parts
    that add up to the loss. T K is the sum of the counts; a row without tokens is 0.
    Source: Fedus et al. 2022, section 2.2; per sequence DeepSeek-V3 2024, section 2.1.2.
    """
    counts_RE = counts_RE.to(sums_RE.dtype)
    chosen_R1 = counts_RE.sum(-1, keepdim=True).clamp(min=1)
    return counts_RE.shape[-1] * (counts_RE / chosen_R1 * sums_RE).sum()


def z_loss(logits_NE: Tensor) -> Tensor:
    """Sum over tokens of logsumexp(logits)^2, which keeps logits small. Source: Zoph et al. 2022, section 3.2."""
    return logits_NE.logsumexp(-1).square().sum()


# --------------------------------------------------------------------------------------------------------- balance


@torch.no_grad()
def update_bias(bias_E: Tensor, counts_E: Tensor, *, speed: float) -> None:
    """Raise the bias of experts with fewer tokens than the mean by `speed` and lower that of those with more, in place.

    counts: of the whole step, over all ranks. The change's own mean is taken off, as torchtitan does: a constant moves no
    choice, and so the mean of the bias stays what it is (0, or what a folder gave) in however many steps. Centring the bias
    itself would change a loaded one at the first step.
    Raises: PlanError for a negative speed.
    Source: Wang et al. 2024 (auxiliary-loss-free), algorithm 1; DeepSeek-V3 2024, section 2.1.2, has speed=1e-3.
    """
    if speed < 0:
        raise PlanError(f"update_bias: speed={speed} moves tokens to the experts that have most. Use at least 0.")
    counts = counts_E.to(bias_E.dtype)
    change = speed * (counts.mean() - counts).sign()
    bias_E += change - change.mean()


class Balance(NamedTuple):
    """How evenly experts are used; scalars, on the device of the counts."""

    max_over_mean: Tensor  # 1 is even, E is everything to one expert
    entropy: Tensor  # of the shares, over log E: 1 is even, 0 is everything to one expert
    unused: Tensor  # experts without a token


def balance(counts_E: Tensor) -> Balance:
    """Statistics of one router's counts, of at least one token."""
    shares = counts_E / counts_E.sum()
    entropy = torch.special.entr(shares).sum() / math.log(max(len(counts_E), 2))
    return Balance(max_over_mean=shares.max() * len(counts_E), entropy=entropy, unused=(counts_E == 0).sum())
