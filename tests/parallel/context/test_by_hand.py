"""Attention that a model writes by hand, with masks of its own, and attention to what a cache gives back: on cp equal to one
device, with each message explained."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import notes_of_counted, refuse_counted
from meshkit.preflight.explain import Message
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import TOKENS as BYTES_TOKENS
from tests.laws.parity.cases import mesh_for
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.parallel.context.compared import worst_difference
from tests.parallel.context.test_modules import TOKENS, VOCAB, OwnBlock, OwnModel
from tests.world import pool
from tests.zoo import causal
from tests.zoo.exact import exact
from tests.zoo.shrink import DATA_IDS, VOCABULARY

TOL = 1e-10
LONGEST = 32  # as many as the model is read on, and more


class ByHand(nn.Module):
    """Products, and what is between them: a mask, added or filled in; 4 heads of 4."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("seen", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()[None, None])
        self.register_buffer("bias", torch.full((LONGEST, LONGEST), -1e9).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / 2
        scores = getattr(self, self.kind)(scores, tokens)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))

    def all(self, scores: Tensor, tokens: int) -> Tensor:
        return scores

    def triangle(self, scores: Tensor, tokens: int) -> Tensor:
        return scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), float("-inf"))

    def added(self, scores: Tensor, tokens: int) -> Tensor:
        return scores + torch.triu(torch.full((tokens, tokens), float("-inf"), dtype=scores.dtype), diagonal=1)

    def kept(self, scores: Tensor, tokens: int) -> Tensor:
        return torch.where(self.seen[:, :, :tokens, :tokens], scores, -1e9)

    def kept_and_added(self, scores: Tensor, tokens: int) -> Tensor:
        return scores + self.bias[:tokens, :tokens].to(scores.dtype)

    def of_heads(self, scores: Tensor, tokens: int) -> Tensor:
        """With as many heads as a rank has tokens."""
        made = torch.full((1, 4, tokens, tokens), float("-inf"), dtype=scores.dtype).triu(1)
        return scores + made + self.bias.expand(4, -1, -1)[:4, :tokens, :tokens].to(scores.dtype)

    def columns(self, scores: Tensor, tokens: int) -> Tensor:
        """Rows and columns change places."""
        return torch.where(self.seen[:, :, :tokens, :tokens].mT, scores, -1e9)

    def later_rows(self, scores: Tensor, tokens: int) -> Tensor:
        """A cut that begins at another row."""
        return torch.where(self.seen[:, :, 1 : tokens + 1, :tokens], scores, -1e9)

    def of_rank(self, scores: Tensor, tokens: int) -> Tensor:
        """A mask that is of a rank's own tokens however it is made."""
        return scores + torch.arange(tokens)[None, :] / 7


class Block(OwnBlock):
    def __init__(self, kind: str) -> None:
        super().__init__(causal=True)
        self.attn = ByHand(kind)  # type: ignore[assignment]


