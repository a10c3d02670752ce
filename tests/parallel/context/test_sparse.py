"""Sparse attention over ranks equals one fp64 attention to the blocks that a plain loop chooses, with every gradient."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.mask import Mask
from meshkit.parallel.context import Shape, SplitMask, block_traffic, choose, traffic, watching_choices
from meshkit.parallel.context._traffic import choice_traffic, total
from meshkit.strategy import BlockTopK, ContextPolicy, Sparse, VerticalSlash, visible_pairs
from tests.depth import draws
from tests.laws.parity.cases import Cell, build, mesh_for, start
from tests.parallel.context.sparse_oracle import SparseRows, blocks_in, chosen_blocks, of_tokens
from tests.parallel.context.test_attention import TOL, Case, heads, inputs, masks, own
from tests.world import pool
from tests.zoo import causal
from tests.zoo.shrink import VOCABULARY

TOL_THEIRS = 1e-6  # transformers computes its norms in fp32 whatever the dtype of the model


@dataclass(frozen=True, kw_only=True)
class SparseCase(Case):
    sparse: Sparse


def oracle(case: SparseCase) -> tuple[list[Tensor], Tensor]:
    """([out, dq, dk, dv], the chosen blocks [B, H, blocks, blocks])."""
    q, k, v, dout = inputs(case, torch.float64)
    shown, scale = case.mask.dense(), q.shape[-1] ** -0.5 if case.scale is None else case.scale
    chosen = [chosen_blocks(*rows, case.mask, case.sparse, scale, shown=shown) for rows in zip(q, k, strict=True)]
    for x in (q, k, v):
        x.requires_grad_()
    out = SparseRows((case.mask,) * case.rows, case.sparse).attend(q, k, v, scale)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)], torch.stack(chosen)


def visible(chosen: Tensor, case: SparseCase) -> Tensor:
    return of_tokens(chosen, case.mask, case.sparse.block, shown=case.mask.dense())


def shape_of(case: SparseCase) -> Shape:
    size = getattr(torch, case.dtype).itemsize
    return Shape(
        heads=case.heads[0], kv_heads=case.heads[1], head_dim=8, rows=case.rows, itemsize=size, sum_itemsize=size
    )


def on_ranks(case: SparseCase) -> list[float]:
    """Largest errors of (out, dq, dk, dv), the second of two backwards, on this rank; asserts bytes and pairs."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN, receive buffers too
    mesh = mesh_for(f"cp={case.ranks}")
    policy = ContextPolicy(sparse=case.sparse)
    layout = choose(case.mask, case.ranks, policy, shape_of(case), multiple=case.multiple).layout
    mask = SplitMask(layout, mesh["cp"])
    q, k, v, dout = (own(mask, x).requires_grad_() for x in inputs(case, getattr(torch, case.dtype)))
    with mk.observe(mesh) as seen, watching_choices() as calls:
        out = mask.attend(q, k, v, scale=case.scale)
        grads = torch.autograd.grad(out, (q, k, v), dout.detach(), retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v), dout.detach())
    torch.use_deterministic_algorithms(False)
    real = slice(0, sum(after - first for first, after in layout.runs[mask.rank]))
    errors = []
    expected, chosen = oracle(case)
    for first, second in zip(grads, again, strict=True):
        assert torch.equal(first[:, real], second[:, real]), "a second backward gives other bits"
    for mine, whole in zip((out, *again), expected, strict=True):
        wanted = own(mask, whole)[:, real]
        errors.append(float((mine.detach().double()[:, real] - wanted).abs().max()) if wanted.numel() else 0.0)
    assert_counted(case, mask, chosen, calls, Counter({(m.op, m.size): n for m, n in seen.items()}))
    return errors


