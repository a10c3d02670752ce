"""The batch of one step: what the scheduler chose as the row of tokens that a model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshkit.algos.rollout._cache import KeyValueCache
from meshkit.algos.rollout._paged import PagedAttention, Past
from meshkit.algos.rollout._rollout import Prompt
from meshkit.algos.rollout._scheduler import Growing, Step

SLACK_PAGES = 16  # half of them more are read in vain rather than that a block more is computed


@dataclass(frozen=True, eq=False)
class RowOfTokens:
    """inputs: what a model takes. wanted: the tokens whose logits are read; rows: [N], which of them each draw reads."""

    inputs: dict[str, Tensor | PagedAttention]
    wanted: Tensor
    rows: Tensor


def row_of(
    step: Step, prompts: Sequence[Prompt], cache: KeyValueCache, *, multiple: int, device: torch.device
) -> RowOfTokens:
    """multiple: the row is padded to a multiple of so many tokens, and to one at least."""
    size = cache.page_tokens
    ids = [prompts[begin.group.prompt].ids for begin in step.begins]
    lengths = [len(prompt) for prompt in ids]
    places = [np.arange(length) for length in lengths]
    slots = [begin.table[place // size] * size + place % size for begin, place in zip(step.begins, places, strict=True)]
    ids.append(np.array([one.ids[-1] for one in step.grows], np.int64))
    last = np.array([one.held - 1 for one in step.grows], np.int64)
    places.append(last)
    pages = np.array([one.table[place // size] for one, place in zip(step.grows, last, strict=True)], np.int64)
    slots.append(pages * size + last % size)

    def row(parts: list[np.ndarray]) -> Tensor:
        whole = np.concatenate(parts)
        padding = -len(whole) % multiple if len(whole) else multiple
        return torch.from_numpy(np.pad(whole, (0, padding))).to(device).unsqueeze(0)

    mask = PagedAttention(
        cache, torch.from_numpy(np.concatenate(slots)).to(device), lengths, _past(step.grows, size, device)
    )
    ends = np.concatenate([np.cumsum(lengths, dtype=np.int64) - 1, sum(lengths) + np.arange(len(step.grows))])
    rows = np.repeat(np.arange(len(ends)), step.draws_per_row)
    return RowOfTokens(
        {"input_ids": row(ids), "position_ids": row(places), "mask": mask},
        torch.from_numpy(ends).to(device),
        torch.from_numpy(rows).to(device),
    )


def _past(grows: Sequence[Growing], page_tokens: int, device: torch.device) -> list[Past]:
    """In blocks whose longest is about half as long again as the shortest: what is read beyond a length is in vain."""
    found, first = [], 0
    pages = [-(-one.held // page_tokens) for one in grows]
    while first < len(grows):
        after = first + 1
        while after < len(grows) and 2 * pages[after] <= 3 * pages[first] + SLACK_PAGES:
            after += 1
        block, width = grows[first:after], pages[after - 1]
        tables = np.stack([one.table[:width] for one in block])
        lengths = torch.tensor([one.held for one in block]).to(device)
        found.append(Past(torch.from_numpy(tables).to(device), lengths, block[-1].held))
        first = after
    return found
