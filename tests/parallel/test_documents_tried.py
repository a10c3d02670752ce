"""Documents of a row that a model mixes: shown by a trial of every model of the zoo, and refused on every rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.rollout import example_values, label_log_probs, token_values
from meshkit.data import Example
from meshkit.parallel import documents_tried
from meshkit.parallel.documents_tried import Mixing, mixes_documents
from meshkit.program import without_values
from tests.world import pool

transformers = pytest.importorskip("transformers")
causal = pytest.importorskip("tests.zoo.causal")

LENGTHS = (8, 8)
TOL = 1e-4  # some models compute parts in fp32; of those that mix, the smallest difference is 0.14
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**mk.step.model_inputs(model, batch))


def packed(lengths: tuple[int, int] = LENGTHS) -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1).contiguous()
    labels = ids.roll(-1, 1)
    labels[:, [lengths[0] - 1, -1]] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def first_alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first documents, with rows filled up as `build_rows` fills them."""
    labels = batch["labels"].clone()
    labels[:, LENGTHS[0] :] = -100
    return {**batch, "labels": labels}


def by_values(model: nn.Module, lengths: tuple[int, int]) -> Mixing:
    """By what the real model gives for a document when tokens of the other one change."""

    def differs(written: slice, read: slice) -> bool:
        batch = packed(lengths)
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][:, written] = (batch["input_ids"][:, written] + 7) % 40
        with torch.no_grad():
            one, changed = (call(model, each).logits[:, read] for each in (batch, other))
        return float((one - changed).abs().max()) > TOL

    first, last = slice(lengths[0]), slice(lengths[0], None)
    if differs(last, first):
        return "later"
    return "earlier" if differs(first, last) else "no"


@pytest.mark.parametrize("name", causal.names())
def test_a_trial_says_of_every_model_of_transformers_what_its_values_say(name: str) -> None:
    model = causal.build(name).eval()
    try:
        wanted = by_values(model, (20, 28))
    except Exception:  # of so many tokens, as of fewer places
        wanted = by_values(model, (8, 8))
    found = mixes_documents(without_values(model), call)
    assert found == wanted


def large(name: str) -> nn.Module:
    config = {**SHAPE, "vocab_size": 300_000, "hidden_size": 64, "num_hidden_layers": 12}
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    return model


@pytest.mark.parametrize(
    ("name", "mixes"), [("Llama", "no"), ("Qwen3Moe", "no"), ("Qwen3Next", "earlier"), ("OPT", "earlier")]
)
def test_a_large_model_is_tried_with_a_few_of_its_layers_and_ids(name: str, mixes: Mixing) -> None:
    model = large(name)
    assert sum(param.numel() for param in model.parameters()) > documents_tried._SMALL
    assert mixes_documents(model, call) == mixes


def test_of_a_model_that_is_too_large_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_tried, "_SHORT", 1000)
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
    assert mixes_documents(TwoTables(), call) == "earlier"


class Sees(nn.Module):
    """One layer of attention over what `sees` says, of [B, T] positions."""

    def __init__(self, sees: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.sees = sees
        self.words, self.mixed = nn.Embedding(50, 8), nn.Linear(8, 24)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.mixed(self.words(input_ids)).chunk(3, dim=-1)
        seen = self.sees(position_ids).expand(len(q), -1, -1).tril()
        out: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out


def alike(documents: Tensor) -> Tensor:
    return documents[:, :, None] == documents[:, None, :]


def numbers(positions: Tensor) -> Tensor:
    return (positions == 0).cumsum(1)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "ends of the first row for all": lambda positions: alike(numbers(positions[:1])),
    "one end in a row": lambda positions: alike(numbers(positions).clamp(max=2)),
    "the last end of a row": lambda positions: alike((numbers(positions) == numbers(positions)[:, -1:]).long()),
    "apart in batches of several rows": lambda positions: alike(numbers(positions) * (len(positions) > 1)),
}


def test_what_keeps_documents_apart_is_not_mixing() -> None:
    assert mixes_documents(Sees(lambda positions: alike(numbers(positions))), call) == "no"


@pytest.mark.parametrize("name", MASKS)
def test_mixing_that_shows_in_some_rows_alone(name: str) -> None:
    assert mixes_documents(Sees(MASKS[name]), call) == "earlier"


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
    for each in (run.forward_backward, run.evaluate, lambda batch: token_values(run, batch)):
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


