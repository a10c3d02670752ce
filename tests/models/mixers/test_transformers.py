"""Gated DeltaNet equals Qwen3-Next's of transformers, and Mamba-2 its own, with every gradient, from the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshkit.models import GatedDeltaConfig, GatedDeltaNet, Mamba2, Mamba2Config

TOL_FP32 = 2e-5  # transformers' scans are in fp32, whatever the dtype
HIDDEN, TOKENS, EPS = 24, 150, 1e-5


def draw(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if name == "A_log":
            nn.init.uniform_(param, -6, -3)  # states that last
        else:
            nn.init.normal_(param, std=0.3) if param.ndim > 1 else nn.init.uniform_(param, 0.5, 1.5)


def delta() -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """(theirs, ours without values, our weights as parts of theirs)."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    keys, values, key_size, value_size = 2, 6, 5, 4
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            linear_num_key_heads=keys,
            linear_num_value_heads=values,
            linear_key_head_dim=key_size,
            linear_value_head_dim=value_size,
            rms_norm_eps=EPS,
        ),
        0,
    )
    draw(theirs)
    sizes = GatedDeltaConfig(key_heads=keys, value_heads=values, key_size=key_size, value_size=value_size)
    ours = GatedDeltaNet(sizes, hidden_size=HIDDEN, eps=EPS)
    each = values // keys
    q, k, v, z = (
        part.flatten(0, 1)
        for part in theirs.in_proj_qkvz.weight.unflatten(0, (keys, -1)).split(
            [key_size, key_size, each * value_size, each * value_size], 1
        )
    )
    b, a = (part.flatten(0, 1) for part in theirs.in_proj_ba.weight.unflatten(0, (keys, -1)).split([each, each], 1))
    projections = dict(zip("qkvzba", (q, k, v, z, b, a), strict=True))
    convolutions = theirs.conv1d.weight.squeeze(1).split([keys * key_size] * 2 + [values * value_size])
    return (
        theirs,
        ours,
        {
            **{f"{name}_proj.weight": weight for name, weight in projections.items()},
            **{f"{name}_conv": weight for name, weight in zip("qkv", convolutions, strict=True)},
            "A_log": theirs.A_log,
            "dt_bias": theirs.dt_bias,
            "norm.weight": theirs.norm.weight,
            "o_proj.weight": theirs.out_proj.weight,
        },
    )


def mamba(groups: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    from transformers import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    heads, size, states = 8, 6, 5
    theirs = Mamba2Mixer(
        TheirConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            num_heads=heads,
            head_dim=size,
            state_size=states,
            n_groups=groups,
            expand=2,
            layer_norm_epsilon=EPS,
            chunk_size=32,
        ),
        0,
    )
    draw(theirs)
    sizes = Mamba2Config(heads=heads, head_size=size, state_size=states, groups=groups)
    ours = Mamba2(sizes, hidden_size=HIDDEN, eps=EPS)
    inner = heads * size
    parts = [inner, groups * states, groups * states]
    z, x, b, c, dt = theirs.in_proj.weight.split([inner, *parts, heads])
    convolutions, biases = theirs.conv1d.weight.squeeze(1).split(parts), theirs.conv1d.bias.split(parts)
    return (
        theirs,
        ours,
        {
            **{
                f"{name}_proj.weight": weight
                for name, weight in zip(("z", "x", "B", "C", "dt"), (z, x, b, c, dt), strict=True)
            },
            **{f"{name}_conv": weight for name, weight in zip("xBC", convolutions, strict=True)},
            **{f"{name}_conv_bias": bias for name, bias in zip("xBC", biases, strict=True)},
            **{name: getattr(theirs, name) for name in ("A_log", "D", "dt_bias")},
            "norm_weight": theirs.norm.weight,
            "out_proj.weight": theirs.out_proj.weight,
        },
    )


@pytest.mark.parametrize("model", ["delta", "mamba", "mamba groups"])
def test_outputs_and_gradients_are_those_of_transformers(model: str) -> None:
    torch.manual_seed(3)
    theirs, ours, weights = delta() if model == "delta" else mamba(2 if model == "mamba groups" else 1)
    assert set(weights) == {name for name, _ in ours.named_parameters()}
    x, dout = torch.randn(2, TOKENS, HIDDEN), torch.randn(2, TOKENS, HIDDEN)
    expected, found = theirs(x), torch.func.functional_call(ours, weights, (x, None))
    assert float((expected - found).detach().abs().max()) < TOL_FP32 * float(expected.detach().abs().max())
    # Of their parameters, which ours are parts of.
    wanted, grads = (
        torch.autograd.grad(out, list(theirs.parameters()), dout, retain_graph=True) for out in (expected, found)
    )
    for a, b in zip(wanted, grads, strict=True):
        assert float((a - b).abs().max()) < TOL_FP32 * max(1.0, float(a.abs().max()))


def test_a_state_matters_after_many_tokens() -> None:
    """Or the comparison would say little of it."""
    torch.manual_seed(3)
    for theirs, *_ in (delta(), mamba(1)):
        x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
        (dx,) = torch.autograd.grad(theirs(x)[0, -1].sum(), x)
        assert float(dx[0, 20].abs().max()) > 1e-4
