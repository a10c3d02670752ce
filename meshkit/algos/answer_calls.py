"""Calls of a dataflow on answers: written, judged, looked at by models.

A sample is one prompt and later one answer to it, of plain fields, since checkpoints hold those that are pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshkit.algos.answer_values import answer_values, with_values
from meshkit.algos.dataflow import Call, Sample
from meshkit.algos.generation import Engine, Sampling
from meshkit.algos.policy_answers import answer_example
from meshkit.algos.prompting import answers_of, encode_prompts
from meshkit.algos.rewards import Answer, Scores
from meshkit.data import Example, Record, Tokenizer
from meshkit.step import Run

ASKED = ("key", "fields")
WRITTEN = ("prompt", "ids", "text", "truncated", "rollout_log_probs")
JUDGED = (*ASKED, *WRITTEN, "reward")


def asked_samples(asked: Sequence[tuple[int, Record]]) -> list[Sample]:
    """What a `PromptLoader` gives, as ASKED."""
    return [{"key": key, "fields": row.fields} for key, row in asked]


def write_call(
    engine: Engine | None, tokenizer: Tokenizer, *, on: str, sampling: Sampling, samples: int, seed: int
) -> Call:
    """ASKED to WRITTEN: so many answers to each prompt.

    engine: who writes, as `partial(generate, run)`; None on ranks without it. Wire: the engine's.
    """

    def write(asked: list[Sample]) -> list[Sample]:
        assert engine is not None
        by_key = {sample["key"]: sample for sample in asked}
        rows = {key: Record(fields=sample["fields"], source=f"prompt {key}") for key, sample in by_key.items()}
        ids = encode_prompts(list(rows.items()), tokenizer)
        written = engine(ids, sampling=sampling, samples=samples, seed=seed)
        return [
            {
                **by_key[each.prompt.key],
                "prompt": each.prompt.ids,
                "ids": each.ids,
                "text": answer.text,
                "truncated": answer.truncated,
                "rollout_log_probs": each.log_probs,
            }
            for each, answer in zip(written, answers_of(written, rows, tokenizer), strict=True)
        ]

    return Call(name="write", on=on, function=write, needs=ASKED, gives=WRITTEN)


def judge_call(scores: Callable[[list[Sample]], Scores], *, on: str) -> Call:
    """WRITTEN to `reward`, NaN where an answer has no score. scores: of this rank's samples; called on every rank."""

    def judge(samples: list[Sample]) -> list[Sample]:
        worth = scores(samples).totals.tolist()
        return [{**sample, "reward": value} for sample, value in zip(samples, worth, strict=True)]

    return Call(name="judge", on=on, function=judge, needs=(*ASKED, *WRITTEN), gives=["reward"])


def values_call(
    name: str,
    run: Run | None,
    function: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    on: str,
    seq_len: int,
    microbatches: int = 1,
) -> Call:
    """JUDGED to `name`: a number of a model for each token, at its present weights. Wire: `answer_values`."""

    def look(samples: list[Sample]) -> list[Sample]:
        assert run is not None
        examples = [example_of(sample) for sample in samples]
        found = answer_values(run, examples, function, seq_len=seq_len, microbatches=microbatches)
        return [{**sample, name: value} for sample, value in zip(samples, found, strict=True)]

    return Call(name=name, on=on, function=look, needs=JUDGED, gives=[name], stage="train")


def answer_of(sample: Sample) -> Answer:
    """WRITTEN as a reward sees it."""
    return Answer(text=sample["text"], ids=sample["ids"], fields=sample["fields"], truncated=sample["truncated"])


def tokens_of(sample: Sample) -> np.ndarray:
    """[P + N], prompt and answer, as a reward model sees them."""
    return np.concatenate([sample["prompt"], sample["ids"]])


def example_of(sample: Sample, names: Sequence[str] = ()) -> Example:
    """JUDGED as a policy loss sees it, with the values of these names. Pack with `names=(*ANSWER_VALUES, *names)`."""
    example = answer_example(
        sample["prompt"],
        sample["ids"],
        reward=sample["reward"],
        group=sample["key"],
        truncated=sample["truncated"],
        rollout_log_probs=sample["rollout_log_probs"],
    )
    return with_values(example, {name: sample[name] for name in names})
