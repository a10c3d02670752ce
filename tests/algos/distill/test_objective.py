"""A student on any mesh learns as on one device, from teachers of other sizes, whole or by their likeliest tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.algos.distill import Distillation, distill_objective, teacher_values
from meshkit.core.sharding import full_tensor
from meshkit.data import Example, pack_step
from meshkit.errors import PlanError
from meshkit.loss import Divergence
from meshkit.metrics import MetricSums
from meshkit.models import LLAMA_PLAN, Llama
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import RankError, pool

TOL_FP64 = 1e-10  # law 1
EXAMPLES, ROW = 7, 24
STUDENT = tiny_config(vocab_size=61)
TEACHERS = {"wise": tiny_config(vocab_size=61, hidden_size=48, num_hidden_layers=1), "other": STUDENT}
KINDS = {
    "forward": Distillation(divergence=Divergence(temperature=2.0), top=None, teachers={"wise": 1.0}, nll=0.3),
    "reverse": Distillation(divergence=Divergence(kind="reverse"), top=5, teachers={"wise": 0.7, "other": 0.3}),
    "jsd": Distillation(divergence=Divergence(kind="jsd", beta=0.2), top=4, teachers={"other": 1.0}),
}


@lru_cache
def examples() -> list[Example]:
    draw = np.random.default_rng(0)
    found = []
    for tokens in (9, 4, 15, 6, 22, 3, 11)[:EXAMPLES]:
        learn = np.arange(tokens) >= 2
        learn[tokens // 2] = tokens < 8  # a hole
        found.append(Example(ids=draw.integers(0, 61, tokens), learn=learn))
    return found


def model_of(config: Any, seed: int) -> Llama:
    model = Llama(config).double()
    mk.init_weights(model, seed=seed)
    for param in model.parameters():
        param.data.mul_(3 if param.ndim > 1 else 1)
    return model


def divergences(p: Tensor, q: Tensor, distillation: Distillation) -> Tensor:
    """[N] of whole distributions of a teacher and a student."""
    if distillation.top is not None:
        kept = p.topk(distillation.top, dim=-1).indices
        p, q = (
            torch.cat([each.gather(-1, kept), 1 - each.gather(-1, kept).sum(-1, keepdim=True)], -1) for each in (p, q)
        )
    kind, beta = distillation.divergence.kind, distillation.divergence.beta
    if kind != "jsd":
        first, second = (p, q) if kind == "forward" else (q, p)
        return (first * (first / second).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)


@lru_cache
def one_device(kind: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients with an example fed by itself, and no code of the library but the models."""
    distillation, student = KINDS[kind], model_of(STUDENT, 0)
    teachers = {name: model_of(config, seed) for seed, (name, config) in enumerate(TEACHERS.items(), start=1)}
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    temperature = distillation.divergence.temperature
    for example in examples():
        ids, learn = torch.as_tensor(example.ids), torch.as_tensor(example.learn)[1:]
        logits = student(ids[None])[0, :-1][learn]
        for name, weight in distillation.teachers.items():
            with torch.no_grad():
                p = (teachers[name](ids[None])[0, :-1][learn] / temperature).softmax(-1)
            total = (
                total + weight * temperature**2 * divergences(p, (logits / temperature).softmax(-1), distillation).sum()
            )
        total = total - distillation.nll * logits.log_softmax(-1).gather(-1, ids[1:][learn, None]).sum()
        tokens += int(learn.sum())
    loss = total / tokens
    loss.backward()
    return loss.item(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def on_mesh(axes: str, microbatches: int, chunked: bool) -> dict[str, float]:
    """Differences from one device, by what."""
    mesh, found = mesh_for(axes), {}
    batch = pack_step(examples(), seq_len=ROW, rank=mesh.data_rank, ranks=mesh.data_ranks)
    memory = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5)) if chunked else mk.MemoryPolicy()
    run = mk.parallelize(model_of(STUDENT, 0), mesh, plan=LLAMA_PLAN, memory=memory)
    teachers = {
        name: mk.parallelize(model_of(config, seed), mesh, plan=LLAMA_PLAN, memory=memory)
        for seed, (name, config) in enumerate(TEACHERS.items(), start=1)
        if config.num_hidden_layers >= mesh.spec.pp
    }
    for kind, distillation in KINDS.items():
        if not teachers.keys() >= distillation.teachers.keys():
            continue
        said = {name: teacher_values(teachers[name], batch, distillation) for name in distillation.teachers}
        sums = MetricSums(mesh, ("divergence", "tokens"))
        loss = run.forward_backward(
            {**batch, **said}, loss=distill_objective(distillation, metrics=sums), microbatches=microbatches
        )
        expected, gradients = one_device(kind)
        found[kind] = abs(loss.item() - expected)
        gaps = [(full_tensor(p.grad) - gradients[name]).abs().max() for name, p in run.named_parameters()]
        found[f"{kind} gradient"] = max(map(float, gaps))
        assert sums.means(1.0)["tokens"] == sum(int(each.learn[1:].sum()) for each in examples())
        for param in run.parameters():
            param.grad = None
    return found


CASES = [
    (1, "", 1, True),
    (2, "tp=2", 2, False),
    (2, "cp=2", 2, True),
    (2, "pp=2", 3, False),
    (4, "dp_shard=2 tp=2", 1, True),
    (4, "dp_shard=4", 3, False),  # fewer rows than ranks times microbatches
    (4, "dp_replicate=2 cp=2", 1, False),
]


@pytest.mark.parametrize(("ranks", "axes", "microbatches", "chunked"), thin(CASES, 2))
def test_every_mesh_equals_one_device(ranks: int, axes: str, microbatches: int, chunked: bool) -> None:
    for found in pool(ranks).run(on_mesh, axes, microbatches, chunked):
        assert found and max(found.values()) < TOL_FP64, found


def with_another_vocabulary() -> None:
    mesh = mesh_for("")
    run, batch = mk.parallelize(model_of(STUDENT, 0), mesh, plan=LLAMA_PLAN), pack_step(examples(), seq_len=ROW)
    whole = KINDS["forward"]
    teacher = mk.parallelize(model_of(tiny_config(vocab_size=64), 1), mesh, plan=LLAMA_PLAN)
    batch["wise"] = teacher_values(teacher, batch, whole)
    run.forward_backward(batch, loss=distill_objective(whole))


def test_a_teacher_of_other_tokens_is_refused() -> None:
    with pytest.raises(RankError, match="wise says 64 numbers of a token, and top=None of a vocabulary of 61 has 61"):
        pool(1).run(with_another_vocabulary)
    with pytest.raises(PlanError, match="Give at least one, with a positive weight"):
        Distillation(teachers={})
