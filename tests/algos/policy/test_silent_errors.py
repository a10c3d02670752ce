"""The eighteen ways in which policy training goes wrong quietly, each as one test.

Small worlds run once, with the same six answers: alone, over two data ranks, over two ranks of cp.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.policy import (
    DAPO,
    DR_GRPO,
    GRPO,
    KL,
    PPO,
    REINFORCE_PP,
    PolicyLoss,
    _step_advantages,
    count_answers,
    critic_values,
    policy_count,
    policy_metrics,
    policy_objective,
    policy_sums,
    step_advantages,
    value_objective,
)
from meshkit.algos.policy._objective import POLICY_MAXIMA, POLICY_SUMS
from meshkit.algos.rollout import Rollout, label_log_probs, token_values
from meshkit.core.sharding import full_tensor
from meshkit.data import Example, check_examples, pack_step, train_tokenizer
from meshkit.errors import DataError
from meshkit.loss import token_log_probs
from meshkit.models import LLAMA_PLAN, Llama, RewardModel
from meshkit.step import count_labels
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import pool

TOL = 1e-10  # law 1
CONFIG = tiny_config(vocab_size=24, num_attention_heads=2, head_dim=8)
ROW, END = 16, 0  # the end of an answer has the id that rows are padded with
LOSSES: dict[str, PolicyLoss] = {
    "sequence_mean": replace(GRPO, kl=KL()),
    "token_mean": DAPO,
    "constant": replace(DR_GRPO, max_tokens=8),
    "whitened": replace(REINFORCE_PP, kl=KL()),
}


def examples(*, mask_truncated: bool = False) -> list[Example]:
    """Three groups of two, which alternate; answers of 2 to 7 tokens; the third is cut off, the others end."""
    draw = np.random.default_rng(11)
    made = []
    for index, tokens in enumerate([5, 2, 7, 3, 6, 4]):
        completion = draw.integers(1, 24, tokens)
        if index != 2:
            completion[-1] = END
        made.append(
            Rollout(
                prompt_ids=draw.integers(1, 24, 3),
                ids=completion,
                reward=float(draw.normal()),
                key=index % 3,
                truncated=index == 2,
                log_probs=-3 * draw.random(tokens),
            ).example(mask_truncated=mask_truncated)
        )
    return made


def model_of(kind: type[nn.Module] = Llama, seed: int = 0) -> nn.Module:
    model = kind(CONFIG).double()
    mk.init_weights(model, seed=seed)
    for param in model.parameters():
        param.data.mul_(3 if param.ndim > 1 else 1)
    return model


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(24, 8), nn.Dropout(0.5), nn.Linear(8, 24)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.drop(self.embed(input_ids)))


def learn(
    run: mk.Run, batch: dict[str, Tensor], loss: PolicyLoss, microbatches: int = 1
) -> tuple[float, Tensor, dict[str, float], int]:
    """Loss, gradients end to end, metrics, and how often this rank ran the model."""
    calls, sums = [0], policy_sums(run.mesh)
    objective = policy_objective(run.mesh, batch, loss, metrics=sums)

    def counted(model: nn.Module, part: dict[str, Any]) -> Tensor:
        calls[0] += 1
        return objective(model, part)

    # Vouched for: the rows of a trial repeat answers, and some of these losses look at whole ones.
    value = run.forward_backward(
        batch, loss=mk.step.additive(counted), count=policy_count(loss), microbatches=microbatches
    )
    gradients = torch.cat([full_tensor(param.grad).flatten() for param in run.parameters()])
    for param in run.parameters():
        param.grad = None
    return value.item(), gradients, policy_metrics(sums), calls[0]


def effective_share(weights: list[list[float]]) -> float:
    """Of two microbatches."""
    sums = policy_sums(mesh_for("tp=1"))
    for part in weights:
        weight = torch.tensor(part)
        given = {name: torch.zeros(1) for name in (*POLICY_SUMS, *POLICY_MAXIMA)}
        sums.add(**{**given, "tokens": torch.ones(len(part)), "weight": weight, "weight_squared": weight.square()})
    return policy_metrics(sums)["effective"]


def test_the_effective_share_is_that_of_kish() -> None:
    """All alike: every token counts. One in four: a quarter. Weights 1, 2, 3: 6^2 / (3 * 14)."""
    for weights, share in (
        ([[0.5, 0.5], [0.5]], 1.0),
        ([[0.0, 3.0], [0.0, 0.0]], 0.25),
        ([[1.0], [2.0, 3.0]], 36 / 42),
        ([[0.0], [0.0]], 0.0),
    ):
        assert pool(1).run(effective_share, weights) == [pytest.approx(share, abs=TOL)]


def world(axes: str) -> dict[str, Any]:
    mesh = mesh_for(axes)
    run = mk.parallelize(model_of(), mesh, plan=LLAMA_PLAN)
    old = mk.parallelize(model_of(seed=1), mesh, plan=LLAMA_PLAN)
    found: dict[str, Any] = {}

    def ready(units: list[Example], loss: PolicyLoss, **where: Any) -> dict[str, Tensor]:
        share = where or {"rank": mesh.data_rank, "ranks": mesh.data_ranks}
        batch = pack_step(units, seq_len=ROW, names=["rollout_log_probs", "groups", "rewards", "truncated"], **share)
        batch["old_log_probs"] = token_values(old, batch)
        return batch | step_advantages(mesh, batch, loss).values

    for name, loss in LOSSES.items():
        batch = ready(examples(), loss)
        for microbatches in (1, 5):
            found[f"{name} {microbatches}"] = learn(run, batch, loss, microbatches)
        found[f"{name} advantages"] = [
            (batch["input_ids"][row, at].item(), batch["labels"][row, at].item(), batch["advantages"][row, at].item())
            for row, at in (batch["labels"] != -100).nonzero().tolist()
        ]
    found["masked"] = learn(run, ready(examples(mask_truncated=True), DAPO), DAPO, 5)
    # Only the first rank has answers, and packs them itself.
    alone = examples()[:3] if mesh.data_rank == 0 else []
    found["one has all"] = learn(run, ready(alone, DAPO, rank=0, ranks=1), DAPO, 3)
    if mesh.tokens.size() == 1:
        drops, plain = mk.parallelize(Dropping(), mesh), pack_step(examples(), seq_len=ROW)
        found["dropout"] = (token_values(drops, plain), token_values(drops, plain), drops.model.training)
        batch = ready(examples(), DAPO)
        for name, rows in {"first": slice(0, 2), "last": slice(2, None), "twice": None}.items():
            part = {key: value[rows] if rows else torch.cat([value] * 2) for key, value in batch.items()}
            found[name] = learn(run, part, DAPO)
            found[f"{name} tokens"] = int((part["labels"] != -100).sum())
    return found


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[dict[str, Any]]]:
    """ "one", "dp" and "cp" -> what each rank found."""
    return {
        name: pool(ranks).run(world, axes)
        for name, ranks, axes in (("one", 1, ""), ("dp", 2, "dp_shard=2"), ("cp", 2, "cp=2"))
    }


Worlds = dict[str, list[dict[str, Any]]]


def assert_same(found: Any, expected: Any) -> None:
    assert abs(found[0] - expected[0]) < TOL
    assert (found[1] - expected[1]).abs().max() < TOL


# ------------------------------------------------------------------------------------------------ counts and means


def test_01_every_split_has_the_same_loss_and_gradient(worlds: Worlds) -> None:
    for name in LOSSES:
        expected = worlds["one"][0][f"{name} 1"]
        assert expected[1].abs().max() > 1e-4
        for where in ("one", "dp", "cp"):
            for microbatches in (1, 5):
                for found in worlds[where]:
                    assert_same(found[f"{name} {microbatches}"], expected)


def test_02_a_microbatch_without_learnt_tokens_is_harmless(worlds: Worlds) -> None:
    """More microbatches than rows, and an answer that is only read, alone in its row."""
    for where in ("one", "dp", "cp"):
        for found in worlds[where]:
            assert found["masked"][1].isfinite().all() and found["masked"][3] == 5
            assert_same(found["masked"], worlds["one"][0]["masked"])


def test_03_each_step_is_divided_by_its_own_tokens(worlds: Worlds) -> None:
    """A last, smaller window is a mean over its own tokens: the windows' means, weighted by tokens, are that of all."""
    one = worlds["one"][0]
    first, last = one["first tokens"], one["last tokens"]
    assert first != last
    whole = (one["first"][1] * first + one["last"][1] * last) / (first + last)
    assert (whole - one["token_mean 1"][1]).abs().max() < TOL


