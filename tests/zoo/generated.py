"""What a rank says of a cell that generates: greedy answers equal those of one device without a cache, and of transformers.

The oracle computes each token by the model's plain forward of the whole row. The answers' log-probabilities are held against
it too. transformers' own `generate` is a second oracle, of ids, where its cache gives what its forward does.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from tests.laws.parity.cases import mesh_for
from tests.zoo import causal
from tests.zoo.case import Cell
from tests.zoo.judge import Said, Unbuilt, reported
from tests.zoo.shrink import DATA_IDS

TOL_FP64 = 1e-9  # only the order of summation differs
LENGTHS, NEW = (5, 9, 5, 12), 8
SAMPLES = 2  # greedy ones are alike, but each has its rows in the cache
AS_THEIRS = "as transformers' generate"
PATHS = ("cache", "cache, rows of one length", "whole rows")

# Of types whose tiny config cannot be generated with by transformers itself, though their real ones can.
CHANGED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
}


@dataclass(frozen=True)
class Alone:
    """ids, log_probs: of each prompt, without a cache. theirs: of transformers' generate, or why it raises."""

    ids: list[list[int]]
    log_probs: list[list[float]]
    theirs: list[list[int]] | str


def build(kind: str) -> nn.Module:
    # With 4 heads of 8 an indexer of keys has many scores of exactly 0, and top-k takes another of these in each shape.
    indexed = {"index_n_heads": 16} if hasattr(causal.config_of(kind), "index_n_heads") else {}
    return causal.build(kind, **indexed, **CHANGED.get(kind, {}))


def prompts() -> list[Prompt]:
    draw = np.random.default_rng(7)
    return [Prompt(ids=draw.integers(*DATA_IDS, length), key=index) for index, length in enumerate(LENGTHS)]


def judge(cell: Cell, folder: str) -> Said:
    return reported(_try, cell, folder)


def _try(cell: Cell, stages: list[str]) -> Said:
    mesh = mesh_for(cell.mesh)
    run = mk.parallelize(build(cell.model), mesh, sequence=cell.sequence)
    stages.append("generate")
    own = range(len(LENGTHS)) if mesh.data_ranks == 1 else [(0, 1, 2), (3,), ()][min(mesh.data_rank, 2)]
    every = prompts()
    sampling = Sampling(max_new_tokens=NEW, temperature=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = generate(run, [every[index] for index in own], sampling=sampling, samples=SAMPLES)
    assert run.model.training
    try:
        expected = alone(cell.model)
    except Exception as error:  # after ours, which may refuse it
        raise Unbuilt from error
    text = _text(run, [str(each.message) for each in said])
    text += f"; {beside_transformers(expected)}" * (mesh.spec.world_size == 1)
    outcome = "equal"
    for rollout, index in zip(found, [index for index in own for _ in range(SAMPLES)], strict=True):
        if rollout.ids.tolist() != expected.ids[index]:
            outcome, text = "wrong", f"answer {index} is {rollout.ids.tolist()}, not {expected.ids[index]}"
            break
        off = float(np.abs(rollout.log_probs - np.array(expected.log_probs[index])).max())
        if off > TOL_FP64:
            outcome, text = "wrong", f"log-probabilities of answer {index} are {off:.2g} off"
            break
    return Said(outcome=outcome, text=text, stage=stages[-1])


def _text(run: mk.Run, warned: list[str]) -> str:
    """The path that was taken, and why."""
    from meshkit.algos.rollout._trial import _FOUND

    way = _FOUND[run.model].way
    if way is not None:
        return PATHS[0] if way == "padded" else PATHS[1]
    why = [each.partition("since ")[2].partition(". Answers")[0] for each in warned if each.startswith("generate: ")]
    return ": ".join([PATHS[2], *why[-1:]])


@lru_cache(maxsize=2)
@torch.no_grad()
def alone(kind: str, new: int = NEW) -> Alone:
    model = build(kind).eval()
    every, ids, log_probs = prompts(), list[list[int]](), list[list[float]]()
    for prompt in every:
        row, of_row = prompt.ids.tolist(), list[float]()
        for _ in range(new):
            next_token = model(torch.tensor([row])).logits[0, -1].log_softmax(-1)
            row.append(int(next_token.argmax()))
            of_row.append(float(next_token.max()))
        ids.append(row[len(prompt.ids) :])
        log_probs.append(of_row)
    try:
        theirs: list[list[int]] | str = [transformers_answer(model, prompt.ids, new) for prompt in every]
    except Exception as error:
        theirs = f"{type(error).__name__}: {error}"
    return Alone(ids, log_probs, theirs)


def transformers_answer(model: Any, prompt: np.ndarray, new: int) -> list[int]:
    ids = torch.from_numpy(prompt)[None]
    # No token is forced or ends an answer: that is the sampler's part, not the model's.
    without = dict.fromkeys(("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        **without,
    )
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


def beside_transformers(expected: Alone) -> str:
    """How its `generate` is beside its own forward of whole rows."""
    if isinstance(expected.theirs, str):
        return f"transformers' generate raises {expected.theirs}"
    same = expected.theirs == expected.ids
    return AS_THEIRS if same else "transformers' generate is not its own forward"
