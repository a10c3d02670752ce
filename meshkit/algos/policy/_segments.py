"""Segment index ("segment sum"): from numbers of tokens to sums and means of answers, and from answers back to tokens.

Dims: A answers; `...` any shape of tokens of this rank, rows of packed answers or one answer a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.algos.preference import packed_logps, whole_sequences
from meshkit.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentIndex:
    """Where the tokens of A answers are: packed into rows, split over cp, or in other microbatches.

    mask: [...] bool, True on the tokens that the policy wrote. index: [...] int64, the answer of each token, 0 to A - 1;
    where masked anything in that range. count: A, the same on every rank of `axis`.
    axis: the ranks that share the answers' tokens (cp); None where this rank has all of them.
    """

    mask: Tensor
    index: Tensor
    count: int
    axis: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.mask.shape != self.index.shape:
            raise DataError(
                f"SegmentIndex: mask {tuple(self.mask.shape)} and index {tuple(self.index.shape)} differ. Both have one a "
                "token."
            )

    @staticmethod
    def of_rows(mask_AT: Tensor) -> SegmentIndex:
        """The index of unpacked rows: one whole answer in each row [A, T]."""
        rows_A = torch.arange(len(mask_AT), device=mask_AT.device)
        index_AT = repeat(rows_A, "a -> a t", t=mask_AT.shape[1])
        return SegmentIndex(mask=mask_AT.bool(), index=index_AT, count=len(mask_AT))

    def sums(self, *values: Tensor) -> list[Tensor]:
        """Each of the values [...] summed over the tokens of each answer; [A] fp64, with the gradient.

        Wire: with an axis, one all-reduce of [values, A] forward, and one backward where a value has a gradient.
        """
        # `...` may be no dim at all, which "... -> 1 (...)" makes one row of one token.
        as_row = "... -> 1 (...)"
        mask, index = rearrange(self.mask, as_row), rearrange(self.index, as_row)
        local_sums = torch.stack(
            [packed_logps(rearrange(value.double(), as_row), mask, index, self.count) for value in values]
        )
        # See [Note: sums over cp, forward and backward] in preference/_tokens.py. Stacked: one message for all values.
        return list((local_sums if self.axis is None else whole_sequences(local_sums, self.axis)).unbind())

    def means(self, values: Tensor) -> Tensor:
        """The mean over the tokens of each whole answer; [A] fp64, 0 for an answer without tokens."""
        return self.sums(values)[0] / self.lengths.clamp(min=1)

    def spread(self, values_A: Tensor) -> Tensor:
        """Give each token the value of its answer; [...]."""
        # A gather: its backward adds the gradients of an answer's tokens up, as the sum over them needs.
        return values_A[self.index]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens that the policy wrote in each whole answer, over all ranks of `axis`; [A] fp64."""
        return self.sums(self.mask.double())[0]

    def only(self, values: Tensor) -> Tensor:
        """fp64 values [...], 0 where masked; NaN there too becomes 0."""
        return torch.where(self.mask, values.double(), 0.0)


def refuse_other_shapes(what: str, answers: SegmentIndex, values: Sequence[tuple[str, Tensor | None]]) -> None:
    """Raises: DataError for values that do not have one number for each token."""
    for name, value in values:
        if value is not None and value.shape != answers.mask.shape:
            raise DataError(
                f"{what}: {name} {tuple(value.shape)}, but there are {tuple(answers.mask.shape)} tokens. Give one number "
                "for each token; `answers.spread` makes them of numbers for each answer."
            )
