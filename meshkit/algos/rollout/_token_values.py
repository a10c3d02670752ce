"""A number of a model for each token: log-probabilities of the policy and of a reference model, values of a critic.

`token_values` of a batch, laid out as the batch is; `example_values` of examples, wherever they were packed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.data.bins import build_rows, first_fit_decreasing
from meshkit.data.examples import Example
from meshkit.loss import IGNORED, token_log_probs
from meshkit.parallel.data import after_inference
from meshkit.step import Batch, Run

REFERENCE = "reference_log_probs"
"""the name under which a batch holds the reference model's log-probability of each label"""
PLACE = "places_of_tokens"


def model_inputs(part: dict[str, Any]) -> dict[str, Any]:
    """What of a part the model itself takes."""
    return {name: part[name] for name in ("input_ids", "position_ids", "mask") if name in part}


def model_logits(model: nn.Module, part: dict[str, Any]) -> Any:
    """The model's logits of a part, of models that return them alone or with more."""
    output = model(**model_inputs(part))
    return getattr(output, "logits", output)


def label_log_probs(model: nn.Module, part: dict[str, Any], *, temperature: float = 1.0) -> Tensor:
    """The log-probability of each label, 0 where it is ignored; [rows, T] of this rank's tokens."""
    return token_log_probs(model_logits(model, part), part["labels"], temperature=temperature).log_probs


def learnt(part: dict[str, Any]) -> Tensor:
    """[B, T] bool: the labels that the policy wrote. A row that only stands in for no rows has none."""
    mask: Tensor = (part["labels"] != IGNORED) & (part["segment_ids"] > 0)
    return mask


@torch.no_grad()
def token_values(
    run: Run,
    batch: Batch,
    function: Callable[[nn.Module, dict[str, Any]], Tensor] = label_log_probs,
    *,
    microbatches: int = 1,
) -> Tensor:
    """function(model, part), [rows, T] of a part's tokens, for all tokens of the rank's batch: [rows, T] fp64, in its order.

    default: the log-probability of each label. The same on ranks of one data rank, those of other stages too.
    Every rank must call it. Wire: forward passes; with cp an all-reduce of [rows, T] over it, with pp one too.
    """
    rows, tokens = batch["input_ids"].shape
    # Each token carries its place through whatever splits and reorders tokens; 0 is what they are padded with.
    places = torch.arange(1, rows * tokens + 1, device=batch["input_ids"].device).view(rows, tokens)
    found = torch.zeros(rows * tokens + 1, dtype=torch.float64, device=run.mesh.device)
    training = run.model.training
    run.model.eval()
    for part, weight in run.parts({**batch, PLACE: places}, microbatches):
        places_of_part = part.pop(PLACE)
        values = run.infer(part, function)
        if values is not None and weight:
            found[places_of_part.flatten()] = values.double().flatten()
    run.model.train(training)
    after_inference(run.model)
    for axis in (run.mesh["cp"], run.mesh["pp"]):
        if axis.size() > 1:
            dist.all_reduce(found, group=axis.get_group())
    return found[1:].view(rows, tokens)


def example_values(
    run: Run,
    examples: Sequence[Example],
    function: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    seq_len: int,
    microbatches: int = 1,
) -> list[np.ndarray]:
    """function(model, part), [rows, T] at each label, of each example: [L] fp64, 0 at tokens that are not learnt.

    examples: of this data rank, which may have none. They go into `Example.token_values` or `Rollout.values`.
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