class ByHand(nn.Module):
    """Attention without masks of documents. ahead: tokens see those after them too. glob: layers that do, the others keep
    documents apart."""

    def __init__(
        self, *, words: int = 40, ahead: bool = False, glob: tuple[int, ...] = (0, 1), layers: int = 2
    ) -> None:
        super().__init__()
        self.places, self.words = nn.Embedding(128, 8), nn.Embedding(words, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, words)
        self.ahead, self.glob = ahead, glob

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        document = (position_ids == 0).cumsum(1)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        seen = seen if self.ahead else seen.tril()
        for index, layer in enumerate(self.layers):
            allowed = seen if index in self.glob else seen & (document[:, :, None] == document[:, None])
            x = x + layer(F.scaled_dot_product_attention(x, x, x, attn_mask=allowed))
        out: Tensor = self.head(x)
        return out


class OwnTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(30, 8))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.table[input_ids]


def test_a_table_may_be_a_parameter_of_few_rows() -> None:
    assert mixes_documents(OwnTable(), call) == "no"


def test_models_by_hand() -> None:
    assert mixes_documents(ByHand(), call) == "earlier"
    assert mixes_documents(ByHand(ahead=True), call) == "later"
    assert mixes_documents(ByHand(glob=()), call) == "no"
    assert mixes_documents(ByHand(words=20), call) == "earlier"  # fewer than places
    many = ByHand(words=1_100_000, glob=(5,), layers=6)  # one of layers with the same modules
    assert mixes_documents(many, call) == "earlier"


class Noting(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.noted = torch.zeros(1)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.noted += 1
        random.random()
        return super().forward(input_ids, position_ids)


def test_a_trial_leaves_no_trace() -> None:
    model, seen = Noting(), list[Any]()
    model.layers[0].register_forward_hook(lambda *args: seen.append(args))
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    assert mixes_documents(model, call) == "earlier"
    assert not seen and float(model.noted) == 0
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    with torch.device("meta"):
        assert mixes_documents(model, call) == "earlier"


def own_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return own_values(model, part).sum()


def own_values(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(part["input_ids"], part["position_ids"])[..., 0]
    return out


def of_own_loss(mesh: str) -> float:
    torch.manual_seed(0)
    run = mk.parallelize(ByHand(), mk.init_mesh(mesh))
    batch = packed() if run.mesh.data_rank == 0 else first_alone(packed())
    run.evaluate(batch, loss=own_loss)
    token_values(run, batch, mk.step.additive(own_values))
    return float(run.forward_backward(batch, loss=own_loss))


def test_a_loss_of_ones_own_calls_the_model_as_it_likes() -> None:
    assert all(map(math.isfinite, pool(2).run(of_own_loss, "dp_shard=2")))


def of_mask(name: str) -> list[str]:
    """Of a batch whose mask says who sees whom."""
    run = mk.parallelize(model_of(name), mk.init_mesh("tp=1"))
    document = (packed()["position_ids"] == 0).cumsum(1)
    seen = (document[:, :, None] == document[:, None]) & torch.ones(16, 16, dtype=torch.bool).tril()
    found = []
    for mask in (seen[:, None], document):
        try:
            run.forward_backward({**packed(), "attention_mask": mask})
            found.append("")
        except mk.MeshkitError as error:
            found.append(str(error))
    return found


def test_a_mask_that_tells_documents_apart_is_left_to_the_model() -> None:
    pairs, numbers = pool(1).run(of_mask, "Llama")[0]
    assert pairs == ""
    assert "LlamaForCausalLM mixes them" in numbers  # to transformers they are ones


class ByNumbers(ByHand):
    """To which an attention_mask is the number of each token's document."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, number = self.words(input_ids), attention_mask
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        seen = seen & (number[:, :, None] == number[:, None])
        out: Tensor = self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=seen))
        return out


def by_numbers() -> float:
    run = mk.parallelize(ByNumbers(), mk.init_mesh("tp=1"))
    return float(run.forward_backward({**packed(), "attention_mask": (packed()["position_ids"] == 0).cumsum(1)}))


def test_numbers_of_documents_are_tried_as_numbers() -> None:
    assert pool(1).run(by_numbers)[0] > 0


def of_filling() -> list[str]:
    """Of a model that sees what comes after a token."""
    run = mk.parallelize(ByHand(ahead=True), mk.init_mesh("tp=1"))
    found = []
    for batch in (first_alone(packed()), {name: value[:, : LENGTHS[0]] for name, value in packed().items()}):
        try:
            run.forward_backward(batch)
            found.append("")
        except mk.MeshkitError as error:
            found.append(str(error))
    return found


def test_filling_is_refused_where_it_is_seen() -> None:
    filled, whole = pool(1).run(of_filling)[0]
    assert "depends on what comes after it, also where that fills the row up" in filled and whole == ""
