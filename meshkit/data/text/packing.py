"""Packing (sequence packing) of documents into samples of one length, with document boundaries. A pure function.

The documents of a token file lie end to end, each `[bos] text eos`. Sample i sees the seq_len + 1 tokens from
i * seq_len on; neighbours share one token, so that every token but the very first is a label in exactly one sample.
Legend: T = seq_len.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from meshkit.data.text.tokens import Tokens, read_ids
from meshkit.errors import DataError

IGNORED = -100
"""the label that no loss counts; torch's own default"""


def sample_count(tokens: Tokens, seq_len: int, *, last: Literal["drop", "pad"] = "drop") -> int:
    """How many samples a token file makes.

    last: "drop" leaves out the labels that do not fill a sample, "pad" makes them one more, padded, sample.
    Raises: DataError if seq_len < 1 or if there is no sample.
    """
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len}: a sample needs at least 1 token. Give seq_len >= 1.")
    labels = len(tokens.ids) - 1
    count = labels // seq_len if last == "drop" else -(-labels // seq_len)
    if count < 1:
        needed = seq_len + 1 if last == "drop" else 2
        raise DataError(
            f"{tokens.path}: has {len(tokens.ids)} tokens, but one sample of seq_len={seq_len} takes {needed}. "
            "Use more text or a smaller seq_len."
        )
    return count


def pack_sample(tokens: Tokens, index: int, *, seq_len: int, documents: bool = True) -> dict[str, torch.Tensor]:
    """Sample `index` of a token file: input_ids [T], labels [T] (already shifted) and position_ids [T], all int64.

    documents=True keeps documents apart: positions restart at 0 at each document (and at the start of the sample),
    and no label crosses into the next document. documents=False is one stream: no position_ids, every label counts.
    Where the tokens end before the sample does, it is padded: inputs 0, labels -100, positions from 0 again.
    Raises: DataError for an id outside the vocabulary.
    """
    return {name: rows[0] for name, rows in pack_batch(tokens, [index], seq_len=seq_len, documents=documents).items()}


def pack_batch(tokens: Tokens, indices: list[int], *, seq_len: int, documents: bool = True) -> dict[str, torch.Tensor]:
    """The samples of `indices` as rows, [B, T] each; no index makes tensors [0, T].

    An index past the last sample makes a row of padding, whose labels are all -100.
    """
    shape = len(indices), seq_len
    inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    batch = {"input_ids": inputs, "labels": labels}
    if documents:
        batch["position_ids"] = np.tile(np.arange(seq_len), (len(indices), 1))
    for row, index in enumerate(indices):
        start = index * seq_len
        window = read_ids(tokens, start, start + seq_len + 1)
        inputs[row, : len(window)] = window[:seq_len]
        labels[row, : max(len(window) - 1, 0)] = window[1:]
        if documents:
            # Documents that begin at 1 to T. One at 0 has position 0 anyway, and its first token is the last label of the
            # sample before. One at T masks that label and restarts no position.
            first, after = np.searchsorted(tokens.offsets, [start + 1, start + seq_len + 1])
            starts = np.asarray(tokens.offsets)[first:after] - start  # the end of the tokens starts the padding
            labels[row, starts - 1] = IGNORED
            restarts = starts[starts < seq_len]
            if len(restarts):
                begun = np.zeros(seq_len, dtype=np.int64)
                begun[restarts] = restarts
                batch["position_ids"][row] -= np.maximum.accumulate(begun)
    return {name: torch.from_numpy(array) for name, array in batch.items()}
