"""Advantages of a training step: from scored rollouts to a packed batch with the advantage of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.policy._advantages import GroupAdvantage, Moments, group_advantages, whiten
from meshkit.algos.policy._loss import PolicyLoss
from meshkit.algos.policy._returns import (
    GAE,
    TURN_STARTS,
    RewardToGo,
    gae,
    rewards_to_go,
    spread_over_turns,
    token_rewards,
    turn_starts,
)
from meshkit.algos.policy._sampling import RolloutRules, keep_informative, overlong_penalty
from meshkit.algos.policy._segments import SegmentIndex
from meshkit.algos.rewards import MeshScores
from meshkit.algos.rollout import (
    REFERENCE,
    BalancedBatch,
    Rollout,
    answer_work,
    balance_examples,
    label_log_probs,
    learnt,
    routed_values,
    token_values,
)
from meshkit.core._torch.tracing import keeps_context_in_backward
from meshkit.data import Balance, pack_step
from meshkit.errors import DataError, PlanError
from meshkit.lora import disabled
from meshkit.mesh import Mesh, gather_over_data
from meshkit.moe import REPLAYS, ROUTING, RoutingReplay
from meshkit.moe.replay import open_routers
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
    """Write, score and select the rollouts of a step.

    Returns the scores of all rollouts, and the rollouts of this data rank to learn from, with penalties in their rewards.
    ask: writes and scores rollouts of `prompts` new prompts, with keys that were not used before. With dynamic sampling it
    is called until `prompts` groups have differing scores, at most `rounds` times; the step may then have fewer, or none.
    max_new_tokens: before `RolloutRules.limit`. Penalties are added after scores are compared, and are not in the scores.
    Every rank must call it. Wire: that of `ask`; with dynamic sampling a gather of two numbers per rollout after each.
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
    """(this data rank's rollouts of the first `wanted` informative groups by key, how many groups are missing)."""
    rollouts = [rollout for part in parts for rollout in part.rollouts]
    numbers = torch.tensor(
        [[float(each.reward) for each in rollouts], [each.key for each in rollouts]], dtype=torch.float64
    )
    (rewards_A, groups_A), local = gather_answers(mesh, numbers)
    # Sorted by key, which is the order of the prompts. Answers come in the order of ranks, which depends on the mesh: the
    # first groups in that order would not be the same on another one.
    order_A = groups_A.argsort(stable=True)
    kept = keep_informative(rewards_A[order_A], groups_A[order_A].long(), wanted=wanted)
    mask_A = torch.zeros_like(kept.mask).index_copy(0, order_A, kept.mask)
    return [rollout for rollout, keep in zip(rollouts, mask_A[local].tolist(), strict=True) if keep], kept.missing


def pack_rollouts(
    rollouts: Sequence[Rollout],
    *,
    seq_len: int,
    values: Sequence[str] = (),
    pad_multiple: int = 8,
    mask_truncated: bool = False,
) -> Batch:
    """Pack this data rank's rollouts (perhaps none) into a batch with rows of at most seq_len tokens.

    values: the names in `Rollout.values`, needed by a rank without rollouts. mask_truncated: see `Rollout.example`.
    Rollouts must have log-probabilities; for others call `pack_step` on their `example()`s.
    """
    # `names` says the entries for a rank without rollouts, too: batches of all ranks have the same ones.
    examples = [rollout.example(mask_truncated=mask_truncated) for rollout in rollouts]
    return pack_step(examples, seq_len=seq_len, names=(*NAMES, *values), pad_multiple=pad_multiple)


class PolicyBatch(NamedTuple):
    """batch: what `policy_objective` and `value_objective` read, of this data rank. microbatches: for `forward_backward`, the
    same on every rank.

    balance: which data rank learns from which rollouts. minibatches: (batch, microbatches) of each optimizer step, of which
    each has all answers to its prompts.
    """

    batch: Batch
    advantages: StepAdvantages
    microbatches: int
    balance: Balance
    minibatches: list[tuple[Batch, int]]


