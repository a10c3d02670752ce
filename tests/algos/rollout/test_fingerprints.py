"""Fingerprints are those of the hidden states that wrote a rollout, on every mesh; what is not as it claims is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.algos.dataflow import generation_call, rollout_of
from meshkit.algos.environments import Player
from meshkit.algos.rollout import (
    BOUNDS_16_BITS,
    BOUNDS_WIDE,
    CachePolicy,
    FingerprintBounds,
    Generation,
    KeptCache,
    Rollout,
    Sampling,
    Verdict,
    fingerprint_rollouts,
    generate,
    honest_bounds,
    verify_rollouts,
)
from meshkit.algos.rollout._fingerprints import CHUNK_TOKENS, ENTRY, chunks_of, entries_of, top_entries
from meshkit.errors import AgreementError, DataError, PlanError
from tests.algos.environments.test_play import Echo, ids_of
from tests.algos.rollout.test_generate import EXPERTS, PLAIN, PROMPTS, VOCABULARY
from tests.laws.parity.cases import Cell, batches, build, mesh_for, own_rows, plan_of, start
from tests.models.families import transformers_model
from tests.world import pool

SAMPLES, TEMPERATURE = 2, 0.7
SAMPLING = Sampling(max_new_tokens=70, temperature=TEMPERATURE, stop_ids=(4,))
ROW = 128
"""tokens per microbatch"""
NUMBERS = tuple(each.name for each in fields(FingerprintBounds))
CHUNKED = replace(PLAIN, memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss()))
LAYOUTS = [
    (2, replace(PLAIN, mesh="dp_shard=2")),
    (2, replace(PLAIN, mesh="tp=2", sequence=True)),
    (2, replace(CHUNKED, mesh="tp=2")),
    (2, replace(PLAIN, mesh="pp=2")),
    (2, replace(PLAIN, mesh="cp=2")),
    (2, replace(EXPERTS, mesh="dp_shard=2 ep=2")),
    (4, replace(PLAIN, layers=4, mesh="pp=2 tp=2", schedule="zbv")),
]
IDS = [f"{cell.mesh.replace(' ', ',')}{'-sequence' * cell.sequence}" for _, cell in LAYOUTS]


def one_rank(cell: Cell) -> Cell:
    return replace(cell, mesh="", sequence=False, schedule="1f1b")


def verify(run: mk.Run, rollouts: list[Rollout], **options: Any) -> list[Verdict]:
    return verify_rollouts(run, rollouts, tokens_per_microbatch=ROW, temperature=TEMPERATURE, **options)


def write(run: mk.Run, seed: int = 5) -> list[Rollout]:
    own = PROMPTS[run.mesh.data_rank :: run.mesh.data_ranks]
    return generate(run, own, sampling=SAMPLING, samples=SAMPLES, seed=seed, fingerprints=True)


def written(cell: Cell) -> list[Rollout]:
    """This data rank's."""
    return write(start(cell))


def verified(cell: Cell, rollouts: list[Rollout], options: dict[str, Any]) -> list[tuple[int, Verdict]]:
    """(number of the rollout, verdict) of this data rank's share."""
    run = start(cell)
    own = range(run.mesh.data_rank, len(rollouts), run.mesh.data_ranks)
    return list(zip(own, verify(run, [rollouts[number] for number in own], **options), strict=True))


def verdicts_of(world: int, cell: Cell, rollouts: list[Rollout], **options: Any) -> list[Verdict]:
    """In order; the ranks of a data rank must say the same."""
    by_rank = pool(world).run(verified, cell, rollouts, options)
    found: dict[int, Verdict] = {}
    for number, verdict in (each for of_rank in by_rank for each in of_rank):
        before = found.setdefault(number, verdict)
        assert (before.failed, before.why) == (verdict.failed, verdict.why)
    return [found[number] for number in range(len(rollouts))]


def worst(verdicts: list[Verdict]) -> dict[str, float]:
    return {name: max(getattr(each, name) for each in verdicts) for name in NUMBERS}


# ------------------------------------------------------------------------------------- what a fingerprint is


def closed_form(model: nn.Module, rollout: Rollout) -> list[set[tuple[int, int, int]]]:
    """Of each chunk (token, feature, bits of bf16), from one plain forward over all tokens and a full sort."""
    seen: list[torch.Tensor] = []
    handle = model.get_submodule("lm_head").register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        model(torch.from_numpy(rollout.tokens).unsqueeze(0))
    handle.remove()
    first, count = len(rollout.prompt_ids) - 1, len(rollout.ids)
    begins = range(0, count, CHUNK_TOKENS)
    return [largest(seen[0][first + begin : first + min(begin + CHUNK_TOKENS, count)]) for begin in begins]


