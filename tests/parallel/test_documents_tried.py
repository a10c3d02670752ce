"""Documents of a row that a model mixes: shown by a trial of every model of the zoo, and refused on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.rollout import example_values, label_log_probs, token_values
from meshkit.data import Example
from meshkit.parallel import documents_tried
from meshkit.parallel.documents_tried import mixes_documents
from meshkit.program import without_values
from tests.world import pool

transformers = pytest.importorskip("transformers")
causal = pytest.importorskip("tests.zoo.causal")

LENGTHS = (8, 8)
TOL = 1e-4  # some models compute parts in fp32; of those that mix, the smallest difference is 0.14
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**mk.step.model_inputs(model, batch))


def packed(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(rows, -1).contiguous()
    labels = ids.roll(-1, 1)
    labels[:, [LENGTHS[0] - 1, -1]] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def first_alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first documents, with rows filled up as `build_rows` fills them."""
    labels = batch["labels"].clone()
    labels[:, LENGTHS[0] :] = -100
    return {**batch, "labels": labels}


def sees_the_first(model: nn.Module) -> bool:
    """Whether what the real model gives for the second document changes with the first one's tokens."""
    batch, first = packed(), LENGTHS[0]
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :first] = (batch["input_ids"][:, :first] + 7) % 40
    with torch.no_grad():
        one, changed = (call(model, each).logits[:, first:] for each in (batch, other))
    return float((one - changed).abs().max()) > TOL


@pytest.mark.parametrize("name", causal.names())
def test_a_trial_says_of_every_model_of_transformers_what_its_values_say(name: str) -> None:
    model = causal.build(name).eval()
    try:
        sees = sees_the_first(model)
    except Exception as error:  # on one device, too
        pytest.skip(f"{type(error).__name__}: {error}")
    assert mixes_documents(without_values(model), call) == sees


def large(name: str) -> nn.Module:
    config = {**SHAPE, "vocab_size": 300_000, "hidden_size": 64, "num_hidden_layers": 12}
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    return model


@pytest.mark.parametrize(("name", "mixes"), [("Llama", False), ("Qwen3Moe", False), ("Qwen3Next", True), ("OPT", True)])
def test_a_large_model_is_tried_with_a_few_of_its_layers_and_ids(name: str, mixes: bool) -> None:
    model = large(name)
    assert sum(param.numel() for param in model.parameters()) > documents_tried._SMALL
    assert mixes_documents(model, call) is mixes


def test_of_a_model_that_is_too_large_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_tried, "_MOST", 1000)
    assert mixes_documents(large("Llama"), call) is None


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.types, self.words = nn.Embedding(1, 8), nn.Embedding(50, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return (self.types(torch.zeros_like(input_ids)) + self.words(input_ids)).cumsum(1)


def test_a_table_of_kinds_is_not_that_of_words() -> None:
    """With ids of its one row the trial would see nothing."""
    assert mixes_documents(TwoTables(), call) is True


# ------------------------------------------------------------------------------------------------------- runs


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    of_opt = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.0} if name == "OPT" else {}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SHAPE, **of_opt))


def refusals(mesh: str, name: str, case: str) -> list[str]:
    """Of a step, an evaluation and log-probabilities. A case is a batch, or what is packed on the first data rank alone."""
    run = mk.parallelize(model_of(name), mk.init_mesh(mesh))
    alone = case == "alone" or (case == "of one rank" and run.mesh.data_rank > 0)
    batch = first_alone(packed()) if alone else packed()
    if case == "masked":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if case == "filled up":  # by segments: no labels
        segments = (torch.arange(sum(LENGTHS)) < LENGTHS[0]).long().expand(2, -1)
        batch = {**batch, "segment_ids": segments}
    found = []
    calls = [run.forward_backward, run.evaluate, lambda batch: token_values(run, batch)]
    for each in calls[:2] if case == "of one rank" else calls:
        try:
            each(batch)
            found.append("")
        except mk.MeshkitError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


REFUSED = "rows hold several documents (position_ids restart), and OPTForCausalLM mixes them"


@pytest.mark.parametrize(("ranks", "mesh"), [(1, "tp=1"), (2, "dp_shard=2"), (2, "tp=2"), (2, "pp=2"), (2, "cp=2")])
def test_packed_rows_of_a_model_that_mixes_them_are_refused(ranks: int, mesh: str) -> None:
    for found in pool(ranks).run(refusals, mesh, "OPT", "packed"):
        assert len(found) == 3 and all(REFUSED in each for each in found), found


def test_a_rank_with_packed_rows_stops_the_others() -> None:
    for found in pool(2).run(refusals, "dp_shard=2", "OPT", "of one rank"):
        assert all("packed rows" in each and REFUSED in each for each in found), found


@pytest.mark.parametrize("case", ["alone", "filled up"])
def test_one_document_in_a_row_with_filling_is_taken(case: str) -> None:
    assert pool(1).run(refusals, "tp=1", "OPT", case) == [["", "", ""]]


def test_with_a_mask_of_ones_a_model_does_not_look_at_positions() -> None:
    (found,) = pool(1).run(refusals, "tp=1", "Llama", "masked")
    assert "LlamaForCausalLM mixes them" in found[0]
    assert pool(1).run(refusals, "tp=1", "Llama", "packed") == [["", "", ""]]


def values_of_answers(axes: str) -> float:
    """The farthest of log-probabilities from those of each answer alone; answers lie on the last data rank."""
    one, run = model_of("OPT"), mk.parallelize(model_of("OPT"), mk.init_mesh(axes))
    assert not run.keeps_documents
    draw = np.random.default_rng(0)
    answers = [draw.integers(3, 40, length) for length in (5, 9, 3, 12, 7)]
    mine = answers if run.mesh.data_rank == run.mesh.data_ranks - 1 else []
    examples = [Example(ids=ids, learn=np.ones(len(ids), dtype=bool)) for ids in mine]
    found = example_values(run, examples, label_log_probs, tokens_per_microbatch=24)
    farthest = 0.0
    for ids, values in zip(mine, found, strict=True):
        row = torch.from_numpy(ids)[None]
        wanted = one(row[:, :-1]).logits.log_softmax(-1).gather(-1, row[:, 1:, None])[0, :, 0]
        farthest = max(farthest, float((torch.from_numpy(values[1:]) - wanted.detach()).abs().max()))
    return farthest


@pytest.mark.parametrize(("ranks", "mesh"), [(1, "tp=1"), (2, "dp_shard=2"), (2, "pp=2")])
def test_answers_of_a_model_that_mixes_lie_in_rows_of_their_own(ranks: int, mesh: str) -> None:
    assert max(pool(ranks).run(values_of_answers, mesh)) < 1e-5


def own_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(part["input_ids"]).logits.square().sum()
    return out


def of_own_loss() -> float:
    run = mk.parallelize(model_of("OPT"), mk.init_mesh("tp=1"))
    return float(run.forward_backward(packed(), loss=own_loss))


def test_a_loss_of_ones_own_calls_the_model_as_it_likes() -> None:
    assert pool(1).run(of_own_loss)[0] > 0
