"""Calls of reinforcement learning: write rollouts, reward them, compute log-probabilities or values of their tokens.

A sample has the fields of a `Rollout` by their names, as plain data, since checkpoints hold pending samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshkit.algos.dataflow._call import Call, Sample
from meshkit.algos.rewards import Scores, Unscored
from meshkit.algos.rollout import Engine, Rollout, Sampling, encode_prompts, example_values
from meshkit.data import Record, Tokenizer
from meshkit.lora import disabled
from meshkit.mesh import Mesh, gather_over_data
from meshkit.step import Run

PROMPTED = ("key", "fields")
"""fields of the first samples of an iteration: key and row of a `PromptLoader`"""
WRITTEN = ("prompt_ids", "ids", "log_probs", "text", "truncated", "wrote", "routing")
ROLLOUT = (*PROMPTED, *WRITTEN)
SIGNED = (*WRITTEN, "fingerprint")
"""of engines that write fingerprints; None of others. No call needs it but one of `verify_rollouts`."""


def rollout_of(sample: Sample, values: Sequence[str] = ()) -> Rollout:
    """The sample's rollout, with its reward if it has one. values: names of `log_prob_call`s, whose numbers it gets too."""
    given = {name: sample[name] for name in (*ROLLOUT, "reward", "versions", "fingerprint") if name in sample}
    return Rollout(**given, values={name: sample[name] for name in values})


def rollout_call(
    engine: Engine | None, tokenizer: Tokenizer, *, on: str, sampling: Sampling, samples: int, seed: int
) -> Call:
    """The call that writes `samples` rollouts of each prompt.

    engine: as `partial(generate, run)`; None on ranks without it. Wire: the engine's.
    """

    def write(prompted: list[Sample]) -> list[Sample]:
        assert engine is not None
        # An engine returns several rollouts of a prompt: the key leads back to the sample, whose `source` each of them
        # keeps.
        by_key = {sample["key"]: sample for sample in prompted}
        rows = [(key, Record(fields=sample["fields"], source=f"prompt {key}")) for key, sample in by_key.items()]
        prompts = encode_prompts(rows, tokenizer)
        rollouts = engine(prompts, sampling=sampling, samples=samples, seed=seed, decode=tokenizer.decode)
        return [{**by_key[each.key], **{name: getattr(each, name) for name in SIGNED}} for each in rollouts]

    return Call(name="write", on=on, function=write, needs=PROMPTED, gives=SIGNED)


def completion_call(tokenizer: Tokenizer, *, on: str) -> Call:
    """The call that takes the `completion` of each prompt's row as its rollout, with eos: answers of somebody else."""

    def read(prompted: list[Sample]) -> list[Sample]:
        found = []
        for sample in prompted:
            row = Record(fields=sample["fields"], source=f"prompt {sample['key']}")
            (prompt,) = encode_prompts([(sample["key"], row)], tokenizer)
            text = row.fields["completion"]
            ids = np.array([*tokenizer.encode(text), tokenizer.eos_id], np.int64)
            answer = {"ids": ids, "log_probs": np.zeros(len(ids)), "text": text, "truncated": False}
            answer |= {"wrote": None, "routing": None}
            found.append({**sample, "prompt_ids": prompt.ids, **answer})
        return found

    return Call(name="read", on=on, function=read, needs=PROMPTED, gives=WRITTEN)


def reward_call(scores: Callable[[list[Rollout]], Scores], *, on: str) -> Call:
    """The call that adds `reward` to each rollout, NaN without a score, and then the reason as `unscored`, else "".

    scores: of this rank's rollouts, on every rank.
    """

    def judge(samples: list[Sample]) -> list[Sample]:
        found = scores([rollout_of(sample) for sample in samples])
        reasons = [f"{value.kind}: {value.text}" if isinstance(value, Unscored) else "" for value in found.values]
        return [
            {**sample, "reward": reward, "unscored": reason}
            for sample, reward, reason in zip(samples, found.totals.tolist(), reasons, strict=True)
        ]

    return Call(name="judge", on=on, function=judge, needs=ROLLOUT, gives=["reward", "unscored"])


def first_unscored(mesh: Mesh, samples: Sequence[Sample]) -> str | None:
    """Why the first answer of the step has no score, by `reward_call`; None where all have one.

    Every rank of the mesh must call it. Wire: one all-gather of a text over the data ranks.
    """
    reason = next((sample["unscored"] for sample in samples if sample["unscored"]), "")
    by_rank = gather_over_data(mesh, reason)
    return next((f"data rank {rank}, {text}" for rank, text in enumerate(by_rank) if text), None)


def log_prob_call(
    name: str,
    run: Run | None,
    function: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    on: str,
    tokens_per_microbatch: int,
    microbatches: int = 1,
    adapters: bool = True,
) -> Call:
    """The call that adds `name`, a number for each token by a model's present weights: log-probabilities, a critic's values.

    function: as of `token_values`. adapters: without them, a model with adapters is its own reference. Wire: that of
    `example_values`.
    """

    def compute(samples: list[Sample]) -> list[Sample]:
        assert run is not None
        examples = [rollout_of(sample).example() for sample in samples]
        sizes = {"tokens_per_microbatch": tokens_per_microbatch, "microbatches": microbatches}
        with nullcontext() if adapters else disabled(run.model):
            values = example_values(run, examples, function, **sizes)
        return [{**sample, name: value} for sample, value in zip(samples, values, strict=True)]

    # In the train stage, before `learn`: pi_old has the weights of this step's beginning, also where rollouts were made
    # ahead with older ones.
    return Call(name=name, on=on, function=compute, needs=ROLLOUT, gives=[name], stage="train")
