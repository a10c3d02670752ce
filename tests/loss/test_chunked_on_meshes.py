"""The loss in chunks on every mesh: losses, gradients, norms and parameters are those of whole logits on one device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.core.sharding import full_tensor
from meshkit.models.deepseek import DeepseekV3, mtp_loss
from meshkit.models.moe import moe_plan
from tests.depth import covering, deal, deep, draws, thin
from tests.laws.parity.cases import ROWS, TOKENS, Cell, Moe, batches, build, mesh_for, own_rows, run_cell, start
from tests.laws.parity.test_parity import TOL_FP64
from tests.laws.parity.test_precision import BF16_RATIO, errors
from tests.tiny import draw_parameters, tiny_deepseek
from tests.world import RankError, pool

CHUNKED = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5))  # of 16 to 80 tokens: the last chunk is shorter

CELLS = [
    Cell(mesh="dp_shard=4", zero=3, microbatches=2, memory=CHUNKED),
    Cell(mesh="dp_shard=4", zero=2, microbatches=2, tied=True, vocab=61, memory=CHUNKED),
    Cell(mesh="dp_shard=4", zero=1, all_masked_microbatch=True, microbatches=3, memory=CHUNKED),
    Cell(mesh="dp_replicate=2 dp_shard=2", tied=True, memory=CHUNKED),
    Cell(mesh="tp=4", vocab=61, memory=CHUNKED),
    Cell(mesh="tp=4", sequence=True, tied=True, memory=CHUNKED),
    Cell(mesh="dp_shard=2 tp=2", vocab=61, microbatches=2, memory=replace(CHUNKED, recompute="full")),
    Cell(mesh="cp=4", documents=True, microbatches=2, memory=CHUNKED),
    Cell(mesh="cp=2 tp=2", sequence=True, vocab=61, memory=CHUNKED),
    Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=3, tied=True, memory=CHUNKED),
    Cell(mesh="pp=2 tp=2", layers=4, microbatches=3, schedule="zbv", vocab=61, memory=CHUNKED),
    Cell(mesh="pp=4", layers=4, microbatches=4, schedule="zb-h1", all_masked_microbatch=True, memory=CHUNKED),
    Cell(mesh="dp_shard=2 tp=2 ep=2", layers=2, moe=Moe(balance=0.1), sequence=True, memory=CHUNKED),
]


def check(cell: Cell) -> None:
    for outcome in pool(4).run(run_cell, cell):
        assert outcome.loss <= TOL_FP64, cell
        assert outcome.gradient <= TOL_FP64, (outcome.worst, cell)
        assert outcome.norm <= TOL_FP64, cell
        assert outcome.parameter <= TOL_FP64, cell


@pytest.mark.parametrize("cell", thin(CELLS, 4), ids=str)
def test_training_with_a_chunked_loss_equals_one_device(cell: Cell) -> None:
    check(cell)


CHOICES = {
    "sequence": [False, True],
    "microbatches": [1, 3],
    "zero": [1, 2, 3],
    "tied": [False, True],
    "vocab": [61, 3],
    "all_masked_microbatch": [False, True],
}
TWO_AXES = [  # and tokens of a chunk
    ("dp_shard=2 tp=2", 7),
    ("dp_replicate=2 tp=2", 16),
    ("dp_replicate=2 dp_shard=2", 33),
    ("cp=2 tp=2", ROWS * TOKENS + 1),
]


@pytest.mark.parametrize(
    ("where", "choice"), thin(deal(covering(CHOICES), TWO_AXES, each=3), 3), ids=lambda each: str(next(iter(each), ""))
)
def test_chunks_on_two_axes_equal_one_device(where: tuple[str, int], choice: dict) -> None:
    mesh, tokens = where
    check(Cell(mesh=mesh, memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=tokens)), **choice))


@deep
@draws(4)
@given(
    mesh=st.sampled_from([mesh for mesh, _ in TWO_AXES]),
    tokens=st.integers(1, ROWS * TOKENS + 1),
    choice=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}),
)
def test_any_chunk_on_any_mesh_equals_one_device(mesh: str, tokens: int, choice: dict) -> None:
    check(Cell(mesh=mesh, memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=tokens)), **choice))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(mesh="dp_shard=4", dtype="float32", bf16=True, microbatches=2),
        Cell(mesh="dp_shard=2 tp=2", dtype="float32", bf16=True, sequence=True, tied=True, vocab=61),
    ],
    ids=str,
)
def test_bf16_is_as_exact_as_with_whole_logits(cell: Cell) -> None:
    chunked = replace(cell, memory=replace(CHUNKED, precision=mk.strategy.Precision()))
    for whole, own in zip(pool(4).run(errors, cell), pool(4).run(errors, chunked), strict=True):
        assert max(whole.values()) > 1e-4, "bf16 was not used"
        assert sum(own.values()) <= BF16_RATIO * sum(whole.values())
        for name, error in own.items():
            assert error <= BF16_RATIO * max(whole[name], max(whole.values()) / 2), name


# ------------------------------------------------------------------------- whoever else calls the model on its mesh


def evaluations(cell: Cell) -> tuple[tuple[float, int], list[int]]:
    run = start(cell)
    batch = own_rows(batches(cell)[0], run.mesh)
    loss, counted = run.evaluate(batch)
    sampling = Sampling(max_new_tokens=6, temperature=0.9)
    (sample,) = generate(run, [Prompt(ids=np.array([1, 2, 3]), key=0)], sampling=sampling, seed=1)
    run.forward_backward(batch)  # what an evaluation has freed is gathered again
    return (loss.item(), int(counted)), sample.ids.tolist()


@pytest.mark.parametrize("mesh", ["dp_shard=2 tp=2", "pp=2 tp=2", "cp=2 dp_shard=2"])
def test_evaluation_and_generation_are_those_of_whole_logits(mesh: str) -> None:
    cell = Cell(mesh=mesh, layers=2, vocab=61)
    (loss, counted), ids = pool(4).run(evaluations, cell)[0]
    for (own, own_counted), own_ids in pool(4).run(evaluations, replace(cell, memory=CHUNKED)):
        assert abs(own - loss) <= TOL_FP64 * loss and own_counted == counted and own_ids == ids


def head_is_not_the_last_unit(zero: int) -> tuple[float, bool]:
    """(difference from a model that registers its head at the end, is what was sent what was explained)"""
    cell, found = Cell(mesh="dp_shard=4"), []
    for first in (False, True):
        model = build(cell)
        if first:
            model._modules = {"lm_head": model.lm_head, **model._modules}
        run = mk.parallelize(model, mesh_for(cell.mesh), plan=mk.models.LLAMA_PLAN, memory=CHUNKED, zero=zero)
        batch = own_rows(batches(cell)[0], run.mesh)
        with mk.observe(run.mesh) as seen:
            found.append(run.forward_backward(batch, microbatches=2))
            mk.clip_grad_norm(run, 1.0)
    place = {"dp_shard": run.mesh.data_rank}
    rows = len(batch["labels"])
    said = mk.explain(run, rows=rows, seq_len=TOKENS, microbatches=2, coordinate=place)
    return abs(float(found[0] - found[1])), seen == said.messages


def test_a_head_that_is_not_the_last_unit_is_kept_too() -> None:
    for difference, explained in pool(4).run(head_is_not_the_last_unit, 3):
        assert difference <= TOL_FP64 and explained


def freed_before_the_loss() -> None:
    cell = Cell(mesh="dp_shard=4", memory=CHUNKED)
    run = start(cell)
    batch = own_rows(batches(cell)[0], run.mesh)
    logits = run.model(batch["input_ids"])
    run.evaluate(batch)
    mk.cross_entropy(logits, batch["labels"])


def test_logits_older_than_an_evaluation_are_refused() -> None:
    with pytest.raises(RankError, match="StepError: loss: the head's weight has been freed since the forward"):
        pool(4).run(freed_before_the_loss)


# -------------------------------------------------------------------------------------------- other models, other losses


def policy_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    """Each token's log-probability and entropy count differently, as with advantages."""
    extra = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    found = mk.loss.token_log_probs(model(batch["input_ids"], **extra), batch["labels"], temperature=0.8)
    advantages = torch.cos(batch["input_ids"].double())
    return -(advantages * found.log_probs + 0.1 * found.entropy).sum()


