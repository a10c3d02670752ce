"""Sequence-level objectives (DPO, KTO, reward model) for `Run.forward_backward`, also with cp and microbatches.

Batches are those of the data loader `ExampleLoader`: `segment_ids` number the answers of a rank's batch from 1 on; in batches
of pairs odd ones are chosen, each followed by its rejected one; `ends` is 1 at the last token of each. A microbatch has some
of the answers, and a rank of cp some of the tokens of each. Unpaired losses need examples with the scalar `desirable`, as
`encode_labelled` makes them. KTO compares with mismatched answers: load the units of `with_mismatches`, and split each batch
by `split_mismatches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.algos.preference._losses import PreferenceLoss, preference_loss
from meshkit.algos.preference._pairs import Pairs
from meshkit.algos.preference._reward import bradley_terry
from meshkit.algos.preference._statistics import mean_of
from meshkit.algos.preference._tokens import packed_logps, whole_sequences, wpo_weights
from meshkit.algos.preference._unpaired import UnpairedLoss, unpaired_loss
from meshkit.algos.rollout import REFERENCE, label_log_probs, model_logits
from meshkit.errors import DataError
from meshkit.loss import IGNORED, log_sum_squares, token_log_probs
from meshkit.mesh import Mesh
from meshkit.metrics import MetricSums
from meshkit.step import Batch, Loss, model_inputs


def count_pairs(batch: Batch) -> Tensor:
    """The number of pairs of a batch: chosen answers that end in it."""
    return (batch["ends"] * (batch["segment_ids"] % 2)).sum()


def count_answers(batch: Batch) -> Tensor:
    """The number of answers of a batch: those that end in it."""
    return batch["ends"].sum()


def sums_of_answers(values: Sequence[Tensor], part: dict[str, Any], mesh: Mesh, answers: int) -> list[Tensor]:
    """Sum each of the values [rows, T] by answer, over all ranks of cp; [answers], 0 for answers of other microbatches.

    answers: the answers of the rank's whole batch, the same number on every rank of cp.
    Wire: with cp, one all-reduce of [values, answers] in each direction.
    """
    unmasked = torch.ones_like(part["segment_ids"])
    # Segment 0 is padding: its sum is cut off. Sums are over all answers of the rank's batch, although a microbatch has only
    # some of them: ranks of cp may hold tokens of different answers, and need the same shape.
    sums = [packed_logps(value, unmasked, part["segment_ids"], answers + 1)[1:] for value in values]
    return list(whole_sequences(torch.stack([of_value.double() for of_value in sums]), mesh["cp"]).unbind())


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
    """Numbers that all parts of a step of pairs must share, see `Pairs`; `pair_statistics` computes them."""

    partners: Tensor | None = None
    """[pairs of the rank's batch], or [pairs, 2]"""
    reward_shift: float = 0.0


def preference_objective(
    mesh: Mesh,
    batch: Batch,
    *losses: PreferenceLoss,
    statistics: StepStatistics | None = None,
    wpo: bool = False,
    metrics: MetricSums | None = None,
) -> Loss:
    """The loss of a batch of pairs, for `forward_backward(batch, loss=..., count=count_pairs)`.

    Reads the log-probabilities of the reference model from batch["reference_log_probs"], [rows, T], if the losses need them.
    statistics: for the kinds "aot", "aot_unpaired" and "bco", of the same batch.
    wpo: weigh each pair by how likely the policy is to write it, see `wpo_weights`.
    metrics: adds the sums over pairs of the names it has: accuracy, margin, chosen_reward, rejected_reward, chosen_log_prob
    and rejected_log_prob, the policy's of whole answers; and the number of tokens.
    Every rank must call it. Wire: for kind "sft" an all-reduce of two numbers over the ranks with different tokens.
    """
    # Here, once for the step, and not in `loss`, which runs for each microbatch: the all-reduce of tokens must be one of
    # the step.
    answers, shared = answers_of_pairs(batch), statistics or StepStatistics()
    tokens_per_pair = _tokens_per_pair(mesh, batch) if any(each.kind == "sft" for each in losses) else None

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        logits = model_logits(model, part)
        valid = (part["labels"] != IGNORED).double()
        log_probs = token_log_probs(logits, part["labels"]).log_probs
        given = {"policy": log_probs, "tokens": valid, "ends": part["ends"].double()}
        if REFERENCE in part:
            given["reference"] = part[REFERENCE] * valid
        if wpo:
            # WPO's weights are constants: detached before the sums, so that no graph is kept for them.
            given["aligned"] = (log_probs.detach() - log_sum_squares(logits)) * valid
        # One message for all of them; labels that are ignored have log-probability 0 already.
        sums = dict(zip(given, sums_of_answers(list(given.values()), part, mesh, answers), strict=True))
        # Odd segments are chosen: of sums that begin with segment 1, those at even places.
        chosen, rejected = ({name: values[side::2] for name, values in sums.items()} for side in (0, 1))
        pairs = Pairs(
            chosen=chosen["policy"],
            rejected=rejected["policy"],
            ref_chosen=chosen.get("reference"),
            ref_rejected=rejected.get("reference"),
            chosen_tokens=chosen["tokens"],
            rejected_tokens=rejected["tokens"],
            weights=wpo_weights(chosen["aligned"], chosen["tokens"], rejected["aligned"], rejected["tokens"])
            if wpo
            else None,
            partners=shared.partners,
            reward_shift=shared.reward_shift,
            tokens_per_pair=tokens_per_pair,
        )
        values = preference_loss(pairs, *losses)
        # See [Note: divided once, by the whole step] in policy/_loss.py.
        share = (chosen["ends"] > 0) / mesh["cp"].size()  # all ranks of cp compute the same losses
        if metrics is not None:
            metrics.add(
                accuracy=values.accuracies * share,
                margin=values.margins * share,
                chosen_reward=values.chosen_rewards * share,
                rejected_reward=values.rejected_rewards * share,
                chosen_log_prob=chosen["policy"] * share,
                rejected_log_prob=rejected["policy"] * share,
                # Ranks of cp have different tokens of a row: this one is counted without `share`.
                tokens=part["segment_ids"] > 0,
            )
        return (values.losses * share).sum()

    return loss


def unpaired_objective(
    mesh: Mesh,
    batch: Batch,
    unpaired: UnpairedLoss,
    *,
    reference_point: float | Tensor | None = None,
    metrics: MetricSums | None = None,
) -> Loss:
    """The loss of a batch of answers, for `forward_backward(batch, loss=..., count=count_answers)`.

    Reads the log-probabilities of the reference model from batch["reference_log_probs"], [rows, T].
    reference_point: of the whole step: `kto_reference_point` for kind "kto", the `RunningMean` of `reward_sums` for
    "bco_unpaired", None for "apo_zero_unpaired".
    metrics: adds the sums over answers of desirable, desirable_reward, undesirable_reward; rewards are 0 on the other side.
    Raises: DataError for a batch that lacks one of the two values.
    """
    for name, source in ((REFERENCE, "token_values(reference, batch)"), ("desirable", "encode_labelled's rows")):
        if name not in batch:
            raise DataError(f"unpaired_objective: the batch has no {name!r}. It comes from {source}.")
    answers = count_of_answers(batch)

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        valid = (part["labels"] != IGNORED).double()
        given = [label_log_probs(model, part), part[REFERENCE] * valid, part["desirable"], part["ends"].double()]
        policy, reference, desirable, ends = sums_of_answers(given, part, mesh, answers)
        values = unpaired_loss(policy, reference, desirable > 0.5, unpaired, reference_point=reference_point)
        share = (ends > 0) / mesh["cp"].size()  # all ranks of cp compute the same losses
        if metrics is not None:
            good = desirable * share
            metrics.add(
                desirable=good,
                desirable_reward=values.rewards * good,
                undesirable_reward=values.rewards * (share - good),
            )
        return (values.losses * share).sum()

    return loss


def reward_objective(mesh: Mesh, batch: Batch, *, center: float = 0.0, metrics: MetricSums | None = None) -> Loss:
    """The Bradley-Terry loss of a batch of pairs, of a model that returns a score for each token [rows, T].

    The score of an answer is that of its last token. batch may have `margin` and `preference` at the ends of answers, as
    `ExampleLoader` puts an example's scalars. metrics: adds the sums over pairs of the names it has: accuracy, margin, score;
    and the number of tokens.
    """
    answers = answers_of_pairs(batch)

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        ends = part["ends"].double()
        # The score at the last token alone; the sum over the answer's tokens on all ranks of cp then is that score.
        scores = model(**model_inputs(model, part)).double() * ends
        named = [name for name in ("margin", "preference") if name in part]
        scores_A, ends_A, *scalars = sums_of_answers(
            [scores, ends, *(part[name] for name in named)], part, mesh, answers
        )
        given = {f"{name}_N": scalar[0::2] for name, scalar in zip(named, scalars, strict=True)}
        values = bradley_terry(scores_A[0::2], scores_A[1::2], center=center, **given)
        share = (ends_A[0::2] > 0) / mesh["cp"].size()
        if metrics is not None:
            mean = (scores_A[0::2] + scores_A[1::2]).detach() / 2
            metrics.add(
                accuracy=values.accuracies * share,
                margin=values.margins * share,
                score=mean * share,
                tokens=part["segment_ids"] > 0,
            )
        return (values.losses * share).sum()

    return loss


def _tokens_per_pair(mesh: Mesh, batch: Batch) -> Tensor:
    """Learnt tokens of chosen answers per pair, over the whole step, for `Pairs`."""
    # Ranks of cp have the same rows: numerator and denominator count them equally often.
    learnt = ((batch["labels"] != IGNORED) & (batch["segment_ids"] % 2 == 1)).sum()
    sums = torch.stack([learnt, count_pairs(batch)]).to(mesh.device, torch.float64)
    if mesh.tokens.size() > 1:
        dist.all_reduce(sums, group=mesh.tokens.get_group())
    return mean_of(sums).clamp(min=1)


def count_of_answers(batch: Batch) -> int:
    """The answers of the rank's whole batch."""
    return int(batch["segment_ids"].max()) if batch["segment_ids"].numel() else 0


def answers_of_pairs(batch: Batch) -> int:
    """`count_of_answers`. Raises: DataError for an odd number."""
    answers = count_of_answers(batch)
    if answers % 2:
        raise DataError(
            f"a batch of pairs has an even number of answers, but segment_ids go up to {answers}. Build it from `Pair`s: "
            "answer 2k+1 is chosen, 2k+2 rejected."
        )
    return answers
