"""What attention over ranks does to numbers: low precision, rows that see nothing, equal bits, and the way back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshkit as mk
from meshkit.mask import Mask
from meshkit.parallel.context import SplitMask
from meshkit.strategy import ContextPolicy
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.parallel.context.test_attention import Case, check, inputs, oracle, own, split_mask
from tests.world import pool

SCHEMES = {
    "ring": ContextPolicy(scheme="ring"),
    "all_gather": ContextPolicy(scheme="all_gather"),
    "group_cast": ContextPolicy(scheme="group_cast"),
    "group_cast locality": ContextPolicy(scheme="group_cast", balance="locality"),
    "ulysses": ContextPolicy(scheme="ulysses"),
    "ulysses=2 ring": ContextPolicy(scheme="ring", ulysses=2),
}
NAMES = ("out", "dq", "dk", "dv")
TOL_LOW_PRECISION = 2.0  # times the error of one device in the same precision: MagiAttention's criterion

schemes = pytest.mark.parametrize("scheme", SCHEMES)

# -------------------------------------------------------------------------------------------------------- low precision

LONG = {"causal": Mask.causal(192), "documents": Mask.documents([70, 3, 50, 1, 68])}
OFFSETS = (0.0, 4.0)  # a common offset of values cancels in dq and dk


def low_precision_cases(ranks: int, scheme: str) -> list[Case]:
    return [
        Case(ranks=ranks, mask=mask, policy=SCHEMES[scheme], heads=(8, 2), dtype="bfloat16", offset=offset, head_dim=16)
        for mask in LONG.values()
        for offset in OFFSETS
    ]


def attended(case: Case) -> tuple[SplitMask, list[Tensor]]:
    """(mask, [out, dq, dk, dv]) of this rank's tokens in the case's dtype, with fresh memory full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    mask = split_mask(case)
    q, k, v, dout = (own(mask, x).requires_grad_() for x in inputs(case, getattr(torch, case.dtype)))
    out = mask.attend(q, k, v)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]
    torch.use_deterministic_algorithms(False)
    return mask, found


def squared_errors(cases: list[Case]) -> list[list[float]]:
    """For each case the squared errors of this rank's (out, dq, dk, dv) against fp64."""
    errors = []
    for case in cases:
        mask, found = attended(case)
        real = slice(0, held(mask))
        wholes = oracle(case)
        errors.append(
            [
                float((mine.double()[:, real] - own(mask, whole)[:, real]).square().sum())
                for mine, whole in zip(found, wholes, strict=True)
            ]
        )
    return errors


def held(mask: SplitMask) -> int:
    return sum(after - first for first, after in mask.layout.runs[mask.rank])


def one_device(case: Case) -> list[float]:
    """Squared errors of F.scaled_dot_product_attention in the case's dtype against fp64."""
    q, k, v, dout = inputs(case, getattr(torch, case.dtype))
    for x in (q, k, v):
        x.requires_grad_()
    given = {"is_causal": True} if case.mask.is_causal else {"attn_mask": case.mask.dense()}
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, enable_gqa=True, **given).transpose(1, 2)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    return [float((x.double() - whole).square().sum()) for x, whole in zip(found, oracle(case), strict=True)]


@pytest.mark.parametrize("ranks", thin([4, 2, 8], 3))
@schemes
def test_low_precision_errs_as_one_device_does(ranks: int, scheme: str) -> None:
    cases = low_precision_cases(ranks, scheme)
    by_rank = pool(ranks).run(squared_errors, cases)
    for index, case in enumerate(cases):
        for place, (name, alone) in enumerate(zip(NAMES, one_device(case), strict=True)):
            together = sum(errors[index][place] for errors in by_rank)
            assert together**0.5 <= TOL_LOW_PRECISION * alone**0.5, (name, case.mask, case.offset)


# ------------------------------------------------------------------------------------------------------- odd situations


@pytest.mark.parametrize("ranks", [6, 7, 8])
@pytest.mark.parametrize("scheme", ["ring", "all_gather", "group_cast locality", "ulysses"])
def test_many_and_odd_ranks_equal_one_device(ranks: int, scheme: str) -> None:
    for mask in (Mask.causal(29), Mask.documents([3, 9, 1, 1, 8, 2], window=4)):
        check(Case(ranks=ranks, mask=mask, policy=SCHEMES[scheme], heads=(9, 3), rows=2))


@pytest.mark.parametrize(("ranks", "heads"), [(2, (1, 1)), (4, (3, 1)), (5, (3, 3))])
def test_ulysses_with_fewer_heads_than_ranks_equals_one_device(ranks: int, heads: tuple[int, int]) -> None:
    check(Case(ranks=ranks, mask=Mask.causal(13), policy=SCHEMES["ulysses"], heads=heads))


@pytest.mark.parametrize("ranks", [6, 8])
def test_two_dimensions_on_many_ranks_equal_one_device(ranks: int) -> None:
    for motion in ("ring", "group_cast"):
        policy = ContextPolicy(scheme=motion, ulysses=2)  # type: ignore[arg-type]
        check(Case(ranks=ranks, mask=Mask.prefix_lm([20, 7], [4, 7]), policy=policy, heads=(3, 1)))


