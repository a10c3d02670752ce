"""Losses of whole answers for `Run.forward_backward`: pairs and scores, wherever the tokens of an answer lie.

Batches are those of `ExampleLoader`: `segment_ids` number the answers of a rank's batch from 1 on, in batches of pairs the
odd ones are chosen and the next ones rejected; `ends` is 1 at the last token of each. A microbatch has some of the answers,
and a rank of cp some of the tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.algos.objectives import (
    Pairs,
    PreferenceLoss,
    bradley_terry,
    packed_logps,
    preference_loss,
    whole_sequences,
)
from meshkit.algos.tally import Tally
from meshkit.errors import DataError
from meshkit.memory.loss import IGNORED
from meshkit.memory.token_log_probs import token_log_probs
from meshkit.mesh import Mesh
from meshkit.step import Batch, Loss

REFERENCE = "reference_log_probs"
"""the name under which a batch holds the reference's log-probability of each label"""


def count_pairs(batch: Batch) -> Tensor:
    """The pairs of a batch: chosen answers that end in it."""
    return (batch["ends"] * (batch["segment_ids"] % 2)).sum()


def model_inputs(part: dict[str, Any]) -> dict[str, Any]:
    """What of a part the model itself takes."""
    return {name: part[name] for name in ("input_ids", "position_ids", "mask") if name in part}


def label_log_probs(model: nn.Module, part: dict[str, Any]) -> Tensor:
    """The log-probability of each label, 0 where it is ignored; [rows, T] of this rank's tokens."""
    output = model(**model_inputs(part))
    log_probs: Tensor = token_log_probs(getattr(output, "logits", output), part["labels"]).log_probs
    return log_probs


def sums_of_answers(values: Sequence[Tensor], part: dict[str, Any], mesh: Mesh, answers: int) -> list[Tensor]:
    """Each of the values [rows, T] summed by answer, over all ranks of cp; [answers], 0 for those of other microbatches.

    answers: the answers of the rank's whole batch, the same number on every rank of cp.
    Wire: with cp, one all-reduce of [values, answers] in each direction.
    """
    everywhere = torch.ones_like(part["segment_ids"])
    sums = [packed_logps(value, everywhere, part["segment_ids"], answers + 1)[1:] for value in values]
    return list(whole_sequences(torch.stack([own.double() for own in sums]), mesh["cp"]).unbind())


def preference_objective(mesh: Mesh, batch: Batch, *losses: PreferenceLoss, tally: Tally | None = None) -> Loss:
    """The loss of a batch of pairs, for `forward_backward(batch, loss=..., count=count_pairs)`.

    Reads the reference's log-probabilities from batch["reference_log_probs"], [rows, T], where the losses need them.
    tally: gets the sums over pairs of accuracy, margin, chosen_reward and rejected_reward.
    """
    answers = _answers_of_pairs(batch)

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        valid = (part["labels"] != IGNORED).double()
        given = [label_log_probs(model, part), valid, part["ends"].double()]
        if REFERENCE in part:
            given.append(part[REFERENCE] * valid)
        policy, tokens, ends, *reference = sums_of_answers(given, part, mesh, answers)
        here = ends[0::2] > 0
        pairs = Pairs(
            chosen=policy[0::2],
            rejected=policy[1::2],
            ref_chosen=reference[0][0::2] if reference else None,
            ref_rejected=reference[0][1::2] if reference else None,
            chosen_tokens=tokens[0::2],
            rejected_tokens=tokens[1::2],
        )
        values = preference_loss(pairs, *losses)
        share = here / mesh["cp"].size()  # every rank of cp has all of it
        if tally is not None:
            tally.add(
                accuracy=values.accuracies * share,
                margin=values.margins * share,
                chosen_reward=values.chosen_rewards * share,
                rejected_reward=values.rejected_rewards * share,
            )
        return (values.losses * share).sum()

    return loss


def reward_objective(mesh: Mesh, batch: Batch, *, center: float = 0.0, tally: Tally | None = None) -> Loss:
    """The Bradley-Terry loss of a batch of pairs, of a model that returns a score for each token [rows, T].

    The score of an answer is that of its last token. batch may have `margin` and `preference` at the ends of answers, as
    `ExampleLoader` puts an example's scalars. tally: gets the sums over pairs of accuracy, margin and score.
    """
    answers = _answers_of_pairs(batch)

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        ends = part["ends"].double()
        scores = model(**model_inputs(part)).double() * ends
        named = [name for name in ("margin", "preference") if name in part]
        scores_A, ends_A, *scalars = sums_of_answers(
            [scores, ends, *(part[name] for name in named)], part, mesh, answers
        )
        given = {f"{name}_N": scalar[0::2] for name, scalar in zip(named, scalars, strict=True)}
        values = bradley_terry(scores_A[0::2], scores_A[1::2], center=center, **given)
        share = (ends_A[0::2] > 0) / mesh["cp"].size()
        if tally is not None:
            mean = (scores_A[0::2] + scores_A[1::2]).detach() / 2
            tally.add(accuracy=values.accuracies * share, margin=values.margins * share, score=mean * share)
        return (values.losses * share).sum()

    return loss


def _answers_of_pairs(batch: Batch) -> int:
    answers = int(batch["segment_ids"].max()) if batch["segment_ids"].numel() else 0
    if answers % 2:
        raise DataError(
            f"a batch of pairs has an even number of answers, but segment_ids go up to {answers}. Build it from `Pair`s: "
            "answer 2k+1 is chosen, 2k+2 rejected."
        )
    return answers
