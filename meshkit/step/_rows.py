"""Rows of a batch: its microbatches, and what stands for one without rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshkit.errors import DataError
from meshkit.mask import Mask
from meshkit.step._loss import Batch


def refuse_odd_rows(batch: Batch, mask: Mask | Sequence[Mask] | None) -> None:
    rows = {name: tensor.shape[0] for name, tensor in batch.items()}
    if len(set(rows.values())) > 1:
        raise DataError(f"batch: the tensors have different numbers of rows: {rows}. The first dim is the row.")
    if not isinstance(mask, Mask | None) and rows and len(mask) != next(iter(rows.values())):
        raise DataError(
            f"batch: {len(mask)} masks for {next(iter(rows.values()))} rows. Give one Mask, or one for each row."
        )


def refuse_microbatches(count: int) -> None:
    """Raises: DataError for a number of microbatches that is no whole number of at least 1."""
    if type(count) is not int or count < 1:
        raise DataError(f"microbatches={count!r}: a step has a whole number of microbatches, at least 1.")


def split_rows(batch: Batch, parts: int) -> Iterator[Batch]:
    """The batch in `parts` runs of consecutive rows. Their lengths differ by at most one; with few rows some are empty."""
    refuse_microbatches(parts)
    split = {name: tensor.tensor_split(parts) for name, tensor in batch.items()}
    return ({name: pieces[index] for name, pieces in split.items()} for index in range(parts))


def spare_row(name: str, tensor: Tensor, batch: Batch) -> Tensor:
    """Of a microbatch without rows."""
    if name == "attention_mask":  # attention to nothing would be NaN
        return tensor.new_ones((1, *tensor.shape[1:]))
    row = tensor.new_zeros((1, *tensor.shape[1:]))
    if "input_ids" in batch or not tensor.is_floating_point():
        return row
    return tensor[:1] if len(tensor) else row.normal_(generator=torch.Generator(row.device).manual_seed(0))
