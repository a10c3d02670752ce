"""The packed batch of one generation step (prefill and decode): the sequences the scheduler chose, as one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from meshkit.algos.rollout._blocks import SLACK_PAGES, Growing
from meshkit.algos.rollout._cache import KeyValueCache, Places
from meshkit.algos.rollout._paged import Apart, Begun, PagedAttention, Past, SideBySide
from meshkit.algos.rollout._scheduler import Step


@dataclass(frozen=True, eq=False)
class RowOfTokens:
    """inputs: of the model. logit_tokens: positions in the row whose logits are read, None for all of them. rows: [N], which
    of those logits each draw reads, None for each its own.
    """

    ids: Tensor
    positions: Tensor
    mask: PagedAttention
    logit_tokens: Tensor | None
    rows: Tensor | None

    @property
    def inputs(self) -> dict[str, Tensor | PagedAttention]:
        return {"input_ids": self.ids, "position_ids": self.positions, "mask": self.mask}

    def go_on(self, drawn_N: Tensor) -> RowOfTokens:
        """The next step of growing sequences alone, without padding: each has the token that was drawn for it."""
        self.mask.go_on()
        return replace(self, ids=drawn_N.unsqueeze(0), positions=self.positions + 1)


def row_of(step: Step, cache: KeyValueCache, *, multiple: int, device: torch.device) -> RowOfTokens:
    """The step's row: the tokens of groups that begin but for what is known, one of each growing sequence, padding.

    multiple: the row is padded to a multiple of so many tokens, and has at least one such multiple.
    """
    page_tokens = cache.page_tokens
    ids = [begin.group.tokens[begin.known :] for begin in step.begins]
    lengths = [len(prompt) for prompt in ids]
    positions = [np.arange(begin.known, len(begin.group.tokens)) for begin in step.begins]
    spans = [span for begin in step.begins for span in begin.spans]
    ids.append(np.array([sequence.answer.ids[-1] for sequence in step.grows], np.int64))
    # The scheduler has counted the new token already: its place is the last of those in the cache.
    positions.append(np.array([sequence.cached - 1 for sequence in step.grows], np.int64))
    for sequence in step.grows:
        spans += sequence.spans(sequence.cached - 1, sequence.cached, page_tokens)

    def row(parts: list[np.ndarray]) -> Tensor:
        tokens = np.concatenate(parts)
        padding = -len(tokens) % multiple if len(tokens) else multiple
        return rearrange(torch.from_numpy(np.pad(tokens, (0, padding))).to(device), "t -> 1 t")

    mask = PagedAttention(
        cache,
        Places.of(spans, device),
        [
            Begun(length, begin.known, torch.from_numpy(begin.table).to(device) if begin.known else None)
            for begin, length in zip(step.begins, lengths, strict=True)
        ],
        _past(step.grows, page_tokens, device),
    )
    if step.grows and not step.begins and multiple == 1:
        return RowOfTokens(row(ids), row(positions), mask, None, None)
    # Logits are read at the last token of each prompt and at each growing token; the others' are never computed.
    ends = np.concatenate([np.cumsum(lengths, dtype=np.int64) - 1, sum(lengths) + np.arange(len(step.grows))])
    # The samples of a prompt draw from one row of logits, each with its own stream.
    rows = np.repeat(np.arange(len(ends)), step.draws_per_row)
    return RowOfTokens(
        row(ids), row(positions), mask, torch.from_numpy(ends).to(device), torch.from_numpy(rows).to(device)
    )


def _past(grows: Sequence[Growing], page_tokens: int, device: torch.device) -> list[Past]:
    """The blocks of the sequences, and of those apart others, whose longest is at most about 1.5 times as long as the
    shortest.

    Attention reads all sequences of one to the length of the longest; what it reads beyond a shorter one is waste.
    """
    past: list[Past] = []
    for block, of_block in groupby(grows, lambda sequence: sequence.block):
        sequences = list(of_block)
        if block is None:
            past += _apart(sequences, page_tokens, device)
        else:
            places = SideBySide(len(sequences), block.first * page_tokens, block.stride * page_tokens)
            past.append(Past(places, [sequence.cached for sequence in sequences], device))
    return past


def _apart(grows: Sequence[Growing], page_tokens: int, device: torch.device) -> list[Past]:
    blocks, first = [], 0
    pages = [-(-sequence.cached // page_tokens) for sequence in grows]
    while first < len(grows):
        after = first + 1
        while after < len(grows) and 2 * pages[after] <= 3 * pages[first] + SLACK_PAGES:
            after += 1
        block, width = grows[first:after], pages[after - 1]
        tables = np.stack([sequence.table[:width] for sequence in block])
        places = Apart(torch.from_numpy(tables).to(device), page_tokens)
        blocks.append(Past(places, [sequence.cached for sequence in block], device))
        first = after
    return blocks
