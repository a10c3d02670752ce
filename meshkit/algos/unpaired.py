"""Losses of answers that are good or bad by themselves, for `Run.forward_backward`, wherever the tokens of an answer lie.

Batches are those of `ExampleLoader`, of examples with the scalar `desirable`, as `encode_labelled` makes them. KTO compares
with mismatched answers: load the units of `with_mismatches`, and `split_mismatches` each batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshkit.algos.answers import REFERENCE, count_of_answers, label_log_probs, sums_of_answers
from meshkit.algos.objectives import UnpairedLoss, unpaired_loss
from meshkit.algos.tally import Tally
from meshkit.errors import DataError
from meshkit.memory.loss import IGNORED
from meshkit.mesh import Mesh
from meshkit.step import Batch, Loss


def count_answers(batch: Batch) -> Tensor:
    """The answers of a batch: those that end in it."""
    return batch["ends"].sum()


def unpaired_objective(
    mesh: Mesh,
    batch: Batch,
    unpaired: UnpairedLoss,
    *,
    reference_point: float | Tensor | None = None,
    tally: Tally | None = None,
) -> Loss:
    """The loss of a batch of answers, for `forward_backward(batch, loss=..., count=count_answers)`.

    Reads the reference's log-probabilities from batch["reference_log_probs"], [rows, T].
    reference_point: of the whole step: `kto_reference_point` for kind "kto", the `RunningMean` of `reward_sums` for
    "bco_unpaired", None for "apo_zero_unpaired".
    tally: gets the sums over answers of desirable, desirable_reward and undesirable_reward; rewards are 0 on the other side.
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
        share = (ends > 0) / mesh["cp"].size()  # every rank of cp has all of it
        if tally is not None:
            good = desirable * share
            tally.add(
                desirable=good,
                desirable_reward=values.rewards * good,
                undesirable_reward=values.rewards * (share - good),
            )
        return (values.losses * share).sum()

    return loss