def assert_counted(case: SparseCase, mask: SplitMask, chosen: Tensor, calls: list, seen: Counter) -> None:
    """What was sent is what follows from the oracle's choice; and so are the pairs that are told."""
    owners = torch.tensor(
        [
            next(rank for rank, runs in enumerate(mask.layout.runs) if any(c <= a and b <= d for c, d in runs))
            for a, b, _ in blocks_in(case.mask, case.sparse.block)
        ]
    )
    group = case.heads[0] // case.heads[1]
    of_rank = [chosen[:, :, owners == rank].any(2).unflatten(1, (-1, group)).any(2) for rank in range(case.ranks)]
    forward, backward = block_traffic(mask.layout, mask.rank, shape_of(case), torch.stack(of_rank))
    said = forward + backward + choice_traffic(mask.layout, mask.rank, shape_of(case))
    assert seen == said, (seen - said, said - seen)
    most = sum(map(total, traffic(mask.layout, mask.rank, shape_of(case))))
    assert total(said) <= most
    own_rows = torch.cat([torch.arange(a, b) for a, b in mask.layout.runs[mask.rank]] or [torch.zeros(0).long()])
    assert [call.pairs for call in calls] == [int(visible(chosen, case)[:, :, own_rows].sum())] * 2


def check(case: SparseCase) -> None:
    for rank, errors in enumerate(pool(case.ranks).run(on_ranks, case)):
        assert max(errors) <= TOL[case.dtype], (rank, errors, case)


sparse = st.sampled_from(
    [
        BlockTopK(block=3, top=2),
        BlockTopK(block=1, top=4),
        BlockTopK(block=4, top=1),
        BlockTopK(block=100, top=1),
        VerticalSlash(block=3, vertical=1, slash=1, queries=2),
        VerticalSlash(block=2, vertical=2, slash=1, queries=5),
        VerticalSlash(block=1, vertical=3, slash=4, queries=1),
        VerticalSlash(block=4, vertical=9, slash=2, queries=30),
    ]
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@draws(20)
@given(
    mask=masks,
    sparse=sparse,
    heads=heads,
    rows=st.integers(1, 2),
    dtype=st.sampled_from(sorted(TOL)),
    multiple=st.sampled_from([1, 1, 2]),
)
def test_outputs_and_gradients_equal_one_attention_to_the_same_blocks(
    ranks, mask, sparse, heads, rows, dtype, multiple
) -> None:
    check(SparseCase(ranks=ranks, mask=mask, sparse=sparse, heads=heads, rows=rows, dtype=dtype, multiple=multiple))


@pytest.mark.parametrize("length", [1, 5, 12, 13])
@pytest.mark.parametrize("top", [1, 2, 9])
def test_pairs_of_block_top_k_are_counted_exactly(length: int, top: int) -> None:
    case = SparseCase(ranks=1, mask=Mask.causal(length), sparse=BlockTopK(block=3, top=top), heads=(1, 1))
    _, chosen = oracle(case)
    assert int(visible(chosen, case).sum()) == visible_pairs(case.sparse, length)


# ------------------------------------------------------------------------------------------------- numbers, and models


def test_a_scale_of_ones_own_reaches_the_choice_and_the_gradients() -> None:
    slash = VerticalSlash(block=2, vertical=2, slash=2, queries=4)
    check(SparseCase(ranks=2, mask=Mask.causal(23), sparse=slash, scale=3.0))


LOW = SparseCase(
    ranks=3, mask=Mask.documents([70, 3, 119]), sparse=BlockTopK(block=16, top=2), heads=(8, 2), dtype="bfloat16"
)


def squared_errors(case: SparseCase) -> list[float]:
    """Of (out, dq, dk, dv), against fp64."""
    mesh = mesh_for(f"cp={case.ranks}")
    layout = choose(case.mask, case.ranks, ContextPolicy(sparse=case.sparse), shape_of(case)).layout
    mask = SplitMask(layout, mesh["cp"])
    q, k, v, dout = (own(mask, x).requires_grad_() for x in inputs(case, torch.bfloat16))
    out = mask.attend(q, k, v)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach()))
    expected, _ = oracle(case)
    real = slice(0, sum(after - first for first, after in layout.runs[mask.rank]))
    return [
        float((mine.double() - own(mask, whole))[:, real].square().sum())
        for mine, whole in zip(found, expected, strict=True)
    ]


def test_the_error_in_bf16_is_at_most_twice_that_of_one_device() -> None:
    one, many = (pool(ranks).run(squared_errors, replace(LOW, ranks=ranks)) for ranks in (1, 3))
    for alone, split in zip(*(torch.tensor(each).sum(0).sqrt().tolist() for each in (one, many)), strict=True):
        assert split <= 2 * alone


