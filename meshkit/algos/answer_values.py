"""A number of a model for each token of given examples, wherever they were packed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshkit.algos.policy_answers import learnt
from meshkit.algos.token_values import token_values
from meshkit.data.bins import build_rows, first_fit_decreasing
from meshkit.data.examples import Example
from meshkit.step import Run


def answer_values(
    run: Run,
    examples: Sequence[Example],
    function: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    seq_len: int,
    microbatches: int = 1,
) -> list[np.ndarray]:
    """function(model, part), [rows, T] at each label, of each example: [L] fp64, 0 at tokens that are not learnt.

    examples: of this data rank, which may have none. Put them into batches with `with_values`; on other meshes too.
    Every rank must call it. Wire: `token_values`.
    """
    bins = first_fit_decreasing([len(example) for example in examples], seq_len)
    plain = [replace(example, token_values={}, scalars={}) for example in examples]
    batch = build_rows([[plain[index] for index in row] for row in bins], length=seq_len)
    found = token_values(run, batch, function, microbatches=microbatches).cpu().numpy()
    segments, labels = batch["segment_ids"].numpy(), learnt(batch).numpy()
    values = [np.zeros(len(example)) for example in examples]
    for number, index in enumerate((index for row in bins for index in row), start=1):  # as segment_ids count them
        learns = examples[index].learn.copy()
        learns[0] = False  # the first token of a sequence is no label
        values[index][learns] = found[labels & (segments == number)]
    return values


def with_values(example: Example, values: Mapping[str, np.ndarray]) -> Example:
    """The example with more numbers of its tokens, [L] each."""
    return replace(example, token_values={**example.token_values, **values})
