"""Verification of rollouts that others wrote (TOPLOC): do their fingerprints and log-probabilities come from these weights?

One forward of the trainer over the tokens of all of them, on its mesh, tells. What nobody trusted sent is read with care: it
gets a verdict, whatever it is, and never raises.

Dims: L tokens of a rollout, N of its answer, C features, K = min(128, C) entries of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from meshkit.algos.rollout._fingerprints import (
    CHUNK_ENTRIES,
    ENTRY,
    MAGNITUDE,
    chunk_entries,
    chunks_of,
    entries_of,
    features_of,
    heads_input,
    top_entries,
)
from meshkit.algos.rollout._generation import vocabulary_of
from meshkit.algos.rollout._rollout import Rollout
from meshkit.algos.rollout._token_values import example_values, label_log_probs
from meshkit.data.examples import Example
from meshkit.errors import DataError
from meshkit.loss.vocab_parallel import wide_dtype
from meshkit.step import Run

HIGH = 0.9
"""the quantile of differences of log-probabilities that `log_prob_high` bounds: a few tokens may go to other experts"""


@dataclass(frozen=True, kw_only=True)
class FingerprintBounds:
    """The most that an honest rollout is off. The first three are of its worst chunk, the others of all its tokens."""

    exponents: float
    """share of a chunk's entries that are not the trainer's, or have another sign or exponent"""
    mantissa_mean: float
    """of the others, the mean difference of mantissas, in units of the last of a bf16's 7 bits"""
    mantissa_median: float
    log_prob_median: float
    """median of |log-probability of the rollout - the trainer's|"""
    log_prob_high: float
    """their quantile 0.9"""
    log_prob_most: float
    """the largest of them"""
    log_prob_drift: float
    """|sum of (log-probability of the rollout - the trainer's), but the largest| / sqrt(number): see [Note: drift]"""


# [Note: drift]
# Rounding has no direction: over N tokens it adds up as sqrt(N). Who moves each token a little the same way moves the ratio
# of the whole answer, on which sequence-level corrections decide, as N does. One token may go to another expert, where it is
# off by up to 1.2 (worst of 6,300 tokens in bf16), in fp32 as in bf16, only less often: so the largest one is apart, and the
# last two bounds are of both.
OTHER_EXPERTS = {"log_prob_most": 3.0, "log_prob_drift": 0.3}

BOUNDS_WIDE = FingerprintBounds(
    exponents=0.04,
    mantissa_mean=0.1,
    mantissa_median=0.0,
    log_prob_median=2e-5,
    log_prob_high=2e-4,
    **OTHER_EXPERTS,
)
"""of models that compute in fp32 or fp64: over ten times the worst of honest rollouts in benchmarks/fingerprints.py"""
BOUNDS_16_BITS = FingerprintBounds(
    exponents=38 / 128,
    mantissa_mean=10.0,
    mantissa_median=8.0,
    log_prob_median=0.08,
    log_prob_high=0.2,
    **OTHER_EXPERTS,
)
"""of models that compute in bf16 or fp16. The first three are the paper's, measured there on models of 7B and more and on
several GPUs; the others over twice the worst of small models on many meshes, in tests/algos/rollout/test_fingerprints.py."""
SLACK = replace(BOUNDS_WIDE, mantissa_median=1.0)  # a median of whole numbers jumps

