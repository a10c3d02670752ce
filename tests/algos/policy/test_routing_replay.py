"""Law 3 for routing replay: with the experts that other weights chose, loss and gradients are those of one device whose
routers are made to choose them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.policy import GRPO, GroupAdvantage, group_advantages, policy_batch, policy_count, policy_objective
from meshkit.algos.rollout import label_log_probs, routed_values
from meshkit.core.sharding import local_tensor
from meshkit.models import Llama
from meshkit.models.experts import MoE
from meshkit.models.router import Router
from meshkit.moe import ROUTING, RoutingReplay
from tests.algos.policy.test_balanced import own_rollouts
from tests.algos.policy.test_objective import TOL_FP64, answers
from tests.compare_shards import computed_once, difference
from tests.laws.parity.cases import Cell, Moe, build, memory_of, mesh_for, plan_of
from tests.tiny import tiny_config
from tests.world import RankError, pool

LOSS = replace(GRPO, kl=replace(GRPO.kl, coefficient=0.0))
VISIBLE = 1e-4  # of gradients: what other experts change, far above rounding


def cell_of(mesh: str, **choices: Any) -> Cell:
    return Cell(mesh=mesh, layers=3, moe=Moe(shared=12, bias=True), **choices)


def weights_of(model: nn.Module, seed: int) -> nn.Module:
    """Other weights for each seed, near to each other, as after some updates: many tokens choose other experts, not all."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.data += 0.2 * seed * param.data.std() * torch.randn(param.shape, generator=generator, dtype=param.dtype)
    return model


# ---------------------------------------------------------------------------------------------- one device, plainly


@contextmanager
def choosing(model: nn.Module, given: list[Tensor] | None) -> Iterator[list[Tensor]]:
    """Collects what the routers choose, [T, K] each; given: what they are made to choose."""
    routers, chosen = [child for child in model.modules() if isinstance(child, Router)], list[Tensor]()

    def choose(router: Router, number: int, ranked: Tensor) -> Tensor:
        experts = type(router)._choose(router, ranked) if given is None else given[number]
        chosen.append(experts)
        return experts

    for number, router in enumerate(routers):
        router._choose = lambda ranked, router=router, number=number: choose(router, number, ranked)
    yield chosen
    for router in routers:
        del router._choose


def logits_of(
    model: nn.Module, answer: dict[str, np.ndarray], given: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    ids = torch.as_tensor(np.concatenate([answer["prompt_ids"], answer["ids"]]))
    with choosing(model, given) as chosen:
        logits = model(ids[None])[0, len(answer["prompt_ids"]) - 1 : -1].log_softmax(-1)
    return logits.gather(-1, torch.as_tensor(answer["ids"])[:, None])[:, 0], chosen


@lru_cache
def one_device(recorded: int, replay: bool) -> tuple[float, dict[str, Tensor]]:
    """GRPO as it is written down, an answer at a time."""
    old, model = (weights_of(build(cell_of("")), seed) for seed in (recorded, 0))
    rewards, groups = (torch.tensor([answer[key] for answer in answers()]) for key in ("reward", "key"))
    assert isinstance(LOSS.advantage, GroupAdvantage)
    advantages = group_advantages(rewards, groups, LOSS.advantage).advantages
    total = torch.zeros((), dtype=torch.float64)
    for answer, advantage in zip(answers(), advantages, strict=True):
        with torch.no_grad():
            old_log_probs, chosen = logits_of(old, answer, None)
        log_probs, _ = logits_of(model, answer, chosen if replay else None)
        ratio = (log_probs - old_log_probs).exp()
        terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOSS.clip.low, 1 + LOSS.clip.high) * advantage)
        wrote = torch.as_tensor(np.ones(len(terms), bool) if answer["wrote"] is None else answer["wrote"])
        total = total + terms[wrote].mean() / len(answers())
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------------------------------- on a mesh


def start(cell: Cell, seed: int) -> mk.Run:
    return mk.parallelize(
        weights_of(build(cell), seed),
        mesh_for(cell.mesh),
        plan=plan_of(cell),
        memory=memory_of(cell),
        sequence=cell.sequence,
        compile=cell.compile or False,
    )


