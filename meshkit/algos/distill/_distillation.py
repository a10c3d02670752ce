"""What a student learns of which teachers, and how what they say of a token travels: as one row of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshkit.errors import PlanError
from meshkit.loss import Divergence, Teacher


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The sum over teachers of weight x temperature^2 x divergence, plus `nll` x the cross-entropy of the labels.

    top: tokens of each prediction that a teacher tells of, the rest being one outcome; None: the whole vocabulary, which
    travels as so many numbers a token. teachers: weight of each by the name that its numbers have in a batch.
    Raises: PlanError for no teacher, or numbers out of range.
    """

    divergence: Divergence = field(default_factory=Divergence)
    top: int | None = 64
    teachers: Mapping[str, float] = field(default_factory=lambda: {"teacher": 1.0})
    nll: float = 0.0

    def __post_init__(self) -> None:
        if not self.teachers or not all(weight > 0 for weight in self.teachers.values()):
            raise PlanError(f"Distillation: teachers={dict(self.teachers)}. Give at least one, with a positive weight.")
        if (self.top is not None and self.top < 1) or self.nll < 0:
            raise PlanError(
                f"Distillation(top={self.top}, nll={self.nll}): give at least 1 token, and no negative weight."
            )

    def width(self, vocabulary: int) -> int:
        """How many numbers a teacher says of a token."""
        return vocabulary if self.top is None else 2 * min(self.top, vocabulary) + 1

    def pack(self, teacher: Teacher) -> Tensor:
        """[..., width] fp64, which holds ids exactly."""
        if teacher.ids is None or teacher.rest is None:
            return teacher.log_probs.double()
        return torch.cat([teacher.ids, teacher.log_probs.double(), teacher.rest.double().unsqueeze(-1)], dim=-1)

    def unpack(self, values: Tensor) -> Teacher:
        """What was packed."""
        if self.top is None:
            return Teacher(values)
        ids, log_probs = values[..., :-1].chunk(2, dim=-1)
        return Teacher(log_probs, ids.long(), values[..., -1])