Check = Literal["", "format", "version", "exponents", "mantissa", "log_probs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """Of one rollout. failed: the first check that it does not pass, "" where it passes all; why: in a line, with numbers.

    The numbers are those of `FingerprintBounds`, NaN where they were not reached. checked: [N] bool, tokens that were held
    against these weights: of a rollout of several versions those of one, which pass if `failed` is "version". log_probs: [N],
    what these weights say of the tokens that were checked, 0 elsewhere.
    """

    failed: Check = ""
    why: str = ""
    exponents: float = math.nan
    mantissa_mean: float = math.nan
    mantissa_median: float = math.nan
    log_prob_median: float = math.nan
    log_prob_high: float = math.nan
    log_prob_most: float = math.nan
    log_prob_drift: float = math.nan
    checked: np.ndarray
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def ok(self) -> bool:
        return not self.failed


def honest_bounds(verdicts: Sequence[Verdict], *, margin: float = 2.0) -> FingerprintBounds:
    """Bounds of `margin` times the worst of these rollouts, which one's own ranks wrote, plus what fp32 may be off.

    In 16 bits rounding depends on the depth of a model and on its logits: bounds of one's own find cheats that are an order
    of magnitude smaller than what the default finds. The last two stay as wide as the default: a few answers need not show
    tokens that go to other experts. verdicts: on every rank the same, as by `mk.mesh.gather_over_data`.
    Raises: DataError without verdicts that have numbers.
    """
    names = [each.name for each in fields(FingerprintBounds)]
    read = [each for each in verdicts if not math.isnan(each.log_prob_high)]
    if not read or len(read) < len(verdicts):
        raise DataError(
            f"honest_bounds: {len(read)} of {len(verdicts)} verdicts have numbers. Give those of rollouts that the run's own "
            "weights wrote."
        )
    worst = {name: max(getattr(each, name) for each in verdicts) for name in names}
    return FingerprintBounds(**{name: margin * worst[name] + getattr(SLACK, name) for name in names})


def verify_rollouts(
    run: Run,
    rollouts: Sequence[Rollout],
    *,
    tokens_per_microbatch: int,
    version: int | None = None,
    temperature: float = 1.0,
    bounds: FingerprintBounds | None = None,
) -> list[Verdict]:
    """A verdict on each rollout: have the weights that the run has now written its tokens, as it says?

    rollouts: of this data rank, which may have none; of any content, also damaged. Their prompts are taken as they are: that
    they are those that were asked for is for the caller to see. version: of the weights; tokens that claim another one are
    not held against them, and fail "version" if all else passes. None: what they claim is not looked at. temperature: of the
    sampling, 1 for greedy answers. bounds: default, those for the dtype in which the model computes.
    Fingerprint and log-probabilities must both fit, since either can be computed by the right weights after others have
    written the tokens. Who computes both so is not found. What log-probabilities say of a rollout that passes is near the
    truth, not the truth: where somebody gains by a little, learn `Verdict.log_probs` in their place.
    Every rank of the mesh must call it; the verdicts are the same on all ranks of a data rank, and on every mesh up to
    rounding.
    Memory: up to 129 numbers of 8 bytes for each token of this data rank. Wire: that of `example_values`, as many a token; an
    all-reduce in which ranks agree on the call.
    Raises: PlanError for a model without a head, AgreementError for ranks that ask for different things.
    Source: Ong et al. 2025 (2501.16007), algorithm 2.
    """
    facts = {"version": version, "temperature": temperature, "bounds": bounds}
    run.mesh.agreement.meet("verify_rollouts", facts=facts)
    bounds = bounds or (BOUNDS_WIDE if _is_wide(run) else BOUNDS_16_BITS)
    kept, vocabulary = min(CHUNK_ENTRIES, features_of(run, asked="verify_rollouts")), vocabulary_of(run)
    read = [_read(each, vocabulary, kept, tokens_per_microbatch) for each in rollouts]
    legible = [each for each in read if isinstance(each, _Claim)]
    values = iter(_prefilled(run, legible, tokens_per_microbatch=tokens_per_microbatch, temperature=temperature))
    return [
        _verdict(each, next(values), version, bounds)
        if isinstance(each, _Claim)
        else Verdict(failed="format", why=each, checked=np.zeros(0, bool))
        for each in read
    ]


def fingerprint_rollouts(run: Run, rollouts: Sequence[Rollout], *, tokens_per_microbatch: int) -> list[Rollout]:
    """The same rollouts with fingerprints, by one forward over their tokens: for engines whose decode steps give none.

    `generate(fingerprints=True)` takes them from the forwards that wrote the tokens, as the paper does, and says more. These
    only say that whoever computed them has the weights. rollouts: of this data rank, written by the run's present weights.
    Every rank must call it. Wire: that of `example_values`, K + 1 numbers a token.
    Raises: DataError for a rollout that has no prompt or is longer than a microbatch; PlanError for a model without a head.
    """
    features_of(run, asked="fingerprint_rollouts")
    claims = [_claim(each) for each in rollouts]
    found = _prefilled(run, claims, tokens_per_microbatch=tokens_per_microbatch, temperature=1.0)
    return [
        replace(rollout, fingerprint=_fingerprint(codes_NK, claim.chunks))
        for rollout, claim, (_, codes_NK) in zip(rollouts, claims, found, strict=True)
    ]


def _fingerprint(codes_NK: np.ndarray, chunks: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, ENTRY), *(entries_of(codes_NK[places]) for places in chunks)]).view(np.uint8)


# -------------------------------------------------------------------------------------------------- what was claimed


@dataclass(frozen=True, kw_only=True, eq=False)
class _Claim:
    """A rollout that can be read. entries: of each chunk; empty where they are still to be computed."""

    prompt_ids: np.ndarray
    ids: np.ndarray
    wrote: np.ndarray
    versions: np.ndarray
    log_probs: np.ndarray
    chunks: list[np.ndarray]
    entries: list[np.ndarray]
    has_versions: bool = True

    @property
    def example(self) -> Example:
        ids, prompt = np.concatenate([self.prompt_ids, self.ids]), np.zeros(len(self.prompt_ids), bool)
        return Example(ids=ids, learn=np.concatenate([prompt, self.wrote]))


def _claim(rollout: Rollout) -> _Claim:
    """Raises: TypeError or ValueError for what are no arrays."""
    ids = np.asarray(rollout.ids)
    wrote = np.ones(len(ids), bool) if rollout.wrote is None else np.asarray(rollout.wrote).astype(bool)
    versions = np.zeros(len(ids), np.int64) if rollout.versions is None else np.asarray(rollout.versions)
    return _Claim(
        prompt_ids=np.asarray(rollout.prompt_ids),
        ids=ids,
        wrote=wrote,
        versions=versions,
        log_probs=np.zeros(len(ids)) if rollout.log_probs is None else np.asarray(rollout.log_probs, np.float64),
        chunks=chunks_of(wrote, versions),
        entries=[],
        has_versions=rollout.versions is not None,
    )


def _read(rollout: Rollout, vocabulary: int, kept: int, longest: int) -> _Claim | str:
    """What it claims, or why that cannot be read."""
    if rollout.fingerprint is None:
        return "it has no fingerprint. Write it by generate(fingerprints=True)"
    if rollout.log_probs is None:
        return "it has no log_probs"
    try:
        lengths = {name: np.shape(getattr(rollout, name)) for name in ("ids", "log_probs", "versions", "wrote")}
        expected = lengths["ids"]
        given = {name: shape for name, shape in lengths.items() if getattr(rollout, name) is not None}
        if len(expected) != 1 or any(shape != expected for shape in given.values()):
            return f"its vectors have the shapes {given}, not one length [N]"
        if np.asarray(rollout.log_probs).dtype.kind not in "fiu":
            return f"its log_probs are {np.asarray(rollout.log_probs).dtype}, not numbers"
        claim = _claim(rollout)
        data = rollout.fingerprint
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
    except (TypeError, ValueError) as error:
        return f"it cannot be read: {type(error).__name__} ({' '.join(str(error).split())[:100]})"
    for name, ids in (("prompt_ids", claim.prompt_ids), ("ids", claim.ids)):
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            return f"its {name} are {ids.dtype} {list(ids.shape)}, not at least one whole number"
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"its {name} reach from {ids.min()} to {ids.max()}, and the model has ids below {vocabulary}"
    if not np.issubdtype(claim.versions.dtype, np.integer):
        return f"its versions are {claim.versions.dtype}, not whole numbers"
    if len(claim.prompt_ids) + len(claim.ids) > longest:
        return f"it has {len(claim.prompt_ids) + len(claim.ids)} tokens, and tokens_per_microbatch is {longest}"
    if not claim.wrote.any():
        return "it says that the policy wrote none of its tokens"
    sizes = [chunk_entries(len(places), kept) for places in claim.chunks]
    if data.dtype != np.uint8 or data.shape != (sum(sizes) * ENTRY.itemsize,):
        return (
            f"its fingerprint is {data.dtype} {list(data.shape)}, and its {int(claim.wrote.sum())} tokens in "
            f"{len(sizes)} chunks have {sum(sizes) * ENTRY.itemsize} bytes"
        )
    entries = np.split(np.ascontiguousarray(data).view(ENTRY), np.cumsum(sizes)[:-1])
    for number, of_chunk in enumerate(entries):
        if len(np.unique(_places(of_chunk))) < len(of_chunk):
            return f"chunk {number} of its fingerprint has an entry twice"
    # Of any width of integers: two of different ones would make fp64 together.
    return replace(claim, prompt_ids=claim.prompt_ids.astype(np.int64), ids=claim.ids.astype(np.int64), entries=entries)


# -------------------------------------------------------------------------------------------------- what holds


def _prefilled(
    run: Run, claims: Sequence[_Claim], *, tokens_per_microbatch: int, temperature: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(log-probabilities [N], codes int64 [N, K]) of each, by the trainer's forward; 0 for tokens that others wrote."""
    kept = min(CHUNK_ENTRIES, features_of(run, asked="verify_rollouts"))
    with heads_input(run) as seen:
        found = example_values(
            run,
            [claim.example for claim in claims],
            partial(_log_probs_and_entries, seen=seen, temperature=temperature),
            tokens_per_microbatch=tokens_per_microbatch,
            width=1 + kept,
        )
    of_answers = [values[len(claim.prompt_ids) :] for claim, values in zip(claims, found, strict=True)]
    return [(values[:, 0], values[:, 1:].astype(np.int64)) for values in of_answers]


def _log_probs_and_entries(model: nn.Module, part: dict[str, Any], *, seen: list[Tensor], temperature: float) -> Tensor:
    """[B, T, 1 + K] fp64, which holds codes exactly."""
    seen.clear()
    log_probs = label_log_probs(model, part, temperature=temperature)
    (hidden_BTC,) = seen
    return torch.cat([log_probs.double().unsqueeze(-1), top_entries(hidden_BTC).double()], -1)


def _verdict(
    claim: _Claim, found: tuple[np.ndarray, np.ndarray], version: int | None, bounds: FingerprintBounds
) -> Verdict:
    log_probs, codes_NK = found
    if version is not None and not claim.has_versions:
        return Verdict(failed="format", why="it has no versions", checked=np.zeros(len(claim.ids), bool))
    of_version = np.full(len(claim.ids), True) if version is None else claim.versions == version
    checked = claim.wrote & of_version
    others = [int(each) for each in np.unique(claim.versions[claim.wrote & ~of_version])]
    claims_others = f"it claims versions {others[:4]}, and the weights here are of {version}"
    if not checked.any():
        return Verdict(failed="version", why=claims_others, checked=checked)
    of_chunks = np.array(
        [
            _differences(entries, entries_of(codes_NK[places]))
            for places, entries in zip(claim.chunks, claim.entries, strict=True)
            if checked[places[0]]
        ]
    )
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are none
        signed = (claim.log_probs - log_probs)[checked]
        apart = np.abs(signed)
        drift = abs(np.delete(signed, apart.argmax()).sum()) / len(signed) ** 0.5
    numbers = {
        "exponents": of_chunks[:, 0].max(),
        "mantissa_mean": of_chunks[:, 1].max(),
        "mantissa_median": of_chunks[:, 2].max(),
        "log_prob_median": np.median(apart),
        "log_prob_high": np.quantile(apart, HIGH),
        "log_prob_most": apart.max(),
        "log_prob_drift": drift,
    }
    numbers = {name: float(number) for name, number in numbers.items()}
    checks: list[tuple[Check, str]] = [
        ("exponents", "exponents"),
        ("mantissa", "mantissa_mean"),
        ("mantissa", "mantissa_median"),
        ("log_probs", "log_prob_median"),
        ("log_probs", "log_prob_high"),
        ("log_probs", "log_prob_most"),
        ("log_probs", "log_prob_drift"),
    ]
    held: dict[str, Any] = {**numbers, "checked": checked, "log_probs": np.where(checked, log_probs, 0.0)}
    for check, name in checks:
        # NaN is below nothing.
        if not numbers[name] <= getattr(bounds, name):
            why = f"{name} is {numbers[name]:.3g}, and at most {getattr(bounds, name):.3g} of an honest rollout"
            return Verdict(failed=check, why=why, **held)
    if others:
        return Verdict(failed="version", why=claims_others, **held)
    return Verdict(**held)


def _differences(claimed: np.ndarray, entries: np.ndarray) -> tuple[float, float, float]:
    """(share of exponents that differ, mean and median difference of mantissas of the others) of a chunk's entries [k]."""
    _, ours, theirs = np.intersect1d(_places(entries), _places(claimed), assume_unique=True, return_indices=True)
    a, b = entries["value"][ours].astype(np.int64), claimed["value"][theirs].astype(np.int64)
    same = (a >> 7 == b >> 7) & (a & MAGNITUDE < 0x7F80)  # sign and exponent; infinity and NaN are like nothing
    exponents = 1 - same.sum() / len(entries)
    mantissas = np.abs((a & 0x7F) - (b & 0x7F))[same]
    if not len(mantissas):
        return exponents, 128.0, 128.0  # more than any difference
    return exponents, float(mantissas.mean()), float(np.median(mantissas))


def _places(entries: np.ndarray) -> np.ndarray:
    """One number for each (token, feature)."""
    places: np.ndarray = entries["token"].astype(np.int64) << 16 | entries["feature"]
    return places


def _is_wide(run: Run) -> bool:
    precision = run.resolved.memory.precision
    dtype = next(run.model.parameters()).dtype if precision is None else precision.compute
    return dtype == wide_dtype(dtype)