@pytest.mark.parametrize("documents", [[1, 2, 1, 3, 2], [1], [2, 1], [1] * 9])
@schemes
def test_documents_shorter_than_cp_equal_one_device(scheme: str, documents: list[int]) -> None:
    check(Case(ranks=4, mask=Mask.documents(documents), policy=SCHEMES[scheme], rows=2))


# Queries 4..7 and 12..15 see nothing, keys 0..1 and 14..15 are seen by nobody, and tokens 13 and 14 have no part at all.
BLIND = Mask.intervals(16, [((0, 4), (2, 12), "full"), ((8, 12), (8, 14), "causal")])
DARK = Mask.intervals(12, [])


def of_blind_rows(case: Case) -> list[bool]:
    """Are the rows that see nothing exactly 0, with exactly 0 gradients, and is everything finite?"""
    mask, (out, dq, dk, dv) = attended(case)
    tokens = [token for first, after in mask.layout.runs[mask.rank] for token in range(first, after)]
    sees, seen = case.mask.dense().any(1)[tokens], case.mask.dense().any(0)[tokens]
    real = slice(0, len(tokens))
    return [
        not out[:, real][:, ~sees].any(),
        not dq[:, real][:, ~sees].any(),
        not dk[:, real][:, ~seen].any(),
        not dv[:, real][:, ~seen].any(),
        *(bool(x.isfinite().all()) for x in (out, dq, dk, dv)),  # of padding, too
    ]


@pytest.mark.parametrize("mask", [BLIND, DARK], ids=["some", "all"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@schemes
def test_rows_that_see_nothing_are_zero_with_finite_gradients(scheme: str, dtype: str, mask: Mask) -> None:
    case = Case(ranks=4, mask=mask, policy=SCHEMES[scheme], dtype=dtype)
    for found in pool(4).run(of_blind_rows, case):
        assert all(found)
    if dtype == "float64":
        check(case)


def changed_bits(case: Case) -> list[str]:
    _, first = attended(case)
    _, second = attended(case)
    return [name for name, one, other in zip(NAMES, first, second, strict=True) if not torch.equal(one, other)]


@schemes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_inputs_give_the_same_bits(scheme: str, dtype: str) -> None:
    for mask in LONG.values():
        for found in pool(4).run(changed_bits, Case(ranks=4, mask=mask, policy=SCHEMES[scheme], dtype=dtype)):
            assert not found


# ------------------------------------------------------------------------------------------------------------- the join


class PerToken(torch.nn.Module):
    """Of a split batch this needs the mask only."""

    def forward(self, values: Tensor, mask: object) -> Tensor:
        return values


def joined_errors(rows: int, tokens: int, mask: Mask | None, policy: ContextPolicy, multiple: int) -> list[float]:
    """Is a split and a join the identity, and is the gradient of a joined result every rank's own part?"""
    generator = torch.Generator().manual_seed(2)
    axis = mesh_for(f"cp={torch.distributed.get_world_size()}")["cp"]
    model = mk.context_parallel(PerToken(), axis, policy=policy, multiple=multiple)
    ids = torch.randint(0, 99, (rows, tokens), generator=generator)
    features = torch.randn(rows, tokens, 3, 2, generator=generator, dtype=torch.float64)
    weights = torch.randn(rows, tokens, 3, 2, generator=generator, dtype=torch.float64)
    part = mk.split_batch(model, {"input_ids": ids, "features": features, "weights": weights, "labels": ids}, mask=mask)
    join = part["mask"].join
    own_features = part["features"].requires_grad_()
    whole = join(own_features)
    assert whole.shape == features.shape
    assert torch.equal(join(part["input_ids"]), ids)
    assert torch.equal(join(part["position_ids"]), torch.arange(tokens).expand(rows, tokens))
    (gradient,) = torch.autograd.grad((whole * weights).sum(), own_features)
    kept = part["labels"] != -100
    assert int(kept.sum()) == held(part["mask"]) * part["labels"].shape[0]
    assert not part["features"][~kept].any()
    assert not part["input_ids"][~kept].any()
    errors = [
        float((whole.detach() - features).abs().max()),
        float((gradient - part["weights"]).abs().max()),  # weights of padding are 0, and so is its gradient
    ]
    total = torch.tensor(int(kept.sum()))
    torch.distributed.all_reduce(total)
    assert int(total) == rows * tokens
    return errors


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "locality"])
@pytest.mark.parametrize("kind", ["rows alike", "rows end to end", "one row", "fewer tokens than ranks"])
def test_a_join_undoes_the_split_and_its_gradient_is_the_own_part(ranks, multiple, balance, kind) -> None:
    rows, tokens, mask = {
        "rows alike": (3, 13, None),
        "rows end to end": (2, 13, Mask.joined([Mask.documents([3, 10]), Mask.prefix_lm([13], [5])])),
        "one row": (1, 13, Mask.full(13)),
        "fewer tokens than ranks": (2, 1, None),
    }[kind]
    policy = ContextPolicy(scheme="group_cast", balance=balance)
    for errors in pool(ranks).run(joined_errors, rows, tokens, mask, policy, multiple):
        assert max(errors) == 0


def test_cases_of_low_precision_are_not_easy() -> None:
    """The offset makes one device err visibly more, or its cases would show nothing."""
    plain, offset = (one_device(case) for case in low_precision_cases(2, "ring")[:2])
    assert [one < other for one, other in pairwise((plain[1], offset[1]))] == [True]
