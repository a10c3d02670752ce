"""transformers: its `generate`, one call for all answers, prompts padded on the left."""

from __future__ import annotations

from itertools import count

import numpy as np
import torch

from benchmarks.peers.turns import Turns
from benchmarks.peers.work import Answers, digest_of, transformers_decoder


@torch.no_grad()
def answer(work: Answers, turns: Turns) -> None:
    model = transformers_decoder(work.config, use_cache=True, spread=0.05).eval()
    for step in count():
        prompts = work.prompts_of(step)
        width = max(map(len, prompts))
        answers = model.generate(
            input_ids=torch.from_numpy(np.stack([np.pad(ids, (width - len(ids), 0)) for ids in prompts])),
            attention_mask=torch.stack([(torch.arange(width) >= width - len(ids)).long() for ids in prompts]),
            do_sample=False,
            max_new_tokens=work.new_tokens,
            eos_token_id=list(work.end_ids) or None,
            pad_token_id=0,
        )[:, width:]
        turns.end_step(digest_of([until_end(row.numpy(), work.end_ids) for row in answers]))


def until_end(ids: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """The answer with its end, without what follows."""
    end_positions = np.flatnonzero(np.isin(ids, ends))
    return ids[: end_positions[0] + 1] if len(end_positions) else ids
