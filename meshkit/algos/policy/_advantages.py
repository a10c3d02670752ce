"""Group-relative advantage (GRPO, RLOO): how much better an answer is than expected, from all rewards of the step.

Dims: A answers of the whole step, over all ranks and groups. A group is the answers to one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshkit.errors import DataError, PlanError

Baseline = Literal["none", "group", "leave_one_out", "length_weighted", "greedy"]
BASELINES = ("none", "group", "leave_one_out", "length_weighted", "greedy")


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage:
    """One advantage for all tokens of an answer: its reward less a baseline, over a scale.

    baseline: "group" is the mean of the group; "leave_one_out" that of the others, 0 for a single answer; "length_weighted"
    the mean of the group weighted by tokens (OPO); "greedy" the reward of the greedy answer, given with the data (ReMax).
    scale: the standard deviation of the "group" or of the whole "batch" of rewards, plus epsilon; "none" is 1.
    whiten: afterwards, mean 0 and variance 1 over all learnt tokens of the step.
    unbiased: deviations over n - 1 (TRL, verl) or n (torchtitan). epsilon: 1e-4 in TRL, 1e-6 in verl, 1e-9 in OpenRLHF.
    """

    baseline: Baseline = "group"
    scale: Literal["none", "group", "batch"] = "none"
    whiten: bool = False
    unbiased: bool = True
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if self.baseline not in BASELINES:
            raise PlanError(
                f"GroupAdvantage: baseline={self.baseline!r} is not known. Choose from {', '.join(BASELINES)}."
            )
        if self.scale not in ("none", "group", "batch"):
            raise PlanError(f"GroupAdvantage: scale={self.scale!r} is not known. Choose from none, group, batch.")
        if self.epsilon < 0:
            raise PlanError(f"GroupAdvantage: epsilon={self.epsilon} is added to a deviation. Use at least 0.")


class GroupAdvantages(NamedTuple):
    """advantages: [A] fp64, 0 for an answer without a score. uniform: [A] bool, all scores of its group are equal, so that a
    group baseline leaves nothing to learn; a group with at most one score is uniform. scored: [A] bool.
    """

    advantages: Tensor
    uniform: Tensor
    scored: Tensor


@torch.no_grad()
def group_advantages(
    rewards_A: Tensor,
    groups_A: Tensor,
    advantage: GroupAdvantage,
    *,
    lengths_A: Tensor | None = None,
    greedy_A: Tensor | None = None,
) -> GroupAdvantages:
    """The advantage of each answer, from all answers of a step at once. Their order and their ranks change nothing.

    rewards: NaN marks an answer that could not be scored: it counts in no mean and no deviation, and its advantage is 0.
    groups: int64, any numbers; answers to one prompt have the same. lengths: tokens, for "length_weighted". greedy: the
    reward of each prompt's greedy answer, for "greedy".
    Raises: DataError for other shapes, for infinite rewards, and where an input that the baseline needs is missing.
    Source: GRPO Shao et al. 2024 (2402.03300); Dr. GRPO Liu et al. 2025 (2503.20783); RLOO Ahmadian et al. 2024 (2402.14740);
    ReMax Li et al. 2023 (2310.10505); OPO Hao et al. 2025 (2505.23585); LitePPO Liu et al. 2025 (2508.08221).
    """
    needed = {"length_weighted": ("lengths_A", lengths_A), "greedy": ("greedy_A", greedy_A)}.get(advantage.baseline)
    if needed is not None and needed[1] is None:
        raise DataError(f"group_advantages: baseline={advantage.baseline!r} needs {needed[0]}. Give it.")
    shapes = {"rewards": tuple(rewards_A.shape), "groups": tuple(groups_A.shape)}
    if len(set(shapes.values())) > 1 or rewards_A.ndim != 1:
        raise DataError(f"group_advantages: shapes {shapes}. Each is [A], one number for each answer.")
    if rewards_A.isinf().any():
        at = int(rewards_A.isinf().nonzero()[0])
        raise DataError(
            f"group_advantages: reward {at} is {float(rewards_A[at])}. NaN marks an answer without a score."
        )
    # Keys of groups are any int64: `unique` numbers them from 0, so that sums over groups are one index_add.
    _, index_A = groups_A.unique(return_inverse=True)
    scored_A = ~rewards_A.isnan()
    # 0, not NaN, for an answer without a score: NaN times a mask of 0 is NaN, and would spread over the group.
    reward_A = torch.where(scored_A, rewards_A.double(), 0.0)
    count_A = _group_sums(scored_A.double(), index_A)
    mean_A = _group_sums(reward_A, index_A) / count_A.clamp(min=1)
    centred_A = torch.where(scored_A, reward_A - mean_A, 0.0)
    # Equal rewards may differ from their mean by rounding, which a small epsilon would make large.
    uniform_A = (count_A <= 1) | ~_varies(reward_A, index_A, scored_A)
    if advantage.baseline == "group":
        gain_A = centred_A.masked_fill(uniform_A, 0.0)
    elif advantage.baseline == "leave_one_out":
        # r - mean of the others = (r - mean of all) n / (n - 1): no sum over the others is needed.
        gain_A = torch.where(count_A > 1, centred_A * count_A / (count_A - 1).clamp(min=1), reward_A)
        # A single answer is uniform too, but has no baseline here: its gain is its reward.
        gain_A = gain_A.masked_fill((count_A > 1) & uniform_A, 0.0)
    elif advantage.baseline == "length_weighted":
        assert lengths_A is not None
        # OPO: the baseline of least variance, if the squared norm of an answer's gradient grows with its length.
        weight_A = lengths_A.double() * scored_A
        total_A = _group_sums(weight_A, index_A)
        gain_A = reward_A - _group_sums(weight_A * reward_A, index_A) / total_A.clamp(min=1)
        gain_A = gain_A.masked_fill(uniform_A, 0.0)
    elif advantage.baseline == "greedy":
        assert greedy_A is not None
        # Without the baseline's score there is no advantage, and no guess of one.
        scored_A = scored_A & ~greedy_A.isnan()
        gain_A = reward_A - greedy_A.double().nan_to_num(0.0)
    else:
        gain_A = reward_A
    if advantage.scale == "group":
        gain_A = gain_A / (_deviation(_group_sums(centred_A.square(), index_A), count_A, advantage) + advantage.epsilon)
    elif advantage.scale == "batch":
        # LitePPO: around the mean of the batch, although the gain was taken from the mean of the group.
        count = scored_A.sum().double()
        centred = torch.where(scored_A, reward_A - reward_A.sum() / count.clamp(min=1), 0.0)
        gain_A = gain_A / (_deviation(centred.square().sum(), count, advantage) + advantage.epsilon)
    return GroupAdvantages(torch.where(scored_A, gain_A, 0.0), uniform_A, scored_A)


def _group_sums(values_A: Tensor, index_A: Tensor) -> Tensor:
    """[A]: for each answer the sum over its group."""
    return torch.zeros_like(values_A).index_add(0, index_A, values_A)[index_A]


def _varies(values_A: Tensor, index_A: Tensor, scored_A: Tensor) -> Tensor:
    """Whether two scores of an answer's group differ; [A] bool."""
    # Compared with one score of the group, exactly: a deviation of equal scores need not be 0 in floating point. With
    # several sources for one target index_copy keeps any of them, which is as good.
    first_A = torch.zeros_like(values_A).index_copy(0, index_A[scored_A], values_A[scored_A])[index_A]
    return _group_sums(((values_A != first_A) & scored_A).double(), index_A) > 0


