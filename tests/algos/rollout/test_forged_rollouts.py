"""What was changed or forged of a rollout is found, and what cannot be read gets a verdict and disturbs no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshkit.algos.rollout import (
    Rollout,
    fingerprint_rollouts,
    generate,
)
from meshkit.algos.rollout._fingerprints import ENTRY
from tests.algos.rollout.test_fingerprints import LONG, ROW, SAMPLES, changed, exceeded, verify, write
from tests.algos.rollout.test_generate import PLAIN, PROMPTS, VOCABULARY
from tests.laws.parity.cases import start
from tests.world import pool

# ------------------------------------------------------------------------------------- other tokens, and forgeries


def forged(dtype: str) -> dict[str, list[tuple[bool, set[str]]]]:
    """(whether it passes, all numbers that are out of bounds) of each rollout, by how it was forged."""
    cell = replace(PLAIN, dtype=dtype)
    run, other = start(cell), changed(cell, "drawn")
    honest = generate(run, PROMPTS, sampling=LONG, samples=SAMPLES, seed=5, fingerprints=True)
    foreign = generate(other, PROMPTS, sampling=LONG, samples=SAMPLES, seed=5, fingerprints=True)
    signed = fingerprint_rollouts(run, foreign, tokens_per_microbatch=ROW)
    after = [*honest[1:], honest[0]]

    def with_token(rollout: Rollout, place: int) -> Rollout:
        ids = rollout.ids.copy()
        ids[place] = (ids[place] + 1) % VOCABULARY
        return replace(rollout, ids=ids)

    cases = {
        "honest": honest,
        "by a prefill": fingerprint_rollouts(run, honest, tokens_per_microbatch=ROW),
        "another prompt": [replace(each, prompt_ids=(each.prompt_ids + 1) % VOCABULARY) for each in honest],
        "the first token": [with_token(each, 0) for each in honest],
        "another's fingerprint": [
            replace(each, fingerprint=next_one.fingerprint) for each, next_one in zip(honest, after, strict=True)
        ],
        "a chunk twice": [
            replace(
                each,
                fingerprint=np.concatenate([each.fingerprint[:640], each.fingerprint[:640], each.fingerprint[1280:]]),
            )
            for each in honest
            if each.fingerprint is not None
        ],
        "of one token": [replace(each, fingerprint=of_one_token(each)) for each in honest],
        "another's tokens, signed": signed,
        "log-probabilities of zero": [replace(each, log_probs=np.zeros(len(each.ids))) for each in honest],
        "NaN": [replace(each, log_probs=np.full(len(each.ids), np.nan)) for each in honest],
        "of two tokens": [with_log_probs(each, slice(3, 5), -19.9) for each in honest],
        "of one token, no number": [with_log_probs(each, slice(3, 4), -1e300) for each in honest],
        "all a little one way": [with_log_probs(each, slice(None), -0.06) for each in honest],
    }
    return {
        name: [(each.ok, exceeded(each, dtype)) for each in verify(run, rollouts)] for name, rollouts in cases.items()
    }


def with_log_probs(rollout: Rollout, places: slice, by: float) -> Rollout:
    assert rollout.log_probs is not None
    log_probs = np.array(rollout.log_probs, np.float64)
    log_probs[places] += by
    return replace(rollout, log_probs=log_probs)


def of_one_token(rollout: Rollout) -> np.ndarray:
    """As if the first token's entries, which all are right, were those of its chunk."""
    assert rollout.fingerprint is not None
    entries = rollout.fingerprint.view(ENTRY).copy()
    first = entries[:128]
    first["token"], first["feature"] = np.repeat(np.arange(4), 32), np.tile(np.arange(32), 4)
    return entries.view(np.uint8)


