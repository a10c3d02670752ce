"""Between rows of data and what is generated for them: prompts as ids, completions as answers that can be scored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from meshkit.algos.generation import Completion, Engine, Prompt, Sampling, generate
from meshkit.algos.policy_answers import answer_example
from meshkit.algos.rewards import Answer, Scorer, score_on_mesh
from meshkit.data import Example, Record, Tokenizer
from meshkit.step import Run

SAMPLE_NAMES = ("prompt", "answer", "", "score")
ANSWER_VALUES = ("groups", "truncated", "rewards", "rollout_log_probs")


def encode_prompts(asked: Sequence[tuple[int, Record]], tokenizer: Tokenizer) -> list[Prompt]:
    """The field `prompt` of each row, after the tokenizer's bos if it has one; the key seeds the sampling."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [Prompt(ids=np.array(bos + tokenizer.encode(row.fields["prompt"])), key=key) for key, row in asked]


def answers_of(written: Sequence[Completion], rows: Mapping[int, Record], tokenizer: Tokenizer) -> list[Answer]:
    """The ids as they were sampled, their text without the end, and the fields of the row with the prompt's key."""
    answers = []
    for each in written:
        ends = bool(len(each.ids)) and each.ids[-1] == tokenizer.eos_id
        text = tokenizer.decode(each.ids[: len(each.ids) - ends].tolist())
        fields = rows[each.prompt.key].fields
        answers.append(Answer(text=text, ids=each.ids, fields=fields, truncated=each.reason == "length"))
    return answers


def completion_example(completion: Completion, *, reward: float) -> Example:
    """What a policy loss needs of an answer. Pack with `names=ANSWER_VALUES`, which a rank without answers has to say."""
    return answer_example(
        completion.prompt.ids,
        completion.ids,
        reward=reward,
        group=completion.prompt.key,
        truncated=completion.reason == "length",
        rollout_log_probs=completion.log_probs,
    )


def greedy_score(
    run: Run,
    rows: Sequence[Record],
    tokenizer: Tokenizer,
    scorer: Scorer,
    *,
    sampling: Sampling,
    engine: Engine | None = None,
) -> float:
    """The mean score of the most probable answers to all the rows, shared out over the data ranks.

    sampling: of any temperature. engine: who writes, default `generate`. Every rank must call it. Wire: the
    engine's, `score_on_mesh`.
    """
    own = list(enumerate(rows))[run.mesh.data_rank :: run.mesh.data_ranks]
    write = engine or partial(generate, run)
    written = write(encode_prompts(own, tokenizer), sampling=replace(sampling, temperature=0.0))
    return score_on_mesh(run.mesh, answers_of(written, dict(own), tokenizer), scorer).mean


def sample_rows(answers: Iterable[Answer], scores: Sequence[float]) -> list[tuple[str, str, str, str]]:
    """Of SAMPLE_NAMES, for `show_samples`."""
    return [
        (answer.fields["prompt"], answer.text, "cut" if answer.truncated else "", f"{score:.2f}")
        for answer, score in zip(answers, scores, strict=True)
    ]
