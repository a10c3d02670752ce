"""Linear attention and short convolutions of packed documents equal their recurrence token by token, with every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshkit.core._torch import FakeTensorMode
from meshkit.core.custom_op import body_of
from meshkit.core.document_chunks import one_document
from meshkit.core.linear_attention import linear_attention, scan_flops
from meshkit.core.masked_attention import mask_table
from meshkit.core.short_convolution import short_convolution
from meshkit.errors import PlanError
from meshkit.mask import Mask
from tests.models.mixers import recurrence

TOL_FP64_SUM = 1e-10  # only the order of summation differs
TOL_FP32 = 1e-5
DOCUMENTS = {  # around the 64 tokens of a chunk
    "short": [5],
    "chunks": [64, 128],
    "uneven": [1, 130, 64, 3, 2, 65],
    "one": [1],
    "long": [200],
}


def table_of(lengths: list[int]) -> Tensor:
    return mask_table(Mask.documents(lengths)) if len(lengths) > 1 else one_document()


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_chunked_scan_equals_the_recurrence(documents: str, delta: bool) -> None:
    lengths = DOCUMENTS[documents]
    inputs, dout = recurrence.scan_inputs(2, sum(lengths), delta=delta)
    for each in inputs:
        each.requires_grad_()
    given = inputs if delta else [*inputs, None]
    expected, found = recurrence.scan(*given, lengths), linear_attention(*given, table_of(lengths))
    wanted, grads = (torch.autograd.grad(out, inputs, dout) for out in (expected, found))
    for a, b in zip((expected, *wanted), (found, *grads), strict=True):
        assert float((a - b).detach().abs().max()) < TOL_FP64_SUM


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
def test_the_state_of_lower_precisions_is_in_fp32(delta: bool) -> None:
    inputs, _ = recurrence.scan_inputs(1, 200, delta=delta)
    given = [x.bfloat16() if number < 3 else x.float() for number, x in enumerate(inputs)]
    of_rounded = [x.double() for x in given]
    rest = [] if delta else [None]
    expected = recurrence.scan(*of_rounded, *rest, [200])
    in_fp32 = linear_attention(*(x.float() for x in given), *rest, one_document())
    assert float((in_fp32 - expected).detach().abs().max()) < TOL_FP32
    # So that of bf16 is the result in fp32, rounded once.
    assert torch.equal(linear_attention(*given, *rest, one_document()), in_fp32.bfloat16())


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("width", [1, 4])
def test_a_short_convolution_equals_torchs_of_each_document(documents: str, width: int) -> None:
    lengths = DOCUMENTS[documents]
    generator = torch.Generator().manual_seed(5)
    x, dout = (torch.randn(2, sum(lengths), 3, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(3, width, generator=generator, dtype=torch.float64).requires_grad_()
    x.requires_grad_()
    expected, found = recurrence.convolution(x, weight, lengths), short_convolution(x, weight, table_of(lengths))
    wanted, grads = (torch.autograd.grad(out, (x, weight), dout) for out in (expected, found))
    for a, b in zip((expected, *wanted), (found, *grads), strict=True):
        assert float((a - b).detach().abs().max()) < TOL_FP64_SUM


def test_nothing_is_scanned_where_there_are_no_tokens() -> None:
    inputs, dout = recurrence.scan_inputs(2, 0, delta=True)
    for each in inputs:
        each.requires_grad_()
    grads = torch.autograd.grad(linear_attention(*inputs, one_document()), inputs, dout)
    assert all(grad.shape == each.shape for grad, each in zip(grads, inputs, strict=True))


@pytest.mark.parametrize("mask", [Mask.causal(9, window=3), Mask.full(9), Mask.prefix_lm([9], [4])], ids=str)
def test_a_mask_that_no_state_follows_is_refused(mask: Mask) -> None:
    inputs, _ = recurrence.scan_inputs(1, 9, delta=True)
    with pytest.raises(PlanError, match="follows packed causal documents"):
        linear_attention(*inputs, mask_table(mask))


def test_the_counter_of_torch_knows_the_scan() -> None:
    inputs, dout = recurrence.scan_inputs(2, 128, delta=True)
    for each in inputs:
        each.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out = linear_attention(*inputs, one_document())
    with FlopCounterMode(display=False) as backward:
        out.backward(dout)
    said = 2 * 128 * scan_flops(4, 5, 3, delta=True)
    assert (forward.get_total_flops(), backward.get_total_flops()) == (said, 3 * said)


def test_what_ran_without_values_leaves_nothing_to_a_run_with_values() -> None:
    """Observers look into operators of tensors without values, and indices of documents are kept between calls."""
    lengths = [3, 77, 11]  # of no other test
    inputs, _ = recurrence.scan_inputs(1, sum(lengths), delta=True)
    x, weight, table = inputs[2].flatten(2), torch.ones(12, 4, dtype=torch.float64), table_of(lengths)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(each) for each in (*inputs, x, weight)]
        body_of("meshkit::linear_attention")(*given[:5], table)
        body_of("meshkit::short_convolution")(*given[5:], table)
    expected = recurrence.scan(*inputs, lengths), recurrence.convolution(x, weight, lengths)
    found = linear_attention(*inputs, table), short_convolution(x, weight, table)
    for a, b in zip(expected, found, strict=True):
        assert float((a - b).abs().max()) < TOL_FP64_SUM
