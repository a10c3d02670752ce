"""A number of a model for each token of a batch, laid out as the batch is: log-probabilities of a reference, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.algos.answers import label_log_probs
from meshkit.parallel.data import after_inference
from meshkit.step import Batch, Run

PLACE = "places_of_tokens"


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
