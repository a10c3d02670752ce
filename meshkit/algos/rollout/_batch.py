"""The packed batch of one generation step (prefill and decode): the sequences the scheduler chose, as one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from meshkit.algos.rollout._cache import KeyValueCache
from meshkit.algos.rollout._paged import Begun, PagedAttention, Past
from meshkit.algos.rollout._scheduler import Growing, Step

SLACK_PAGES = 16  # reading up to half as many pages in vain is cheaper than one more attention call


@dataclass(frozen=True, eq=False)
class RowOfTokens:
    """inputs: of the model. slots: in the cache, of its tokens without padding. logit_tokens: positions in the row whose
    logits are read. rows: [N], which of those logits each draw reads.
    """

    inputs: dict[str, Tensor | PagedAttention]
    slots: Tensor
    logit_tokens: Tensor
    rows: Tensor


def row_of(step: Step, cache: KeyValueCache, *, multiple: int, device: torch.device) -> RowOfTokens:
    """The step's row: the tokens of groups that begin but for what is known, one of each growing sequence, padding.

    multiple: the row is padded to a multiple of so many tokens, and has at least one such multiple.
    """
    page_tokens = cache.page_tokens
    ids = [begin.group.tokens[begin.known :] for begin in step.begins]
    lengths = [len(prompt) for prompt in ids]
    positions = [np.arange(begin.known, len(begin.group.tokens)) for begin in step.begins]
    slots = [
        begin.table[position // page_tokens] * page_tokens + position % page_tokens
        for begin, position in zip(step.begins, positions, strict=True)
    ]
    ids.append(np.array([sequence.answer.ids[-1] for sequence in step.grows], np.int64))
    # The scheduler has counted the new token already: its place is the last of those in the cache.
    last = np.array([sequence.cached - 1 for sequence in step.grows], np.int64)
    positions.append(last)
    pages = np.array(
        [sequence.table[position // page_tokens] for sequence, position in zip(step.grows, last, strict=True)], np.int64
    )
    slots.append(pages * page_tokens + last % page_tokens)

    def row(parts: list[np.ndarray]) -> Tensor:
        tokens = np.concatenate(parts)
        padding = -len(tokens) % multiple if len(tokens) else multiple
        return rearrange(torch.from_numpy(np.pad(tokens, (0, padding))).to(device), "t -> 1 t")

    mask = PagedAttention(
        cache,
        torch.from_numpy(np.concatenate(slots)).to(device),
        [
            Begun(length, begin.known, torch.from_numpy(begin.table).to(device) if begin.known else None)
            for begin, length in zip(step.begins, lengths, strict=True)
        ],
        _past(step.grows, page_tokens, device),
    )
    # Logits are read at the last token of each prompt and at each growing token; the others' are never computed.
    ends = np.concatenate([np.cumsum(lengths, dtype=np.int64) - 1, sum(lengths) + np.arange(len(step.grows))])
    # The samples of a prompt draw from one row of logits, each with its own stream.
    rows = np.repeat(np.arange(len(ends)), step.draws_per_row)
    return RowOfTokens(
        {"input_ids": row(ids), "position_ids": row(positions), "mask": mask},
        mask.slots,
        torch.from_numpy(ends).to(device),
        torch.from_numpy(rows).to(device),
    )


def _past(grows: Sequence[Growing], page_tokens: int, device: torch.device) -> list[Past]:
    """Blocks of sequences (sorted by length) whose longest is at most about 1.5 times as long as the shortest.

    Attention over a block reads all its sequences to the length of the longest; what it reads beyond a shorter one is waste.
    """
    blocks, first = [], 0
    pages = [-(-sequence.cached // page_tokens) for sequence in grows]
    while first < len(grows):
        after = first + 1
        while after < len(grows) and 2 * pages[after] <= 3 * pages[first] + SLACK_PAGES:
            after += 1
        block, width = grows[first:after], pages[after - 1]
        tables = np.stack([sequence.table[:width] for sequence in block])
        lengths = torch.tensor([sequence.cached for sequence in block]).to(device)
        blocks.append(Past(torch.from_numpy(tables).to(device), lengths, block[-1].cached))
        first = after
    return blocks