def _deviation(squares: Tensor, count: Tensor, advantage: GroupAdvantage) -> Tensor:
    """The standard deviation; 0 for a single number."""
    return (squares / (count - 1 if advantage.unbiased else count).clamp(min=1)).sqrt()


class Moments(NamedTuple):
    """Count, sum and sum of squares, fp64 scalars. Ranks add them up to get the mean and the variance of a step."""

    number: Tensor
    total: Tensor
    squares: Tensor

    @staticmethod
    def of(values: Tensor, mask: Tensor) -> Moments:
        # fp64: the variance is a difference of sums over all tokens of the step, which would cancel in fp32.
        kept = values.double()[mask.bool()]
        return Moments(kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum())


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None, *, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon), fp64, 0 where masked; the variance over n - 1.

    moments: of the whole step, added up over its ranks; default: of these values. One number alone is not changed.
    Source: masked_whiten of TRL, which takes the moments of a rank, and of verl, which takes those of all ranks.
    """
    number, total, squares = Moments.of(values, mask) if moments is None else moments
    if number <= 1:
        return torch.where(mask.bool(), values.double(), 0.0)
    mean = total / number
    # Rounding may make it a little negative where all values are equal.
    variance = ((squares - number * mean.square()) / (number - 1)).clamp(min=0)
    return torch.where(mask.bool(), (values.double() - mean) * torch.rsqrt(variance + epsilon), 0.0)
