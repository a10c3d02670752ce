"""The natural gradient is that of the Fisher matrix, assembled and solved on one device; a TRPO step keeps its limit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.algos.policy import PolicyLoss, Reinforce, step_advantages
from meshkit.algos.rollout import Rollout, token_values
from meshkit.algos.trpo import natural_gradient, trpo_step
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.data import pack_step
from meshkit.errors import PlanError
from meshkit.models import LLAMA_PLAN, Llama
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import RankError, pool

CONFIG = tiny_config(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, head_dim=4
)
DAMPING = 0.05
TOL_DIFFERENCE = 1e-6  # relative: central differences in fp64, and a residual of 1e-10
LOSS = PolicyLoss(clip=Reinforce())


@lru_cache
def answers() -> list[dict[str, Any]]:
    draw = np.random.default_rng(3)
    return [
        {
            "prompt_ids": draw.integers(0, 11, 2),
            "ids": draw.integers(0, 11, tokens),
            "reward": float(draw.integers(0, 4)),
            "key": index % 2,
            "log_probs": np.zeros(tokens),
        }
        for index, tokens in enumerate([5, 1, 4, 2, 3])
    ]


def model() -> Llama:
    made = Llama(CONFIG).double()
    mk.init_weights(made, seed=0)
    for param in made.parameters():
        param.data.mul_(3 if param.ndim > 1 else 1)
    return made


@lru_cache
def one_device() -> tuple[Tensor, float]:
    """(F + damping)^-1 g of the flattened parameters, with g a mean of -log pi, and x F x."""
    policy = model()
    parameters = list(policy.parameters())
    count = sum(len(answer["ids"]) for answer in answers())
    size = sum(param.numel() for param in parameters)
    fisher, gradient = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)

    def flat(value: Tensor) -> Tensor:
        grads = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads])

    for answer in answers():
        ids = torch.as_tensor(np.concatenate([answer["prompt_ids"], answer["ids"]]))
        log_probs = policy(ids[None])[0, len(answer["prompt_ids"]) - 1 : -1].log_softmax(-1)
        for token, row in zip(answer["ids"], log_probs, strict=True):
            gradient -= flat(row[int(token)]) / count
            scores = torch.stack([flat(entry) for entry in row])  # of each token of the vocabulary
            fisher += scores.T @ (row.detach().exp()[:, None] * scores) / count
    damped = fisher + DAMPING * torch.eye(size, dtype=torch.float64)
    solution = torch.linalg.solve(damped, gradient)
    return solution, float(solution @ fisher @ solution)


def start(axes: str) -> tuple[mk.Run, dict[str, Tensor]]:
    mesh = mesh_for(axes)
    examples = [Rollout(**answer).example() for answer in answers()]
    batch = pack_step(examples, seq_len=8, rank=mesh.data_rank, ranks=mesh.data_ranks)
    return mk.parallelize(model(), mesh, plan=LLAMA_PLAN), batch


def of_mesh(axes: str, microbatches: int) -> tuple[float, float, float, int]:
    """(farthest entry of x from the oracle's, of x F x, residual, products)."""
    run, batch = start(axes)
    before = [full_tensor(param.detach()).clone() for param in run.parameters()]
    run.forward_backward(batch, microbatches=microbatches)  # cross-entropy: a mean of -log pi
    found = natural_gradient(run, batch, damping=DAMPING, products=200, tolerance=1e-10, microbatches=microbatches)
    expected, curvature = one_device()
    sizes = {name: param.numel() for name, param in model().named_parameters()}
    parts = dict(zip(sizes, expected.split(list(sizes.values())), strict=True))
    worst, params = 0.0, list(run.named_parameters())
    assert all(torch.equal(full_tensor(p.detach()), old) for (_, p), old in zip(params, before, strict=True))
    assert all(param.grad is None for _, param in params)
    for (name, param), shard in zip(params, found.shards, strict=True):
        with torch.no_grad():
            local_tensor(param).copy_(shard)
        whole = full_tensor(param.detach())
        worst = max(worst, float((whole.flatten() - parts[name]).abs().max()))
    return worst / float(expected.abs().max()), abs(found.curvature / curvature - 1), found.residual, found.products


CASES = [
    (1, "", 1),
    (2, "dp_shard=2", 2),
    (2, "tp=2", 1),
    (2, "cp=2", 1),
    (2, "pp=2", 2),
    (4, "dp_replicate=2 tp=2", 1),
]


@pytest.mark.parametrize(("ranks", "axes", "microbatches"), thin(CASES, 2))
def test_it_is_the_solution_with_the_whole_fisher_matrix(ranks: int, axes: str, microbatches: int) -> None:
    for worst, curvature, residual, products in pool(ranks).run(of_mesh, axes, microbatches):
        assert worst < TOL_DIFFERENCE and curvature < TOL_DIFFERENCE and residual < 1e-9 and products > 10


def step_of(axes: str) -> tuple[float, ...]:
    run, batch = start(axes)
    batch["old_log_probs"] = token_values(run, batch).cpu()
    batch |= step_advantages(run.mesh, batch, LOSS).values
    made = trpo_step(run, batch, LOSS, limit=0.003, damping=0.01, products=20)
    moved = (token_values(run, batch).cpu() - batch["old_log_probs"])[batch["labels"] != -100]
    return made.taken.kl, made.taken.improvement, made.taken.fraction, float(moved.abs().max()) if len(moved) else 0.0


def test_a_step_keeps_its_limit_and_is_the_same_on_other_meshes() -> None:
    (alone,) = pool(1).run(step_of, "")
    kl, improvement, fraction, moved = alone
    assert 0 < kl <= 0.003 and improvement > 0 and moved > 0
    assert kl > 0.003 / 2 or fraction < 1  # a natural step of this size has about this KL
    for other in pool(2).run(step_of, "tp=2"):
        assert other[:3] == pytest.approx(alone[:3], rel=1e-5)


def in_bf16() -> None:
    memory = mk.MemoryPolicy(precision=mk.strategy.Precision())
    run = mk.parallelize(model().float(), mesh_for(""), plan=LLAMA_PLAN, memory=memory)
    natural_gradient(run, {})


def test_what_would_be_noise_is_refused() -> None:
    with pytest.raises(RankError, match="the run computes in lower precision"):
        pool(1).run(in_bf16)
    with pytest.raises(PlanError, match="damping=-1"):
        natural_gradient(None, {}, damping=-1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="trpo_step.limit=0."):
        trpo_step(None, {}, LOSS, limit=0)  # type: ignore[arg-type]