def balance_rollouts(
    run: Run,
    rollouts: Sequence[Rollout],
    *,
    tokens_per_microbatch: int,
    microbatches: int = 1,
    minibatches: int = 1,
    values: Sequence[str] = (),
    beside: Run | None = None,
) -> BalancedBatch:
    """`balance_examples` of this data rank's rollouts (perhaps none), by `answer_work`, instead of `pack_rollouts`.

    minibatches: optimizer steps, of which each has all answers to its prompts, so that they are the same on every mesh.
    values: the names in `Rollout.values`. beside: another run that computes with these rows, as a reference model.
    Every rank must call it. Wire: that of `balance_examples`.
    """
    return balance_examples(
        run.mesh,
        [rollout.example() for rollout in rollouts],
        tokens_per_microbatch=tokens_per_microbatch,
        names=(*NAMES, *values),
        microbatches=microbatches,
        minibatches=minibatches,
        minibatch_of=[rollout.key % minibatches for rollout in rollouts],
        work=answer_work(run),
        packed=run.keeps_documents and (beside is None or beside.keeps_documents),
    )


def policy_batch(
    run: Run,
    rollouts: Sequence[Rollout],
    loss: PolicyLoss,
    *,
    tokens_per_microbatch: int,
    microbatches: int = 1,
    temperature: float = 1.0,
    reference: Run | None = None,
    snapshot: bool = False,
    minibatches: int = 1,
    values: Sequence[str] = (),
    routing: RoutingReplay = "none",
) -> PolicyBatch:
    """What a policy or its critic learns from this data rank's rollouts, balanced by tokens, with the step's advantages.

    run: who learns. tokens_per_microbatch, microbatches: see `balance_tokens`. minibatches, values: see `balance_rollouts`.
    A data rank learns from rollouts of others, too.
    reference: the reference model, for KL; the run itself is taken without its adapters. snapshot: keep the present
    log-probabilities as the old ones, for several updates on one batch; losses with corrections or KL in the reward do so
    anyway, unless `values` has them.
    routing: of a policy with experts, which ones updates use, as `policy_objective` reads from the batch: "none", those that
    each chooses; "old" (R2), those that the run chooses now, recorded by the snapshot's forward, which is then made anyway;
    "rollout" (R3), those that `generate(routing=True)` recorded, for the snapshot too, and not for the reference model.
    Every rank must call it, also without rollouts.
    Wire: that of `balance_rollouts`, of `token_values` (`routed_values`), once for the snapshot and once for the reference
    model, and of `step_advantages`. Raises: PlanError for a model whose routers cannot be recorded.
    """
    if routing not in REPLAYS:
        raise PlanError(f"policy_batch: routing={routing!r} is not known. Choose from {', '.join(REPLAYS)}.")
    if routing != "none" and run.resolved.strategy.compile and not keeps_context_in_backward():
        raise PlanError(
            f"policy_batch: routing={routing!r} with compile needs torch 2.15, and this is {torch.__version__}: before, "
            "blocks that run again in backward do not know what to replay. Leave compile or the replay away."
        )
    sizes = {"tokens_per_microbatch": tokens_per_microbatch, "microbatches": microbatches, "minibatches": minibatches}
    place = None if routing == "none" else open_routers(run.model)
    named = (*values, ROUTING) if routing == "rollout" else values
    balanced = balance_rollouts(run, rollouts, values=named, beside=reference, **sizes)
    batch, count = balanced.batch, balanced.microbatches
    if (
        routing == "rollout" and place is not None and not len(batch[ROUTING])
    ):  # without rollouts nothing tells its dims
        batch[ROUTING] = place.empty(*batch["input_ids"].shape)
    log_probs = partial(label_log_probs, temperature=temperature)
    # pi_old is the trainer's own, before the first update; the engine's numbers have other rounding and other kernels. For
    # a single update on policy it is log_probs itself, and this forward is saved.
    if routing == "old":
        old, batch[ROUTING] = routed_values(run, batch, log_probs, microbatches=count)
        batch.setdefault("old_log_probs", old.cpu())
    elif "old_log_probs" not in values and (snapshot or loss.corrections or loss.kl.in_reward):
        replayed = partial(log_probs, replay=routing == "rollout")
        batch["old_log_probs"] = token_values(run, batch, replayed, microbatches=count).cpu()
    if reference is not None:
        with disabled(run.model) if reference is run else nullcontext():
            batch[REFERENCE] = token_values(reference, batch, log_probs, microbatches=count).cpu()
    advantages = step_advantages(run.mesh, batch, loss)
    batch |= advantages.values
    return PolicyBatch(batch, advantages, count, balanced.balance, balanced.minibatches(batch))