def policy_errors(cell: Cell) -> float:
    batch = batches(cell)[0]
    worst = 0.0
    found = []
    for memory in (None, CHUNKED):
        run = start(replace(cell, memory=memory))
        loss = run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches, loss=policy_loss)
        found.append([loss, *(full_tensor(param.grad) for param in run.parameters())])
    worst = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    assert all(bool(value.abs().max() > 0) for value in found[1])
    return worst


@pytest.mark.parametrize(
    "cell",
    [
        Cell(mesh="dp_shard=2 tp=2", vocab=61, microbatches=2, sequence=True),
        Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=2, schedule="zbv", tied=True),
    ],
    ids=str,
)
def test_a_loss_of_log_probabilities_trains_alike_with_and_without_chunks(cell: Cell) -> None:
    assert max(pool(4).run(policy_errors, cell)) <= TOL_FP64


def mtp_errors(mesh: str, sequence: bool) -> float:
    """Of DeepSeek's modules that predict further ahead, which use the head once more each."""
    found = []
    for memory, where in ((mk.MemoryPolicy(), ""), (CHUNKED, mesh)):
        torch.manual_seed(2)
        config = tiny_deepseek(vocab_size=61, num_nextn_predict_layers=2)
        model = DeepseekV3(config).double()
        draw_parameters(model)
        batch = batches(Cell(mesh="", vocab=61))[0]
        if where:
            run = mk.parallelize(model, mk.init_mesh(where), plan=moe_plan(config), memory=memory, sequence=sequence)
            loss = run.forward_backward(own_rows(batch, run.mesh), microbatches=2, loss=mtp_loss)
            found.append([loss, *(full_tensor(param.grad) for param in run.parameters())])
        else:
            count = (batch["labels"] != -100).sum()
            loss = mtp_loss(model, batch) / count
            loss.backward()
            found.append([loss.detach(), *(param.grad for param in model.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("mesh", "sequence"), [("dp_shard=4", False), ("dp_shard=2 tp=2", True)])
def test_heads_used_once_more_for_tokens_further_ahead_give_the_same(mesh: str, sequence: bool) -> None:
    assert max(pool(4).run(mtp_errors, mesh, sequence)) <= TOL_FP64
