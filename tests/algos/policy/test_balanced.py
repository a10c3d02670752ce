"""Balanced steps: wherever answers begin and whoever learns them, losses, gradients and metrics are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.policy import (
    PPO,
    balance_rollouts,
    critic_values,
    policy_batch,
    policy_count,
    policy_metrics,
    policy_objective,
    policy_sums,
    step_advantages,
    value_objective,
)
from meshkit.algos.rollout import Rollout, answer_work, balance_examples, label_log_probs, token_values
from meshkit.data import Example, balance_tokens
from meshkit.errors import DataError
from meshkit.mesh import gather_over_data
from meshkit.models import Llama, RewardModel
from meshkit.preflight.observe import Peak
from meshkit.recipes.tasks import REFERENCE_TASKS
from tests.algos.policy.test_objective import (
    ANSWERS,
    LOSSES,
    TEMPERATURE,
    TOL_FP64,
    answers,
    farthest,
    gae_of_one_device,
    one_device,
    start,
)
from tests.laws.parity.cases import mesh_for
from tests.world import pool

LOG_PROBS = partial(label_log_probs, temperature=TEMPERATURE)


def own_rollouts(mesh: mk.Mesh, where: str) -> list[Rollout]:
    """On the last data rank alone, so that the others have none; or by turns, so that groups lie on several."""
    last = mesh.data_ranks - 1
    homes = [last if where == "last" else index // 2 % mesh.data_ranks for index in range(ANSWERS)]
    return [Rollout(**answer) for answer, home in zip(answers(), homes, strict=True) if home == mesh.data_rank]


def policies_on_mesh(axes: str, where: str, budget: int, microbatches: int) -> dict[str, float]:
    mesh = mesh_for(axes)
    run, found = start(Llama, mesh, 0), {}
    old, reference = start(Llama, mesh, 1), start(Llama, mesh, 2)
    for name, loss in LOSSES.items():
        sizes = {"tokens_per_microbatch": budget, "microbatches": microbatches}
        step = policy_batch(run, own_rollouts(mesh, where), loss, **sizes, temperature=TEMPERATURE, reference=reference)
        assert (step.advantages.answers, step.advantages.unscored, step.advantages.groups) == (ANSWERS, 1, 2)
        assert step.microbatches % microbatches == 0
        assert len(step.batch["input_ids"]) <= (step.microbatches if run.keeps_documents else ANSWERS)
        batch = step.batch
        batch["old_log_probs"] = token_values(old, batch, LOG_PROBS, microbatches=step.microbatches)
        tally = policy_sums(mesh)
        objective = policy_objective(mesh, batch, loss, temperature=TEMPERATURE, metrics=tally)
        value = run.forward_backward(batch, loss=objective, count=policy_count(loss), microbatches=step.microbatches)
        expected, gradients, rejected = one_device(name)
        found[name] = abs(value.item() - expected)
        found[f"{name} gradient"] = farthest(run, gradients)
        found[f"{name} rejected"] = abs(policy_metrics(tally)["rejected"] - rejected)
    return found


def critic_on_mesh(axes: str, where: str, budget: int, microbatches: int) -> dict[str, float]:
    mesh = mesh_for(axes)
    sizes = {"tokens_per_microbatch": budget, "microbatches": microbatches}
    run = start(RewardModel, mesh, 4)
    balanced = balance_rollouts(run, own_rollouts(mesh, where), **sizes)
    batch, count = balanced.batch, balanced.microbatches
    for name, seed in (("old_log_probs", 1), ("reference_log_probs", 2)):
        batch[name] = token_values(start(Llama, mesh, seed), batch, LOG_PROBS, microbatches=count)
    batch["old_values"] = token_values(start(RewardModel, mesh, 3), batch, critic_values, microbatches=count)
    batch |= step_advantages(mesh, batch, PPO).values
    *_, expected, gradients = gae_of_one_device()
    loss = run.forward_backward(batch, loss=value_objective(mesh, batch), microbatches=count)
    return {"critic": abs(loss.item() - expected), "critic gradient": farthest(run, gradients)}


@pytest.mark.parametrize("what", [policies_on_mesh, critic_on_mesh])
@pytest.mark.parametrize(
    ("ranks", "axes", "where", "budget", "microbatches"),
    [
        (1, "", "turns", 12, 1),
        (2, "dp_shard=2", "last", 12, 1),
        (3, "dp_shard=3", "last", 64, 2),  # more microbatches than the budget needs: some are empty
        (4, "dp_shard=2 cp=2", "turns", 24, 1),
        (4, "pp=2 dp_replicate=2", "last", 16, 3),
    ],
)
def test_any_assignment_equals_one_device(
    what: object, ranks: int, axes: str, where: str, budget: int, microbatches: int
) -> None:
    for found in pool(ranks).run(what, axes, where, budget, microbatches):
        assert max(found.values()) < TOL_FP64, found


def unpacked_on_mesh(what: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
    """As of a model that mixes documents, which refuses rows of several."""
    with mock.patch("meshkit.step._documents.PackedRows.mixing", return_value="earlier"):
        return what(*args)


@pytest.mark.parametrize("what", [policies_on_mesh, critic_on_mesh])
@pytest.mark.parametrize(
    ("ranks", "axes", "where", "budget", "microbatches"),
    [(1, "", "turns", 12, 1), (3, "dp_shard=3", "last", 64, 2), (4, "dp_shard=2 cp=2", "turns", 24, 1)],
)
def test_an_answer_in_a_row_of_its_own_is_learnt_alike(
    what: object, ranks: int, axes: str, where: str, budget: int, microbatches: int
) -> None:
    for found in pool(ranks).run(unpacked_on_mesh, what, axes, where, budget, microbatches):
        assert max(found.values()) < TOL_FP64, found


def minibatches_on_mesh(axes: str) -> list[list[tuple[int, ...]]]:
    mesh = mesh_for(axes)
    run = start(Llama, mesh, 0)
    balanced = balance_rollouts(run, own_rollouts(mesh, "turns"), tokens_per_microbatch=16, minibatches=2)
    steps = []
    for batch, microbatches in balanced.minibatches(balanced.batch):
        told = gather_over_data(mesh, (microbatches, [tuple(row.tolist()) for row in _answers(batch)]))
        assert len({count for count, _ in told}) == 1
        steps.append(sorted(ids for _, of_rank in told for ids in of_rank))
    return steps


def _answers(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    numbers = batch["segment_ids"].unique()
    return [batch["input_ids"][batch["segment_ids"] == number] for number in numbers if number]


def test_a_minibatch_has_the_same_groups_on_every_mesh() -> None:
    expected = [
        sorted(
            (*answer["prompt_ids"].tolist(), *answer["ids"].tolist()) for answer in answers() if answer["key"] == key
        )
        for key in (0, 1)
    ]
    for ranks, axes in ((1, ""), (2, "dp_shard=2"), (3, "dp_shard=3")):
        for found in pool(ranks).run(minibatches_on_mesh, axes):
            assert found == expected


def sent_on_mesh(axes: str) -> tuple[int, int, float, list[str]]:
    mesh = mesh_for(axes)
    draw = np.random.default_rng(mesh.data_rank)
    examples = [
        Example(
            ids=draw.integers(0, 2**50, size),
            learn=draw.random(size) > 0.5,
            token_values={"a": draw.random(size), "b": draw.random(size)},
            scalars={"c": float("nan"), "d": draw.random()},
            truncated=bool(size % 2),
        )
        for size in draw.integers(1, 40, 20 * mesh.data_rank).tolist()  # the first rank has none
    ]
    with mk.observe(mesh) as seen:
        balanced = balance_examples(mesh, examples, tokens_per_microbatch=128, names=["a", "b", "c", "d"])
    sent = sum(message.size * times for message, times in seen.items() if message.op == "all_to_all")
    # Back where they came from, bit for bit.
    for name in ("input_ids", "a", "b"):
        for example, found in zip(examples, balanced.back(balanced.batch[name]), strict=True):
            if name == "input_ids":
                assert found.tolist() == example.ids.tolist()
            else:
                assert found[:-1].tolist() == example.token_values[name][1:].tolist()
    other = Example(ids=np.arange(3), learn=np.ones(3, bool), scalars={"e": 1.0})
    long = Example(ids=np.arange(300), learn=np.ones(300, bool))
    refused = []
    for wrong in ([*examples, other] if mesh.data_rank == 1 else examples, [long] if mesh.data_rank else []):
        with pytest.raises(DataError) as error:
            balance_examples(mesh, wrong, tokens_per_microbatch=128)
        refused.append(str(error.value))
    examples_moved = sum(
        1 for rank, numbers in enumerate(balanced.balance.taken) for n in numbers if balanced.balance.home[n] != rank
    )
    said = 8 * (balanced.balance.moved * 4 + examples_moved * 3)
    return sent, said, balanced.balance.max_over_mean, refused


@pytest.mark.parametrize(("ranks", "axes"), [(3, "dp_shard=3"), (4, "dp_shard=2 cp=2")])
def test_bytes_that_move_are_those_of_the_moved_tokens_and_all_refuse_alike(ranks: int, axes: str) -> None:
    results = pool(ranks).run(sent_on_mesh, axes)
    cp = ranks // mk.MeshSpec.parse(axes).dp_shard
    assert sum(sent for sent, *_ in results) == cp * results[0][1] > 0
    assert max(ratio for *_, ratio, _ in results) < 1.05
    assert {tuple(texts) for *_, texts in results} == {tuple(results[0][3])}
    assert results[0][3][0].startswith(
        "balance_examples: some examples have the values ['a', 'b', 'c', 'd'], others ['e']."
    )
    assert "takes 300 tokens, but a microbatch holds tokens_per_microbatch=128" in results[0][3][1]


def test_work_is_flops_with_attention() -> None:
    assert pool(1).run(doubled)[0] == [True, True]


def doubled() -> list[bool]:
    """An answer twice as long costs twice as much, and for its attention four times."""
    run = start(Llama, mesh_for(""), 0)
    work, shape = answer_work(run), run.full_model.config
    per_pair = 2 * 2 * 3 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    beyond = [work(2 * tokens) - 2 * work(tokens) for tokens in (100, 1000)]
    return [abs(more / (per_pair * tokens**2) - 1) < 0.02 for more, tokens in zip(beyond, (100, 1000), strict=True)]


# ------------------------------------------------------------------------- tokens and memory at examples/grpo.py's own sizes


def step_of(phase: str, ranks: int, samples: int) -> list[list[Example]]:
    """By data rank, `samples` answers to each of 32 prompts of the recipe's reversal task, a prompt's answers on one rank.

    right: as long as the word. cut: of a policy that never ends, at the length to which it may write. mixed: the first
    prompts are answered right and the last ones cut, as where tasks are of different difficulty.
    """
    draw = np.random.default_rng(len(phase))
    task = REFERENCE_TASKS["reversal"]
    rows = task.rows(count=64).train
    by_rank: list[list[Example]] = [[] for _ in range(ranks)]
    for prompt in range(32):
        letters = len(rows[prompt].fields["completion"])
        cut = phase == "cut" or (phase == "mixed" and prompt >= 24)
        length = 1 + letters + 1 + (8 * task.max_new_tokens if cut else letters + 1)
        for _ in range(samples):
            ids = draw.integers(0, 32, length)
            by_rank[prompt * ranks // 32].append(Example(ids=ids, learn=np.arange(length) > letters + 1))
    return by_rank


@pytest.mark.parametrize(("ranks", "samples", "budget"), [(4, 16, 16_384), (2, 16, 512), (8, 16, 128)])
def test_tokens_of_ranks_are_within_5_percent_at_the_sizes_of_the_recipe(ranks: int, samples: int, budget: int) -> None:
    for phase, unbalanced in (("right", 1.0), ("cut", 1.0), ("mixed", 1.5)):
        by_rank = step_of(phase, ranks, samples)
        tokens = [sum(map(len, of_rank)) for of_rank in by_rank]
        assert max(tokens) / np.mean(tokens) >= unbalanced
        balance = balance_tokens(
            [len(example) for of_rank in by_rank for example in of_rank],
            [rank for rank, of_rank in enumerate(by_rank) for _ in of_rank],
            ranks=ranks,
            tokens_per_microbatch=budget,
        )
        assert balance.max_over_mean <= 1.05, (phase, str(balance))


def peaks_on_mesh(axes: str, budget: int) -> dict[str, int]:
    mesh = mesh_for(axes)
    run = start(Llama, mesh, 0)
    full = [Example(ids=np.arange(8) % 32, learn=np.ones(8, bool))] * (budget // 8)
    peaks: dict[str, int] = {}
    # Twice: a message may hold its buffer a moment longer, which only ever adds.
    for phase in ("warm", *2 * ("budget", "right", "mixed", "cut")):
        examples = full if phase in ("warm", "budget") else step_of(phase, mesh.data_ranks, 32)[mesh.data_rank]
        balanced = balance_examples(mesh, examples, tokens_per_microbatch=budget)
        for param in run.parameters():
            param.grad = None
        with Peak() as peak:
            run.forward_backward(balanced.batch, microbatches=balanced.microbatches)
        peaks[phase] = min(peak.bytes, peaks.get(phase, peak.bytes))
    peaks.pop("warm")  # buffers of the first step
    return peaks


def test_the_peak_of_memory_is_that_of_the_budget_whatever_the_lengths() -> None:
    """One of full microbatches; 11, 23 and 56 microbatches of 9 answers or more, whose tokens grow five times over."""
    results = pool(2).run(peaks_on_mesh, "dp_shard=2", 512)
    for peaks in results:
        # Rows that do not fill a microbatch to the last token may need a little less.
        assert all(0.9 <= peak / peaks["budget"] <= 1.05 for peak in peaks.values()), results