def largest(hidden_TC: torch.Tensor) -> set[tuple[int, int, int]]:
    """The 128 largest entries, by a full sort."""
    states = hidden_TC.to(torch.bfloat16)
    bits = states.view(torch.int16).numpy().view(np.uint16)
    flat = [
        (-abs(float(value)), feature, token) for token, row in enumerate(states) for feature, value in enumerate(row)
    ]
    return {(token, feature, int(bits[token, feature])) for _, feature, token in sorted(flat)[:128]}


def with_closed_form(cell: Cell) -> list[tuple[list[set[tuple[int, int, int]]], list[set[tuple[int, int, int]]]]]:
    rollouts, model = written(cell), build(cell)
    pairs = []
    for rollout in rollouts:
        assert rollout.fingerprint is not None and rollout.fingerprint.dtype == np.uint8
        expected = closed_form(model, rollout)
        cuts = np.cumsum([len(chunk) for chunk in expected])[:-1]
        entries = np.split(rollout.fingerprint.view(ENTRY), cuts)
        found = [{(int(token), int(feature), int(bits)) for token, feature, bits in chunk} for chunk in entries]
        pairs.append((found, expected))
    return pairs


@pytest.mark.parametrize(("world", "cell"), LAYOUTS, ids=IDS)
def test_fingerprints_are_the_largest_entries_of_a_plain_forward_on_every_mesh(world: int, cell: Cell) -> None:
    lengths = set()
    for pairs in pool(world).run(with_closed_form, cell):
        for found, expected in pairs:
            assert found == expected  # in fp64, so that no rounding to bf16 goes the other way
            lengths.add(len(found))
    assert len(lengths) > 1


@pytest.mark.parametrize("tokens", [1, 5])
def test_of_more_features_than_entries_the_largest_are_kept_of_either_sign_and_of_equal_ones_the_first(
    tokens: int,
) -> None:
    hidden = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(0)).mul(20).round() / 20
    codes = top_entries(hidden)
    assert codes.shape == (tokens, 128)
    found = {tuple(map(int, each)) for each in entries_of(codes.numpy())}
    assert found == largest(hidden)
    assert {value >> 15 for *_, value in found} == {0, 1}


def test_a_chunk_is_of_one_version_and_of_tokens_that_follow_each_other() -> None:
    wrote = np.array([1] * 40 + [0] * 2 + [1] * 5, bool)
    versions = np.array([3] * 38 + [4] * 9)
    assert [(part[0], len(part)) for part in chunks_of(wrote, versions)] == [(0, 32), (32, 6), (38, 2), (42, 5)]


# ------------------------------------------------------------------------------------- honest rollouts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "cell"), LAYOUTS, ids=IDS)
def test_honest_rollouts_pass_on_every_mesh_whichever_wrote_them(world: int, cell: Cell, dtype: str) -> None:
    cell = replace(cell, dtype=dtype)
    (on_one,) = pool(1).run(written, one_rank(cell))
    there = {
        (rollout.key, index % SAMPLES): rollout
        for of_rank in pool(world).run(written, cell)
        for index, rollout in enumerate(of_rank)
    }
    for rollouts, ranks, verifier in ((on_one, world, cell), (list(there.values()), 1, one_rank(cell))):
        assert len(rollouts) == SAMPLES * len(PROMPTS)
        verdicts = verdicts_of(ranks, verifier, rollouts, version=0)
        assert [each.why for each in verdicts if not each.ok] == []
        assert all(each.checked.all() for each in verdicts)
        print(dtype, cell.mesh, ranks, worst(verdicts))  # pytest -s: what the default bounds leave room for


