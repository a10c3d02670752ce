"""What one block of Llama-3-8B keeps for backward, byte by byte, against closed forms.

With g key/value heads a query head, F features a hidden one, D the size of a head and C the hidden size, in bf16 and in
units of tokens x C bytes: 12 + 4g + 8F + 4/D, if norms and attention are fused. That is two inputs, two norms' outputs, q, k,
v, the attention's output with one fp32 number a head, gate, up, silu and product. Each norm also keeps one fp32 scale a
token: 8/C. Shapes are the real ones, on fake tensors: they have storages and no memory.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import meshkit as mk
from meshkit.core._torch import FakeTensorMode
from meshkit.models.llama import dense_layer
from meshkit.strategy import Recompute
from tests.tiny import tiny_config

CONFIG, TOKENS = mk.models.LLAMA3_8B, 256
G = Fraction(CONFIG.num_key_value_heads, CONFIG.num_attention_heads)
FFN = Fraction(CONFIG.intermediate_size, CONFIG.hidden_size)
ATTENTION, NORMS = Fraction(4, CONFIG.head_dim), Fraction(8, CONFIG.hidden_size)
FUSED = 12 + 4 * G + 8 * FFN + ATTENTION
PRODUCT = Recompute(mode="activation", keep=("product",))


class FlashOnCuda(TorchFunctionMode):
    """The kernel that a GPU would choose; without one torch chooses to write out all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and args[0].is_cuda:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], 0.0, True)[0]
        return func(*args, **(kwargs or {}))


def kept(device: str, mode: Any) -> Fraction:
    """Bytes of distinct storages that the forward of one block saves, over tokens x C."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []
    with FakeTensorMode(), torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer = dense_layer(CONFIG)
        finally:
            torch.set_default_dtype(torch.float32)
        mk.recompute(layer, blocks=[""], mode=mode)
        x = torch.randn(1, TOKENS, CONFIG.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        cos = torch.randn(1, TOKENS, CONFIG.head_dim // 2, dtype=torch.bfloat16)
        sin = torch.randn_like(cos)
        known = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), cos, sin)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and tensor.numel() > 2:  # not the seed and the offset of dropout
                alive.append(tensor)
                sizes[storage._cdata] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), FlashOnCuda():
            layer(x, cos, sin, None)
    return Fraction(sum(sizes.values()), TOKENS * CONFIG.hidden_size)


@pytest.mark.parametrize(
    ("mode", "expected", "printed"),
    [
        ("none", FUSED, 41.03),
        (PRODUCT, FUSED - 2 * FFN, 34.03),
        ("activation", FUSED - 4 * FFN, 27.03),
    ],
    ids=str,
)
def test_a_block_on_cuda_keeps_the_closed_form(mode: Any, expected: Fraction, printed: float) -> None:
    assert kept("cuda", mode) == expected + NORMS
    assert float(expected) == pytest.approx(printed, abs=0.005)


@pytest.mark.parametrize(("mode", "less"), [("none", 0), (PRODUCT, 2 * FFN), ("activation", 4 * FFN)], ids=str)
def test_a_block_on_a_cpu_keeps_its_norms_in_fp32_too(mode: Any, less: Fraction) -> None:
    """There a norm is written out: it keeps its input in fp32 in place of bf16, and the normalised one: +2 +4, for two."""
    assert kept("cpu", mode) == FUSED - less + 12 + NORMS
    assert float(FUSED + 12) == pytest.approx(53.03, abs=0.005)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_full_recompute_keeps_the_input(device: str) -> None:
    assert kept(device, "full") == 2


@pytest.mark.parametrize("mode", ["activation", PRODUCT], ids=str)
def test_made_again_is_the_same_bits(mode: Any) -> None:
    gradients = []
    for each in ("none", mode):
        torch.manual_seed(0)
        model = mk.models.Llama(tiny_config(hidden_size=32, intermediate_size=48, head_dim=8))
        mk.recompute(model, blocks=["layers.0", "layers.1"], mode=each)
        model(torch.arange(16).reshape(2, 8)).square().mean().backward()
        gradients.append([param.grad for param in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_a_block_without_a_known_feed_forward_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="Linear has no feed-forward with the steps"):
        mk.recompute(nn.Linear(2, 2), blocks=[""], mode="activation")
