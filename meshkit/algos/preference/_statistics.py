"""Statistics of a whole training step (KTO's KL, BCO's reward shift, AOT's partners), from sums over ranks and microbatches.

If each microbatch computed its own statistic, the loss would depend on how the step is split. So a first pass without
gradients adds the sums over microbatches and over the ranks with different rows (`mesh.tokens`; rows that cp or tp repeat
count once), and every part gets the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.errors import DataError


@torch.no_grad()
def sum_and_count(values: Tensor) -> Tensor:
    """[2] fp64: the sum of all values and their number. Add these over microbatches and ranks, then take `mean_of`."""
    # Sum and number, not the mean: means of parts of different sizes cannot be averaged.
    return torch.stack([values.double().sum(), values.new_tensor(values.numel(), dtype=torch.float64)])


def mean_of(sums: Tensor) -> Tensor:
    """The mean from `sum_and_count`; 0 without values."""
    return sums[0] / sums[1].clamp(min=1)


def kto_kl(sums: Tensor) -> Tensor:
    """KTO's reference point: max(0, mean of log pi - log pi_ref over mismatched answers); a scalar.

    sums: `sum_and_count(logps - ref_logps)` of prompts with the answers of other prompts, over the whole step.
    Source: Ethayarajh et al. 2024 (2402.01306).
    """
    # A KL is not negative; its estimate from few answers may be. KTO takes 0 then.
    return mean_of(sums).clamp(min=0)


@dataclass(frozen=True)
class RunningMean:
    """The mean of all values since the start: BCO's reward shift. A resumed run must load its two numbers."""

    total: float = 0.0
    count: float = 0.0

    def after(self, sums: Tensor) -> RunningMean:
        """The mean with one more step. sums: `sum_and_count` of its rewards, beta times the log-ratios, chosen and rejected.

        Source: Jung et al. 2024 (2404.04656); the cumulative mean, this step included, is what TRL's BCOTrainer keeps. For
        answers without pairs the paper's shift is the mean of the means of desirable and undesirable ones: keep two.
        """
        total, count = sums.tolist()
        return RunningMean(self.total + total, self.count + count)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1.0)


@torch.no_grad()
def aot_partners(policy_margins_M: Tensor, ref_margins_M: Tensor) -> Tensor:
    """[M] fp64: for each pair of the step the reference margin of the same rank in sorted order; `partners` for kind "aot".

    margins: log p(chosen) - log p(rejected) of the policy and of the reference, for all M pairs of the step, gathered after a
    first pass. Give each rank and microbatch its rows of the result. Equal margins keep the order of the rows, so gather them
    in an order that does not depend on the ranks.
    Source: Melnyk et al. 2024 (2406.05882).
    """
    return _same_rank(policy_margins_M, ref_margins_M)


@torch.no_grad()
def aot_unpaired_partners(chosen_ratios_M: Tensor, rejected_ratios_M: Tensor) -> Tensor:
    """[M, 2] fp64, `Pairs.partners` for kind "aot_unpaired".

    For each chosen log-ratio, the rejected one of the same rank in sorted order; for each rejected one, the chosen one.

    ratios: log pi - log pi_ref of all M pairs of the step; as for `aot_partners`.
    """
    return torch.stack(
        [_same_rank(chosen_ratios_M, rejected_ratios_M), _same_rank(rejected_ratios_M, chosen_ratios_M)], dim=1
    )


def _same_rank(values_M: Tensor, others_M: Tensor) -> Tensor:
    """For each value, the one of `others` that has the same rank in sorted order; [M]."""
    if values_M.shape != others_M.shape or values_M.ndim != 1:
        raise DataError(
            f"aot partners: {tuple(values_M.shape)} and {tuple(others_M.shape)} values. Give all M of the step, once each."
        )
    # argsort of argsort is the rank of each value. Stable, so that equal values give the same partners on every rank.
    ranks_M = values_M.double().argsort(stable=True).argsort()
    return others_M.double().sort(stable=True).values[ranks_M]
