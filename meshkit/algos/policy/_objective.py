"""Policy and value (critic) objectives of a training step for `Run.forward_backward`, also with cp and microbatches.

Batches come from `pack_step`: `segment_ids` number the answers of a rank's batch from 1 on, and the value of a token stands
where the token is the label. A microbatch holds some of the answers, and a rank of cp some of the tokens of each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.algos.policy._loss import PolicyLoss, policy_loss
from meshkit.algos.policy._returns import TURN_STARTS
from meshkit.algos.policy._segments import SegmentIndex
from meshkit.algos.policy._terms import value_losses
from meshkit.algos.rollout import REFERENCE, learnt, model_logits
from meshkit.errors import DataError
from meshkit.loss import token_log_probs
from meshkit.mesh import Mesh
from meshkit.metrics import MetricSums
from meshkit.step import Batch, Count, Loss, count_labels, model_inputs

POLICY_SUMS = (
    *("tokens", "clipped_low", "clipped_high", "old_k1", "old_k3", "reference_kl", "entropy"),
    *("rollout_error", "rollout_k3", "weight", "weight_squared", "rejected"),
)
POLICY_MAXIMA = ("ratio", "rollout_gap")
VALUE_SUMS = ("tokens", "clipped", "error", "error_squared", "return", "return_squared")


def count_answers(batch: Batch) -> Tensor:
    """The number of answers of a batch that have a learnt token."""
    # By number, not by `ends`: an answer whose last token is not learnt (cut off, masked) is counted if any token of it is.
    counted = batch["segment_ids"][learnt(batch)].unique().numel()
    return torch.tensor(counted, device=batch["segment_ids"].device)


def policy_count(loss: PolicyLoss) -> Count:
    """The count that divides the sum of `policy_objective`: tokens of the step (token-level), or answers (sequence-level)."""
    return count_labels if loss.counts_tokens else count_answers


def policy_objective(
    mesh: Mesh, batch: Batch, loss: PolicyLoss, *, temperature: float = 1.0, metrics: MetricSums | None = None
) -> Loss:
    """The loss of a batch of answers, for `forward_backward(batch, loss=..., count=policy_count(loss))`.

    Reads from the batch `advantages` [B, T], and if present `old_log_probs` (without them: a step on policy),
    `rollout_log_probs`, `reference_log_probs`, `loss_weights`, and `routing`, the experts that routers use again.
    Log-probabilities come from `token_values` with the same temperature, which divides logits. metrics: `policy_sums(mesh)`;
    read it with `policy_metrics`.
    Wire: with cp what `SegmentIndex.sums` sends, for losses that look at whole answers.
    Raises: DataError for a batch without advantages, or without another input that the loss needs.
    """
    if "advantages" not in batch:
        raise DataError(
            "policy_objective: the batch has no advantages. Add those of step_advantages(mesh, batch, loss)."
        )
    # Of the whole batch, also in microbatches: ranks of cp have tokens of different answers and sum vectors of one length.
    count = _answer_count(batch)

    def objective(model: nn.Module, part: dict[str, Any]) -> Tensor:
        logits = model_logits(model, part, replay=True)
        predictions = token_log_probs(logits, part["labels"], temperature=temperature)
        answers = _answers(mesh, part, count)
        values = policy_loss(
            loss,
            answers,
            predictions.log_probs,
            part["advantages"],
            old_log_probs=part.get("old_log_probs"),
            rollout_log_probs=part.get("rollout_log_probs"),
            reference_log_probs=part.get(REFERENCE),
            entropy=predictions.entropy,
            weights=part.get("loss_weights"),
        )
        if metrics is not None:
            # On policy the old ones are the present ones; without an engine's, the generator is taken to be the trainer.
            log_probs = answers.only(predictions.log_probs.detach())
            old = answers.only(part["old_log_probs"]) if "old_log_probs" in part else log_probs
            rollout = answers.only(part["rollout_log_probs"]) if "rollout_log_probs" in part else old
            log_ratio, gap = log_probs - old, old - rollout
            metrics.add(
                tokens=answers.mask,
                clipped_low=values.clipped_low,
                clipped_high=values.clipped_high,
                old_k1=-log_ratio,
                # k3 of KL(pi_old || pi): tokens come from pi_old, so the ratio is pi / pi_old.
                old_k3=log_ratio.exp() - 1 - log_ratio,
                reference_kl=values.kl,
                entropy=answers.only(predictions.entropy),
                # Through `only`: exp(0) of a masked token is 1, and would count.
                rollout_error=answers.only(gap.abs().exp()),
                rollout_k3=gap.exp() - 1 - gap,
                weight=values.corrections,
                weight_squared=values.corrections.square(),
                rejected=answers.mask & (values.corrections == 0),
                ratio=values.ratios,
                rollout_gap=gap.abs(),
            )
        return values.losses.sum()  # See [Note: divided once, by the whole step] in _loss.py.

    return objective


def policy_sums(mesh: Mesh) -> MetricSums:
    """For `policy_objective(metrics=)`; `policy_metrics` reads it."""
    return MetricSums(mesh, POLICY_SUMS, POLICY_MAXIMA)


def policy_metrics(metrics: MetricSums) -> dict[str, float]:
    """Means over the learnt tokens of all steps since the last call, the same on every rank. Every rank must call it.

    clipped_low, clipped_high: shares. old_k1, old_k3: estimates of KL(pi_old || pi). reference_kl: of the loss's estimator,
    with the ratio if it is weighted. entropy: nats. rollout_error: exp |log pi_old - log pi_rollout|, 1 if trainer and
    generator agree; above 1.05 look for the cause. rollout_k3: KL(pi_rollout || pi_old). effective: (sum w)^2 / (n sum w^2)
    of the corrections' weights, the share of tokens that a plain mean would need. rejected: the share of weights that are 0.
    ratio_max, rollout_gap_max: the largest ratio, and the largest |log pi_old - log pi_rollout|.
    """
    sums = metrics.means(1.0)
    tokens = max(sums.pop("tokens"), 1.0)
    largest = {f"{name}_max": sums.pop(name) for name in POLICY_MAXIMA}
    weight, squared = sums.pop("weight"), sums.pop("weight_squared")
    # Kish's effective sample size, as a share.
    effective = weight**2 / (tokens * squared) if squared else 0.0
    return {**{name: value / tokens for name, value in sums.items()}, "effective": effective, **largest}


def critic_values(model: nn.Module, part: dict[str, Any]) -> Tensor:
    """The critic's value V of the state before each label, [rows, T], for `token_values(critic, batch, ...)`.

    model: returns a number for each token, as `RewardModel` does: the value after reading it.
    """
    values: Tensor = model(**model_inputs(model, part))
    return values


def value_objective(mesh: Mesh, batch: Batch, *, clip: float | None = 0.2, metrics: MetricSums | None = None) -> Loss:
    """The value loss of a critic, for `forward_backward(batch, loss=..., count=value_count)`: a mean over learnt tokens.

    Reads from the batch `returns` [B, T], from `step_advantages`, and `old_values` and `turn_starts` if present: with GAE of
    turns the mean is over turns, one value each. metrics: `value_sums(mesh)`.
    Raises: DataError for a batch without returns.
    """
    if "returns" not in batch:
        raise DataError("value_objective: the batch has no returns. Add those of step_advantages with a GAE advantage.")
    count = _answer_count(batch)

    def objective(model: nn.Module, part: dict[str, Any]) -> Tensor:
        values, answers = critic_values(model, part), _answers(mesh, part, count)
        if TURN_STARTS in part:
            answers = replace(answers, mask=answers.mask & (part[TURN_STARTS] > 0))
        critic_loss = value_losses(values, part["returns"], answers, old_values=part.get("old_values"), clip=clip)
        if metrics is not None:
            target = answers.only(part["returns"])
            error = target - answers.only(values.detach())
            metrics.add(
                tokens=answers.mask,
                clipped=critic_loss.clipped,
                error=error,
                error_squared=error.square(),
                **{"return": target, "return_squared": target.square()},
            )
        return critic_loss.losses.sum()

    return objective


def value_count(batch: Batch) -> Tensor:
    """The count that divides the sum of `value_objective`: learnt tokens, or with GAE of turns their turns."""
    if TURN_STARTS not in batch:
        return count_labels(batch)
    return (learnt(batch) & (batch[TURN_STARTS] > 0)).sum()


def value_sums(mesh: Mesh) -> MetricSums:
    """For `value_objective(metrics=)`; `value_metrics` reads it."""
    return MetricSums(mesh, VALUE_SUMS)


def value_metrics(metrics: MetricSums) -> dict[str, float]:
    """Means over the learnt tokens of all steps since the last call. Every rank must call it.

    clipped: a share. error: the mean of R - V. explained: 1 - var(R - V) / var(R), 0 where R does not vary.
    """
    sums = metrics.means(1.0)
    tokens = max(sums.pop("tokens"), 1.0)
    mean = {name: value / tokens for name, value in sums.items()}
    # From sums, since a metric is added up over ranks and microbatches; fp64 sums make up for the cancellation.
    variance = mean["return_squared"] - mean["return"] ** 2
    unexplained = mean["error_squared"] - mean["error"] ** 2
    explained = 1 - unexplained / variance if variance > 1e-12 else 0.0
    return {"clipped": mean["clipped"], "error": mean["error"], "return": mean["return"], "explained": explained}


def _answer_count(batch: Batch) -> int:
    return max(int(batch["segment_ids"].max()), 1) if batch["segment_ids"].numel() else 1


def _answers(mesh: Mesh, part: dict[str, Any], count: int) -> SegmentIndex:
    # Padding has segment 0. It is masked, so any index in range will do.
    index = (part["segment_ids"] - 1).clamp(min=0)
    return SegmentIndex(mask=learnt(part), index=index, count=count, axis=mesh["cp"])