def test_04_means_of_answers_over_cp_have_whole_lengths(worlds: Worlds) -> None:
    for found in worlds["cp"]:
        assert_same(found["sequence_mean 1"], worlds["one"][0]["sequence_mean 1"])


def test_05_a_constant_normaliser_counts_the_answers_of_all_ranks(worlds: Worlds) -> None:
    for found in worlds["dp"]:
        assert_same(found["constant 5"], worlds["one"][0]["constant 1"])


def test_06_several_steps_of_one_generation_do_not_scale_the_loss(worlds: Worlds) -> None:
    """The answers generated twice and taken in two steps: each step is the one of the answers alone."""
    assert_same(worlds["one"][0]["twice"], worlds["one"][0]["token_mean 1"])


def test_07_whitening_is_that_of_the_whole_step(worlds: Worlds) -> None:
    expected = sorted(worlds["one"][0]["whitened advantages"])
    found = sorted(one for rank in worlds["dp"] for one in rank["whitened advantages"])
    assert [x[:2] for x in found] == [x[:2] for x in expected]
    assert np.abs(np.array(found)[:, 2] - np.array(expected)[:, 2]).max() < TOL
    white = np.array(expected)[:, 2]
    assert abs(white.mean()) < TOL and abs(white.std(ddof=1) - 1) < 1e-6