def on_mesh(
    cell: Cell,
    where: str,
    budget: int,
    microbatches: int,
    routing: RoutingReplay,
    recorded: int,
    oracle: tuple[int, bool],
) -> tuple[float, float]:
    """Differences of loss and gradients from one device. recorded: the weights of the snapshot; trained are those of seed 0.

    oracle: see `one_device`.
    """
    old, run = start(cell, recorded), start(cell, 0)
    sizes = {"tokens_per_microbatch": budget, "microbatches": microbatches}
    step = policy_batch(old, own_rollouts(old.mesh, where), LOSS, **sizes, snapshot=True, routing=routing)
    assert (ROUTING in step.batch) == (routing == "old")
    objective = policy_objective(run.mesh, step.batch, LOSS)
    value = run.forward_backward(step.batch, loss=objective, count=policy_count(LOSS), microbatches=step.microbatches)
    expected, gradients = computed_once(one_device, *oracle)
    return abs(value.item() - expected), max(difference(p.grad, gradients[name]) for name, p in run.named_parameters())


MESHES = [
    (1, "", "turns", 12, 1, {}),
    (2, "dp_shard=2", "last", 32, 1, {}),
    (2, "dp_shard=2", "turns", 64, 3, {}),  # more microbatches than the budget needs: some are empty
    (2, "tp=2", "turns", 24, 1, {}),
    (2, "tp=2", "turns", 24, 1, {"sequence": True, "recompute": "selective"}),
    (2, "cp=2", "turns", 24, 1, {}),
    (2, "pp=2", "turns", 24, 1, {}),
    (2, "pp=2", "turns", 24, 1, {"recompute": "full"}),
    (2, "dp_shard=2 ep=2", "last", 24, 1, {"recompute": "full"}),
    (4, "cp=2 tp=2 ep=2", "turns", 40, 1, {"sequence": True}),
    (4, "pp=2 dp_replicate=2", "last", 24, 3, {}),
]


@pytest.mark.parametrize(("ranks", "axes", "where", "budget", "microbatches", "choices"), MESHES)
def test_replay_equals_one_device_that_is_made_to_choose(
    ranks: int, axes: str, where: str, budget: int, microbatches: int, choices: dict[str, object]
) -> None:
    for found in pool(ranks).run(on_mesh, cell_of(axes, **choices), where, budget, microbatches, "old", 1, (1, True)):
        assert max(found) < TOL_FP64, found


def test_without_replay_it_is_another_gradient() -> None:
    """So that the law above says something: it is that of one device whose routers choose anew."""
    arguments = cell_of("cp=2"), "turns", 24, 1, "none", 1
    for loss, gradient in pool(2).run(on_mesh, *arguments, (1, True)):
        assert min(loss, gradient) > VISIBLE
    for found in pool(2).run(on_mesh, *arguments, (1, False)):
        assert max(found) < TOL_FP64, found


def compiled_on_mesh(*arguments: Any) -> tuple[float, float]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes, .grad of non-leaves for one, that warn
        found = on_mesh(*arguments)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    return found


def test_compiled_blocks_replay() -> None:
    cell = cell_of("tp=2", sequence=True, compile="aot_eager", recompute="full")
    arguments = (cell, "turns", 24, 1, "old", 1, (1, True))
    if torch.__version__ < "2.15":
        with pytest.raises(RankError, match="with compile needs torch 2.15"):
            pool(2).run(compiled_on_mesh, *arguments, timeout_s=400)
        return
    for found in pool(2).run(compiled_on_mesh, *arguments, timeout_s=400):
        assert max(found) < TOL_FP64, found


def of_the_same_weights(axes: str, sequence: bool) -> float:
    """How far a step with the choices of its own weights is from one without."""
    cell, gradients = cell_of(axes, sequence=sequence), []
    for routing in ("none", "old"):
        run = start(cell, 0)
        rollouts = own_rollouts(run.mesh, "turns")
        step = policy_batch(run, rollouts, LOSS, tokens_per_microbatch=24, snapshot=True, routing=routing)
        objective = policy_objective(run.mesh, step.batch, LOSS)
        run.forward_backward(step.batch, loss=objective, count=policy_count(LOSS), microbatches=step.microbatches)
        gradients.append([local_tensor(p.grad) for p in run.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True) if a.numel())


