"""The objective of a student, for `Run.forward_backward`: sums over the learnt tokens of all ranks and microbatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshkit.algos.distill._distillation import Distillation
from meshkit.algos.rollout import learnt, model_logits
from meshkit.errors import DataError
from meshkit.loss import IGNORED, cross_entropy, token_divergences
from meshkit.metrics import MetricSums
from meshkit.step import Loss


def distill_objective(distillation: Distillation, *, metrics: MetricSums | None = None) -> Loss:
    """The loss of a batch with what its teachers say, for `forward_backward(batch, loss=...)`: a sum over learnt tokens.

    Reads batch[name], [rows, T, width], of each teacher: of `teacher_values`, or of samples that went through `teacher_call`.
    metrics: of `divergence`, over tokens and teachers, and `tokens`.
    Raises: DataError, from the loss, for a teacher of another vocabulary.
    """

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        # The dummy row of a rank without rows has labels 0: it must not count in metrics.
        logits, labels = model_logits(model, part), part["labels"].masked_fill(~learnt(part), IGNORED)
        width = distillation.width(logits.shape[-1])
        total = distillation.nll * cross_entropy(logits, labels) if distillation.nll else 0.0
        found = torch.zeros((), device=labels.device)
        for name, weight in distillation.teachers.items():
            values = part[name]
            if values.ndim == 2:  # of a rank without rows, which runs a spare one of zeros
                values = values.new_zeros(*values.shape, width)
            if values.shape[-1] != width:
                raise DataError(
                    f"distill: {name} says {values.shape[-1]} numbers of a token, and top={distillation.top} of a vocabulary "
                    f"of {logits.shape[-1]} has {width}. Teacher and student must have the same tokens."
                )
            told = distillation.unpack(values)
            divergence = token_divergences(logits, labels, told, distillation.divergence).sum()
            total = total + weight * distillation.divergence.temperature**2 * divergence
            found = found + divergence.detach()
        if metrics is not None:
            metrics.add(divergence=found, tokens=(labels != IGNORED).sum())
        assert isinstance(total, Tensor)
        return total

    return loss
