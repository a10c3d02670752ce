"""Token-level numbers of a model: log-probabilities of the policy or of a reference model, values of a critic.

`token_values` are those of a batch, in its layout; `example_values` those of examples, which are packed to compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

from meshkit.algos.rollout._balanced import answer_work, balance_examples
from meshkit.core.evaluating import evaluating
from meshkit.data.examples import Example
from meshkit.loss import IGNORED, token_log_probs
from meshkit.moe.replay import ROUTING, replaying
from meshkit.parallel.data import after_inference
from meshkit.step import Batch, Run, model_inputs

REFERENCE = "reference_log_probs"
"""the name under which a batch holds the reference model's log-probability of each label"""
TOKEN_INDEX = "token_index"


def model_logits(model: nn.Module, part: dict[str, Any], *, replay: bool = False) -> Any:
    """The model's logits of a microbatch, also of models that return an object with `logits`.

    replay: routers use the experts of the part's `routing`, if it has any; see `meshkit.moe.replay`.
    """
    with replaying(model, part.get(ROUTING) if replay else None):
        output = model(**model_inputs(model, part))
    return getattr(output, "logits", output)


def label_log_probs(
    model: nn.Module, part: dict[str, Any], *, temperature: float = 1.0, replay: bool = False
) -> Tensor:
    """The log-probability of each label, 0 where ignored; [rows, T] of this rank's tokens. replay: as of `model_logits`."""
    logits = model_logits(model, part, replay=replay)
    return token_log_probs(logits, part["labels"], temperature=temperature).log_probs


def learnt(part: dict[str, Any]) -> Tensor:
    """[B, T] bool: the labels that the policy wrote. The dummy row of a rank without rows has none."""
    mask: Tensor = (part["labels"] != IGNORED) & (part["segment_ids"] > 0)
    return mask


@torch.no_grad()
def token_values(
    run: Run,
    batch: Batch,
    function: Callable[[nn.Module, dict[str, Any]], Tensor] = label_log_probs,
    *,
    microbatches: int = 1,
    width: int | None = None,
) -> Tensor:
    """Compute function(model, part) -> [rows, T] for all tokens of the rank's batch, without gradients.

    function: default, the log-probability of each label; `part` is a microbatch, with cp this rank's tokens of it.
    width: of a function that returns [rows, T, width], as this then does.
    Returns [rows, T] fp64 in the order of the batch, the same on all ranks of a data rank, also those of other stages.
    Every rank must call it. Wire: forward passes; with cp an all-reduce of [rows, T] over it, with pp one too; for a function
    that is not of meshkit one of a few numbers over the mesh.
    Raises: PlanError, on every rank, in the first call of a function of one's own that mixes tokens or rows, of which it gets
    a part, or of which that cannot be tried and is not vouched for by `mk.step.additive`.
    """
    return values_of_parts(run, batch, function, microbatches=microbatches, width=width)


def values_of_parts(
    run: Run,
    batch: Batch,
    function: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    microbatches: int,
    width: int | None = None,
    around: Callable[[Tensor, float], AbstractContextManager[None]] = lambda numbers, weight: nullcontext(),
) -> Tensor:
    """`token_values`. around(number of each token, weight): entered around each forward; padding has number 0."""
    rows, tokens = batch["input_ids"].shape
    # Microbatches and cp split and reorder tokens. So each token carries its index in the batch along; 0 marks padding, and
    # element 0 collects what padding gives.
    index_BT = rearrange(
        torch.arange(1, rows * tokens + 1, device=batch["input_ids"].device), "(b t) -> b t", b=rows, t=tokens
    )
    dims = () if width is None else (width,)
    values = torch.zeros(rows * tokens + 1, *dims, dtype=torch.float64, device=run.mesh.device)
    numbered = {**batch, TOKEN_INDEX: index_BT}
    run.refuse_mixing("token_values", numbered, function, index=TOKEN_INDEX, microbatches=microbatches)
    with evaluating(run.model):  # no dropout
        for part, weight in run.parts(numbered, microbatches):
            index_of_part = part.pop(TOKEN_INDEX)
            with around(index_of_part, weight):
                values_of_part = run.infer(part, function)
            # None on stages of pp but the last. Weight 0 marks the dummy row of a rank with fewer rows than others.
            if values_of_part is not None and weight:
                values[index_of_part.flatten()] = values_of_part.double().flatten(0, 1)
    # FSDP frees gathered parameters in backward, which does not come. The next step would compute with these old copies.
    after_inference(run.model)
    for axis in (run.mesh["cp"], run.mesh["pp"]):
        if axis.size() > 1:
            dist.all_reduce(values, group=axis.get_group())  # each rank holds 0 for the tokens of others
    return rearrange(values[1:], "(b t) ... -> b t ...", b=rows, t=tokens)


def example_values(
    run: Run,
    examples: Sequence[Example],
    function: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    tokens_per_microbatch: int,
    microbatches: int = 1,
    width: int | None = None,
) -> list[np.ndarray]:
    """Compute function(model, part) -> [rows, T] at each label of each example: [L] fp64, 0 at tokens that are not learnt.

    width: of a function that returns [rows, T, width]: the values are then [L, width].
    examples: of this data rank, which may have none; they are computed where `balance_examples` puts them, with the same
    sizes of microbatches. The results go into `Example.token_values` or `Rollout.values`.
    Every rank must call it. Wire: `balance_examples`, `token_values`, and `BalancedBatch.back`.
    """
    # A function may replay the choices of the generator's routers; other numbers are not sent along.
    kept = [{name: value for name, value in each.token_values.items() if name == ROUTING} for each in examples]
    plain = [replace(example, token_values=own, scalars={}) for example, own in zip(examples, kept, strict=True)]
    sizes: dict[str, Any] = {"tokens_per_microbatch": tokens_per_microbatch, "microbatches": microbatches}
    balanced = balance_examples(run.mesh, plain, **sizes, work=answer_work(run), packed=run.keeps_documents)
    values_BT = token_values(run, balanced.batch, function, microbatches=balanced.microbatches, width=width)
    values = [np.zeros((len(example), *values_BT.shape[2:])) for example in examples]
    for example, of_example, by_place in zip(examples, values, balanced.back(values_BT), strict=True):
        # Place t predicts token t + 1; nothing predicts the first token of a sequence.
        is_label = example.learn[1:]
        of_example[1:][is_label] = by_place[:-1][is_label]
    return values