MANTISSAS = {"mantissa_mean", "mantissa_median"}
LOG_PROBS = {"log_prob_median", "log_prob_high", "log_prob_most", "log_prob_drift"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changed_tokens_and_forged_fingerprints_are_found(dtype: str) -> None:
    (found,) = pool(1).run(forged, dtype)
    for name in ("honest", "by a prefill"):
        assert all(ok for ok, _ in found.pop(name))
    for of_case in found.values():
        assert not any(ok for ok, _ in of_case)
    # Each half finds what the other cannot.
    for name in ("another's fingerprint", "a chunk twice", "of one token"):
        assert all("exponents" in numbers and not numbers & LOG_PROBS for _, numbers in found[name])
    for name in ("another's tokens, signed", "log-probabilities of zero", "NaN"):
        assert all(numbers and numbers <= LOG_PROBS for _, numbers in found[name])
    # Of fewer tokens than one in ten, and of all by less than rounding: the last two bounds alone find them.
    assert all("log_prob_most" in numbers for _, numbers in found["of two tokens"])
    assert all(numbers == {"log_prob_most"} for _, numbers in found["of one token, no number"])
    assert all("log_prob_drift" in numbers for _, numbers in found["all a little one way"])
    if dtype == "bfloat16":
        assert all(numbers == {"log_prob_drift"} for _, numbers in found["all a little one way"])


# ------------------------------------------------------------------------------------- what nobody can read


def damaged(rollout: Rollout) -> dict[str, Rollout]:
    """By what is said of it."""
    count, fingerprint = len(rollout.ids), rollout.fingerprint
    assert fingerprint is not None and rollout.log_probs is not None
    twice = fingerprint.copy()
    twice[5:10] = twice[:5]

    def but(**changes: Any) -> Rollout:
        return replace(rollout, **changes)

    return {
        "it has no fingerprint. Write it by generate(fingerprints=True)": but(fingerprint=None),
        "it has no log_probs": but(log_probs=None),
        "its fingerprint is uint8 [3], and its": but(fingerprint=b"abc"),
        f"its fingerprint is uint8 [{len(fingerprint) - 5}], and its": but(fingerprint=fingerprint[5:]),
        f"its fingerprint is uint8 [{len(fingerprint) + 640}], and its": but(
            fingerprint=np.concatenate([fingerprint, fingerprint[:640]])
        ),
        f"its fingerprint is float64 [{len(fingerprint)}], and its": but(fingerprint=fingerprint.astype(float)),
        "its fingerprint is <U5 [], and its": but(fingerprint="bytes"),
        "its fingerprint is object [], and its": but(fingerprint={}),
        "chunk 0 of its fingerprint has an entry twice": but(fingerprint=twice),
        "its vectors have the shapes": but(log_probs=rollout.log_probs[:-1]),
        "its vectors have the shapes {'ids': (),": but(ids=np.array(3)),
        "its log_probs are <U1, not numbers": but(log_probs=np.full(count, "x")),
        "its log_probs are complex128, not numbers": but(log_probs=np.ones(count) * 1j),
        "it cannot be read: ValueError (": but(versions=[[1], [2, 3]]),
        "it cannot be read: UFuncTypeErr": but(versions=np.full(count, "x")),
        "its versions are float64, not whole numbers": but(versions=np.zeros(count)),
        f"its ids reach from 0 to {VOCABULARY}, and the model has ids below {VOCABULARY}": but(
            ids=np.resize([0, VOCABULARY], count)
        ),
        "its ids reach from -1 to 0": but(ids=np.resize([0, -1], count)),
        "its ids are float64": but(ids=np.zeros(count)),
        "its prompt_ids are int64 [0], not at least one whole number": but(prompt_ids=np.zeros(0, np.int64)),
        "its prompt_ids are int64 [1, 1]": but(prompt_ids=np.zeros((1, 1), np.int64)),
        f"it has {len(rollout.tokens) + 200} tokens, and tokens_per_microbatch is {ROW}": but(
            prompt_ids=np.zeros(len(rollout.prompt_ids) + 200, np.int64)
        ),
        "it says that the policy wrote none of its tokens": but(wrote=np.zeros(count, bool)),
        f"its ids are {rollout.ids.dtype} [0], not at least one": but(
            ids=rollout.ids[:0], log_probs=rollout.log_probs[:0], versions=np.zeros(0, np.int64)
        ),
    }


def bytes_of(rollout: Rollout) -> Any:
    assert rollout.fingerprint is not None
    return rollout.fingerprint.tobytes()


def read_damaged(spec: str) -> list[tuple[list[tuple[str, ...]], list[bool]]]:
    """((what should be said, check, what is said) of damaged ones, which of the others pass) of three calls: of all rollouts,
    of damaged ones alone, and of none.
    """
    run = start(replace(PLAIN, mesh=spec, dtype="float32"))
    rollouts = write(run)
    cases = damaged(max(rollouts, key=lambda each: len(each.ids))) if run.mesh.data_rank == 0 else {}
    others = [replace(each, ids=each.ids.astype(np.uint64), fingerprint=bytes_of(each)) for each in rollouts]
    calls: list[tuple[list[Rollout], list[Rollout]]] = [
        (list(cases.values()), [*rollouts, *others]),
        (list(cases.values()), []),
        ([], []),
    ]
    said: list[tuple[list[tuple[str, ...]], list[bool]]] = []
    for bad, good in calls:
        verdicts = verify(run, [*bad, *good])
        texts = zip(cases, verdicts, strict=False) if bad else ()
        said.append(
            ([(text, each.failed, each.why) for text, each in texts], [each.ok for each in verdicts[len(bad) :]])
        )
    return said


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2"])
def test_what_cannot_be_read_gets_a_verdict_and_disturbs_no_other(spec: str) -> None:
    for rank, said in enumerate(pool(2).run(read_damaged, spec)):
        for bad, good in said:
            assert all(good)
            for expected, failed, why in bad:
                assert (failed, why[: len(expected)]) == ("format", expected)
        assert [len(bad) > 20 for bad, _ in said] == [rank == 0 or spec == "pp=2"] * 2 + [False]
        assert said[0][1]