def with_sinks_and_softcap(case: SparseCase) -> float:
    """The largest difference of out and of the gradients of q and of the sinks from a softmax written out."""
    mesh = mesh_for(f"cp={case.ranks}")
    mask = SplitMask(
        choose(case.mask, case.ranks, ContextPolicy(sparse=case.sparse), shape_of(case)).layout, mesh["cp"]
    )
    q, k, v, dout = inputs(case, torch.float64)
    of_heads = torch.linspace(-1, 1, case.heads[0], dtype=torch.float64)
    mine = [own(mask, q).requires_grad_(), of_heads.clone().requires_grad_()]
    out = mask.attend(mine[0], own(mask, k), own(mask, v), softcap=2.0, sinks=mine[1])
    dq, dsinks = torch.autograd.grad(out, mine, own(mask, dout))
    torch.distributed.all_reduce(dsinks, group=mesh["cp"].get_group())
    _, chosen = oracle(case)
    whole = [q.requires_grad_(), of_heads.requires_grad_()]
    ratio = case.heads[0] // case.heads[1]
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(ratio, 2)) * q.shape[-1] ** -0.5
    scores = (2 * torch.tanh(scores / 2)).masked_fill(~visible(chosen, case), float("-inf"))
    with_sink = torch.cat([scores, of_heads.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", with_sink[..., :-1], v.repeat_interleave(ratio, 2))
    wanted = [expected.detach(), *torch.autograd.grad(expected, whole, dout)]
    pairs = [(out.detach(), own(mask, wanted[0])), (dq, own(mask, wanted[1])), (dsinks, wanted[2])]
    return max(float((one - other).abs().max()) for one, other in pairs)


def test_sinks_and_caps_of_scores_are_those_of_one_device() -> None:
    case = SparseCase(ranks=2, mask=Mask.documents([9, 15]), sparse=BlockTopK(block=3, top=2))
    assert max(pool(2).run(with_sinks_and_softcap, case)) <= TOL["float64"]


def loss_and_gradients(kind: str, ranks: int, sparse: Sparse) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    run = mk.parallelize(
        causal.build(kind).double(),
        mesh_for(f"cp={ranks}" if ranks > 1 else "dp_shard=1"),
        plan=mk.Plan(),
        context=ContextPolicy(sparse=sparse),
    )
    ids = torch.arange(2 * 20).view(2, -1) ** 2 % VOCABULARY
    with watching_choices() as calls:
        loss = run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    assert any(call.pairs < call.layout.mask.area * call.chosen.shape[0] * call.chosen.shape[1] for call in calls)
    return float(loss.detach()), {
        name: full_tensor(p.grad).clone() for name, p in run.named_parameters() if p.grad is not None
    }


# Grouped heads; windows in some layers; sinks; values of another width.
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_other_peoples_models_are_the_same_on_one_rank_and_on_several(kind: str) -> None:
    slash = VerticalSlash(block=3, vertical=1, slash=2, queries=4)
    ((loss, gradients),) = pool(1).run(loss_and_gradients, kind, 1, slash)
    for other, found in pool(2).run(loss_and_gradients, kind, 2, slash):
        assert abs(loss - other) <= TOL_THEIRS
        assert max(float((found[name] - grad).abs().max()) for name, grad in gradients.items()) <= TOL_THEIRS


def refused(kind: str) -> str:
    policy = ContextPolicy(sparse=BlockTopK(block=3, top=2))
    try:
        if kind == "generate":
            run = mk.parallelize(build(Cell(mesh="dp_shard=1")), mesh_for("dp_shard=1"), context=policy)
            mk.algos.rollout.generate(run, [], sampling=mk.algos.rollout.Sampling(max_new_tokens=1))
        elif kind == "mixers":
            cell = Cell(mesh="dp_shard=1", mixer="delta", context=policy)
            start(cell)
        else:
            mk.parallelize(
                causal.build(kind), mesh_for("dp_shard=1"), plan=mk.Plan(), context=policy, unproved="replicate"
            )
    except mk.MeshkitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mixers", "sparse=BlockTopK: the model has recurrent mixers, whose state would go to another rank"),
        ("mamba", "runs on all tokens .unproved='replicate'."),
        ("mpt", "the model's own code computes with all pairs of tokens. Leave sparse away"),
        ("generate", "generate: context sparse=BlockTopK chooses keys for blocks of queries"),
    ],
)
def test_what_would_not_see_chosen_blocks_is_refused(kind: str, text: str) -> None:
    for found in pool(1).run(refused, kind):
        assert re.search(text, found), found
