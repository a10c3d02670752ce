"""Law 3 for losses of whole answers: on every mesh and in any microbatches they are those of one device, one answer a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.answers import REFERENCE, count_pairs, label_log_probs, preference_objective, reward_objective
from meshkit.algos.objectives import PreferenceLoss
from meshkit.algos.tally import Tally
from meshkit.algos.token_values import token_values
from meshkit.data import ExampleLoader
from meshkit.data.examples import Example, Pair
from meshkit.models import LLAMA_PLAN, REWARD_PLAN, Llama, LlamaConfig, RewardModel
from meshkit.sharding import full_tensor
from tests.parity.cases import mesh_for
from tests.world import pool

TOL_FP64 = 1e-10  # law 1
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)
BETA, PAIRS, TOKENS = 0.3, 5, 24


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


def build(kind: type[nn.Module], seed: int) -> nn.Module:
    model = kind(CONFIG).double()
    mk.init_weights(model, seed=seed)
    for param in model.parameters():  # scores and log-probabilities that differ visibly
        param.data.mul_(4 if param.ndim > 1 else 1)
    return model


def dpo_on_one_device() -> tuple[float, dict[str, float], dict[str, Tensor]]:
    model, reference = build(Llama, 0), build(Llama, 1)

    def log_prob(model: nn.Module, example: Example) -> Tensor:
        given = alone(example)
        logits = model(given["input_ids"])[0].log_softmax(-1)
        valid = given["labels"][0] != -100
        return logits[valid].gather(-1, given["labels"][0][valid].unsqueeze(-1)).sum()

    losses, right = [], 0.0
    for pair in pairs():
        chosen, rejected = (
            BETA * (log_prob(model, side) - log_prob(reference, side).detach()) for side in (pair.chosen, pair.rejected)
        )
        losses.append(-F.logsigmoid(chosen - rejected))
        right += float(chosen > rejected)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {"accuracy": right / PAIRS}, {name: param.grad for name, param in model.named_parameters()}


def reward_on_one_device() -> tuple[float, dict[str, float], dict[str, Tensor]]:
    model = build(RewardModel, 0)
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


def on_mesh(what: str, axes: str, microbatches: int, chunk: int | None) -> tuple[float, float, dict[str, float]]:
    """Differences of loss, accuracy and gradients by name from one device."""
    mesh = mesh_for(axes)
    memory = mk.MemoryPolicy(loss=mk.ChunkedLoss(tokens=chunk) if chunk and what == "dpo" else None)
    loader = ExampleLoader(
        pairs(), seq_len=TOKENS, global_batch=PAIRS, seed=0, rank=mesh.data_rank, ranks=mesh.data_ranks, packing="step"
    )
    batch = next(loader)

    def start(kind: type[nn.Module], seed: int) -> mk.Run:
        plan = REWARD_PLAN if kind is RewardModel else LLAMA_PLAN
        return mk.parallelize(build(kind, seed), mesh, plan=plan, sequence=True, memory=memory)

    if what == "dpo":
        run, expected = start(Llama, 0), dpo_on_one_device()
        tally = Tally(mesh, ("accuracy", "margin", "chosen_reward", "rejected_reward"))
        batch[REFERENCE] = token_values(start(Llama, 1), batch, label_log_probs, microbatches=2)
        loss = preference_objective(mesh, batch, PreferenceLoss(kind="sigmoid", beta=BETA), tally=tally)
    else:
        run, expected = start(RewardModel, 0), reward_on_one_device()
        tally = Tally(mesh, ("accuracy", "margin", "score"))
        loss = reward_objective(mesh, batch, tally=tally)
    found = run.forward_backward(batch, loss=loss, count=count_pairs, microbatches=microbatches)
    accuracy = tally.means(PAIRS)["accuracy"]
    held_out, counted = run.evaluate(batch, loss=loss, count=count_pairs)
    assert counted == PAIRS and abs(held_out / counted - found) < TOL_FP64
    gradients = {
        name: float((full_tensor(param.grad) - expected[2][name]).abs().max()) for name, param in run.named_parameters()
    }
    return abs(found.item() - expected[0]), abs(accuracy - expected[1]["accuracy"]), gradients


@pytest.mark.parametrize("what", ["dpo", "reward"])
@pytest.mark.parametrize(
    ("ranks", "axes", "microbatches", "chunk"),
    [
        (1, "", 1, None),
        (2, "cp=2", 2, None),
        (2, "tp=2", 3, 7),
        (2, "pp=2", 2, None),
        (4, "dp_shard=2 cp=2", 1, 5),
        (4, "dp_shard=4", 2, None),
        (4, "cp=2 tp=2", 2, None),
        (4, "pp=2 cp=2", 2, 5),
    ],
)
def test_pairs_equal_one_device_with_an_answer_a_row(
    what: str, ranks: int, axes: str, microbatches: int, chunk: int | None
) -> None:
    for loss, accuracy, gradients in pool(ranks).run(on_mesh, what, axes, microbatches, chunk):
        assert loss < TOL_FP64 and accuracy < TOL_FP64
        assert max(gradients.values()) < TOL_FP64, max(gradients, key=gradients.__getitem__)
