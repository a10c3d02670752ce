"""The decoder computes what transformers computes, and keeps what parallelism from outside relies on."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshkit import models
from meshkit.errors import PlanError
from meshkit.models import Llama, config_from_pretrained, load_pretrained
from meshkit.models.layers import attention_mask, rope_tables
from tests.tiny import tiny_config

from .families import FAMILIES, PACKED, TOKENS, VOCABULARY, logits_of, randomise, token_ids, transformers_model

TOL_FP32 = 1e-5  # only the order of sums may differ
TOL_FP64 = 1e-12

TINY = tiny_config(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=44, head_dim=8)


def tiny(**changes: Any) -> Llama:
    model = Llama(dataclasses.replace(TINY, **changes))
    randomise(model, seed=1)
    return model


def relative_error(ours: Tensor, oracle: Tensor) -> float:
    return ((ours - oracle).abs().max() / oracle.abs().max()).item()


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ----------------------------------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_equal_transformers(family: str, positions: Tensor | None, tmp_path: Path) -> None:
    oracle = transformers_model(family)
    oracle.save_pretrained(tmp_path)
    model = Llama(config_from_pretrained(tmp_path))
    load_pretrained(model, tmp_path)
    ids = token_ids()

    expected, found = logits_of(oracle, ids, positions), logits_of(model, ids, positions)
    assert relative_error(found, expected) <= TOL_FP32
    loss_of(expected, ids).backward()
    loss_of(found, ids).backward()
    expected_grads = {name.removeprefix("model."): param.grad for name, param in oracle.named_parameters()}
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert grad is not None
        assert relative_error(grad, expected_grads[name]) <= TOL_FP32, name


@pytest.mark.parametrize("family", ["yarn", "qwen3", "mistral"])
def test_fp64_is_fp64_throughout(family: str, tmp_path: Path) -> None:
    oracle = transformers_model(family)
    oracle.save_pretrained(tmp_path)
    model = Llama(config_from_pretrained(tmp_path)).double()
    load_pretrained(model, tmp_path)
    ids = token_ids()
    logits = model(ids, PACKED)
    assert logits.dtype == torch.float64
    assert relative_error(logits, logits_of(oracle, ids, PACKED)) <= TOL_FP32
    # A rounding to fp32 anywhere would show as noise of 1e-7 in a difference quotient of the loss.
    weight = model.layers[0].self_attn.q_proj.weight
    (grad,) = torch.autograd.grad(loss_of(logits, ids), weight)
    step = 1e-5 * grad / grad.norm()
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            weight.add_(sign * step)
            losses.append(loss_of(model(ids, PACKED), ids))
            weight.sub_(sign * step)
    quotient = (losses[0] - losses[1]) / (2 * step.norm())
    assert abs(quotient / grad.norm() - 1).item() <= 1e-5  # O(step^2); fp32 noise would be 1e-3


def test_a_packed_row_gives_each_document_the_logits_it_has_alone() -> None:
    model = tiny().double()
    ids = token_ids(rows=1)
    packed = model(ids, PACKED[:1])
    alone = [model(part) for part in ids.split([10, 5, 9], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=TOL_FP64)


def test_rows_without_an_inner_restart_take_the_causal_path() -> None:
    """Also when positions do not start at 0, as in a row that continues a document."""
    ids = token_ids(rows=2)
    positions = torch.stack([torch.arange(TOKENS), torch.arange(5, 5 + TOKENS)])
    assert attention_mask(ids, positions, window=None) is None
    assert attention_mask(ids, None, window=TOKENS) is None
    assert attention_mask(ids, PACKED[:2], window=None) is not None


# ------------------------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_transformers_without_the_prefix(family: str, tmp_path: Path) -> None:
    oracle = transformers_model(family)
    oracle.config.save_pretrained(tmp_path)
    model = Llama(config_from_pretrained(tmp_path))
    expected = {name.removeprefix("model."): tuple(value.shape) for name, value in oracle.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected


def test_a_model_built_on_meta_loses_nothing() -> None:
    model = tiny(qk_norm=True)
    with torch.device("meta"):
        shell = Llama(model.config)
    assert not list(shell.buffers())
    shell.to_empty(device="cpu").load_state_dict(model.state_dict())
    ids = token_ids()
    torch.testing.assert_close(shell(ids, PACKED), model(ids, PACKED), rtol=0, atol=0)


def test_a_tied_head_is_the_embedding() -> None:
    model = tiny(tie_word_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("window", [None, 5])
def test_an_empty_batch_gives_zero_gradients(positions: Tensor | None, window: int | None) -> None:
    model = tiny(sliding_window=window, qk_norm=True)
    logits = model(token_ids()[:0], None if positions is None else positions[:0])
    assert logits.shape == (0, TOKENS, VOCABULARY)
    logits.sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


@pytest.mark.parametrize(
    ("query_heads", "kv_heads"),
    [([[0, 1], [2, 3]], [[0], [1]]), ([[0, 1, 2], [3]], [[0, 0, 1], [1]])],
    ids=["even", "uneven, a key/value head for each query head"],
)
def test_attention_is_the_sum_over_ranks_that_hold_some_heads(
    query_heads: list[list[int]], kv_heads: list[list[int]]
) -> None:
    model = tiny(qk_norm=True, attention_bias=True).double()
    whole = model.layers[0].self_attn
    ids = token_ids()
    cos, sin = rope_tables(TINY.rope, PACKED, TINY.head_dim, dtype=torch.float64)
    mask = attention_mask(ids, PACKED, window=None)
    x = torch.randn(*ids.shape, TINY.hidden_size, dtype=torch.float64)
    total = torch.zeros_like(x)
    for own_query, own_kv in zip(query_heads, kv_heads, strict=True):
        part = copy.deepcopy(whole)
        for name, heads in (("q_proj", own_query), ("k_proj", own_kv), ("v_proj", own_kv)):
            rows = torch.tensor([head * TINY.head_dim + i for head in heads for i in range(TINY.head_dim)])
            projection = getattr(part, name)
            projection.weight = nn.Parameter(projection.weight[rows])
            projection.bias = nn.Parameter(projection.bias[rows])
            if name == "q_proj":
                part.o_proj.weight = nn.Parameter(part.o_proj.weight[:, rows])
        total += part(x, cos, sin, mask)
    torch.testing.assert_close(total, whole(x, cos, sin, mask), rtol=0, atol=TOL_FP64)


def test_a_block_may_hold_a_part_of_the_tokens_if_attention_sees_all() -> None:
    """Sequence parallelism by hooks: each half of the residual stream comes out as that half of the whole."""
    model = tiny().double()
    layer = model.layers[0]
    ids = token_ids()
    rotation = rope_tables(TINY.rope, PACKED, TINY.head_dim, dtype=torch.float64)
    mask = attention_mask(ids, PACKED, window=None)
    x = torch.randn(*ids.shape, TINY.hidden_size, dtype=torch.float64)
    expected = layer(x, *rotation, mask)
    for half in (slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)):
        part = copy.deepcopy(layer)
        gathered = layer.input_layernorm(x)
        part.self_attn.register_forward_pre_hook(lambda module, args, whole=gathered: (whole, *args[1:]))
        part.self_attn.register_forward_hook(lambda module, args, out, half=half: out[:, half])
        found = part(x[:, half], *rotation, mask)
        torch.testing.assert_close(found, expected[:, half], rtol=0, atol=TOL_FP64)


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
def test_a_block_compiles_into_one_graph_with_the_same_gradients(positions: Tensor | None) -> None:
    model = tiny(qk_norm=True)
    layer = model.layers[0]
    ids = token_ids()
    place = torch.arange(TOKENS)[None] if positions is None else positions
    rotation = rope_tables(TINY.rope, place, TINY.head_dim, dtype=torch.float32)
    mask = attention_mask(ids, positions, window=None)
    x = torch.randn(*ids.shape, TINY.hidden_size)
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        out = call(x, *rotation, mask)
        out.square().mean().backward()
        results.append([out, *(param.grad.clone() for param in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) <= TOL_FP32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch 2.11's dynamo, as the next is
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_equals_cpu(positions: Tensor | None, window: int | None, compiled: bool) -> None:
    changes = {"head_dim": 16, "sliding_window": window}  # FlexAttention's kernels need at least 16
    on_cpu, on_gpu = tiny(**changes), tiny(**changes).cuda()
    if compiled:
        for layer in on_gpu.layers:
            layer.compile(fullgraph=True)
    ids = token_ids()
    loss = loss_of(on_cpu(ids, positions), ids)
    loss.backward()
    found = loss_of(on_gpu(ids.cuda(), None if positions is None else positions.cuda()), ids.cuda())
    found.backward()
    tolerance = 1e-3  # fp32 on both, but CUDA's kernels may multiply in tf32
    assert relative_error(found.cpu(), loss) <= tolerance
    for param, other in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        assert relative_error(param.grad.cpu(), other.grad) <= 10 * tolerance


# --------------------------------------------------------------------------------------------------------- presets

# Published parameter counts (the safetensors metadata of the models' pages; Qwen3-0.6B without its second copy of the
# tied head).
PUBLISHED = {
    "LLAMA2_7B": 6_738_415_616,
    "LLAMA3_8B": 8_030_261_248,
    "LLAMA3_70B": 70_553_706_496,
    "LLAMA32_1B": 1_235_814_400,
    "LLAMA32_3B": 3_212_749_824,
    "QWEN2_0_5B": 494_032_768,
    "QWEN2_7B": 7_615_616_512,
    "QWEN3_0_6B": 596_049_920,
    "QWEN3_8B": 8_190_735_360,
    "MISTRAL_7B": 7_241_732_096,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Llama(getattr(models, name))
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads=6 is not a multiple of num_key_value",
        ),
        ({"head_dim": 7}, "head_dim=7 is odd, but rope rotates pairs"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, but is 0"),
        ({"vocab_size": 2.5}, "vocab_size must be a whole number of at least 1, but is 2.5"),
        ({"sliding_window": 0}, "sliding_window must be a whole number of at least 1, but is 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, but is 0.0"),
        ({"attention_output_bias": True}, "attention_output_bias=True needs attention_bias=True"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        dataclasses.replace(TINY, **changes)
