"""First pass (KTO, AOT, BCO): statistics of a whole training step that the loss needs, from forwards without gradients.

Batches are those of `preference_objective`, with the log-probabilities of the reference model. Every rank must call each of
these functions, and gets the same numbers for any split of the step's answers over ranks and microbatches.
Wire: forward passes of the policy, and an all-gather of a few numbers per answer over the ranks with different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
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
    """The statistics of a step of pairs that these losses need, for `preference_objective(..., statistics=)`.

    Returns them, and `rewards` with this step added. rewards: of the earlier steps, for kind "bco"; a resumed run must load
    them. The model runs only for the kinds "aot", "aot_unpaired" and "bco".
    Raises: DataError if log-probabilities of the reference model are needed and missing.
    """
    rewards = rewards or RunningMean()
    by_kind = {loss.kind: loss for loss in losses}
    # For its refusal: below, an odd number of answers would pair chosen with chosen.
    answers_of_pairs(batch)
    partners = None
    if by_kind.keys() & {"aot", "aot_unpaired", "bco"}:
        by_pair = "(pairs two) models -> pairs two models"  # chosen and rejected answers alternate
        step = _gathered(rearrange(_policy_and_reference(run, batch, microbatches), by_pair, two=2), run.mesh)
        policy, reference = step.values.unbind(-1)  # [pairs, 2] each, chosen first
        ratios = policy - reference
        # Partners are found among the pairs of the whole step; then each rank takes those of its own.
        if "aot" in by_kind:
            partners = aot_partners(policy[:, 0] - policy[:, 1], reference[:, 0] - reference[:, 1])[step.local]
        if "aot_unpaired" in by_kind:
            partners = aot_unpaired_partners(ratios[:, 0], ratios[:, 1])[step.local]
        if "bco" in by_kind:
            rewards = rewards.after(sum_and_count(by_kind["bco"].beta * ratios))
    return StepStatistics(partners=partners, reward_shift=rewards.mean), rewards


def kto_reference_point(run: Run, mismatched: Batch, *, microbatches: int = 1) -> float:
    """KTO's reference point z of the step: max(0, mean of log pi - log pi_ref) over answers to other prompts.

    mismatched: the second half of `split_mismatches`, with log-probabilities of the reference model.
    """
    policy, reference = _policy_and_reference(run, mismatched, microbatches).unbind(-1)
    return kto_kl(sum_and_count(_gathered(policy - reference, run.mesh).values)).item()


def reward_sums(run: Run, batch: Batch, *, beta: float, microbatches: int = 1) -> Tensor:
    """[2]: the sum of beta (log pi - log pi_ref) over all answers of the step, and their number, for `RunningMean.after`.

    With kind "bco_unpaired" the mean is the reference point.
    """
    policy, reference = _policy_and_reference(run, batch, microbatches).unbind(-1)
    return sum_and_count(beta * _gathered(policy - reference, run.mesh).values)


def _policy_and_reference(run: Run, batch: Batch, microbatches: int) -> Tensor:
    """[answers, 2] fp64: log-probabilities of the whole answers of the rank's batch, the same on each rank of cp."""
    if REFERENCE not in batch:
        raise DataError(
            f"the batch has no {REFERENCE!r}, which a first pass compares with. Set it to token_values(reference, batch)."
        )
    # The reference's numbers are already in the batch. Both are summed by one function, in fp64, so that equal models give
    # a ratio of exactly 0.
    policy = token_values(run, batch, microbatches=microbatches)
    return torch.stack([_answer_sums(policy, batch), _answer_sums(batch[REFERENCE].to(policy), batch)], dim=1)


def _answer_sums(values_BT: Tensor, batch: Batch) -> Tensor:
    """[answers]: values of tokens with a label, added up by answer."""
    # + 1 and [1:]: segment 0 is padding.
    segments, valid = batch["segment_ids"].to(values_BT.device), batch["labels"].to(values_BT.device) != IGNORED
    return packed_logps(values_BT, valid, segments, count_of_answers(batch) + 1)[1:]


@dataclass(frozen=True)
class _Gathered:
    values: Tensor
    """of the whole step, in the order of its rows"""
    local: slice
    """those of this rank's batch"""


def _gathered(local: Tensor, mesh: Mesh) -> _Gathered:
    # Through the host: ranks have different numbers of answers, which a collective of tensors cannot have.
    parts = [part.to(local.device) for part in gather_over_data(mesh, local.cpu())]
    first = sum(len(part) for part in parts[: mesh.data_rank])
    return _Gathered(torch.cat(parts), slice(first, first + len(local)))
