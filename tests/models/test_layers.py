"""Rotary frequencies against transformers, masks against the rule spelled out, attention against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from meshkit.errors import PlanError
from meshkit.mask import Band, Mask
from meshkit.models import LinearScaling, Llama3Scaling, Rope, YarnScaling
from meshkit.models.layers import MaskedRows, apply_rope, attention, attention_mask, rope_frequencies, rope_tables

TOL_FP32_ROUNDING = 4e-7  # a few units in the last place
TOL_FP64 = 1e-12

LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("scaling", "kind", "values"),
    [
        (LinearScaling(factor=4.0), "linear", {"factor": 4.0}),
        (LLAMA31, "llama3", vars(LLAMA31)),
        (
            YarnScaling(factor=4.0, original_max_position_embeddings=32_768),
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 32_768},
        ),
        (
            YarnScaling(factor=16.0, original_max_position_embeddings=4096, attention_factor=0.7, truncate=False),
            "yarn",
            {"factor": 16.0, "original_max_position_embeddings": 4096, "attention_factor": 0.7, "truncate": False},
        ),
        (  # all frequencies turn too often to be scaled: the ramp has no width
            YarnScaling(factor=2.0, original_max_position_embeddings=10**12),
            "yarn",
            {"factor": 2.0, "original_max_position_embeddings": 10**12},
        ),
    ],
)
def test_frequencies_equal_transformers_at_real_sizes(scaling: Any, kind: str, values: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": kind, "rope_theta": 500_000.0, **values},
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[kind](config)
    found, scale = rope_frequencies(Rope(theta=500_000.0, scaling=scaling), head_dim=128)
    torch.testing.assert_close(found, expected, rtol=TOL_FP32_ROUNDING, atol=0)
    assert scale == pytest.approx(expected_scale, rel=1e-12)


def test_a_rotation_is_multiplication_by_a_unit_complex_number() -> None:
    """Pair (r, r + D/2) as a complex number times exp(i * position * theta^(-2r/D))."""
    theta, head_dim = 100.0, 6
    positions = torch.tensor([[0, 1, 7, 1000]])
    x = torch.randn(1, 4, 2, head_dim, dtype=torch.float64)
    cos, sin = rope_tables(Rope(theta=theta), positions, head_dim, dtype=torch.float64)
    found = apply_rope(x, cos, sin)
    for r in range(head_dim // 2):
        turn = torch.polar(torch.ones(4, dtype=torch.float64), positions[0].double() * theta ** (-2 * r / head_dim))
        expected = torch.complex(x[..., r], x[..., r + head_dim // 2]) * turn[None, :, None]
        torch.testing.assert_close(found[..., r], expected.real, rtol=0, atol=TOL_FP64)
        torch.testing.assert_close(found[..., r + head_dim // 2], expected.imag, rtol=0, atol=TOL_FP64)


def test_a_bf16_model_rotates_by_exact_positions() -> None:
    """Positions 1000 and 1001 are one number in bf16; their rotations are not."""
    exact, _ = rope_tables(Rope(), torch.tensor([[1000, 1001]]), 64, dtype=torch.float64)
    low, _ = rope_tables(Rope(), torch.tensor([[1000, 1001]]), 64, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=2**-8, atol=1e-3)


@st.composite
def packings(draw: st.DrawFn) -> tuple[Tensor, int | None]:
    """(position_ids [B, T], window): rows of documents, of which the first may continue from an earlier row."""
    tokens = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        start = draw(st.integers(0, 3))
        while len(row) < tokens:
            length = draw(st.integers(1, tokens - len(row)))
            row += range(start, start + length)
            start = 0
        rows.append(row)
    return torch.tensor(rows), draw(st.none() | st.integers(1, tokens + 1))


def spelled_out(positions: Tensor, window: int | None) -> Tensor:
    batch, tokens = positions.shape
    visible = torch.zeros(batch, 1, tokens, tokens, dtype=torch.bool)
    for row in range(batch):
        first = 0
        for query in range(tokens):
            if query and positions[row, query] != positions[row, query - 1] + 1:
                first = query
            nearest = first if window is None else max(first, query - window + 1)
            visible[row, 0, query, nearest : query + 1] = True
    return visible


@settings(max_examples=100, deadline=None)
@given(case=packings())
def test_a_query_sees_its_own_document_backwards_within_the_window(case: tuple[Tensor, int | None]) -> None:
    positions, window = case
    mask = attention_mask(torch.zeros_like(positions), positions, window=window)
    expected = spelled_out(positions, window)
    if mask is None:
        assert torch.equal(expected, torch.ones_like(expected).tril())
        return
    assert isinstance(mask, MaskedRows)
    bands = tuple(Band(*row) for row in mask.table.tolist())
    rows, tokens = positions.shape
    if not mask.joined:
        found = Mask(tokens, bands).dense().expand(rows, 1, tokens, tokens)
    else:
        whole = Mask(rows * tokens, bands).dense()
        blocks = [slice(row * tokens, (row + 1) * tokens) for row in range(rows)]
        found = torch.stack([whole[block, block] for block in blocks])[:, None]
        assert whole.sum() == found.sum()  # and nothing across rows
    assert torch.equal(found, expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_its_formula(window: int | None, kv_heads: int, packed: bool) -> None:
    batch, tokens, heads, head_dim = 2, 11, 6, 4
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 2], list(range(11))])
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    q = torch.randn(batch, tokens, heads, head_dim, dtype=torch.float64)
    k, v = torch.randn(2, batch, tokens, kv_heads, head_dim, dtype=torch.float64)
    found = attention(q, k, v, attention_mask(ids, positions if packed else None, window=window))
    visible = spelled_out(positions if packed else torch.arange(tokens).expand(batch, -1), window)[:, 0]
    for head in range(heads):
        own = head // (heads // kv_heads)
        scores = q[:, :, head] @ k[:, :, own].transpose(1, 2) / head_dim**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[:, :, head], weights @ v[:, :, own], rtol=0, atol=TOL_FP64)


class HoldsAll:
    """A split attention whose message is all there: keys and values of one size."""

    def windowed(self, window: int | None) -> HoldsAll:
        return self

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        return attention(*torch.stack((q_BTHD, k_BTKD, v_BTKD)), None)


@pytest.mark.parametrize(
    "mask", [None, torch.ones(7, 7, dtype=torch.bool).tril(), HoldsAll()], ids=["", "dense", "split"]
)
def test_heads_of_v_may_be_smaller(mask: Any) -> None:
    q, k = torch.randn(2, 2, 7, 3, 8, dtype=torch.float64)
    v = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    found = attention(q, k, v, mask)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    weights = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("bhts,bshd->bthd", weights, v), rtol=0, atol=TOL_FP64)


def test_interleaved_pairs_turn_as_halved_ones_do() -> None:
    """Scores are those of the same pairs in the other layout."""
    cos, sin = rope_tables(Rope(), torch.arange(5)[None], 8, dtype=torch.float64)
    q, k = torch.randn(2, 1, 5, 2, 8, dtype=torch.float64)
    halved = [torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k)]
    found, expected = (
        torch.einsum("bthd,bshd->bhts", *(apply_rope(x, cos, sin, interleaved=interleaved) for x in pair))
        for pair, interleaved in (((q, k), True), (halved, False))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=TOL_FP64)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LinearScaling(factor=0.5), "factor >= 1, but got 0.5"),
        (lambda: YarnScaling(factor=0.5, original_max_position_embeddings=8), "factor >= 1, but got 0.5"),
        (lambda: Rope(theta=1.0), "theta > 1, but got 1.0"),
        (
            lambda: Llama3Scaling(
                factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0, original_max_position_embeddings=8
            ),
            "low_freq_factor < high_freq_factor, but got 4.0 and 4.0",
        ),
    ],
)
def test_scalings_that_make_no_sense_are_refused(make: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()