@pytest.mark.parametrize(("ranks", "axes", "sequence"), [(1, "", False), (2, "tp=2", True), (2, "pp=2", False)])
def test_replay_of_own_choices_changes_no_bit(ranks: int, axes: str, sequence: bool) -> None:
    assert pool(ranks).run(of_the_same_weights, axes, sequence) == [0.0] * ranks


def counts_and_loss(axes: str) -> tuple[list[list[int]], list[list[int]], float, float]:
    """Tokens per expert of a step that replays, beside those of one device that is made to choose; and its balance loss,
    beside that of what the routers of one device would choose there."""
    cell = Cell(mesh=axes, layers=3, moe=Moe(balance=0.5, per="batch"))
    run, ids = start(cell, 0), torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    batch[ROUTING] = routed_values(start(cell, 1), batch).routing

    def loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
        return -label_log_probs(model, part, replay=True).sum()

    run.forward_backward(batch, loss=mk.step.additive(loss))
    counts, auxiliary = run.routing_of_stages()

    other, model = (weights_of(build(cell), seed) for seed in (1, 0))
    seen = list[Tensor]()
    for router in (child for child in model.modules() if isinstance(child, Router)):
        router.register_forward_pre_hook(lambda router, args: seen.append(args[0].flatten(0, 1) @ router.weight.T))
    with torch.no_grad():
        with choosing(other, None) as chosen:
            other(ids)
        with choosing(model, chosen):
            model(ids)
    expected, would = ([torch.bincount(each.flatten(), minlength=6) for each in some] for some in (chosen, _best(seen)))
    assert [each.tolist() for each in expected] != [each.tolist() for each in would]
    shares = [logits.softmax(-1).sum(0) for logits in seen]
    # T E / (K T^2) sum_e counts_e sums_e, of each router.
    losses = [6 / (2 * ids.numel()) * (own * share).sum() for own, share in zip(would, shares, strict=True)]
    per_token = 0.5 * float(sum(losses)) / ids.numel()
    return (
        [each.tolist() for each in counts.values()],
        [each.tolist() for each in expected],
        float(auxiliary["balance"]),
        per_token,
    )


def _best(logits: list[Tensor]) -> list[Tensor]:
    return [each.topk(2, dim=-1).indices for each in logits]


@pytest.mark.parametrize(("ranks", "axes"), [(1, ""), (2, "cp=2"), (2, "pp=2")])
def test_counts_are_of_the_experts_that_are_used_and_the_balance_loss_of_those_that_would_be(
    ranks: int, axes: str
) -> None:
    for counts, expected, loss, expected_loss in pool(ranks).run(counts_and_loss, axes):
        assert counts == expected
        assert abs(loss - expected_loss) < TOL_FP64


class Twice(MoE):
    def forward(self, x_BTC: Tensor) -> Tensor:
        return super().forward(x_BTC.flip(1)).flip(1)


def refused(what: str) -> str:
    mesh, cell = mesh_for(""), cell_of("")
    if what == "dense":
        run = mk.parallelize(Llama(tiny_config()).double(), mesh)
    elif what == "own code":
        model = build(cell)
        model.layers[1].mlp.__class__ = Twice
        run = mk.parallelize(model, mesh, plan=plan_of(cell))
    else:
        run = start(cell, 0)
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "labels": ids}
    loss = mk.step.additive(lambda model, part: -label_log_probs(model, part, replay=True).sum())
    try:
        if what == "other routers":
            batch[ROUTING] = routed_values(run, batch).routing[:, :, 1:]
        else:
            routed_values(run, batch)
        run.forward_backward(batch, loss=loss)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dense", "the model has no router of meshkit.models, after mk.parallelize, whose choices could be recorded"),
        ("own code", "the router 'layers.1.mlp.gate' is called by your own code or beside hooks"),
        ("other routers", "'routing' is [1, 8, 1, 2], but the model's routers want [1, 8, 2, 2]"),
    ],
)
def test_what_cannot_be_replayed_is_refused(what: str, said: str) -> None:
    (text,) = pool(1).run(refused, what)
    assert said in text
