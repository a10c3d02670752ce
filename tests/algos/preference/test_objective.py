"""Law 3 for losses of whole answers: on every mesh and in any microbatches they are those of one device, one answer a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.preference import PreferenceLoss, count_pairs, preference_objective, reward_objective
from meshkit.algos.rollout import REFERENCE, label_log_probs, token_values
from meshkit.data import ExampleLoader
from meshkit.data.examples import Example, Pair
from meshkit.errors import DataError
from meshkit.metrics import MetricSums
from meshkit.models import (
    LLAMA_PLAN,
    LlamaConfig,
    Qwen3MoeConfig,
    RewardModel,
    build_model,
    moe_plan,
    reward_plan,
)
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64 = 1e-10  # law 1
CONFIG = tiny_config()
EXPERTS = Qwen3MoeConfig(
    **{**vars(CONFIG), "qk_norm": True}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
)
BETA, PAIRS, TOKENS = 0.3, 5, 24
MIX = (PreferenceLoss(kind="sigmoid", beta=BETA), PreferenceLoss(kind="sft", weight=0.7))


def pairs() -> list[Pair]:
    draw = np.random.default_rng(7)

    def answer(prompt: np.ndarray, margin: float) -> Example:
        ids = np.concatenate([prompt, draw.integers(0, 32, draw.integers(1, 8))])
        return Example(ids=ids, learn=np.arange(len(ids)) >= len(prompt), scalars={"margin": margin})

    made = []
    for index in range(PAIRS):
        prompt = draw.integers(0, 32, draw.integers(1, 4))
        made.append(Pair(answer(prompt, index / 5), answer(prompt, index / 5)))
    return made


def alone(example: Example) -> dict[str, Tensor]:
    ids, learn = torch.as_tensor(np.array(example.ids)).long(), torch.as_tensor(np.array(example.learn))
    return {"input_ids": ids[None, :-1], "labels": ids[None, 1:].masked_fill(~learn[None, 1:], -100)}


def build(config: LlamaConfig, seed: int, *, reward: bool = False) -> nn.Module:
    model = (RewardModel(config) if reward else build_model(config)).double()
    mk.init_weights(model, seed=seed)
    for param in model.parameters():  # scores and log-probabilities that differ visibly
        param.data.mul_(4 if param.ndim > 1 else 1)
    return model


def dpo_on_one_device(config: LlamaConfig, *, mix: bool) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """mix: DPO and the loss of SFT, each pair weighed as by WPO."""
    model, reference = build(config, 0), build(config, 1)

    def log_probs(model: nn.Module, example: Example) -> tuple[Tensor, Tensor]:
        """(of each label, log sum of squares of each prediction)."""
        given = alone(example)
        logits = model(given["input_ids"])[0].log_softmax(-1)
        valid = given["labels"][0] != -100
        labels = given["labels"][0][valid].unsqueeze(-1)
        return logits[valid].gather(-1, labels).squeeze(-1), logits[valid].exp().square().sum(-1).log()

    losses, right = [], 0.0
    learnt = sum(len(log_probs(model, pair.chosen)[0]) for pair in pairs()) / PAIRS
    for pair in pairs():
        (chosen, sharp_chosen), (rejected, sharp_rejected) = (log_probs(model, side) for side in pair)
        ratios = [
            BETA * (own.sum() - log_probs(reference, side)[0].sum().detach())
            for own, side in ((chosen, pair.chosen), (rejected, pair.rejected))
        ]
        loss = -F.logsigmoid(ratios[0] - ratios[1])
        if mix:
            weight = ((chosen - sharp_chosen).mean() + (rejected - sharp_rejected).mean()).exp().detach()
            loss = weight * (loss - 0.7 * chosen.sum() / learnt)
        losses.append(loss)
        right += float(ratios[0] > ratios[1])
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {"accuracy": right / PAIRS}, {name: param.grad for name, param in model.named_parameters()}


def reward_on_one_device(config: LlamaConfig) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    model = build(config, 0, reward=True)
    losses, right = [], 0.0
    for pair in pairs():
        # A row's inputs end before the last token: it is fed whole here.
        chosen, rejected = (
            model(torch.as_tensor(np.array(side.ids)).long()[None])[0, -1] for side in (pair.chosen, pair.rejected)
        )
        losses.append(-F.logsigmoid(chosen - rejected - pair.chosen.scalars["margin"]))
        right += float(chosen > rejected)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {"accuracy": right / PAIRS}, {name: param.grad for name, param in model.named_parameters()}


def on_mesh(
    what: str, axes: str, microbatches: int, chunk: int | None, config: LlamaConfig = CONFIG
) -> tuple[float, float, dict[str, float]]:
    """Differences of loss, accuracy and gradients by name from one device."""
    mesh = mesh_for(axes)
    memory = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=chunk) if chunk and what != "reward" else None)
    loader = ExampleLoader(
        pairs(), seq_len=TOKENS, global_batch=PAIRS, seed=0, rank=mesh.data_rank, ranks=mesh.data_ranks, packing="step"
    )
    batch = next(loader)

    def start(seed: int) -> mk.Run:
        reward = what == "reward"
        plan = reward_plan(config) if reward else LLAMA_PLAN if config is CONFIG else moe_plan(config)
        return mk.parallelize(build(config, seed, reward=reward), mesh, plan=plan, sequence=True, memory=memory)

    run = start(0)
    if what == "reward":
        expected = reward_on_one_device(config)
        tally = MetricSums(mesh, ("accuracy", "score"))
        loss = reward_objective(mesh, batch, metrics=tally)
    else:
        expected = dpo_on_one_device(config, mix=what == "mix")
        tally = MetricSums(mesh, ("accuracy", "margin", "chosen_log_prob"))
        batch[REFERENCE] = token_values(start(1), batch, label_log_probs, microbatches=2)
        losses = MIX if what == "mix" else MIX[:1]
        loss = preference_objective(mesh, batch, *losses, wpo=what == "mix", metrics=tally)
    found = run.forward_backward(batch, loss=loss, count=count_pairs, microbatches=microbatches)
    accuracy = tally.means(PAIRS)["accuracy"]
    held_out, counted = run.evaluate(batch, loss=loss, count=count_pairs)
    assert counted == PAIRS and abs(held_out / counted - found) < TOL_FP64
    gradients = {name: difference(param.grad, expected[2][name]) for name, param in run.named_parameters()}
    return abs(found.item() - expected[0]), abs(accuracy - expected[1]["accuracy"]), gradients


SPLITS = [
    (1, "", 1, None),
    (2, "cp=2", 2, None),
    (2, "tp=2", 3, 7),
    (2, "pp=2", 2, None),
    (4, "dp_shard=2 cp=2", 1, 5),
    (4, "dp_shard=4", 2, None),
    (4, "cp=2 tp=2", 2, None),
    (4, "pp=2 cp=2", 2, 5),
]


@pytest.mark.parametrize(
    ("what", "ranks", "axes", "microbatches", "chunk"),
    thin([(what, *split) for split in SPLITS for what in ("dpo", "reward")], 5),
)
def test_pairs_equal_one_device_with_an_answer_a_row(
    what: str, ranks: int, axes: str, microbatches: int, chunk: int | None
) -> None:
    for loss, accuracy, gradients in pool(ranks).run(on_mesh, what, axes, microbatches, chunk):
        assert loss < TOL_FP64 and accuracy < TOL_FP64
        assert max(gradients.values()) < TOL_FP64, max(gradients, key=gradients.__getitem__)


@pytest.mark.parametrize(("axes", "microbatches", "chunk"), [("tp=2", 3, 7), ("cp=2", 2, None), ("dp_shard=2", 1, 5)])
def test_weighed_mixes_equal_one_device(axes: str, microbatches: int, chunk: int | None) -> None:
    for loss, accuracy, gradients in pool(2).run(on_mesh, "mix", axes, microbatches, chunk):
        assert loss < TOL_FP64 and accuracy < TOL_FP64
        assert max(gradients.values()) < TOL_FP64, max(gradients, key=gradients.__getitem__)


@pytest.mark.parametrize("what", ["dpo", "reward"])
@pytest.mark.parametrize("axes", ["dp_shard=2 ep=2", "tp=2 ep=2"])
def test_pairs_equal_one_device_with_experts(what: str, axes: str) -> None:
    for loss, accuracy, gradients in pool(2).run(on_mesh, what, axes, 2, None, EXPERTS):
        assert loss < TOL_FP64 and accuracy < TOL_FP64
        assert max(gradients.values()) < TOL_FP64, max(gradients, key=gradients.__getitem__)


def tallied() -> str:
    tally = MetricSums(mesh_for(""), ("accuracy", "perplexity"))
    with pytest.raises(DataError) as refused:
        tally.add(accuracy=torch.ones(2), margin=torch.ones(2))
    return str(refused.value)


def test_what_a_loss_does_not_offer_is_not_tallied() -> None:
    assert "there is no perplexity to add, only accuracy, margin" in pool(1).run(tallied)[0]
