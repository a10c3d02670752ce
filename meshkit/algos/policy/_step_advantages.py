"""From scored rollouts to the batch of a step: which of them it learns from, packed, with the advantages of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.policy._advantages import GroupAdvantage, Moments, group_advantages, whiten
from meshkit.algos.policy._loss import PolicyLoss
from meshkit.algos.policy._returns import GAE, RewardToGo, gae, rewards_to_go, token_rewards
from meshkit.algos.policy._sampling import RolloutRules, keep_informative, overlong_penalty
from meshkit.algos.policy._segments import SegmentIndex
from meshkit.algos.rewards import MeshScores
from meshkit.algos.rollout import REFERENCE, Rollout, label_log_probs, learnt, token_values
from meshkit.data import pack_step
from meshkit.errors import DataError
from meshkit.mesh import Mesh, gather_over_data
from meshkit.step import Batch, Run

NAMES = ("groups", "truncated", "rewards", "rollout_log_probs")


def step_rollouts(
    mesh: Mesh,
    ask: Callable[[], MeshScores],
    rules: RolloutRules,
    *,
    prompts: int,
    max_new_tokens: int,
    rounds: int = 10,
) -> tuple[MeshScores, list[Rollout]]:
    """The scores of all rollouts of a step, and those of this data rank that it learns from, with the rewards it learns.

    ask: writes and scores the rollouts of `prompts` more prompts, of keys that never came before. With dynamic sampling it
    is called until so many groups have different scores, `rounds` times at most: the step then has fewer, perhaps none.
    max_new_tokens: before `RolloutRules.limit`. Penalties come after scores were compared, and are not in the scores.
    Every rank must call it. Wire: that of `ask`; with dynamic sampling a gather of two numbers a rollout after each.
    Source: DAPO, Yu et al. 2025 (2503.14476), algorithm 1.
    """
    parts = [ask()]
    rollouts, missing = parts[0].rollouts, 0
    if rules.dynamic:
        rollouts, missing = _informative(mesh, parts, prompts)
    while missing and len(parts) < rounds:
        parts.append(ask())
        rollouts, missing = _informative(mesh, parts, prompts)
    if rules.overlong:
        limit = rules.limit(max_new_tokens)
        lengths_A = torch.tensor([len(each.ids) for each in rollouts], dtype=torch.int64)
        penalties = overlong_penalty(lengths_A, limit=limit, buffer=limit - max_new_tokens).tolist()
        rollouts = [
            replace(each, reward=each.reward + penalty) for each, penalty in zip(rollouts, penalties, strict=True)
        ]
    return MeshScores.joined(parts), rollouts


def _informative(mesh: Mesh, parts: Sequence[MeshScores], wanted: int) -> tuple[list[Rollout], int]:
    """(this data rank's rollouts of informative groups, how many groups are missing), the first groups by key."""
    own = [rollout for part in parts for rollout in part.rollouts]
    numbers = torch.tensor([[float(each.reward) for each in own], [each.key for each in own]], dtype=torch.float64)
    (rewards_A, groups_A), here = gather_answers(mesh, numbers)
    # By key, which is the order of the prompts: gathered by rank, the first groups would be others on other meshes.
    order_A = groups_A.argsort(stable=True)
    kept = keep_informative(rewards_A[order_A], groups_A[order_A].long(), wanted=wanted)
    mask_A = torch.zeros_like(kept.mask).index_copy(0, order_A, kept.mask)
    return [rollout for rollout, keep in zip(own, mask_A[here].tolist(), strict=True) if keep], kept.missing


def pack_rollouts(
    rollouts: Sequence[Rollout],
    *,
    seq_len: int,
    values: Sequence[str] = (),
    pad_multiple: int = 8,
    mask_truncated: bool = False,
) -> Batch:
    """The batch of this data rank's rollouts, which may be none, packed into rows of at most seq_len tokens.

    values: the names in `Rollout.values`, said here for a rank without any. mask_truncated: see `Rollout.example`.
    Rollouts have log-probabilities; for those of other fields call `pack_step` on `example()`s.
    """
    examples = [rollout.example(mask_truncated=mask_truncated) for rollout in rollouts]
    return pack_step(examples, seq_len=seq_len, names=(*NAMES, *values), pad_multiple=pad_multiple)


def policy_batch(
    run: Run,
    rollouts: Sequence[Rollout],
    loss: PolicyLoss,
    *,
    seq_len: int,
    temperature: float = 1.0,
    reference: Run | None = None,
    snapshot: bool = False,
    microbatches: int = 1,
) -> tuple[Batch, StepAdvantages]:
    """This data rank's rollouts as a batch with all that `policy_objective` reads, and the advantages of the step.

    reference: the reference model, for KL. snapshot: keep the log-probabilities of now as the old ones, for several updates;
    losses with corrections or KL in the reward do so anyway. Every rank must call it, those without rollouts too.
    Wire: that of `token_values`, for each of the two, and of `step_advantages`.
    """
    batch = pack_rollouts(rollouts, seq_len=seq_len, pad_multiple=run.mesh.row_multiple)
    log_probs = partial(label_log_probs, temperature=temperature)
    if snapshot or loss.corrections or loss.kl.in_reward:
        batch["old_log_probs"] = token_values(run, batch, log_probs, microbatches=microbatches).cpu()
    if reference is not None:
        batch[REFERENCE] = token_values(reference, batch, log_probs, microbatches=microbatches).cpu()
    advantages = step_advantages(run.mesh, batch, loss)
    return batch | advantages.values, advantages


class StepAdvantages(NamedTuple):
    """values: what to add to the batch, [B, T] fp64 each: `advantages`, and with GAE `returns`. Of the whole step, the same
    on every rank: answers; tokens, the learnt ones; unscored, answers without a score, whose advantages are 0; groups;
    uniform, groups whose scores are all equal; reward, the mean of the scores.
    """

    values: dict[str, Tensor]
    answers: int
    tokens: int
    unscored: int
    groups: int
    uniform: int
    reward: float


@torch.no_grad()
def step_advantages(mesh: Mesh, batch: Batch, loss: PolicyLoss) -> StepAdvantages:
    """The advantage of each learnt token of this rank's batch, from the rewards of all answers of the step.

    batch: of `pack_rollouts`, or with the same names: `rewards` [B, T], at the end of an answer or at each token; `groups`
    and `truncated` at the ends; for GAE `old_values`; for KL in the reward `old_log_probs` and `reference_log_probs`; for a
    greedy baseline `greedy_rewards` at the ends. An answer that has a NaN among its rewards is not scored.
    With GAE and bootstrap an answer that was cut off keeps only its KL, and goes on with the critic's value at its end.
    Every rank must call it. Wire: over the data ranks, a gather of five numbers an answer as objects, and for whitening an
    all-reduce of three numbers.
    Raises: DataError for what the advantage needs and the batch has not.
    """
    _refuse_missing(batch, loss)
    advantage, batch = loss.advantage, {name: value.cpu() for name, value in batch.items()}
    segments, learn, given = batch["segment_ids"], learnt(batch), batch["rewards"]
    answers = SegmentIndex(
        mask=segments > 0,
        index=(segments - 1).clamp(min=0),
        count=int(segments.max()) if segments.numel() else 0,
    )
    rewards = given
    if isinstance(advantage, GAE) and advantage.bootstrap:
        rewards = given.masked_fill(_of_segments(answers, batch["truncated"]) > 0, 0.0)
    scored = _of_segments(answers, rewards.isnan().double()) == 0
    penalised = token_rewards(
        torch.where(scored, rewards, 0.0),
        learn,
        kl=loss.kl,
        old_log_probs_BT=batch.get("old_log_probs"),
        reference_log_probs_BT=batch.get("reference_log_probs"),
    )
    own = answers.sums(
        torch.where(scored, penalised, torch.nan),
        given,
        batch["groups"],
        learn.double(),
        batch.get("greedy_rewards", torch.zeros_like(given)),
    )
    (totals_A, scores_A, groups_A, lengths_A, greedy_A), here = gather_answers(mesh, torch.stack(own))
    if isinstance(advantage, GroupAdvantage):
        found = group_advantages(totals_A, groups_A.long(), advantage, lengths_A=lengths_A, greedy_A=greedy_A)
        spread = answers.spread(found.advantages[here]) if answers.count else torch.zeros_like(given)
        values = {"advantages": torch.where(learn, spread, 0.0)}
    else:
        values = _of_tokens(advantage, batch, penalised, learn, scored)
    if advantage.whiten:
        moments = _sum_over_data(mesh, Moments.of(values["advantages"], learn & scored))
        values["advantages"] = whiten(values["advantages"], learn & scored, moments)
    equal_A = group_advantages(scores_A, groups_A.long(), GroupAdvantage()).uniform
    return StepAdvantages(
        values=values,
        answers=len(scores_A),
        tokens=int(lengths_A.sum()),
        unscored=int(scores_A.isnan().sum()),
        groups=len(groups_A.unique()),
        uniform=len(groups_A[equal_A].unique()),
        reward=float(scores_A.nanmean()) if len(scores_A) else 0.0,
    )


def _refuse_missing(batch: Batch, loss: PolicyLoss) -> None:
    advantage = loss.advantage
    needed = ["rewards", "groups", "truncated"]
    if isinstance(advantage, GAE):
        needed.append("old_values")
    if isinstance(advantage, GroupAdvantage) and advantage.baseline == "greedy":
        needed.append("greedy_rewards")
    if loss.kl.in_reward:
        needed += ["old_log_probs", "reference_log_probs"]
    if missing := [name for name in needed if name not in batch]:
        raise DataError(
            f"step_advantages: the batch has no {', '.join(missing)}, which {advantage} with {loss.kl} needs. Add it."
        )


def _of_tokens(
    advantage: GAE | RewardToGo, batch: Batch, rewards: Tensor, learn: Tensor, scored: Tensor
) -> dict[str, Tensor]:
    """An answer without a score has advantages of 0, and returns that are what the critic says already."""
    segments = batch["segment_ids"]
    if isinstance(advantage, RewardToGo):
        togo = rewards_to_go(rewards, learn, segments, discount=advantage.discount)
        return {"advantages": torch.where(scored, togo, 0.0)}
    cut = (batch["truncated"] > 0) & (batch["ends"] > 0)
    found = gae(
        rewards,
        batch["old_values"],
        learn,
        segments,
        discount=advantage.discount,
        decay=advantage.decay,
        open_BT=cut if advantage.bootstrap else None,
    )
    return {
        "advantages": torch.where(scored, found.advantages, 0.0),
        "returns": torch.where(scored, found.returns, batch["old_values"] * learn),
    }


def _of_segments(answers: SegmentIndex, values: Tensor) -> Tensor:
    """To each token the sum over its answer; 0 in padding."""
    if not answers.count:
        return torch.zeros_like(values)
    return torch.where(answers.mask, answers.spread(answers.sums(values)[0]), 0.0)


def gather_answers(mesh: Mesh, own: Tensor) -> tuple[Tensor, slice]:
    """[..., own answers] of each data rank, on the host, to ([..., answers of the step], which are those of this data rank).

    In order of data rank, the same on every rank; for `keep_informative` and whatever else looks at all answers.
    Every rank must call it. Wire: `gather_over_data`.
    """
    parts = gather_over_data(mesh, own)
    before = sum(part.shape[-1] for part in parts[: mesh.data_rank])
    return torch.cat(parts, dim=-1), slice(before, before + own.shape[-1])


def _sum_over_data(mesh: Mesh, moments: Moments) -> Moments:
    """Over the data ranks; those of cp have the same numbers, of which the first counts."""
    summed = torch.stack(list(moments)) * (mesh["cp"].get_local_rank() == 0)
    if mesh.tokens.size() > 1:
        summed = summed.to(mesh.device)
        dist.all_reduce(summed, group=mesh.tokens.get_group())
    return Moments(*summed.cpu())