def held() -> tuple[list[Any], list[Any], list[str]]:
    """(fingerprints of a generation that went on elsewhere, of one call, what verification says with the cache of a call)."""
    run = start(replace(PLAIN, mesh="dp_shard=2"))
    generation = Generation(run, sampling=SAMPLING, fingerprints=True)
    generation.add(PROMPTS[run.mesh.data_rank :: 2], samples=SAMPLES, seed=5)
    ended = generation.advance(40)
    gather = mk.mesh.gather_over_data
    pending = [answer for of_rank in gather(run.mesh, generation.state_dict()["answers"]) for answer in of_rank]
    assert pending
    before = [rollout for of_rank in gather(run.mesh, ended) for rollout in of_rank]
    run = start(replace(PLAIN, mesh="pp=2"))
    generation = Generation(run, sampling=SAMPLING, fingerprints=True)
    generation.load_state_dict({"version": 0, "answers": pending})
    both = [*before, *generation.advance()]
    expected = write(run)
    state = {name: value for name, value in pending[0].items() if not name.startswith("fingerprint")}
    with pytest.raises(DataError) as without:
        generation.load_state_dict({"version": 0, "answers": [state]})
    plain = Generation(run, sampling=SAMPLING)
    plain.load_state_dict({"version": 0, "answers": pending})
    (first, *_) = plain.advance()
    assert first.fingerprint is None
    return told(both), told(expected), [str(without.value), *(each.why for each in verify(run, both))]


def told(rollouts: list[Rollout]) -> list[tuple[int, bytes, bytes]]:
    fingerprints = [np.zeros(0) if each.fingerprint is None else each.fingerprint for each in rollouts]
    return sorted(
        (each.key, each.ids.tobytes(), fingerprint.tobytes())
        for each, fingerprint in zip(rollouts, fingerprints, strict=True)
    )


def test_a_generation_that_goes_on_on_another_mesh_has_the_same_fingerprints() -> None:
    for found, expected, (without, *whys) in pool(2).run(held):
        assert found == expected and len(found) == SAMPLES * len(PROMPTS)
        assert without.startswith("generate(fingerprints=True): the state has answers that were begun without.")
        assert set(whys) == {""}


def conversed() -> list[tuple[int, str]]:
    """(turns, what verification says) of each episode."""
    run = start(replace(PLAIN, mesh="tp=2"))
    engine = partial(generate, run, cache=KeptCache(CachePolicy(page_tokens=4)), fingerprints=True)
    player = Player(mesh=run.mesh, engine=engine, environment=Echo, encode=ids_of, turns=4)
    prompts = [replace(prompt, fields={"secret": number}) for number, prompt in enumerate(PROMPTS)]
    sampling = replace(SAMPLING, max_new_tokens=10)
    episodes = player(prompts, sampling=sampling, samples=SAMPLES, seed=3)
    return [(each.fields["turns"], verdict.why) for each, verdict in zip(episodes, verify(run, episodes), strict=True)]


def test_episodes_of_several_turns_have_the_fingerprints_of_all_of_them() -> None:
    for episodes in pool(2).run(conversed):
        assert {why for _, why in episodes} == {""}
        assert max(turns for turns, _ in episodes) > 2


def streamed(spec: str) -> tuple[list[bool], int]:
    """(what passes of a stream's samples, how many) of which some were in a checkpoint."""
    run = start(replace(PLAIN, mesh=spec))
    tokenizer: Any = SimpleNamespace(vocab_size=VOCABULARY, bos_id=None, encode=ids_of, decode=str)
    options: dict[str, Any] = {"on": "all", "sampling": SAMPLING, "samples": SAMPLES, "seed": 5, "fingerprints": True}
    prompts = PROMPTS[run.mesh.data_rank :: run.mesh.data_ranks]
    begun = [
        {"source": number, "key": each.key, "fields": {"prompt_ids": each.ids.tolist()}}
        for number, each in enumerate(prompts)
    ]
    writer, other = (generation_call(run, tokenizer, **options).writer for _ in range(2))
    assert writer is not None and other is not None
    writer.begin(begun)
    groups = [*writer.advance(), *writer.advance()]
    file = BytesIO()
    torch.save(writer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    while other.busy:
        groups += other.advance()
    rollouts = [rollout_of(sample) for group in groups for sample in group]
    return [each.ok for each in verify(run, rollouts, version=0)], len(prompts)


@pytest.mark.parametrize("spec", ["", "tp=2"])
def test_samples_of_a_stream_keep_their_fingerprints_through_a_checkpoint(spec: str) -> None:
    for passed, prompts in pool(2 if spec else 1).run(streamed, spec):
        assert len(passed) == SAMPLES * prompts and all(passed)


# ------------------------------------------------------------------------------------- rollouts that are not what they claim

Change = Callable[[nn.Module], None]


def moved(share: float) -> Change:
    """Each weight by so much, up or down, as a first step of AdamW of that learning rate moves it."""

    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    (torch.rand(parameter.shape, generator=generator) - 0.5).sign().to(parameter), alpha=share
                )

    return change


