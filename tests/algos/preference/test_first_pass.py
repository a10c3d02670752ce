"""Law 3 for objectives of two passes: on every mesh and in any microbatches they are those of one device."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshkit as mk
from meshkit.algos.preference import (
    PreferenceLoss,
    RunningMean,
    StepStatistics,
    UnpairedLoss,
    count_answers,
    count_pairs,
    kto_reference_point,
    pair_statistics,
    preference_objective,
    reward_sums,
    unpaired_objective,
)
from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.data import ExampleLoader, Pair, split_mismatches, with_mismatches
from meshkit.data.examples import Example, Unit
from meshkit.metrics import MetricSums
from meshkit.models import LLAMA_PLAN, Llama
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64 = 1e-10  # law 1
CONFIG = tiny_config()
BETA, PAIRS, TOKENS = 0.3, 5, 32
BEFORE = RunningMean(total=1.5, count=4.0)  # of the steps before
PAIRED = {
    "aot": PreferenceLoss(kind="aot", beta=BETA),
    "aot_unpaired": PreferenceLoss(kind="aot_unpaired", beta=BETA),
    "bco": PreferenceLoss(kind="bco", beta=BETA),
    "sft": PreferenceLoss(kind="sft"),
}
UNPAIRED = {
    kind: UnpairedLoss(kind=kind, beta=BETA, undesirable_weight=1.3)
    for kind in ("kto", "apo_zero_unpaired", "bco_unpaired")
}


def answer(draw: np.random.Generator, prompt: np.ndarray, **scalars: float) -> Example:
    ids = np.concatenate([prompt, draw.integers(0, 32, draw.integers(1, 8))])
    return Example(ids=ids, learn=np.arange(len(ids)) >= len(prompt), scalars=scalars)


def pairs() -> list[Pair]:
    draw = np.random.default_rng(7)
    prompts = [draw.integers(0, 32, draw.integers(1, 4)) for _ in range(PAIRS)]
    return [Pair(answer(draw, prompt), answer(draw, prompt)) for prompt in prompts]


def labelled() -> list[tuple[Example, Example]]:
    draw = np.random.default_rng(8)
    made = [answer(draw, draw.integers(0, 32, 2), desirable=float(index % 3 == 0)) for index in range(PAIRS)]
    return with_mismatches(made)


def build(seed: int) -> Llama:
    model = Llama(CONFIG).double()
    mk.init_weights(model, seed=seed)
    for param in model.parameters():  # log-probabilities that differ visibly
        param.data.mul_(4 if param.ndim > 1 else 1)
    return model


@cache
def on_one_device(kind: str) -> tuple[float, dict[str, Tensor]]:
    """From the objectives' own definitions, with the whole step in one list."""
    model, reference = build(0), build(1)

    def log_prob(model: Llama, example: Example) -> Tensor:
        ids, learn = torch.tensor(example.ids.tolist()), torch.tensor(example.learn.tolist())
        logps = model(ids[None, :-1])[0].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        return logps[learn[1:]].sum()

    def both(examples: list[Example]) -> tuple[Tensor, Tensor]:
        return tuple(torch.stack([log_prob(each, one) for one in examples]) for each in (model, reference))

    if kind in PAIRED:
        (chosen, ref_chosen), (rejected, ref_rejected) = (both(list(side)) for side in zip(*pairs(), strict=True))
        w, r = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
        if kind == "aot":
            margins, ref_margins = chosen - rejected, (ref_chosen - ref_rejected).detach()
            losses = -F.logsigmoid(BETA * (margins.sort().values - ref_margins.sort().values))
        elif kind == "aot_unpaired":
            losses = -F.logsigmoid(BETA * (w.sort().values - r.sort().values))
        elif kind == "bco":
            rewards = BETA * torch.cat([w, r]).detach()
            shift = (BEFORE.total + rewards.sum()) / (BEFORE.count + len(rewards))
            losses = -F.logsigmoid(BETA * w - shift) - F.logsigmoid(shift - BETA * r)
        else:
            tokens = sum(int(pair.chosen.learn[1:].sum()) for pair in pairs())
            losses = -chosen * PAIRS / tokens
    else:
        examples, mismatched = (list(side) for side in zip(*labelled(), strict=True))
        policy, ref = both(examples)
        ratio = policy - ref.detach()
        good = torch.tensor([example.scalars["desirable"] > 0 for example in examples])
        sign = torch.where(good, 1.0, -1.0).double()
        weight = torch.where(good, 1.0, torch.tensor(1.3, dtype=torch.float64))
        if kind == "kto":
            other, ref_other = both(mismatched)
            point = (other - ref_other).mean().detach().clamp(min=0)
            assert point > 0  # or the test would not see it
            losses = weight * (1 - (BETA * sign * (ratio - point)).sigmoid())
        elif kind == "bco_unpaired":
            shift = (BEFORE.total + (BETA * ratio).detach().sum()) / (BEFORE.count + PAIRS)
            losses = -weight * F.logsigmoid(sign * (BETA * ratio - shift))
        else:
            losses = weight * (1 - (BETA * sign * ratio).sigmoid())
    loss = losses.mean()
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