class StepAdvantages(NamedTuple):
    """values: entries to add to the batch, [B, T] fp64 each: `advantages`, and with GAE `returns`; with GAE of turns
    `turn_starts`, 1 where a turn begins, which has the returns.

    The rest is of the whole step and the same on every rank. answers, groups: their numbers. tokens: learnt tokens.
    unscored: answers without a score, whose advantages are 0. uniform: groups whose scores are all equal. truncated: answers
    that were cut off. reward: the mean of the scores.
    """

    values: dict[str, Tensor]
    answers: int
    tokens: int
    unscored: int
    groups: int
    uniform: int
    truncated: int
    reward: float


@torch.no_grad()
def step_advantages(mesh: Mesh, batch: Batch, loss: PolicyLoss) -> StepAdvantages:
    """The advantage of each learnt token of this rank's batch, from the rewards of all answers of the step.

    batch: of `pack_rollouts`, or with the same names: `rewards` [B, T], at the end of an answer or at each token; `groups`
    and `truncated` at the ends; for GAE `old_values`; for KL in the reward `old_log_probs` and `reference_log_probs`; for a
    greedy baseline `greedy_rewards` at the ends. An answer with a NaN among its rewards has no score.
    With GAE and bootstrap, an answer that was cut off has no score, which is what stands at its end; it keeps the rewards
    that it earned before, and is continued by the critic's value at its end. A step in which no answer ended or earned
    anything has advantages of 0, and the critic's own values as returns.
    Every rank must call it. Wire: over the data ranks, a gather of seven numbers per answer as objects, and for whitening an
    all-reduce of three numbers.
    Raises: DataError for an input that the advantage needs and the batch lacks.
    """
    _refuse_missing(batch, loss)
    # On the host: all that follows is small, and of answers, whose number differs between ranks.
    advantage, batch = loss.advantage, {name: value.cpu() for name, value in batch.items()}
    segments, learn, raw_rewards = batch["segment_ids"], learnt(batch), batch["rewards"]
    answers = SegmentIndex(
        mask=segments > 0,
        index=(segments - 1).clamp(min=0),
        count=int(segments.max()) if segments.numel() else 0,
    )
    rewards = raw_rewards
    # An answer that was cut off has not earned its score: the value of its last state stands for what would have come.
    if isinstance(advantage, GAE) and advantage.bootstrap:
        # Rewards of tokens before its end it has earned, and keeps.
        rewards = raw_rewards.masked_fill(_cut(batch), 0.0)
    # After the line above: the NaN of an answer that was cut off is no reason to drop it, where the critic continues it.
    scored = _answer_sums(answers, rewards.isnan().double()) == 0
    penalised = token_rewards(
        torch.where(scored, rewards, 0.0),
        learn,
        kl=loss.kl,
        old_log_probs_BT=batch.get("old_log_probs"),
        reference_log_probs_BT=batch.get("reference_log_probs"),
    )
    local_sums = answers.sums(
        # NaN marks the unscored ones in the gathered totals, where `group_advantages` expects it.
        torch.where(scored, penalised, torch.nan),
        raw_rewards,
        batch["groups"],
        learn.double(),
        batch.get("greedy_rewards", torch.zeros_like(rewards)),
        batch["truncated"],
        rewards.nan_to_num(0.0).abs(),
    )
    # On the host, and by objects: ranks have different numbers of answers, perhaps none.
    gathered, local = gather_answers(mesh, torch.stack(local_sums))
    totals_A, scores_A, groups_A, lengths_A, greedy_A, truncated_A, earned_A = gathered
    if isinstance(advantage, GroupAdvantage):
        by_answer = group_advantages(totals_A, groups_A.long(), advantage, lengths_A=lengths_A, greedy_A=greedy_A)
        # A rank without answers has no index to spread by.
        by_token = answers.spread(by_answer.advantages[local]) if answers.count else torch.zeros_like(rewards)
        values = {"advantages": torch.where(learn, by_token, 0.0)}
    else:
        # Where nothing was earned, GAE is a sum of differences of the critic's values alone, which whitening would make as
        # large as any advantage: the policy would follow the critic's noise.
        if isinstance(advantage, GAE) and advantage.bootstrap and not ((truncated_A == 0) | (earned_A > 0)).any():
            scored = torch.zeros_like(scored)
        values = _token_advantages(advantage, batch, penalised, learn, scored)
    # Over the tokens of all ranks, after each rank has its own: moments are added, and no advantage leaves its rank.
    if advantage.whiten:
        moments = _sum_over_data(mesh, Moments.of(values["advantages"], learn & scored))
        values["advantages"] = whiten(values["advantages"], learn & scored, moments)
    # Of raw scores: `uniform` counts groups without a signal, also where KL in the reward makes their totals differ.
    equal_A = group_advantages(scores_A, groups_A.long(), GroupAdvantage()).uniform
    return StepAdvantages(
        values=values,
        answers=len(scores_A),
        tokens=int(lengths_A.sum()),
        unscored=int(scores_A.isnan().sum()),
        groups=len(groups_A.unique()),
        uniform=len(groups_A[equal_A].unique()),
        truncated=int((truncated_A > 0).sum()),
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


def _token_advantages(
    advantage: GAE | RewardToGo, batch: Batch, rewards: Tensor, learn: Tensor, scored: Tensor
) -> dict[str, Tensor]:
    """`StepAdvantages.values`.

    An answer without a score has advantages of 0, and the critic's own values as returns: the value loss is then 0.
    """
    segments = batch["segment_ids"]
    # Of turns: the same recursion over their first tokens, which get the rewards of all tokens up to the next turn.
    steps = turn_starts(learn, segments) if advantage.level == "turn" else learn
    if isinstance(advantage, RewardToGo):
        to_go = rewards_to_go(rewards, steps, segments, discount=advantage.discount)
        return {"advantages": torch.where(scored, spread_over_turns(to_go, steps, learn), 0.0)}
    estimated = gae(
        rewards,
        batch["old_values"],
        steps,
        segments,
        discount=advantage.discount,
        decay=advantage.decay,
        open_BT=_cut(batch) if advantage.bootstrap else None,
    )
    values = {
        "advantages": torch.where(scored, spread_over_turns(estimated.advantages, steps, learn), 0.0),
        "returns": torch.where(scored, estimated.returns, batch["old_values"] * steps),
    }
    return {**values, TURN_STARTS: steps.double()} if advantage.level == "turn" else values


def _cut(batch: Batch) -> Tensor:
    """[B, T] bool, the last token of each answer that was cut off."""
    return (batch["truncated"] > 0) & (batch["ends"] > 0)


def _answer_sums(answers: SegmentIndex, values: Tensor) -> Tensor:
    """For each token the sum over its answer; 0 in padding."""
    if not answers.count:
        return torch.zeros_like(values)
    return torch.where(answers.mask, answers.spread(answers.sums(values)[0]), 0.0)


def gather_answers(mesh: Mesh, local: Tensor) -> tuple[Tensor, slice]:
    """Gather numbers of answers, [..., answers of this data rank], from all data ranks, on the host.

    Returns [..., answers of the step] in the order of data ranks, the same on every rank, and the slice of this data rank's
    answers in it. For `keep_informative`, and whatever else looks at all answers.
    Every rank must call it. Wire: `gather_over_data`.
    """
    parts = gather_over_data(mesh, local)
    # Data ranks have different numbers of answers, so offsets come from the gathered parts.
    before = sum(part.shape[-1] for part in parts[: mesh.data_rank])
    return torch.cat(parts, dim=-1), slice(before, before + local.shape[-1])


def _sum_over_data(mesh: Mesh, moments: Moments) -> Moments:
    """Add the moments up over the data ranks."""
    # `mesh.tokens` has the ranks of cp too, which computed the same moments of the same rows: only the first may count.
    summed = torch.stack(list(moments)) * (mesh["cp"].get_local_rank() == 0)
    if mesh.tokens.size() > 1:
        summed = summed.to(mesh.device)
        dist.all_reduce(summed, group=mesh.tokens.get_group())
    return Moments(*summed.cpu())
