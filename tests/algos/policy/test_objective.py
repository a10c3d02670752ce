"""Law 3 for policies: on every mesh and in any microbatches losses, gradients, advantages and metrics are those of one device
with an answer a row."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.policy import (
    DAPO,
    DR_GRPO,
    GMPO,
    GRPO,
    GSPO,
    KL,
    PPO,
    RLOO,
    Clip,
    Correction,
    OffPolicyMask,
    PolicyLoss,
    SegmentIndex,
    critic_values,
    group_advantages,
    policy_count,
    policy_loss,
    policy_metrics,
    policy_objective,
    policy_sums,
    step_advantages,
    step_within,
    value_metrics,
    value_objective,
    value_sums,
)
from meshkit.algos.rollout import Rollout, label_log_probs, token_values
from meshkit.core.sharding import full_tensor
from meshkit.data import pack_step
from meshkit.models import LLAMA_PLAN, REWARD_PLAN, Llama, RewardModel
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64 = 1e-10  # law 1
CONFIG = tiny_config()
ANSWERS, ROW, TEMPERATURE = 8, 24, 0.7
LOSSES: dict[str, PolicyLoss] = {
    "grpo": replace(GRPO, entropy=0.01),
    "dr_grpo": DR_GRPO.for_answers(10),
    "dapo": replace(DAPO, corrections=(Correction(high=1.2),)),
    "gspo": replace(
        GSPO,
        clip=Clip(low=0.3, high=0.3),
        kl=KL(estimator="k3", coefficient=0.1, weighted=True),
        corrections=(Correction(level="sequence", kind="mask", low=0.1, high=5.0), OffPolicyMask(threshold=-0.1)),
    ),
    "gmpo": replace(GMPO, corrections=(Correction(level="geometric", kind="reject", low=0.7, high=1.3),)),
    "rloo": RLOO,
}


@lru_cache
def answers() -> list[dict[str, Any]]:
    """Two groups, which alternate so that they lie on several ranks; answers of 1 to 9 tokens, one cut off, one unscored."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, 32, 2), draw.integers(0, 32, 3)]
    made = []
    for index in range(ANSWERS):
        tokens = [9, 1, 4, 6, 2, 8, 5, 3][index]
        made.append(
            {
                "prompt_ids": prompts[index % 2],
                "ids": draw.integers(0, 32, tokens),
                "reward": float("nan") if index == 4 else float(draw.integers(0, 4)),
                "key": index % 2,
                "truncated": index == 5,
                "wrote": np.arange(tokens) != 2 if tokens > 3 else None,
                "log_probs": -1 - 3 * draw.random(tokens),
            }
        )
    return made


def build(kind: type[nn.Module], seed: int) -> nn.Module:
    model = kind(CONFIG).double()
    mk.init_weights(model, seed=seed)
    for param in model.parameters():  # ratios that differ visibly from 1
        param.data.mul_(3 if param.ndim > 1 else 1)
    return model


# ---------------------------------------------------------------------------------------------- one device, plainly


def padded(values: list[Any], fill: float = 0.0) -> Tensor:
    return torch.stack([F.pad(torch.as_tensor(np.asarray(v)), (0, 9 - len(v)), value=fill) for v in values])


