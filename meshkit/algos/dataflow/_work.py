"""Work of a call, as data: which model it runs, on how many tokens; what a searched plan is priced from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshkit.errors import PlanError

Kind = Literal["generate", "infer", "train"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call does with one model in an iteration, over all ranks.

    model: its name. kind: "generate" writes `new` tokens after each prompt, "infer" runs a forward over both, "train" a
    forward and a backward. rows: sequences. prompt, new: tokens of each. minibatches: optimizer steps of a pass over the
    rows; passes: over all of them (PPO epochs).
    Raises: PlanError for a kind that there is not, and for numbers below 1.
    """

    model: str
    kind: Kind
    rows: int
    prompt: int
    new: int
    minibatches: int = 1
    passes: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise PlanError(f"Work(kind={self.kind!r}): choose one of {', '.join(get_args(Kind))}.")
        for name in ("rows", "prompt", "new", "minibatches", "passes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"Work({name}={value!r}) of {self.model!r}: give a whole number of at least 1.")
        if self.minibatches > self.rows:
            raise PlanError(
                f"Work(minibatches={self.minibatches}) of {self.model!r} with rows={self.rows}: a minibatch has at least one "
                "row. Give fewer minibatches."
            )

    @property
    def tokens(self) -> int:
        """Of a row, prompt and answer."""
        return self.prompt + self.new
