"""Dynamic groups: a model whose documents are shared out by their lengths equals one device, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import DataError, PlanError
from meshkit.parallel.context import context_of
from meshkit.strategy import ContextPolicy
from tests.laws.parity.cases import Cell, Moe, build, mesh_for
from tests.laws.parity.test_parity import check
from tests.tiny import tiny_config
from tests.world import pool

TOL = 1e-10  # only summation order differs
CELLS = [
    (2, "cp=2", {"groups": "by_length"}, {}),
    (3, "cp=3", {"groups": "by_length"}, {"microbatches": 3, "zero": 1}),
    (4, "cp=4", {"groups": "by_length"}, {"microbatches": 2, "zero": 2}),
    (4, "cp=4", {"groups": "flexsp"}, {"microbatches": 2}),
    (4, "cp=4", {"groups": "zeppelin"}, {}),
    (3, "cp=3", {"groups": "bytescale", "tokens_per_rank": 16}, {"microbatches": 6, "zero": 1}),
    (4, "cp=2 tp=2", {"groups": "by_length"}, {"sequence": True, "microbatches": 2}),
    (4, "dp_shard=2 cp=2", {"groups": "by_length"}, {"microbatches": 2, "window": 5}),
    (4, "pp=2 cp=2", {"groups": "by_length"}, {"microbatches": 4, "zero": 1}),
    # Some ranks have no document in a microbatch; what their routers report is of no token.
    (4, "cp=4 ep=2", {"groups": "by_length"}, {"microbatches": 4, "moe": Moe(z=0.1, bias=True)}),
    # Without a limit its units are made to fit; data ranks have other documents, and must run as many microbatches.
    (4, "dp_shard=2 cp=2", {"groups": "bytescale"}, {"microbatches": 2, "zero": 1}),
]


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(
    ("world", "mesh", "context", "choices"), CELLS, ids=[f"{c[1]} {c[2]['groups']}" for c in CELLS]
)
def test_a_model_equals_one_device(world: int, mesh: str, context: dict, choices: dict, documents: bool) -> None:
    """Without documents each row is one of 16 tokens, of which there are five on up to four ranks."""
    policy = ContextPolicy(**context)
    if documents:
        choices = {**choices, "all_masked_microbatch": True}
    check(world, Cell(mesh=mesh, context=policy, documents=documents, **choices))


# 40 of 64 tokens in one document, which is more than half of all ranks' average; the others are of 1 to 9.
LENGTHS = (40, 2, 6, 1, 9, 3, 3)


def skewed() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 64, (1, sum(LENGTHS) + 1), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions}


def gradients(policy: ContextPolicy, mesh: str, zero: int, microbatches: int) -> tuple[float, list[Tensor], list[list]]:
    """The loss, every gradient, and of each rank and microbatch the tokens that the plan gives it."""
    model = build(Cell(mesh=mesh))
    run = mk.parallelize(model, mesh_for(mesh), plan=mk.models.LLAMA_PLAN, context=policy, zero=zero)
    loss = run.forward_backward(skewed(), microbatches=microbatches)
    plan = context_of(run.model).plan
    found = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in run.parameters()]
    return loss.item(), found, [] if plan is None else [plan.tokens.tolist(), [len(each) for each in plan.shares]]


@pytest.mark.parametrize(("zero", "microbatches"), [(3, 1), (3, 3), (1, 4)])
def test_a_step_with_a_long_document_is_that_of_static_groups(zero: int, microbatches: int) -> None:
    policy = ContextPolicy(groups="by_length", tokens_per_rank=16)
    fixed = pool(4).run(gradients, ContextPolicy(), "cp=4", zero, microbatches)[0]
    for loss, found, (tokens, ranks) in pool(4).run(gradients, policy, "cp=4", zero, microbatches):
        assert abs(loss - fixed[0]) < TOL
        assert max(float((mine - other).abs().max()) for mine, other in zip(found, fixed[1], strict=True)) < TOL
        assert (ranks[0] >= 3 and ranks[1:] == [1] * 6) or microbatches > 1
        assert max(map(max, tokens)) <= 16 and sum(map(sum, tokens)) == 64


def joins(model: nn.Module, batch: dict) -> Tensor:
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], mask=batch["mask"])
    return batch["mask"].join(logits).sum()


def refused(what: str) -> str:
    policy = ContextPolicy(groups="by_length")
    try:
        if what in ("delta", "sdpa"):
            model = build(Cell(mesh="cp=2", mixer=what)) if what == "delta" else Unaware()
            mk.parallelize(model, mesh_for("cp=2"), context=policy, **({} if what == "delta" else {"plan": mk.Plan()}))
            return "nothing"
        if what == "room":
            policy = ContextPolicy(groups="by_length", tokens_per_rank=9)
        run = mk.parallelize(build(Cell(mesh="cp=2")), mesh_for("cp=2"), plan=mk.models.LLAMA_PLAN, context=policy)
        if what == "join":
            run.forward_backward(skewed(), loss=mk.step.additive(joins))  # what a trial would refuse
        run.forward_backward(skewed(), microbatches=2)
    except (PlanError, DataError) as error:
        return str(error)
    return "nothing"


class Unaware(nn.Module):
    """Its attention follows no documents, and a position is the place in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(64, 16), nn.Linear(16, 48)

    def forward(self, input_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(input_ids)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("delta", "groups='by_length': the model has recurrent mixers, whose state goes along a document"),
        ("sdpa", "follow no documents, so each row is one"),
        ("room", "do not fit into microbatches=2 of 2 ranks with tokens_per_rank=9. Give at least microbatches=4"),
        ("join", "a loss joins the tokens of whole rows, but with dynamic groups"),
    ],
)
def test_what_would_differ_is_refused(what: str, text: str) -> None:
    for answer in pool(2).run(refused, what):
        assert text in answer


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"groups": "longest"}, "groups 'longest' do not exist. Choose one of fixed, by_length"),
        ({"groups": "by_length", "scheme": "ulysses"}, "or heads traded among them, would send to ranks without it"),
        ({"groups": "flexsp", "ulysses": 2}, "Leave scheme and ulysses away"),
        ({"groups": "by_length", "balance": "zigzag"}, "groups say by themselves which rank has which tokens"),
        ({"groups": "by_length", "slack": 0.1}, "Leave balance and slack away"),
        ({"groups": "by_length", "whole": ("pixels",)}, "documents leave their rows"),
        ({"tokens_per_rank": 8}, "is of dynamic groups, and fixed ones give every rank as many"),
        ({"groups": "by_length", "tokens_per_rank": 0}, "room for at least 1 token"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(choices: dict, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        ContextPolicy(**choices)


def test_explain_prints_the_plan_beside_those_of_other_rules() -> None:
    with torch.device("meta"):
        model = mk.models.Llama(tiny_config())
    policy = ContextPolicy(groups="by_length")
    found = mk.explain(
        model, "cp=4", plan=mk.models.LLAMA_PLAN, context=policy, rows=1, seq_len=64, mask=mk.Mask.documents(LENGTHS)
    )
    (note,) = found.notes
    assert note.startswith("cp=4: documents shared out by_length: ")
    assert all(f"; {rule}: " in note for rule in ("flexsp", "bytescale", "zeppelin"))
