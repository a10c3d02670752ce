"""What a worker's answers are made into: rollouts whose prompts, texts and ends are the trainer's own."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshkit.algos.dataflow import WRITTEN, Sample
from meshkit.algos.rollout import Rollout, Sampling, Stopping, encode_prompts, fingerprint_bytes
from meshkit.data import Record, Tokenizer
from meshkit.errors import DataError

GIVES = (*WRITTEN, "versions")
FINGERPRINT = "fingerprint"
CLAIMED = ("ids", "log_probs", "versions")


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
    features: int | None = None,
) -> list[Sample]:
    """The `samples` answers to a sample's prompt as samples with the fields `GIVES`.

    answers: ids, log_probs and versions of each token. features: of the model's head, where answers have fingerprints, which
    are then a field more. Raises: DataError for answers that `sampling` cannot have drawn: too few, too long or not ended,
    with ids that the tokenizer has not, numbers that are no log-probabilities, and without a fingerprint of their size.
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
        signed = {} if features is None else {FINGERPRINT: _fingerprint(answer, number, versions, features)}
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
                **signed,
            }
        )
    return made


def answer_of(sample: Sample) -> dict[str, Any]:
    """What a worker says of an answer, as plain JSON, with its fingerprint if it has one."""
    answer = {name: sample[name].tolist() for name in CLAIMED}
    if sample[FINGERPRINT] is not None:
        answer[FINGERPRINT] = base64.b64encode(sample[FINGERPRINT].tobytes()).decode()
    return answer


def claim_of(sample: Sample) -> dict[str, Any]:
    """What a validator gets of a sample of `read_answers`: `rollout_of_claim` reads it."""
    return {"prompt_ids": sample["prompt_ids"].tolist(), **answer_of(sample)}


def rollout_of_claim(claim: Mapping[str, Any]) -> Rollout:
    """The rollout that a validator verifies."""
    return Rollout(
        prompt_ids=np.array(claim["prompt_ids"], np.int64),
        ids=np.array(claim["ids"], np.int64),
        log_probs=np.array(claim["log_probs"], np.float64),
        versions=np.array(claim["versions"], np.int64),
        fingerprint=np.frombuffer(base64.b64decode(claim[FINGERPRINT]), np.uint8),
    )


def _fingerprint(answer: Mapping[str, Any], number: int, versions: list[int], features: int) -> np.ndarray:
    text = answer.get(FINGERPRINT)
    if not isinstance(text, str):
        raise DataError(f"answer {number} has no fingerprint, and the trainer verifies rollouts (--worker-verify).")
    try:
        data = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except ValueError as error:
        raise DataError(f"answer {number} has a fingerprint that is no base64: {error}.") from error
    if len(data) != (size := fingerprint_bytes(np.array(versions), features)):
        raise DataError(
            f"answer {number} has a fingerprint of {len(data)} bytes, and its {len(versions)} tokens have {size}."
        )
    return data


def _record(sample: Sample) -> Record:
    return Record(fields=sample["fields"], source=f"prompt {sample['key']}")
