"""What a worker's answers are made into: rollouts whose prompts, texts and ends are the trainer's own."""

from __future__ import annotations

import base64
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
# Nobody draws a token of a smaller probability, nor twice an answer of that: in fp32 the first happens once in 10^16 tokens
# of a vocabulary of 10^5, the second once in 10^11 groups of 16.
LEAST_LOG_PROB, LEAST_TWICE = -50.0, -30.0
MOST_VERSIONS = 1 << 31


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
    with ids that the tokenizer has not, numbers that are no log-probabilities, twice what is drawn once, and without a
    fingerprint of their size. The time grows as the tokens do, and what is too long is not read.
    """
    stopping = Stopping(sampling, tokenizer.decode)
    if not isinstance(answers, list | tuple) or len(answers) != samples:
        came = len(answers) if isinstance(answers, list | tuple) else "no list of"
        raise DataError(f"{came} answers came, and {samples} were asked for.")
    (prompt,) = encode_prompts([(sample["key"], _record(sample))], tokenizer)
    made = []
    for number, answer in enumerate(answers):
        if not isinstance(answer, Mapping):
            raise DataError(f"answer {number} is a {type(answer).__name__}, not an object.")
        counts = [len(answer[name]) if isinstance(answer[name], list) else -1 for name in CLAIMED]
        if min(counts) < 0 or len(set(counts)) > 1:
            told = ["no list of" if count < 0 else count for count in counts]
            raise DataError(f"answer {number} has {told[0]} ids, {told[1]} log_probs and {told[2]} versions.")
        if counts[0] > sampling.max_new_tokens:
            raise DataError(
                f"answer {number} has {counts[0]} tokens, and at most {sampling.max_new_tokens} were asked for."
            )
        ids = _whole(answer["ids"], "id", number)
        versions = _whole(answer["versions"], "version", number)
        log_probs = answer["log_probs"]
        if odd := [each for each in ids if not 0 <= each < tokenizer.vocab_size]:
            raise DataError(f"answer {number} has the id {_short(odd[0])}, and there are {tokenizer.vocab_size}.")
        if odd := [each for each in versions if not 0 <= each < MOST_VERSIONS]:
            raise DataError(f"answer {number} has the version {_short(odd[0])}, which there is not.")
        if odd := [each for each in log_probs if not _is_log_prob(each)]:
            raise DataError(f"answer {number} has the log-probability {_short(odd[0])}.")
        end, reason = stopping.ends_after(ids)
        if not ids or reason is None or end < len(ids):
            raise DataError(f"answer {number} of {len(ids)} tokens ends before or after its end.")
        signed = {} if features is None else {FINGERPRINT: _fingerprint(answer, number, versions, features)}
        made.append(
            {
                **sample,
                "prompt_ids": prompt.ids,
                "ids": np.array(ids, np.int64),
                "log_probs": np.array(log_probs, np.float64),
                "versions": np.array(versions, np.int64),
                "text": stopping.text(ids),
                "truncated": reason == "length",
                "wrote": None,
                "routing": None,
                **signed,
            }
        )
    _refuse_copies(made, sampling)
    return made


def _refuse_copies(made: Sequence[Sample], sampling: Sampling) -> None:
    """Where each answer is drawn for itself, with the probability that it has."""
    if sampling.filters or not sampling.temperature:
        return
    before: dict[bytes, int] = {}
    for number, sample in enumerate(made):
        first = before.setdefault(sample["ids"].tobytes(), number)
        if first < number and (log_prob := float(sample["log_probs"].sum())) < LEAST_TWICE:
            raise DataError(
                f"answers {first} and {number} are the same, of a log-probability of {log_prob:.3g}: nobody draws one twice."
            )


def _whole(values: list[Any], what: str, number: int) -> list[int]:
    """JSON has one kind of number, and true is one to Python: 4.9 and true are no ids."""
    for each in values:
        if type(each) is not int:
            raise DataError(f"answer {number} has the {what} {_short(each)}, which is no whole number.")
    return values


def _is_log_prob(value: Any) -> bool:
    return type(value) in (int, float) and LEAST_LOG_PROB <= value <= 0


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**20:
        return "of more than 20 digits"
    return f"{value!r:.40}"


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
