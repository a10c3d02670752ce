"""Advantages and values of turns: against a plain loop over the turns of each episode, on any split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.algos.policy import (
    GAE,
    PolicyLoss,
    RewardToGo,
    pack_rollouts,
    step_advantages,
    value_count,
    value_metrics,
    value_objective,
    value_sums,
)
from meshkit.algos.rollout import Rollout
from meshkit.errors import PlanError
from tests.laws.parity.cases import mesh_for
from tests.world import pool

TOL_FP64_SUM = 1e-10  # only the order of sums differs
# Of each episode the runs of tokens, W written and o observed, and whether it was cut off.
EPISODES = [("WWWooWWoW", False), ("W", False), ("WWoWooooWWWWoWWo", True), ("WWWW", True), ("WoWoWoWoWoW", False)]
DISCOUNT, DECAY = 0.9, 0.8
LOSS = PolicyLoss(advantage=GAE(discount=DISCOUNT, decay=DECAY, whiten=False, level="turn"))


def episode(index: int) -> Rollout:
    runs, cut = EPISODES[index]
    draw = np.random.default_rng(index)
    size = len(runs)
    return Rollout(
        ids=draw.integers(0, 30, size),
        prompt_ids=np.arange(1 + index % 3),
        log_probs=np.zeros(size),
        key=index,
        reward=draw.normal(size=size),
        truncated=cut,
        wrote=np.array([each == "W" for each in runs]),
        values={"old_values": np.concatenate([np.zeros(1 + index % 3), draw.normal(size=size)])},
    )


def turns_of(rollout: Rollout) -> list[list[int]]:
    turns: list[list[int]] = []
    for token, wrote in enumerate(rollout.wrote):
        if wrote and (not turns or not rollout.wrote[token - 1]):
            turns.append([])
        if wrote:
            turns[-1].append(token)
    return turns


def oracle(rollout: Rollout, advantage: GAE | RewardToGo) -> tuple[dict[int, float], dict[int, float]]:
    """(the advantage of each written token, the return of each turn's first token), by the definition."""
    turns = turns_of(rollout)
    rewards = np.asarray(rollout.reward)
    values = rollout.values["old_values"][len(rollout.prompt_ids) :]
    ends = [turn[0] for turn in turns[1:]] + [len(rewards)]
    advantages, returns, ahead = {}, {}, 0.0
    for number in reversed(range(len(turns))):
        first = turns[number][0]
        earned = rewards[first : ends[number]].sum()
        if isinstance(advantage, RewardToGo):
            ahead = earned + DISCOUNT * ahead
        else:
            # The state after the end of an episode that was cut off has the value that stands at its end: 0 in this batch,
            # where no token follows.
            after = values[turns[number + 1][0]] if number + 1 < len(turns) else 0.0
            ahead = earned + DISCOUNT * after - values[first] + DISCOUNT * DECAY * ahead
        advantages |= dict.fromkeys(turns[number], ahead)
        returns[first] = ahead + values[first]
    return advantages, returns


def step(loss: PolicyLoss, order: list[int]) -> dict[int, tuple[dict[int, float], dict[int, float]]]:
    mesh = mesh_for("dp_replicate=-1")
    own = order[mesh.data_rank :: mesh.data_ranks]
    batch = pack_rollouts([episode(index) for index in own], seq_len=48, values=["old_values"])
    values = step_advantages(mesh, batch, loss).values
    found = {}
    for index in own:
        rollout = episode(index)
        # In the order of packing: a segment is known by its ids.
        for row, segment in {(r, int(s)) for r, line in enumerate(batch["segment_ids"]) for s in line.unique() if s}:
            places = (batch["segment_ids"][row] == segment).nonzero().flatten()
            if batch["input_ids"][row, places].tolist() == rollout.tokens.tolist():
                begin = int(places[0]) + len(rollout.prompt_ids) - 1
                wanted = [token for turn in turns_of(rollout) for token in turn]
                advantages = {token: float(values["advantages"][row, begin + token]) for token in wanted}
                starts = [turn[0] for turn in turns_of(rollout)]
                returns = {}
                if "returns" in values:
                    returns = {token: float(values["returns"][row, begin + token]) for token in starts}
                    is_start = values["turn_starts"][row, places].nonzero().flatten() - len(rollout.prompt_ids) + 1
                    assert is_start.tolist() == starts
                found[index] = advantages, returns
    learnt = batch["labels"] != -100
    assert not values["advantages"][~learnt].any()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("advantage", [LOSS.advantage, RewardToGo(discount=DISCOUNT, whiten=False, level="turn")])
def test_they_are_those_of_a_plain_loop_over_turns(world: int, advantage: Any) -> None:
    seen: dict[int, Any] = {}
    for found in pool(world).run(step, replace(LOSS, advantage=advantage), [4, 2, 0, 3, 1]):
        seen |= found
    assert seen.keys() == set(range(len(EPISODES)))
    for index, (advantages, returns) in seen.items():
        expected, expected_returns = oracle(episode(index), advantage)
        assert advantages == pytest.approx(expected, abs=TOL_FP64_SUM)
        if isinstance(advantage, GAE):
            assert returns == pytest.approx(expected_returns, abs=TOL_FP64_SUM)


def test_with_a_token_a_turn_both_levels_are_one() -> None:
    by_token = replace(LOSS, advantage=replace(LOSS.advantage, level="token"))
    (turns,) = pool(1).run(step, LOSS, [4, 1])
    (tokens,) = pool(1).run(advantages_of, by_token, [4, 1])
    for index in (4, 1):
        assert list(turns[index][0].values()) == pytest.approx(tokens[index], abs=TOL_FP64_SUM)


def advantages_of(loss: PolicyLoss, order: list[int]) -> dict[int, list[float]]:
    found = {}
    for index in order:
        batch = pack_rollouts([episode(index)], seq_len=48, values=["old_values"])
        values = step_advantages(mesh_for("dp_replicate=-1"), batch, loss).values["advantages"]
        found[index] = values[batch["labels"] != -100].tolist()
    return found


class Critic(nn.Module):
    """A number for each token, by its id alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 30, dtype=torch.float64))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: object = None) -> Tensor:
        return self.table[input_ids]


def value_step(order: list[int], microbatches: int) -> tuple[float, list[float], dict[str, float]]:
    mesh = mesh_for("dp_replicate=-1")
    run = mk.parallelize(Critic(), mesh)
    own = order[mesh.data_rank :: mesh.data_ranks]
    batch = pack_rollouts([episode(index) for index in own], seq_len=20, values=["old_values"])
    batch |= step_advantages(mesh, batch, LOSS).values
    del batch["old_values"]
    sums = value_sums(mesh)
    objective = value_objective(mesh, batch, metrics=sums)
    loss = run.forward_backward(batch, loss=objective, count=value_count, microbatches=microbatches)
    (gradient,) = [parameter.grad for parameter in run.parameters()]
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return float(loss), whole.tolist(), value_metrics(sums)


def test_the_critic_learns_one_value_a_turn_on_any_split() -> None:
    table = torch.linspace(-1, 1, 30, dtype=torch.float64, requires_grad=True)
    losses = []
    for index in range(len(EPISODES)):
        rollout = episode(index)
        _, returns = oracle(rollout, LOSS.advantage)
        for first, wanted in returns.items():
            # The state before a turn is known after the token before it.
            before = rollout.tokens[len(rollout.prompt_ids) + first - 1]
            losses.append((table[before] - wanted).square() / 2)
    expected = torch.stack(losses).mean()
    expected.backward()
    for world, microbatches in ((1, 1), (1, 3), (2, 2), (3, 1)):
        for loss, gradient, metrics in pool(world).run(value_step, [0, 1, 2, 3, 4], microbatches):
            assert loss == pytest.approx(expected.item(), abs=TOL_FP64_SUM)
            assert gradient == pytest.approx(table.grad.tolist(), abs=TOL_FP64_SUM)
            assert metrics["return"] == pytest.approx(
                np.mean([r for i in range(5) for r in oracle(episode(i), LOSS.advantage)[1].values()]), abs=TOL_FP64_SUM
            )


def test_other_levels_are_refused() -> None:
    with pytest.raises(PlanError, match="GAE: level='step' is not known. Choose token or turn"):
        GAE(level="step")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="RewardToGo: level='step' is not known"):
        RewardToGo(level="step")  # type: ignore[arg-type]