def batch_of(mesh: mk.Mesh, units: list[Unit]) -> dict[str, Tensor]:
    share = {"rank": mesh.data_rank, "ranks": mesh.data_ranks}
    return next(ExampleLoader(units, seq_len=TOKENS, global_batch=PAIRS, seed=0, **share, packing="step"))


def on_mesh(axes: str, microbatches: int, chunk: int | None) -> dict[str, tuple[float, float]]:
    """Differences of loss and gradients from one device, by kind."""
    mesh = mesh_for(axes)
    memory = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=chunk) if chunk else None)
    run, reference = (
        mk.parallelize(build(seed), mesh, plan=LLAMA_PLAN, sequence=True, memory=memory) for seed in (0, 1)
    )
    found = {}

    def note(kind: str, value: Tensor) -> None:
        expected, gradients = on_one_device(kind)
        worst = max(difference(p.grad, gradients[name]) for name, p in run.named_parameters())
        found[kind] = abs(value.item() - expected), worst
        for param in run.parameters():
            param.grad = None

    for kind, paired in PAIRED.items():
        batch = batch_of(mesh, pairs())
        batch[REFERENCE] = token_values(reference, batch)
        statistics, rewards = pair_statistics(run, batch, paired, rewards=BEFORE, microbatches=microbatches)
        assert rewards.count == BEFORE.count + (2 * PAIRS if kind == "bco" else 0)
        loss = preference_objective(mesh, batch, paired, statistics=statistics)
        note(kind, run.forward_backward(batch, loss=loss, count=count_pairs, microbatches=microbatches))
    tally = MetricSums(mesh, ("desirable", "desirable_reward", "undesirable_reward"))
    for kind, unpaired in UNPAIRED.items():
        answers, mismatched = split_mismatches(batch_of(mesh, labelled()))
        answers[REFERENCE], mismatched[REFERENCE] = (token_values(reference, part) for part in (answers, mismatched))
        point = None
        if kind == "kto":
            point = kto_reference_point(run, mismatched, microbatches=microbatches)
        elif kind == "bco_unpaired":
            point = BEFORE.after(reward_sums(run, answers, beta=BETA, microbatches=microbatches)).mean
        loss = unpaired_objective(mesh, answers, unpaired, reference_point=point, metrics=tally)
        note(kind, run.forward_backward(answers, loss=loss, count=count_answers, microbatches=microbatches))
        assert tally.means(PAIRS)["desirable"] == pytest.approx(2 / PAIRS)
    return found


@pytest.mark.parametrize(
    ("ranks", "axes", "microbatches", "chunk"),
    thin(
        [
            (1, "", 2, None),
            (2, "cp=2", 2, None),
            (2, "tp=2", 1, 7),
            (2, "pp=2", 2, None),
            (2, "dp_shard=2", 3, None),
            (4, "dp_replicate=2 cp=2", 1, 5),
        ],
        2,
    ),
)
def test_objectives_of_two_passes_equal_one_device(ranks: int, axes: str, microbatches: int, chunk: int | None) -> None:
    for found in pool(ranks).run(on_mesh, axes, microbatches, chunk):
        assert found.keys() == PAIRED.keys() | UNPAIRED.keys()
        assert {kind: worst for kind, worst in found.items() if not max(worst) < TOL_FP64} == {}


def refused(what: str) -> str:
    mesh = mesh_for("")
    run = mk.parallelize(build(0), mesh, plan=LLAMA_PLAN)
    batch = batch_of(mesh, pairs())
    try:
        if what == "aot":
            pair_statistics(run, batch, PAIRED["aot"])
        elif what == "no statistics":
            batch[REFERENCE] = token_values(run, batch)
            run.forward_backward(batch, loss=preference_objective(mesh, batch, PAIRED["aot"]), count=count_pairs)
        elif what == "no label":
            batch[REFERENCE] = token_values(run, batch)
            unpaired_objective(mesh, batch, UNPAIRED["kto"])
        else:
            split_mismatches(batch_of(mesh, [pair.chosen for pair in pairs()]))
    except mk.errors.DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("aot", "the batch has no 'reference_log_probs', which a first pass compares with. Set it to token_values"),
        ("no statistics", "kind='aot' compares sorted values of the whole step. Give Pairs the partners"),
        ("no label", "the batch has no 'desirable'. It comes from encode_labelled's rows"),
        ("odd", "segment_ids go up to 5, an odd number, so some answer has no mismatch"),
    ],
)
def test_what_a_step_lacks_is_named(what: str, match: str) -> None:
    assert match in pool(1).run(refused, what)[0]


def test_statistics_that_no_kind_needs_run_no_model() -> None:
    loss = PreferenceLoss(kind="sigmoid")
    statistics, rewards = pair_statistics(None, {"segment_ids": torch.zeros(1, 4)}, loss, rewards=BEFORE)  # type: ignore[arg-type]
    assert statistics == StepStatistics(reward_shift=BEFORE.mean) and rewards == BEFORE
