"""What a worker's answers are made into: rollouts whose prompts, texts and ends are the trainer's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshkit.algos.dataflow import WRITTEN, Sample
from meshkit.algos.rollout import Sampling, Stopping, encode_prompts
from meshkit.data import Record, Tokenizer
from meshkit.errors import DataError

GIVES = (*WRITTEN, "versions")


def prompt_of(sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a worker gets of a sample with `key` and `fields`: the prompt's key and ids."""
    (prompt,) = encode_prompts([(sample["key"], _record(sample))], tokenizer)
    return {"key": sample["key"], "prompt_ids": prompt.ids.tolist()}


def read_answers(
    sample: Sample,
    answers: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    sampling: Sampling,
    samples: int,
) -> list[Sample]:
    """The `samples` answers to a sample's prompt as samples with the fields `GIVES`.

    answers: ids, log_probs and versions of each token. Raises: DataError for answers that `sampling` cannot have drawn: too
    few, too long or not ended, with ids that the tokenizer has not, and numbers that are no log-probabilities.
    """
    stopping = Stopping(sampling, tokenizer.decode)
    if len(answers) != samples:
        raise DataError(f"{len(answers)} answers came, and {samples} were asked for.")
    (prompt,) = encode_prompts([(sample["key"], _record(sample))], tokenizer)
    made = []
    for number, answer in enumerate(answers):
        ids = [int(each) for each in answer["ids"]]
        log_probs = [float(each) for each in answer["log_probs"]]
        versions = [int(each) for each in answer["versions"]]
        if not len(ids) == len(log_probs) == len(versions):
            raise DataError(
                f"answer {number} has {len(ids)} ids, {len(log_probs)} log_probs and {len(versions)} versions."
            )
        if odd := [each for each in ids if not 0 <= each < tokenizer.vocab_size]:
            raise DataError(f"answer {number} has the id {odd[0]}, and there are {tokenizer.vocab_size}.")
        if odd_probs := [each for each in log_probs if not math.isfinite(each) or each > 0]:
            raise DataError(f"answer {number} has the log-probability {odd_probs[0]}.")
        ends = [stopping.reason(ids[: end + 1]) for end in range(len(ids))]
        if not ends or ends[-1] is None or any(ends[:-1]):
            raise DataError(f"answer {number} of {len(ids)} tokens ends before or after its end.")
        made.append(
            {
                **sample,
                "prompt_ids": prompt.ids,
                "ids": np.array(ids, np.int64),
                "log_probs": np.array(log_probs),
                "versions": np.array(versions, np.int64),
                "text": stopping.text(ids),
                "truncated": ends[-1] == "length",
                "wrote": None,
                "routing": None,
            }
        )
    return made


def _record(sample: Sample) -> Record:
    return Record(fields=sample["fields"], source=f"prompt {sample['key']}")