class Model(OwnModel):
    """Positions are counted among the tokens that are no padding, which is 0."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions = nn.Embedding(LONGEST, 16)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        real = input_ids.ne(0).int()
        x = self.tokens(input_ids) + self.positions(real.cumsum(dim=1) * real)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = mk.Plan(blocks=("blocks.*",))
KINDS = ("triangle", "added", "kept", "kept_and_added")


def model_and_batch(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(kind).double()
    ids = torch.randint(0, 5, (4, TOKENS + 1))  # zeros among them
    return model, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def error_of_a_run(kind: str, mesh: str, recompute: str, microbatches: int) -> float:
    """13 tokens, which no number of ranks divides."""
    (one, batch), (model, _) = model_and_batch(kind), model_and_batch(kind)
    return worst_difference(one, model, batch, mesh, plan=PLAN, recompute=recompute, microbatches=microbatches)


@pytest.mark.parametrize(
    ("kind", "mesh", "recompute", "microbatches"),
    [
        *((kind, "cp=2", "none", 1) for kind in (*KINDS, "all")),
        ("triangle", "cp=3", "full", 2),
        ("kept", "cp=4", "none", 1),
        ("added", "dp_shard=2 cp=2", "full", 1),
        ("kept_and_added", "pp=2 cp=2", "none", 2),
    ],
)
def test_attention_by_hand_equals_one_device(kind: str, mesh: str, recompute: str, microbatches: int) -> None:
    ranks = MeshSpec.parse(mesh).world_size
    assert max(pool(ranks).run(error_of_a_run, kind, mesh, recompute, microbatches)) < TOL


def error_of_heads() -> float:
    """Of rows of other lengths, also of as many tokens on a rank as there are heads, or as a row has."""
    one, _ = model_and_batch("of_heads")
    model, _ = model_and_batch("of_heads")
    run = mk.parallelize(model, mesh_for("cp=2"), plan=PLAN)
    worst = 0.0
    for tokens in (4, 32, 8, 1):
        ids = torch.randint(0, 5, (2, tokens), generator=torch.Generator().manual_seed(tokens))
        loss = F.cross_entropy(one(ids).flatten(0, 1), ids.flatten())
        found = run.forward_backward({"input_ids": ids, "labels": ids})
        worst = max(worst, abs(float(found.detach()) - float(loss.detach())))
    return worst


def test_heads_are_no_tokens_and_a_row_may_have_one() -> None:
    assert max(pool(2).run(error_of_heads)) < TOL


@pytest.mark.parametrize("kind", ["columns", "later_rows", "of_rank"])
def test_masks_that_are_no_rows_of_all_tokens_are_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="cannot be split by its tokens"):
        resolve(read_program(Model(kind)), Strategy(plan=PLAN), MeshSpec(cp=2))


def observed(recompute: str) -> tuple[Counter[Message], Counter[Message]]:
    torch.manual_seed(0)
    run = mk.parallelize(Model("triangle"), mesh_for("cp=2"), plan=PLAN, memory=mk.MemoryPolicy(recompute=recompute))
    ids = torch.arange(2 * BYTES_TOKENS).view(2, -1) % VOCAB
    return seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_gathered_by_hand_is_explained(recompute: str) -> None:
    assert_alike(pool(2).run(observed, recompute))


def test_the_lines_are_named_and_with_what_does_not_know_them_refused() -> None:
    doors = resolve(read_program(Model("triangle")), Strategy(plan=PLAN), MeshSpec(cp=2)).reading[1]
    said = {note.partition(" at ")[0].partition("cp=2: ")[2] for note in notes_of_counted(doors.counted, 2)}
    assert said == {"cumsum", "bmm", "ones", "tril"}
    elements = {name: [each.elements for each in found] for name, found in doors.sent.items()}
    assert elements == {"": [1], "blocks.0.attn": [16, 16], "blocks.1.attn": [16, 16]}
    none: dict[str, Any] = {"sequence": False, "compiled": False, "tp": 1}
    for given, text in (
        ({"sequence": True}, "sequence=False"),
        ({"compiled": True}, "compile=False"),
        ({"tp": 2}, "tp=1"),
    ):
        with pytest.raises(PlanError, match=f"Use {text}"):
            refuse_counted(doors, **{**none, **given})
    refuse_counted(doors, **none)


def error_of_a_given_mask() -> str:
    model, batch = model_and_batch("triangle")
    run = mk.parallelize(model, mesh_for("cp=2"), plan=PLAN)
    with pytest.raises(PlanError) as error:
        run.forward_backward(batch, mask=mk.Mask.full(TOKENS))
    return str(error.value)


def test_a_mask_that_it_would_not_follow_is_refused() -> None:
    assert all("attends by hand" in text for text in pool(2).run(error_of_a_given_mask))


def of_padding(kind: str) -> str:
    """What is said of rows that begin later, which have masks of their own and are laid end to end."""
    ids = torch.randint(*DATA_IDS, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    real = torch.arange(TOKENS) >= torch.arange(4)[:, None]
    run = mk.parallelize(causal.build(kind), mesh_for("cp=2"))
    with pytest.raises(PlanError) as error:
        run.forward_backward({"input_ids": ids, "labels": ids.where(real, -100), "attention_mask": real.long()})
    return str(error.value)


@pytest.mark.parametrize("kind", ["bloom", "xglm"])
def test_rows_with_masks_of_their_own_are_refused(kind: str) -> None:
    assert all("cp=1" in text for text in pool(2).run(of_padding, kind))


# ---------------------------------------------------------------------------------------------------- through a cache


def error_of_a_zoo_model(kind: str, mesh: str, recompute: str) -> float:
    """The largest difference of a gradient; its config returns a cache, as transformers' do by default."""
    ids = torch.randint(*DATA_IDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    with exact():
        one = causal.build(kind)
        F.cross_entropy(one(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()).backward()
        model = causal.build(kind)
        model.config.use_cache = True
        microbatches = 2 if "pp" in mesh else 1
        run = mk.parallelize(
            model, mesh_for(mesh), microbatches=microbatches, memory=mk.MemoryPolicy(recompute=recompute)
        )
        own = {name: x.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for name, x in batch.items()}
        run.forward_backward(own, microbatches=microbatches)
        expected = {name: param.grad for name, param in one.named_parameters()}
        return max(
            float((full_tensor(param.grad) - expected[name]).abs().max())
            for name, param in run.named_parameters()
            if expected[name] is not None
        )


@pytest.mark.parametrize(
    ("kind", "mesh", "recompute"),
    [
        ("deepseek_v32", "cp=2", "none"),
        ("roformer", "dp_shard=2 cp=2", "full"),
        ("mpt", "cp=3", "none"),
        ("bloom", "cp=2", "none"),
        ("xglm", "cp=2", "full"),
        ("gptj", "pp=2 cp=2", "none"),
        ("gemma3", "cp=2", "none"),
    ],
)
def test_keys_and_values_come_out_of_a_cache(kind: str, mesh: str, recompute: str) -> None:
    ranks = MeshSpec.parse(mesh).world_size
    assert max(pool(ranks).run(error_of_a_zoo_model, kind, mesh, recompute)) < TOL


def observed_of_a_cache(kind: str, recompute: str) -> tuple[Counter[Message], Counter[Message]]:
    torch.manual_seed(0)
    named = {"xglm": {"**.self_attn": mk.plan.attention(output="out_proj")}}.get(kind, {})
    plan = mk.Plan(tensor=named, blocks=("model.layers.*",))
    run = mk.parallelize(causal.build(kind), mesh_for("cp=2"), plan=plan, memory=mk.MemoryPolicy(recompute=recompute))
    ids = torch.arange(2 * BYTES_TOKENS).view(2, -1) % VOCABULARY
    return seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1)


@pytest.mark.parametrize(("kind", "recompute"), [("xglm", "none"), ("xglm", "full")])
def test_what_a_cache_gathers_is_explained(kind: str, recompute: str) -> None:
    assert_alike(pool(2).run(observed_of_a_cache, kind, recompute))
