"""A teacher: its log-probabilities of a batch on the student's mesh, or a call of a dataflow on a mesh of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from meshkit.algos.dataflow import ROLLOUT, Call, Sample, rollout_of
from meshkit.algos.distill._distillation import Distillation
from meshkit.algos.rollout import example_values, model_logits, token_values
from meshkit.errors import PlanError
from meshkit.loss import top_log_probs
from meshkit.loss.linear_logits import head_of
from meshkit.step import Batch, Run


def teacher_values(run: Run, batch: Batch, distillation: Distillation, *, microbatches: int = 1) -> Tensor:
    """What the teacher says of each prediction of the batch, [rows, T, width], for the entry of its name in that batch.

    Every rank must call it. Wire: that of `token_values` with this width, and of `top_log_probs`.
    """
    told = partial(_told, distillation=distillation)
    return token_values(run, batch, told, microbatches=microbatches, width=distillation.width(vocabulary_of(run)))


def teacher_call(
    name: str, run: Run | None, distillation: Distillation, *, on: str, seq_len: int, microbatches: int = 1
) -> Call:
    """The call that adds `name`, what a teacher says of each token of a rollout, [L, width]. It may run ahead of training.

    run: the teacher, None on ranks without it. Its ids must be the student's.
    """

    def tell(samples: list[Sample]) -> list[Sample]:
        assert run is not None
        examples = [rollout_of(sample).example() for sample in samples]
        options = {"seq_len": seq_len, "microbatches": microbatches, "width": distillation.width(vocabulary_of(run))}
        values = example_values(run, examples, partial(_told, distillation=distillation), **options)
        return [{**sample, name: value} for sample, value in zip(samples, values, strict=True)]

    return Call(name=name, on=on, function=tell, needs=ROLLOUT, gives=[name])


def vocabulary_of(run: Run) -> int:
    """Tokens of the model's head. Raises: PlanError for a model without a linear one."""
    model = run.resolved.program.model
    head = model.get_submodule(head_of(model, run.plan, asked="distill"))
    if not isinstance(head, nn.Linear):
        raise PlanError(
            f"distill: the head of {type(model).__name__} is a {type(head).__name__}. Give it a Linear one."
        )
    return head.out_features


def _told(model: nn.Module, part: dict[str, Any], *, distillation: Distillation) -> Tensor:
    logits = model_logits(model, part)
    top = None if distillation.top is None else min(distillation.top, logits.shape[-1])
    return distillation.pack(top_log_probs(logits, top, temperature=distillation.divergence.temperature))
