"""Attention with capped scores, sinks, values of another width, chunks and padding, over ranks and alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.parallel.context import SplitMask
from meshkit.parallel.context._pattern import Pattern, pattern_of
from meshkit.strategy import ContextPolicy
from tests.laws.parity.cases import mesh_for
from tests.parallel.context.test_attention import Case, own, split_mask
from tests.world import pool

TOL = 1e-10  # only the order of summation differs
TOL_LOW_PRECISION = 2.0  # times the error of one device in the same precision: MagiAttention's criterion
SCHEMES = {
    "ring": ContextPolicy(scheme="ring"),
    "all_gather": ContextPolicy(scheme="all_gather"),
    "group_cast": ContextPolicy(scheme="group_cast"),
    "ulysses": ContextPolicy(scheme="ulysses"),
}
# softcap, whether there are sinks, width of values; queries and keys are 8 wide.
VARIANTS = {
    "softcap": (1.5, False, 8),
    "sinks": (0.0, True, 8),
    "narrow values": (0.0, False, 5),
    "wide values": (0.0, False, 11),
    "all of it": (0.7, True, 5),
}
MASK = Mask.documents([9, 1, 14])


def tensors(width: int) -> list[Tensor]:
    """q, k, v, sinks, dout."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 24, 4, 8), (2, 24, 2, 8), (2, 24, 2, width), (4,), (2, 24, 4, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, softcap: float, mask: Mask) -> Tensor:
    k, v = (each.repeat_interleave(2, 2) for each in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~mask.dense(), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., : k.shape[1]], v)


def errors(scheme: str, variant: str, ranks: int) -> float:
    softcap, has_sinks, width = VARIANTS[variant]
    *inputs, sinks, dout = tensors(width)
    wanted = [*inputs, sinks] if has_sinks else inputs
    for each in wanted:
        each.requires_grad_()
    out = written_out(*inputs, sinks if has_sinks else None, softcap, MASK)
    expected = [out.detach(), *torch.autograd.grad(out, wanted, dout)]

    mask = split_mask(Case(ranks=ranks, mask=MASK, policy=SCHEMES[scheme], rows=2))
    local = [own(mask, each.detach()).requires_grad_() for each in inputs]
    local_sinks = sinks.detach().requires_grad_()
    found = mask.attend(*local, softcap=softcap, sinks=local_sinks if has_sinks else None)
    grads = torch.autograd.grad(found, [*local, local_sinks] if has_sinks else local, own(mask, dout))
    worst = max(
        float((mine - own(mask, whole)).abs().max())
        for mine, whole in zip([found.detach(), *grads[:3]], expected[:4], strict=True)
    )
    if has_sinks:
        total = grads[3].clone()
        torch.distributed.all_reduce(total)
        worst = max(worst, float((total - expected[4]).abs().max()))
    return worst


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_of_another_kind_equals_one_device_with_every_gradient(scheme: str, variant: str) -> None:
    assert max(pool(2).run(errors, scheme, variant, 2)) <= TOL


def of_bfloat16(scheme: str, softcap: float) -> tuple[list[float], list[float]]:
    """Squared errors of (out, dq, dk, dv) against fp64, of this rank's tokens: of ranks, and of one device written out."""
    *wide, _, dout = (each.bfloat16() for each in tensors(8))
    mask = split_mask(Case(ranks=2, mask=MASK, policy=SCHEMES[scheme], rows=2))

    def written(dtype: torch.dtype) -> list[Tensor]:
        given = [each.to(dtype).requires_grad_() for each in wide]
        out = written_out(*given, None, softcap, MASK)
        return [own(mask, each) for each in (out.detach(), *torch.autograd.grad(out, given, dout.to(dtype)))]

    local = [own(mask, each).requires_grad_() for each in wide]
    out = mask.attend(*local, softcap=softcap)
    found = [out.detach(), *torch.autograd.grad(out, local, own(mask, dout))]
    exact, alone = written(torch.float64), written(torch.bfloat16)
    squares = [
        [float((each.double() - other).square().sum()) for each, other in zip(given, exact, strict=True)]
        for given in (found, alone)
    ]
    return squares[0], squares[1]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("softcap", [1.5, 30.0])
def test_capped_scores_in_low_precision_err_as_one_device_does(scheme: str, softcap: float) -> None:
    by_rank = pool(2).run(of_bfloat16, scheme, softcap)
    for place in range(4):
        together, alone = (sum(errors[which][place] for errors in by_rank) ** 0.5 for which in (0, 1))
        assert 0 < together <= TOL_LOW_PRECISION * alone, (place, together, alone)