# ---------------------------------------------------------------------------------------------------------- tokens


def test_08_the_end_is_learnt_once_and_padding_never() -> None:
    """The end has the id of the padding. An answer that is masked because it was cut off counts in no mean."""
    batch = pack_step(examples(), seq_len=ROW)
    for answer in range(1, 7):
        here = batch["segment_ids"] == answer
        ends = (batch["labels"][here] == END).sum()
        cut = batch["truncated"][here].sum()
        assert ends == 1 - cut
    assert (batch["labels"][batch["segment_ids"] == 0] == -100).all()
    masked = pack_step(examples(mask_truncated=True), seq_len=ROW)
    assert count_labels(batch) == 27 and count_labels(masked) == 20
    assert count_answers(batch) == 6 and count_answers(masked) == 5


def test_09_no_second_beginning_is_added() -> None:
    """A prompt comes with its BOS from its template: nothing adds another, and a prompt with two is refused."""
    tokenizer = train_tokenizer(["a text " * 40], vocab_size=300)
    bos, end = tokenizer.bos_id, tokenizer.eos_id
    assert bos is not None
    once = Rollout(prompt_ids=[bos, 5, 6], ids=[7, end], reward=1.0).example()
    assert once.ids.tolist() == [bos, 5, 6, 7, end]
    check_examples([once], tokenizer)
    with pytest.raises(DataError, match="begin with two BOS"):
        check_examples([Rollout(prompt_ids=[bos, bos, 5], ids=[7, end], reward=1.0).example()], tokenizer)


def test_10_tokens_are_learnt_as_they_were_generated() -> None:
    """Ids in, ids out: what makes batches knows no tokenizer, so nothing is decoded and encoded again."""
    made = Rollout(prompt_ids=[3, 3], ids=[5, 1, 1, 5, END], reward=1.0).example()
    batch = pack_step([made], seq_len=8)
    assert batch["labels"][0].tolist() == [-100, 5, 1, 1, 5, END, -100, -100]
    assert "okenizer" not in inspect.getsource(Rollout) + inspect.getsource(_step_advantages)


def test_11_temperature_divides_logits_before_the_softmax() -> None:
    model, batch = model_of(), pack_step(examples(), seq_len=ROW)
    found = label_log_probs(model, batch, temperature=0.6)
    logits = model(batch["input_ids"], position_ids=batch["position_ids"])
    expected = (logits / 0.6).log_softmax(-1).gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert (found - expected)[batch["labels"] != -100].abs().max() < TOL


def test_12_log_probs_are_fp32_and_without_dropout(worlds: Worlds) -> None:
    logits = 8 * torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(5)
    found = token_log_probs(logits, labels).log_probs
    assert found.dtype == torch.float32
    assert (found - logits.float().log_softmax(-1)[labels, labels]).abs().max() < 1e-5
    one, other, training = worlds["one"][0]["dropout"]
    assert torch.equal(one, other) and training


def test_13_packed_answers_do_not_see_each_other() -> None:
    model, units = model_of(), examples()
    batch = pack_step(units, seq_len=ROW)
    packed = label_log_probs(model, batch)
    assert (batch["segment_ids"].amax(1) > batch["segment_ids"].clamp(min=1).amin(1)).any()
    for unit in units:
        ids = torch.as_tensor(np.array(unit.ids))
        alone = model(ids[None, :-1])[0].log_softmax(-1).gather(-1, ids[1:, None])[unit.prompt_length - 1 :, 0]
        (place,) = [
            segment
            for segment in range(1, 7)
            if batch["input_ids"][batch["segment_ids"] == segment].tolist() == ids.tolist()
        ]
        here = (batch["segment_ids"] == place) & (batch["labels"] != -100)
        assert (packed[here] - alone).abs().max() < TOL
        assert batch["position_ids"][batch["segment_ids"] == place].tolist() == list(range(len(ids)))