def rounded(bits: int) -> Change:
    """Each row of a matrix to so many bits and back."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    scale = parameter.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
                    parameter.copy_((parameter / scale).round() * scale)

    return change


def drawn(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def cast(dtype: torch.dtype) -> Change:
    def change(model: nn.Module) -> None:
        model.to(dtype)

    return change


CHANGES: dict[str, Change] = {
    "none": lambda model: None,
    "drawn": drawn,
    "bf16": cast(torch.bfloat16),
    "fp32": cast(torch.float32),
    **{f"int{bits}": rounded(bits) for bits in (8, 4)},
    **{f"{rate:.0e}": moved(rate) for rate in (1e-2, 1e-3, 3e-4, 1e-4, 1e-5)},
}


def changed(cell: Cell, name: str) -> mk.Run:
    model = build(cell)
    CHANGES[name](model)
    return mk.parallelize(model, mesh_for(""), plan=plan_of(cell))


def written_by(cell: Cell, name: str) -> list[Rollout]:
    return write(changed(cell, name))


def exceeded(verdict: Verdict, dtype: str) -> set[str]:
    """All the numbers that no honest rollout has, not only the first."""
    bounds = BOUNDS_WIDE if dtype == "float32" else BOUNDS_16_BITS
    return {name for name in NUMBERS if not getattr(verdict, name) <= getattr(bounds, name)}


# What finds each rollout of a writer, by the bounds of its dtype: all of these numbers are out of them.
FOUND = {
    ("float32", "drawn"): {"exponents", "mantissa_mean", "mantissa_median", "log_prob_median", "log_prob_high"},
    ("float32", "1e-03"): {"mantissa_mean", "mantissa_median", "log_prob_median", "log_prob_high"},
    ("float32", "1e-04"): {"mantissa_mean", "log_prob_median", "log_prob_high"},
    ("float32", "1e-05"): {"log_prob_median", "log_prob_high"},
    ("float32", "bf16"): {"mantissa_mean", "mantissa_median", "log_prob_median", "log_prob_high"},
    ("float32", "int8"): {"mantissa_mean", "mantissa_median", "log_prob_median", "log_prob_high"},
    ("bfloat16", "drawn"): {"exponents", "mantissa_mean", "mantissa_median", "log_prob_median", "log_prob_high"},
    ("bfloat16", "int4"): {"exponents", "mantissa_mean", "mantissa_median", "log_prob_high"},
    ("bfloat16", "1e-02"): {"mantissa_mean", "mantissa_median"},
}


@pytest.mark.parametrize(("dtype", "name"), FOUND)
def test_other_weights_and_other_precisions_are_found(dtype: str, name: str) -> None:
    cell = replace(PLAIN, dtype=dtype)
    (rollouts,) = pool(1).run(written_by, cell, name)
    verdicts = verdicts_of(2, replace(cell, mesh="dp_shard=2"), rollouts)
    assert not any(each.ok for each in verdicts)
    for each in verdicts:
        assert exceeded(each, dtype) >= FOUND[dtype, name]


LONG = Sampling(max_new_tokens=70, temperature=TEMPERATURE)


def with_own_bounds(names: list[str]) -> dict[str, list[bool]]:
    """Of each writer, whether its rollouts pass by bounds of the trainer's own rollouts, in bf16."""
    cell = replace(PLAIN, dtype="bfloat16")
    trainer = start(cell)

    def by(name: str, seed: int) -> list[Verdict]:
        run = changed(cell, name)
        return verify(trainer, generate(run, PROMPTS, sampling=LONG, samples=4, seed=seed, fingerprints=True))

    bounds = honest_bounds(by("none", seed=1))
    found = {}
    for name in names:
        verdicts = by(name, seed=2)
        found[name] = [all(getattr(each, n) <= getattr(bounds, n) for n in NUMBERS) for each in verdicts]
    with pytest.raises(DataError, match="honest_bounds: 0 of 0 verdicts have numbers"):
        honest_bounds([])
    return found


def test_bounds_of_ones_own_model_find_smaller_changes_in_bf16() -> None:
    (found,) = pool(1).run(with_own_bounds, ["none", "1e-04", "3e-04", "1e-03", "int8"])
    assert all(found["none"])
    assert not any(found["1e-03"]) and not any(found["int8"])


