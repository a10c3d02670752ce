"""Numbers of a whole step that some objectives need before its loss: a pass without gradients, gathered over all ranks.

Batches are those of `preference_objective`, with the reference's log-probabilities. Every rank must call each of these
functions, and gets the same numbers, however the step's answers are split over ranks and microbatches.
Wire: forward passes of the policy, and an all-gather of a few numbers for each answer over the ranks with different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.algos.preference._losses import PreferenceLoss
from meshkit.algos.preference._objective import StepStatistics, answers_of_pairs, count_of_answers
from meshkit.algos.preference._statistics import RunningMean, aot_partners, aot_unpaired_partners, kto_kl, sum_and_count
from meshkit.algos.preference._tokens import packed_logps
from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.errors import DataError
from meshkit.loss import IGNORED
from meshkit.mesh import Mesh, gather_over_data
from meshkit.step import Batch, Run


def pair_statistics(
    run: Run, batch: Batch, *losses: PreferenceLoss, rewards: RunningMean | None = None, microbatches: int = 1
) -> tuple[StepStatistics, RunningMean]:
    """What these losses need of a step of pairs, for `preference_objective(..., statistics=)`; and rewards, with this step.

    rewards: of the steps before, for kind "bco"; part of what a resumed run must load. Without kinds that need the policy,
    "aot", "aot_unpaired" and "bco", no model runs.
    Raises: DataError without the reference's log-probabilities, where they are needed.
    """
    rewards = rewards or RunningMean()
    by_kind = {loss.kind: loss for loss in losses}
    answers_of_pairs(batch)
    partners = None
    if by_kind.keys() & {"aot", "aot_unpaired", "bco"}:
        step = _of_step(_policy_and_reference(run, batch, microbatches).unflatten(0, (-1, 2)), run.mesh)
        policy, reference = step.values.unbind(-1)  # [pairs, 2] each, chosen first
        ratios = policy - reference
        if "aot" in by_kind:
            partners = aot_partners(policy[:, 0] - policy[:, 1], reference[:, 0] - reference[:, 1])[step.own]
        if "aot_unpaired" in by_kind:
            partners = aot_unpaired_partners(ratios[:, 0], ratios[:, 1])[step.own]
        if "bco" in by_kind:
            rewards = rewards.after(sum_and_count(by_kind["bco"].beta * ratios))
    return StepStatistics(partners=partners, reward_shift=rewards.mean), rewards


def kto_reference_point(run: Run, mismatched: Batch, *, microbatches: int = 1) -> float:
    """KTO's z of the step: max(0, mean of log pi - log pi_ref) over answers that belong to other prompts.

    mismatched: the second half of `split_mismatches`, with the reference's log-probabilities.
    """
    policy, reference = _policy_and_reference(run, mismatched, microbatches).unbind(-1)
    return kto_kl(sum_and_count(_of_step(policy - reference, run.mesh).values)).item()


def reward_sums(run: Run, batch: Batch, *, beta: float, microbatches: int = 1) -> Tensor:
    """[2]: the sum of beta (log pi - log pi_ref) over all answers of the step, and their number, for `RunningMean.after`.

    With kind "bco_unpaired" the mean is the reference point.
    """
    policy, reference = _policy_and_reference(run, batch, microbatches).unbind(-1)
    return sum_and_count(beta * _of_step(policy - reference, run.mesh).values)


def _policy_and_reference(run: Run, batch: Batch, microbatches: int) -> Tensor:
    """[answers, 2] fp64: log-probabilities of the answers of the rank's batch, whole on each rank of cp."""
    if REFERENCE not in batch:
        raise DataError(
            f"the batch has no {REFERENCE!r}, which a first pass compares with. Set it to token_values(reference, batch)."
        )
    policy = token_values(run, batch, microbatches=microbatches)
    return torch.stack([_summed(policy, batch), _summed(batch[REFERENCE].to(policy), batch)], dim=1)


def _summed(values_BT: Tensor, batch: Batch) -> Tensor:
    """[answers]: values of tokens with a label, added up by answer."""
    segments, valid = batch["segment_ids"].to(values_BT.device), batch["labels"].to(values_BT.device) != IGNORED
    return packed_logps(values_BT, valid, segments, count_of_answers(batch) + 1)[1:]


@dataclass(frozen=True)
class _Step:
    values: Tensor
    """of the whole step, in the order of its rows"""
    own: slice
    """those of this rank's batch"""


def _of_step(own: Tensor, mesh: Mesh) -> _Step:
    parts = [part.to(own.device) for part in gather_over_data(mesh, own.cpu())]
    first = sum(len(part) for part in parts[: mesh.data_rank])
    return _Step(torch.cat(parts), slice(first, first + len(own)))