def test_14_an_id_outside_of_the_vocabulary_is_refused() -> None:
    """A model's rows beyond its tokenizer can be sampled; an id beyond the model's cannot be learnt."""
    made = Rollout(prompt_ids=[1], ids=[23, 24], reward=1.0, source="answer 7").example()
    assert pack_step([made], seq_len=8, vocab_size=25)["labels"].max() == 24
    with pytest.raises(DataError, match="answer 7: id 24 at position 2 is outside the vocabulary of 24"):
        pack_step([made], seq_len=8, vocab_size=24)


# ---------------------------------------------------------------------------------------------------- metrics, ranks


def test_15_metrics_have_the_counts_of_the_loss_and_maxima_are_maxima(worlds: Worlds) -> None:
    expected = worlds["one"][0]["token_mean 1"][2]
    assert expected["ratio_max"] > 1.5 and expected["old_k3"] > 0.01 and expected["rollout_error"] > 1.1
    assert 0 < expected["clipped_low"] + expected["clipped_high"] < 1
    for where in ("one", "dp", "cp"):
        for found in worlds[where]:
            for name, value in found["token_mean 5"][2].items():
                assert abs(value - expected[name]) < TOL, name


def test_16_numbers_of_a_token_stand_where_it_is_the_label() -> None:
    """Log-probabilities of the generator, of the trainer and values: all at the place that predicts the token."""
    units, model, critic = examples(), model_of(), model_of(RewardModel, 3)
    batch = pack_step(units, seq_len=ROW)
    log_probs, values = label_log_probs(model, batch), critic_values(critic, batch)
    for row, at in (batch["labels"] != -100).nonzero().tolist():
        start = at - int(batch["position_ids"][row, at])
        read, written = batch["input_ids"][row, start : at + 1], batch["labels"][row, at]
        unit = next(u for u in units if u.ids[: len(read)].tolist() == read.tolist() and u.ids[len(read)] == written)
        assert batch["rollout_log_probs"][row, at] == unit.token_values["rollout_log_probs"][len(read)] < 0
        assert abs(log_probs[row, at] - model(read[None])[0, -1].log_softmax(-1)[written]) < TOL
        assert abs(values[row, at] - critic(read[None])[0, -1]) < TOL


def test_17_all_ranks_run_the_model_equally_often(worlds: Worlds) -> None:
    """One rank has three answers, the other none."""
    calls = [found["one has all"][3] for found in worlds["dp"]]
    assert calls == [3, 3]
    for found in worlds["dp"]:
        assert_same(found["one has all"], worlds["one"][0]["one has all"])


def test_18_a_group_may_lie_on_several_ranks(worlds: Worlds) -> None:
    """Answers of one group on both ranks have the advantages of the gathered group."""
    expected = sorted(worlds["one"][0]["token_mean advantages"])
    found = [sorted(rank["token_mean advantages"]) for rank in worlds["dp"]]
    assert all(found) and np.abs(np.array(sorted(found[0] + found[1])) - np.array(expected)).max() < TOL
    rewards = {example.ids.tobytes(): example.scalars["rewards"] for example in examples()}
    assert len(rewards) == 6
    # The two advantages of each group of two are +-1/sqrt(2), but for the epsilon.
    sizes = np.abs(np.array(expected)[:, 2])
    assert np.abs(sizes - np.sqrt(0.5)).max() < 1e-3


def test_what_a_step_needs_is_said() -> None:
    batch = {name: torch.zeros(1, 4) for name in ("segment_ids", "labels", "rewards", "groups")}
    with pytest.raises(DataError, match="the batch has no truncated, old_values, old_log_probs, reference_log_probs"):
        step_advantages(None, batch, PPO)  # type: ignore[arg-type]  # refused before the mesh is looked at
    with pytest.raises(DataError, match="the batch has no advantages. Add those of step_advantages"):
        policy_objective(None, batch, PPO)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the batch has no returns. Add those of step_advantages with a GAE"):
        value_objective(None, batch)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="an answer: rollout_log_probs has 1 entries for a completion of 2 tokens"):
        Rollout(prompt_ids=[1], ids=[2, 3], reward=1.0, log_probs=[-1.0]).example()
