"""Attention over tokens on several ranks equals one fp64 attention, with every gradient, for any scheme and mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshkit.mask import FAR, Band, Mask
from meshkit.parallel.context import Shape, SplitMask, choose
from meshkit.strategy import ContextPolicy
from tests.depth import draws
from tests.laws.parity.cases import mesh_for
from tests.world import pool

TOL = {"float64": 1e-10, "float32": 1e-5}  # only the order of summation differs


@dataclass(frozen=True, kw_only=True)
class Case:
    ranks: int
    mask: Mask
    policy: ContextPolicy = field(default_factory=ContextPolicy)
    heads: tuple[int, int] = (4, 2)
    rows: int = 1
    dtype: str = "float64"
    multiple: int = 1
    offset: float = 0.0  # common to all values, which cancels badly in low precision
    head_dim: int = 8
    scale: float | None = None


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout [B, N, heads, D] of the whole sequence, the same on every rank, exact in the case's dtype."""
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads = case.heads
    made = [
        torch.randn(case.rows, case.mask.tokens, count, case.head_dim, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    made[2] += case.offset
    q, k, v, dout = (x.to(getattr(torch, case.dtype)).to(dtype) for x in made)
    return q, k, v, dout


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """Attention written out; rows that see nothing are 0."""
    ratio = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    shown = mask.dense()
    p = scores.masked_fill(~shown, float("-inf")).softmax(-1).masked_fill(~shown, 0)
    return torch.einsum("bhts,bshd->bthd", p, v)


def oracle(case: Case) -> list[Tensor]:
    q, k, v, dout = inputs(case, torch.float64)
    for x in (q, k, v):
        x.requires_grad_()
    out = dense(q, k, v, case.mask, case.scale)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def split_mask(case: Case) -> SplitMask:
    axis = mesh_for(f"cp={case.ranks}")["cp"]
    shape = Shape(heads=case.heads[0], kv_heads=case.heads[1], head_dim=case.head_dim, rows=case.rows)
    layout = choose(case.mask, case.ranks, case.policy, shape, multiple=case.multiple).layout
    return SplitMask(layout, axis)


def own(mask: SplitMask, whole: Tensor) -> Tensor:
    """This rank's tokens, with NaN for padding, which nobody may read."""
    pieces = [whole[:, first:after] for first, after in mask.layout.runs[mask.rank]]
    padding = mask.tokens - sum(piece.shape[1] for piece in pieces)
    return torch.cat([*pieces, whole.new_full((whole.shape[0], padding, *whole.shape[2:]), float("nan"))], dim=1)


def on_ranks(case: Case) -> list[float]:
    """Largest errors of (out, dq, dk, dv), the second of two backwards, on this rank."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN, receive buffers too
    mask = split_mask(case)
    q, k, v, dout = (own(mask, x).requires_grad_() for x in inputs(case, getattr(torch, case.dtype)))
    out = mask.attend(q, k, v, scale=case.scale)
    grads = torch.autograd.grad(out, (q, k, v), dout.detach(), retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v), dout.detach())
    torch.use_deterministic_algorithms(False)
    real = slice(0, sum(after - first for first, after in mask.layout.runs[mask.rank]))
    errors = []
    for first, second in zip(grads, again, strict=True):
        assert torch.equal(first[:, real], second[:, real]), "a second backward gives other bits"
    for mine, whole in zip((out, *again), oracle(case), strict=True):
        expected = own(mask, whole)[:, real]
        errors.append(float((mine.detach().double()[:, real] - expected).abs().max()) if expected.numel() else 0.0)
    return errors


masks = st.sampled_from(
    [
        Mask.causal(24),
        Mask.full(17),
        Mask.causal(23, window=5),
        Mask.causal(24, window=1),
        Mask.documents([14, 1, 9], window=4, sinks=2),
        Mask.documents([3, 9, 1, 1, 8, 2]),
        Mask.documents([3, 9, 1, 1, 8, 2], window=4),
        Mask.documents([7, 6, 10], kind="full"),
        Mask.prefix_lm([9, 4, 8], [3, 0, 8]),
        Mask.causal(3),
        Mask.intervals(
            20,
            [
                ((0, 6), (0, 6), "causal"),
                ((4, 9), (10, 20), "full"),
                Band(12, 20, 0, 10, -9, -4),
                ((12, 18), (12, 18), "causal"),
                Band(18, 20, 0, 20, 1 - FAR, -15),
            ],
        ),
    ]
)
heads = st.sampled_from([(4, 2), (8, 8), (6, 1), (7, 7), (6, 3), (3, 1), (10, 5)])
policies = st.sampled_from(
    [
        ContextPolicy(scheme=scheme, balance=balance, kv_heads_per_gather=per_gather)
        for scheme, per_gather in (
            ("ring", 1),
            ("all_gather", 1),
            ("all_gather", 2),
            ("group_cast", 1),
            ("ulysses", 1),
            ("auto", 1),
        )
        for balance in ("auto", "contiguous", "zigzag", "per_document", "locality")
    ]
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@draws(20)
@given(
    mask=masks,
    policy=policies,
    heads=heads,
    rows=st.integers(1, 2),
    dtype=st.sampled_from(sorted(TOL)),
    multiple=st.sampled_from([1, 1, 2]),
)
def test_outputs_and_gradients_equal_one_attention(ranks, mask, policy, heads, rows, dtype, multiple) -> None:
    check(Case(ranks=ranks, mask=mask, policy=policy, heads=heads, rows=rows, dtype=dtype, multiple=multiple))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "group_cast", "ulysses"])
def test_a_scale_of_ones_own_reaches_outputs_and_gradients(scheme: str) -> None:
    policy = ContextPolicy(scheme=scheme)  # type: ignore[arg-type]  # one of its names
    check(Case(ranks=2, mask=Mask.causal(23, window=9), policy=policy, scale=0.8))


def check(case: Case) -> None:
    for rank, errors in enumerate(pool(case.ranks).run(on_ranks, case)):
        assert max(errors) <= TOL[case.dtype], (rank, errors, case)