def chunked_error() -> float:
    mask = split_mask(Case(ranks=2, mask=Mask.causal(24), policy=SCHEMES["ring"], rows=2))
    q, k, v, *_ = tensors(8)
    shown = Mask.documents([5, 5, 5, 5, 4])
    found = mask.following(Pattern(chunk=5), "the layer").attend(*(own(mask, each) for each in (q, k, v)))
    return float((found - own(mask, written_out(q, k, v, None, 0.0, shown))).abs().max())


def test_a_chunk_is_of_the_row_and_not_of_a_rank() -> None:
    assert max(pool(2).run(chunked_error)) <= TOL


# ------------------------------------------------------------------------------------------------------- without ranks


def test_chunks_begin_anew_in_each_row() -> None:
    found = Mask.joined([Mask.causal(7)] * 2).chunked(3, 7)
    assert torch.equal(found.dense(), Mask.documents([3, 3, 1, 3, 3, 1]).dense())
    mask = Mask.causal(7)
    assert mask.chunked(None) is mask


def test_keys_that_are_hidden_are_seen_by_nobody() -> None:
    shown = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.bool)
    mask = Mask.documents([4, 2]).seeing(shown)
    assert torch.equal(mask.dense(), Mask.documents([4, 2]).dense() & shown)
    assert not Mask.causal(6).seeing(torch.zeros(6, dtype=torch.bool)).bands


def of_transformers() -> dict[str, tuple[Callable[..., Tensor], Pattern]]:
    from transformers import masking_utils as theirs

    zeros = torch.zeros(1, dtype=torch.int64)
    return {
        "causal": (theirs.causal_mask_function, Pattern()),
        "full": (theirs.bidirectional_mask_function, Pattern(causal=False)),
        "window": (theirs.sliding_window_causal_mask_function(3), Pattern(window=3)),
        "chunk": (theirs.chunked_causal_mask_function(4, zeros), Pattern(chunk=4)),
    }


@pytest.mark.parametrize("name", ["causal", "full", "window", "chunk"])
def test_a_mask_function_of_transformers_is_known_by_its_parts(name: str) -> None:
    """The oracle is the function itself, asked for every pair."""
    function, expected = of_transformers()[name]
    assert pattern_of(function, padded=False, packed=False) == expected
    token = torch.arange(10)
    shown = function(0, 0, token[:, None], token[None, :]).expand(10, 10)
    base = Mask.causal(10) if expected.causal else Mask.full(10)
    assert torch.equal(expected.of(base, None).dense(), shown)


def test_a_mask_function_that_is_unknown_is_refused() -> None:
    from transformers import masking_utils as theirs

    zeros = torch.zeros(1, dtype=torch.int64)
    either = theirs.or_masks(theirs.causal_mask_function, theirs.bidirectional_mask_function)
    with pytest.raises(PlanError, match="or_masks, which is no pattern that ranks can follow"):
        pattern_of(either, padded=False, packed=False)
    with pytest.raises(PlanError, match="of_one_head"):
        pattern_of(of_one_head, padded=False, packed=False)
    with pytest.raises(PlanError, match="one to both sides"):
        both = theirs.and_masks(theirs.sliding_window_overlay(3), theirs.bidirectional_mask_function)
        pattern_of(both, padded=False, packed=False)
    with pytest.raises(PlanError, match="Leave attention_mask away"):
        pattern_of(theirs.chunked_causal_mask_function(4, zeros), padded=True, packed=False)


def of_one_head(batch: int, head: int, query: int, key: int) -> bool:
    return head == 0


def padded_split(begin: int, label: int) -> list[list[int]]:
    """Of each rank: for its tokens, how many keys they see."""
    import meshkit as mk

    class Model(torch.nn.Module):
        def forward(self, input_ids: Tensor, position_ids: Tensor, mask: SplitMask) -> Tensor:
            x = torch.nn.functional.one_hot(input_ids[..., None], 8).double()
            return mask.attend(x, x, x)

    model = mk.context_parallel(Model(), mesh_for("cp=2")["cp"], attention=[])
    shown = torch.arange(6).expand(2, 6) >= torch.tensor([[begin], [0]])
    labels = torch.full((2, 6), label).masked_fill(shown, 1)
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "labels": labels, "attention_mask": shown.long()}
    mask = mk.split_batch(model, batch)["mask"]
    return mask.layout.mask.dense().sum(1).view(2, 6).tolist()


def test_padding_is_taken_from_the_mask_of_each_row() -> None:
    for found in pool(2).run(padded_split, 2, -100):
        assert found == [[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