def alone(model: nn.Module) -> tuple[Tensor, Tensor]:
    """log-probability and entropy of each completion's token, [answers, 9], with an answer fed by itself."""
    found = []
    for answer in answers():
        ids = torch.as_tensor(np.concatenate([answer["prompt_ids"], answer["ids"]]))
        logits = (model(ids[None])[0, len(answer["prompt_ids"]) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        log_probs = logits.gather(-1, ids[len(answer["prompt_ids"]) :, None])[:, 0]
        entropy = -(logits.exp() * logits).sum(-1)
        found.append([F.pad(x, (0, 9 - len(x))) for x in (log_probs, entropy)])
    return torch.stack([x for x, _ in found]), torch.stack([x for _, x in found])


@lru_cache
def fixed(seed: int) -> Tensor:
    """Log-probabilities of a model that is not trained."""
    return alone(build(Llama, seed))[0].detach()


@lru_cache
def mask() -> Tensor:
    wrote = [np.ones(len(a["ids"]), bool) if a["wrote"] is None else a["wrote"] for a in answers()]
    return padded([w.astype(float) for w in wrote]).bool()


@lru_cache
def one_device(name: str) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients by name and the share of tokens whose weight is 0."""
    loss, model = LOSSES[name], build(Llama, 0)
    log_probs, entropy = alone(model)
    rewards, groups = (torch.tensor([answer[key] for answer in answers()]) for key in ("reward", "key"))
    advantages = group_advantages(rewards, groups, loss.advantage).advantages  # type: ignore[arg-type]
    layout = SegmentIndex.of_rows(mask())
    values = policy_loss(
        loss,
        layout,
        log_probs,
        layout.spread(advantages),
        old_log_probs=fixed(1),
        reference_log_probs=fixed(2),
        rollout_log_probs=padded([answer["log_probs"] for answer in answers()]),
        entropy=entropy,
    )
    total = values.losses.sum() / (mask().sum() if loss.counts_tokens else ANSWERS)
    total.backward()
    rejected = ((values.corrections == 0) & mask()).sum().double() / mask().sum()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, rejected.item()


@lru_cache
def gae_of_one_device() -> tuple[list[list[float]], list[list[float]], float, dict[str, Tensor]]:
    """Whitened advantages and returns of learnt tokens, the critic's loss and gradients; recursions in plain floats."""
    log_probs, reference = fixed(1), fixed(2)
    old, critic = build(RewardModel, 3), build(RewardModel, 4)

    def of(model: nn.Module, answer: dict[str, Any]) -> Tensor:
        ids = torch.as_tensor(np.concatenate([answer["prompt_ids"], answer["ids"]]))
        return model(ids[None])[0, len(answer["prompt_ids"]) - 1 :]

    advantages, returns, kept, losses = [], [], [], []
    for row, answer in enumerate(answers()):
        values, learnt = of(old, answer).tolist(), mask()[row].tolist()
        tokens = [t for t in range(len(answer["ids"])) if learnt[t]]
        scored = answer["truncated"] or answer["reward"] == answer["reward"]
        after, ahead, found = values[-1] if answer["truncated"] else 0.0, 0.0, {}
        for t in reversed(tokens):
            reward = -0.05 * (log_probs[row, t] - reference[row, t]).item()
            reward += answer["reward"] if t == tokens[-1] and scored and not answer["truncated"] else 0.0
            ahead = reward + after - values[t] + 0.95 * ahead
            after, found[t] = values[t], ahead
        advantages.append([found[t] if scored else 0.0 for t in tokens])
        returns.append([found[t] + values[t] if scored else values[t] for t in tokens])
        kept += advantages[-1] if scored else []
        now = of(critic, answer)
        for t, target in zip(tokens, returns[-1], strict=True):
            near = values[t] + (now[t] - values[t]).clamp(-0.2, 0.2)
            losses.append(torch.maximum((now[t] - target) ** 2, (near - target) ** 2) / 2)
    loss = torch.stack(losses).mean()
    loss.backward()
    mean, deviation = np.mean(kept), np.sqrt(np.var(kept, ddof=1) + 1e-8)
    white = [
        [
            (x - mean) / deviation
            if answers()[row]["truncated"] or answers()[row]["reward"] == answers()[row]["reward"]
            else 0.0
            for x in one
        ]
        for row, one in enumerate(advantages)
    ]
    return white, returns, loss.item(), {n: p.grad for n, p in critic.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------------------------- meshes


def batch_of(mesh: mk.Mesh) -> dict[str, Tensor]:
    examples = [Rollout(**answer).example() for answer in answers()]
    return pack_step(examples, seq_len=ROW, rank=mesh.data_rank, ranks=mesh.data_ranks)


def start(kind: type[nn.Module], mesh: mk.Mesh, seed: int) -> mk.Run:
    return mk.parallelize(build(kind, seed), mesh, plan=REWARD_PLAN if kind is RewardModel else LLAMA_PLAN)


def farthest(run: mk.Run, expected: dict[str, Tensor]) -> float:
    found = max(difference(param.grad, expected[name]) for name, param in run.named_parameters())
    for param in run.parameters():
        param.grad = None
    return found


def policies_on_mesh(axes: str, microbatches: int) -> dict[str, float]:
    """Differences from one device, by what."""
    mesh = mesh_for(axes)
    batch, log_probs = batch_of(mesh), partial(label_log_probs, temperature=TEMPERATURE)
    batch["old_log_probs"] = token_values(start(Llama, mesh, 1), batch, log_probs)
    batch["reference_log_probs"] = token_values(start(Llama, mesh, 2), batch, log_probs, microbatches=2)
    run, found = start(Llama, mesh, 0), {}
    for name, loss in LOSSES.items():
        step = step_advantages(mesh, batch, loss)
        assert (step.answers, step.unscored, step.groups, step.uniform) == (ANSWERS, 1, 2, 0)
        batch |= step.values
        tally = policy_sums(mesh)
        objective = policy_objective(mesh, batch, loss, temperature=TEMPERATURE, metrics=tally)
        value = run.forward_backward(batch, loss=objective, count=policy_count(loss), microbatches=microbatches)
        expected, gradients, rejected = one_device(name)
        metrics = policy_metrics(tally)
        found[name] = abs(value.item() - expected)
        found[f"{name} gradient"] = farthest(run, gradients)
        found[f"{name} rejected"] = abs(metrics["rejected"] - rejected)
    return found


def critic_on_mesh(axes: str, microbatches: int) -> dict[str, float]:
    mesh = mesh_for(axes)
    batch, log_probs = batch_of(mesh), partial(label_log_probs, temperature=TEMPERATURE)
    for name, seed in (("old_log_probs", 1), ("reference_log_probs", 2)):
        batch[name] = token_values(start(Llama, mesh, seed), batch, log_probs)
    batch["old_values"] = token_values(start(RewardModel, mesh, 3), batch, critic_values)
    step = step_advantages(mesh, batch, PPO)
    batch |= step.values
    white, returns, expected, gradients = gae_of_one_device()
    # Sorted numbers of the rank are among the sorted ones of all: match each to the nearest.
    found = {}
    learn = batch["labels"] != -100
    for name, own in (("advantages", white), ("returns", returns)):
        every = torch.tensor(sorted(x for one in own for x in one), dtype=torch.float64)
        here = batch[name][learn]
        found[name] = float((here[:, None] - every).abs().amin(1).max()) if len(here) else 0.0
    run, tally = start(RewardModel, mesh, 4), value_sums(mesh)
    loss = run.forward_backward(batch, loss=value_objective(mesh, batch, metrics=tally), microbatches=microbatches)
    found["critic"] = abs(loss.item() - expected)
    found["critic gradient"] = farthest(run, gradients)
    assert 0 <= value_metrics(tally)["clipped"] <= 1
    return found


CASES = [
    (1, "", 1),
    (2, "cp=2", 2),
    (2, "pp=2", 3),
    (4, "dp_shard=2 cp=2", 4),  # fewer rows than ranks times microbatches: some are empty
    (4, "dp_replicate=2 tp=2", 2),
]


@pytest.mark.parametrize(
    ("ranks", "axes", "microbatches", "what"),
    thin([(*case, what) for what in (policies_on_mesh, critic_on_mesh) for case in CASES], 3),
)
def test_every_split_equals_one_device_with_an_answer_a_row(
    what: Any, ranks: int, axes: str, microbatches: int
) -> None:
    for found in pool(ranks).run(what, axes, microbatches):
        assert max(found.values()) < TOL_FP64, found


def trust_region_on_mesh(axes: str) -> list[float]:
    mesh = mesh_for(axes)
    batch = batch_of(mesh)
    run = start(Llama, mesh, 0)
    batch["old_log_probs"] = token_values(run, batch)
    batch |= step_advantages(mesh, batch, DAPO).values
    objective = policy_objective(mesh, batch, DAPO)
    optimizer = torch.optim.SGD(run.parameters(), lr=2.0)
    run.forward_backward(batch, loss=objective, count=policy_count(DAPO))
    norms = [float(full_tensor(param).square().sum()) for param in run.parameters()]
    taken = step_within(run, batch, DAPO, optimizer.step, limit=0.02)
    again = token_values(run, batch)
    moved = (again - batch["old_log_probs"])[batch["labels"] != -100]
    kl = (moved.exp() - 1 - moved).sum()
    none = step_within(run, batch, DAPO, optimizer.step, limit=1e-12, tries=2)
    still = float((token_values(run, batch) - again).abs().max()) if len(again) else 0.0
    assert norms and none.fraction == 0 and still < 1e-12
    return [taken.fraction, taken.kl, taken.improvement, float(kl), float((batch["labels"] != -100).sum())]


def test_a_step_goes_back_until_it_is_within_the_trust_region() -> None:
    found = pool(2).run(trust_region_on_mesh, "dp_shard=2")
    (fraction, kl, improvement, *_), other = found[0], found[1]
    assert 0 < fraction < 1 and kl <= 0.02 and improvement > 0 and other[:3] == found[0][:3]
    assert abs((found[0][3] + found[1][3]) / (found[0][4] + found[1][4]) - kl) < 1e-12
    alone_ = pool(1).run(trust_region_on_mesh, "")[0]
    assert np.allclose(alone_[:3], found[0][:3], rtol=0, atol=TOL_FP64)
