"""Reward model as a scorer: one score for each sequence, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshkit.algos.rewards._score import Scores, Unscored
from meshkit.algos.rollout import model_inputs, token_values
from meshkit.data.bins import build_rows, first_fit_decreasing
from meshkit.data.examples import Example
from meshkit.errors import DataError
from meshkit.step import Run


def model_scores(
    run: Run, sequences: Sequence[np.ndarray], *, seq_len: int, microbatches: int = 1, truncated: Sequence[bool] = ()
) -> Scores:
    """The score of each sequence at its last token, by a model that returns a score for each token, as `RewardModel`.

    sequences: [L] ids each, prompt and answer with its end token as they were sampled, of this data rank; may be none.
    They are packed into rows of seq_len. truncated: if given, sequences that never ended, which get no score.
    Every rank of the run must call it, ranks of a data rank with the same sequences. Wire: as `token_values`.
    Raises: DataError, before anything is sent, for a sequence longer than seq_len.
    """
    longest = max(map(len, sequences), default=0)
    if longest > seq_len:
        raise DataError(f"model_scores: a sequence has {longest} tokens, but a row holds seq_len={seq_len}. Give more.")
    # All tokens are labels, so that the score of the last one is among the values.
    examples = [Example(ids=ids, learn=np.ones(len(ids), dtype=bool)) for ids in sequences]
    bins = first_fit_decreasing([len(ids) for ids in sequences], seq_len)
    batch = build_rows([[examples[index] for index in row] for row in bins], length=seq_len)
    scores_BT = token_values(run, batch, _token_scores, microbatches=microbatches).cpu()
    at_ends = scores_BT[batch["ends"] == 1]  # row by row, the order in which examples were packed
    values: list[float | np.ndarray | Unscored] = [0.0] * len(sequences)
    for index, value in zip((index for row in bins for index in row), at_ends.tolist(), strict=True):
        # A score that overflowed in bf16 would make the mean of its whole group infinite.
        finite = bool(torch.isfinite(torch.tensor(value)))
        values[index] = value if finite else Unscored(kind="not finite", text=f"the reward model gives {value}")
    for index in np.flatnonzero(truncated).tolist():
        values[index] = Unscored(kind="no score", text="the answer was stopped by its length")
    return Scores(values=tuple(values))


def _token_scores(model: nn.Module, part: dict[str, Any]) -> Tensor:
    scores: Tensor = model(**model_inputs(part))
    return scores
