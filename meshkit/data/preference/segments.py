"""Segments of a packed batch (its examples), taken out by number and packed into rows of their own.

Legend: B rows of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshkit.data.bins import first_fit_decreasing
from meshkit.data.text.packing import IGNORED
from meshkit.errors import DataError

Batch = dict[str, torch.Tensor]


def take_segments(batch: Batch, numbers: Iterable[int]) -> Batch:
    """The examples with these `segment_ids`, packed into as few rows of the same length T as first-fit-decreasing finds.

    All tensors of the batch are [B, T] and go along; the examples are numbered anew, from 1 on.
    """
    segment_ids_BT = batch["segment_ids"]
    length = segment_ids_BT.shape[1]
    tokens_of_segment = [
        (segment_ids_BT == number).nonzero() for number in numbers
    ]  # [L, 2] each, of one row, side by side
    bins = first_fit_decreasing([len(token_indices) for token_indices in tokens_of_segment], length)
    taken = {
        name: tensor.new_full((len(bins), length), IGNORED if name == "labels" else 0) for name, tensor in batch.items()
    }
    count = 0
    for row, indices in enumerate(bins):
        start = 0
        for index in indices:
            (old, first), stop = tokens_of_segment[index][0].tolist(), start + len(tokens_of_segment[index])
            for name, tensor in batch.items():
                taken[name][row, start:stop] = tensor[old, first : first + stop - start]
            count += 1
            taken["segment_ids"][row, start:stop] = count
            start = stop
        taken["position_ids"][row, start:] = torch.arange(length - start)  # padding is a document of its own
    return taken


def split_mismatches(batch: Batch) -> tuple[Batch, Batch]:
    """A batch of units of `with_mismatches`: (the answers, the mismatched ones), each packed into a batch of its own.

    Raises: DataError for an odd number of examples.
    """
    examples = int(batch["segment_ids"].max()) if batch["segment_ids"].numel() else 0
    if examples % 2:
        raise DataError(
            f"split_mismatches: segment_ids go up to {examples}, an odd number, so some answer has no mismatch. Build the "
            "batch from the units of `with_mismatches`."
        )
    return take_segments(batch, range(1, examples + 1, 2)), take_segments(batch, range(2, examples + 1, 2))