def of_all_ranks() -> tuple[list[bool], str]:
    run = start(replace(PLAIN, mesh="dp_shard=2", dtype="float32"))
    rollouts = write(run)
    told = [each for of_rank in mk.mesh.gather_over_data(run.mesh, verify(run, rollouts)) for each in of_rank]
    passed = [each.ok for each in verify(run, rollouts, bounds=honest_bounds(told))]
    with pytest.raises(AgreementError) as error:
        verify(run, rollouts, version=run.mesh.rank)
    return passed, str(error.value)


def test_ranks_agree_on_bounds_and_versions() -> None:
    for passed, error in pool(2).run(of_all_ranks):
        assert all(passed)
        assert error.startswith("ranks differ in version of verify_rollouts")


# ------------------------------------------------------------------------------------- versions


def step(run: mk.Run) -> mk.Run:
    """One update of AdamW."""
    optimizer = mk.adamw(run, lr=1e-3)
    run.forward_backward(own_rows(batches(replace(PLAIN, mesh=""))[0], run.mesh))
    optimizer.step()
    optimizer.zero_grad()
    return run


def of_versions(cell: Cell) -> dict[str, list[Any]]:
    """What is said of rollouts of two versions by the trainers of both, and of those that claim the wrong one."""
    older, newer = start(cell), step(start(cell))
    prompts = PROMPTS[older.mesh.data_rank :: older.mesh.data_ranks]
    writer = start(cell)
    generation = Generation(writer, sampling=SAMPLING, fingerprints=True)
    generation.add(prompts, samples=SAMPLES, seed=5)
    rollouts = generation.advance(20)
    step(writer)
    generation.take_weights(1)
    rollouts += generation.advance()
    said: dict[str, list[Any]] = {}
    for version, run in ((0, older), (1, newer)):
        verdicts = verify(run, rollouts, version=version)
        said[f"by {version}"] = [
            each.failed == ("" if np.all(rollout.versions == version) else "version")
            and np.array_equal(each.checked, rollout.versions == version)
            and math.isnan(each.exponents) == (not each.checked.any())
            for each, rollout in zip(verdicts, rollouts, strict=True)
        ]
    said["mixed"] = [len(set(rollout.versions.tolist())) > 1 for rollout in rollouts if rollout.versions is not None]
    stale = write(older)
    lied = [replace(each, versions=np.ones_like(each.ids)) for each in stale]
    said["stale"] = [each.why for each in verify(newer, stale, version=1)]
    said["lied"] = [each.failed for each in verify(newer, lied, version=1)]
    said["unasked"] = [each.failed for each in verify(newer, stale)]
    said["none"] = [each.why for each in verify(newer, [replace(each, versions=None) for each in stale], version=1)]
    return said


@pytest.mark.parametrize(
    ("world", "cell"), [(1, PLAIN), (2, replace(PLAIN, mesh="dp_shard=2")), (2, replace(PLAIN, mesh="tp=2"))]
)
def test_tokens_are_held_against_the_weights_of_the_version_that_they_claim(world: int, cell: Cell) -> None:
    for said in pool(world).run(of_versions, replace(cell, dtype="float32")):
        assert all(said["by 0"]) and all(said["by 1"]) and any(said["mixed"])
        assert set(said["stale"]) == {"it claims versions [0], and the weights here are of 1"}
        assert set(said["lied"]) | set(said["unasked"]) <= {"exponents", "mantissa"}
        assert set(said["none"]) == {"it has no versions"}


# ------------------------------------------------------------------------------------- other models


def of_transformers() -> tuple[str, list[bool], list[str]]:
    """(what is said of fingerprints of decode steps, honest ones, those of other weights)"""
    torch.manual_seed(0)
    model = transformers_model("llama3").float()
    run = mk.parallelize(model, mk.init_mesh(""))
    with pytest.raises(PlanError) as refused:
        generate(run, PROMPTS, sampling=SAMPLING, fingerprints=True)
    rollouts = generate(run, PROMPTS, sampling=SAMPLING, samples=SAMPLES, seed=5)
    signed = fingerprint_rollouts(run, rollouts, tokens_per_microbatch=ROW)
    honest = [each.ok for each in verify(run, signed)]
    with torch.no_grad():
        for parameter in run.parameters():
            parameter.mul_(1.01)
    return str(refused.value), honest, [each.failed for each in verify(run, signed)]


def test_models_without_a_paged_cache_get_fingerprints_by_a_prefill() -> None:
    ((refused, honest, others),) = pool(1).run(of_transformers)
    assert refused.startswith("generate(fingerprints=True): LlamaForCausalLM does not attend by a `mask`")
    assert all(honest) and "" not in others
