"""Reward model as a scorer: one score for each sequence, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshkit.algos.rewards._score import Scores, Unscored
from meshkit.algos.rollout import answer_work, balance_examples, token_values
from meshkit.data.examples import Example
from meshkit.step import Run, model_inputs


def model_scores(
    run: Run,
    sequences: Sequence[np.ndarray],
    *,
    tokens_per_microbatch: int,
    microbatches: int = 1,
    truncated: Sequence[bool] = (),
) -> Scores:
    """The score of each sequence at its last token, by a model that returns a score for each token, as `RewardModel`.

    sequences: [L] ids each, prompt and answer with its end token as they were sampled, of this data rank; may be none.
    They are computed where `balance_examples` puts them, in microbatches of its sizes.
    truncated: if given, sequences that never ended, which get no score.
    Every rank of the run must call it, ranks of a data rank with the same sequences. Wire: as `example_values`.
    Raises: DataError, on every rank, for a sequence longer than a microbatch.
    """
    examples = [Example(ids=ids, learn=np.ones(len(ids), dtype=bool)) for ids in sequences]
    sizes: dict[str, Any] = {"tokens_per_microbatch": tokens_per_microbatch, "microbatches": microbatches}
    balanced = balance_examples(run.mesh, examples, **sizes, work=answer_work(run), packed=run.keeps_documents)
    scores_BT = token_values(run, balanced.batch, _token_scores, microbatches=balanced.microbatches)
    values: list[float | np.ndarray | Unscored] = [0.0] * len(sequences)
    for index, by_place in enumerate(balanced.back(scores_BT)):
        value = float(by_place[-1])
        # A score that overflowed in bf16 would make the mean of its whole group infinite.
        finite = bool(torch.isfinite(torch.tensor(value)))
        values[index] = value if finite else Unscored(kind="not finite", text=f"the reward model gives {value}")
    for index in np.flatnonzero(truncated).tolist():
        values[index] = Unscored(kind="no score", text="the answer was stopped by its length")
    return Scores(values=tuple(values))


def _token_scores(model: nn.Module, part: dict[str, Any]) -> Tensor:
    scores: Tensor = model(**model_inputs(model, part))
    return scores
