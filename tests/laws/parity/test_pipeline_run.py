"""What a run with pp does beside training: the same first values, evaluation, generation, and errors that say where."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.core.model_state import copies_of
from meshkit.core.sharding import full_tensor
from meshkit.models import Llama, load_pretrained, save_pretrained
from meshkit.models.llama import LLAMA_PLAN
from meshkit.step import next_token_loss
from meshkit.strategy import PipelinePolicy
from tests.depth import thin
from tests.laws.parity.cases import Cell, Moe, batches, build, mesh_for, own_rows, start
from tests.world import RankError, pool, run_ranks

TOL = 1e-10


def first_values(mesh: str, schedule: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = build(Cell(mesh=mesh, layers=4, tied=True))
    run = mk.parallelize(model, mesh_for(mesh), plan=LLAMA_PLAN, pipeline=mk.strategy.PipelinePolicy(schedule=schedule))
    mk.init_weights(run.model, seed=7, plan=run.plan)
    return {copies_of(run.model).get(name, name): full_tensor(p) for name, p in run.named_parameters()}


@pytest.mark.parametrize(("mesh", "schedule"), [("pp=2 dp_shard=2", "1f1b"), ("pp=4", "1f1b"), ("pp=2 tp=2", "zbv")])
def test_first_values_are_those_of_one_device(mesh: str, schedule: str) -> None:
    one = build(Cell(mesh="", layers=4, tied=True))
    mk.init_weights(one, seed=7)
    expected = dict(one.named_parameters())
    seen = set()
    for values in pool(4).run(first_values, mesh, schedule):
        for name, value in values.items():
            assert torch.equal(value.to(expected[name].dtype), expected[name])
            seen.add(name)
    assert seen == set(expected)


def evaluated_and_generated(cell: Cell) -> tuple[float, int, list[int]]:
    run = start(cell)
    loss, count = run.evaluate(own_rows(batches(cell)[0], run.mesh))
    (sample,) = generate(
        run, [Prompt(ids=np.array([1, 2, 3]), key=0)], sampling=Sampling(max_new_tokens=5, temperature=0)
    )
    run.forward_backward(own_rows(batches(cell)[0], run.mesh), microbatches=2)  # and training goes on
    return float(loss), int(count), sample.ids.tolist()


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    thin(list(product(("pp=4", "pp=2 dp_shard=2", "pp=2 tp=2", "pp=2 cp=2"), ("1f1b", "zbv"))), 3),
)
def test_evaluation_and_generation_equal_one_device(mesh: str, schedule: str) -> None:
    check_evaluation_and_generation(Cell(mesh=mesh, layers=8, documents=True, schedule=schedule))


def test_evaluation_and_generation_with_stages_of_no_blocks_equal_one_device() -> None:
    check_evaluation_and_generation(Cell(mesh="pp=4", layers=4, documents=True, stages=(0, 2, 2, 0)))


def check_evaluation_and_generation(cell: Cell) -> None:
    one = Cell(mesh="dp_shard=1", layers=cell.layers, documents=True)
    ((expected_loss, expected_count, expected_ids),) = pool(1).run(evaluated_and_generated, one)
    found = pool(4).run(evaluated_and_generated, cell)
    for loss, count, ids in found:
        assert abs(loss - expected_loss) <= TOL * expected_loss
        assert count == expected_count
        assert ids == expected_ids


@pytest.mark.parametrize(
    ("ranks", "mesh"), [(4, "dp_shard=4 ep=2"), (4, "dp_shard=2 tp=2 ep=4"), (2, "cp=2 ep=2"), (2, "tp=2"), (2, "pp=2")]
)
def test_evaluation_and_generation_with_experts_equal_one_device(ranks: int, mesh: str) -> None:
    cell = Cell(mesh="dp_shard=1", layers=4, documents=True, moe=Moe(experts=8))
    ((expected_loss, expected_count, expected_ids),) = pool(1).run(evaluated_and_generated, cell)
    for loss, count, ids in pool(ranks).run(evaluated_and_generated, replace(cell, mesh=mesh)):
        assert abs(loss - expected_loss) <= TOL * expected_loss
        assert count == expected_count
        assert ids == expected_ids


def fail_in_the_loss() -> None:
    @mk.step.additive  # what raises cannot be tried
    def failing(model: torch.nn.Module, part: dict) -> torch.Tensor:
        raise ValueError("no loss today")

    run = start(Cell(mesh="pp=2", layers=4))
    run.forward_backward(batches(Cell(mesh="pp=2"))[0], microbatches=2, loss=failing)


def test_an_error_says_rank_stage_op_and_microbatch() -> None:
    with pytest.raises(RankError, match="pipeline '1f1b': pp rank 0, stage 0, F of microbatch 0"):
        run_ranks(2, fail_in_the_loss)


def refusals() -> list[str]:
    texts = []
    for options in (
        {"pipeline": PipelinePolicy(stages=(1, 1))},
        {"pipeline": PipelinePolicy(schedule="zbv", stages=(2, 0, 1, 1))},
        {"pipeline": PipelinePolicy(schedule="1f2b")},
        {"zero": 3},
        {"pipeline": PipelinePolicy(schedule="interleaved"), "layers": 3},
    ):
        cell = Cell(mesh="pp=2", layers=options.pop("layers", 4))
        try:
            mk.parallelize(build(cell), mesh_for("pp=2"), plan=LLAMA_PLAN, **options)
        except mk.MeshkitError as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_cut_is_refused() -> None:
    for texts in pool(2).run(refusals):
        assert texts[0].startswith("pipeline: split=(1, 1) does not share 4 blocks among 2 stages.")
        assert texts[1].startswith("pipeline: split=(2, 0, 1, 1) does not share 4 blocks among 4 stages.")
        assert texts[2].startswith("there is no schedule '1f2b'. Did you mean '1f1b'?")
        assert texts[3].startswith("zero=3 with pp: parameters are gathered once a step")
        assert texts[4].startswith("pipeline: 4 stages need at least 4 blocks, but the model has 3.")


def save_folder(cell: Cell, folder: str) -> dict[str, torch.Tensor]:
    """The state of this rank by single-device names."""
    run = start(cell)
    mk.init_weights(run.model, seed=5, plan=run.plan)
    save_pretrained(run.model, CONFIG_OF[cell.tied], folder, max_shard_bytes=20_000)
    copies = copies_of(run.model)
    return {copies.get(name, name): full_tensor(param) for name, param in run.named_parameters()}


def load_folder(cell: Cell, folder: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Llama(CONFIG_OF[cell.tied]).double()
    run = mk.parallelize(
        model, mesh_for(cell.mesh), plan=LLAMA_PLAN, pipeline=mk.strategy.PipelinePolicy(schedule=cell.schedule)
    )
    load_pretrained(run.model, folder)
    copies = copies_of(run.model)
    return {copies.get(name, name): full_tensor(param) for name, param in run.named_parameters()}


CONFIG_OF = {tied: build(Cell(mesh="", layers=4, tied=tied)).config for tied in (True, False)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("mesh", "schedule"), [("pp=4", "1f1b"), ("pp=2 dp_shard=2", "1f1b"), ("pp=2 tp=2", "zbv")])
def test_hugging_face_folders_of_stages(tmp_path: Path, mesh: str, schedule: str, tied: bool) -> None:
    cell = Cell(mesh=mesh, layers=4, tied=tied, schedule=schedule)
    folder = tmp_path / "saved"
    whole: dict[str, torch.Tensor] = {}
    for rank in pool(4).run(save_folder, cell, str(folder)):
        whole.update(rank)
    read = load_pretrained(Llama(CONFIG_OF[tied]).double(), folder)
    assert {name for name, _ in read.named_parameters()} == set(whole)
    assert all(torch.equal(param, whole[name]) for name, param in read.named_parameters())
    for other in (cell, Cell(mesh="pp=2 dp_shard=2", layers=4, tied=tied, schedule="interleaved")):
        for rank in pool(4).run(load_folder, other, str(folder)):
            assert all(torch.equal(value, whole[name]) for name, value in rank.items())


def load_other_folder(folder: str) -> str:
    with torch.device("meta"):
        model = Llama(replace(CONFIG_OF[True], num_hidden_layers=5)).double()
    run = mk.parallelize(model, mesh_for("pp=2"), plan=LLAMA_PLAN)
    try:
        load_pretrained(run.model, folder)
    except mk.MeshkitError as error:
        return str(error)
    return "no error"


def test_a_folder_of_another_model_is_refused_on_every_stage(tmp_path: Path) -> None:
    save_pretrained(build(Cell(mesh="", layers=4, tied=True)), CONFIG_OF[True], tmp_path / "saved")
    for text in pool(2).run(load_other_folder, str(tmp_path / "saved")):
        assert "has no tensor 'model.layers.4.self_attn.q_proj.weight', which the model needs (9 of 48 are" in text


def losses_of_evaluation_first() -> float:
    """An evaluation before any step must not hide stages from FSDP."""
    cell = Cell(mesh="pp=2 dp_shard=2", layers=4, schedule="zbv")
    run = start(cell)
    batch = own_rows(batches(cell)[0], run.mesh)
    before, count = run.evaluate(batch)
    return abs(float(run.forward_backward(batch, microbatches=3, loss=next_token_loss)) - float(before) / int(count))


def test_training_after_evaluation_has_the_same_loss() -> None:
    assert max(pool(4).run(losses_of_evaluation_first)) <= TOL


class LooksTwice(torch.nn.Module):
    """Adds its embedding to what comes out of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.embed(ids))


def look_twice() -> float:
    torch.manual_seed(0)
    alone = LooksTwice().double()
    run = mk.parallelize(copy.deepcopy(alone), mesh_for("pp=2"), plan=mk.Plan(blocks=("blocks.*",)))
    ids = torch.arange(6).view(2, 3)
    run.forward_backward({"input_ids": ids, "labels": ids}, microbatches=2)
    (next_token_loss(alone, {"input_ids": ids, "labels": ids}) / 6).backward()
    expected = dict(alone.named_parameters())
    return max(float((param.grad - expected[name].grad).abs().max()) for name, param in run.named_parameters())


def test_an_embedding_that_is_looked_up_again_equals_one_device() -> None:
    assert max(pool(2).run(look_twice)) <= TOL
