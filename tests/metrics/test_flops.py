import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from meshkit import models
from meshkit.errors import MeshkitError
from meshkit.metrics import ModelFlops, document_lengths, peak_flops_of, peak_flops_per_s, train_flops_per_token
from meshkit.strategy import BlockTopK, VerticalSlash

LLAMA3_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
FAMILIES = [
    (LlamaConfig, LlamaForCausalLM, {}),
    (MistralConfig, MistralForCausalLM, {"sliding_window": 7, "head_dim": 16}),
    (Qwen2Config, Qwen2ForCausalLM, {}),
    (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
]
TOL_PUBLISHED = 3e-4  # the tables round MFU to two digits of a percent and tokens per second to whole numbers


def test_llama3_8b_at_8192_costs_the_published_57_9_gflops():
    # torchtitan: 6 * 7.50e9 + 12 * 32 * 4096 * 8192
    flops = ModelFlops.from_config(LLAMA3_8B)
    assert flops.matmul_params == pytest.approx(7.50e9, rel=1e-3)
    assert flops.per_token(8192).full == pytest.approx(57.9e9, rel=1e-3)
    assert flops.per_token(8192).full == 6 * flops.matmul_params + 12 * 32 * 4096 * 8192
    assert flops.per_token(8192).causal == 6 * flops.matmul_params + 6 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    "layers, width, params, length, tokens_per_s, mfu_percent",
    [  # llm-foundry, scripts/train/benchmarking/README.md, H100 80GB BF16: full convention, every parameter counted
        (32, 4096, 6658859008, 2048, 10643, 46.44),
        (32, 4096, 6784688128, 32768, 3318, 30.94),
        (40, 5120, 12853954560, 2048, 4792, 39.79),
        (24, 2048, 1315950592, 2048, 45455, 41.82),
    ],
)
def test_published_mfu_of_mosaicml_is_reproduced(layers, width, params, length, tokens_per_s, mfu_percent):
    flops = train_flops_per_token(
        matmul_params=params, layers=layers, q_heads=width // 128, head_dim=128, lengths=length
    )
    mfu = tokens_per_s * flops.full / peak_flops_of("NVIDIA H100 80GB HBM3")
    assert 100 * mfu == pytest.approx(mfu_percent, rel=TOL_PUBLISHED)


def test_published_mfu_of_kempnerforge_is_reproduced_in_both_conventions():
    # H200, 8.03e9 parameters with the embedding, sequence 4096, 10,471 tokens/s: 57.8 % full, 54.4 % causal
    flops = train_flops_per_token(matmul_params=8_030_261_248, layers=32, q_heads=32, head_dim=128, lengths=4096)
    rate = 10_471 / peak_flops_of("NVIDIA H200")
    assert 100 * rate * flops.full == pytest.approx(57.8, abs=0.05)
    assert 100 * rate * flops.causal == pytest.approx(54.4, abs=0.05)


def test_megatron_closed_form_holds_for_a_gpt_without_recompute():
    # Narayanan et al. 2021, equation 3 without the recomputed forward: 72 B s L h^2 (1 + s / 6h + V / 12 L h)
    layers, hidden, vocabulary, length = 24, 1024, 50304, 2048
    flops = train_flops_per_token(
        matmul_params=layers * 12 * hidden**2 + vocabulary * hidden,
        layers=layers,
        q_heads=16,
        head_dim=64,
        lengths=length,
    )
    closed = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert flops.full == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("config_class, model_class, extra", FAMILIES)
def test_flops_equal_what_the_counter_sees_in_forward_and_backward(config_class, model_class, extra):
    config = config_class(**TINY, **{**extra, "sliding_window": None}, attn_implementation="eager")
    model = model_class(config)
    tokens = torch.randint(0, 101, (2, 17))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    by_op = counter.get_flop_counts()["Global"]
    # The counter also sees the outer product of positions and RoPE frequencies, which trains nothing.
    rope = 2 * config.head_dim // 2 * 17 if hasattr(config, "head_dim") else 2 * 4 * 17
    counted = sum(by_op.values())
    expected = ModelFlops.from_config(config).per_token(17).full * tokens.numel()
    assert 0 <= counted - expected <= 2 * rope


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config_class, model_class, extra", FAMILIES)
def test_a_module_on_meta_has_the_matmul_parameters_of_its_configuration(config_class, model_class, extra, tied):
    config = config_class(**TINY, **extra, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = model_class(config)
    counted = ModelFlops.from_module(model, layers=3, q_heads=6, head_dim=8)
    assert counted.matmul_params == ModelFlops.from_config(config).matmul_params
    assert counted.note == ""


def kept_by_the_mask(length: int, window: int) -> float:
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return ((key <= query) & (key > query - window)).sum().item()


@pytest.mark.parametrize("lengths", [64, [64], [40, 24], [1, 62, 1], [5] * 13])
@pytest.mark.parametrize("window", [None, 1, 7, 40, 64, 500])
def test_causal_attention_counts_the_entries_that_the_mask_keeps(lengths, window):
    documents = [lengths] if isinstance(lengths, int) else lengths
    flops = train_flops_per_token(
        matmul_params=0, layers=1, q_heads=1, head_dim=1, lengths=lengths, sliding_window=window
    )
    tokens = sum(documents)
    kept = sum(kept_by_the_mask(length, window or length) for length in documents)
    reach = [min(length, window or length) for length in documents]
    # The convention takes half of the first square; the mask keeps its diagonal as well, half an entry per row more.
    assert flops.causal / 12 * tokens == pytest.approx(kept - sum(reach) / 2)
    assert flops.full / 12 * tokens == pytest.approx(sum(n * w for n, w in zip(documents, reach, strict=True)))
    assert flops.full / 2 <= flops.causal <= flops.full


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (models.QWEN3_30B_A3B, 3.04),
        (models.MIXTRAL_8X7B, 12.75),
    ],  # published active parameters: 3.3 and 12.9, with embedding
)
def test_of_experts_those_that_a_token_chooses_count(config, billions):
    assert ModelFlops.from_config(config).matmul_params == pytest.approx(billions * 1e9, rel=2e-3)


def test_a_configuration_of_transformers_with_experts_counts_as_ours():
    theirs = Qwen3MoeConfig(**TINY, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
    theirs.mlp_only_layers = [1]
    sizes = {**TINY, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    ours = models.Qwen3MoeConfig(**sizes, mlp_only_layers=(1,))
    by_hand = 3 * 2 * (48 * 48 + 48 * 16) + 2 * (48 * 6 + 2 * 3 * 48 * 20) + 3 * 48 * 80 + 48 * 101
    assert ModelFlops.from_config(theirs) == ModelFlops.from_config(ours)
    assert ModelFlops.from_config(ours).matmul_params == by_hand
    mixtral = ModelFlops.from_config(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=3))
    assert mixtral.matmul_params == 3 * (2 * (48 * 48 + 48 * 16) + 48 * 4 + 9 * 48 * 80) + 48 * 101


TOP, SLASH = BlockTopK(block=3, top=2), VerticalSlash(block=3, vertical=2, slash=1)


@pytest.mark.parametrize("lengths", [64, [40, 24], [1, 62, 1], [5] * 13])
def test_attention_to_chosen_blocks_is_charged_the_most_that_can_be_chosen(lengths):
    documents = [lengths] if isinstance(lengths, int) else lengths
    for sparse, most in ((TOP, 2), (SLASH, 3)):
        per_key = train_flops_per_token(
            matmul_params=0, layers=1, q_heads=1, head_dim=1, lengths=lengths, sparse=sparse
        )
        seen = 0.0
        for length in documents:  # its own block up to itself, and whole blocks before
            seen += sum(query % 3 + 1 + 3 * min(query // 3, most - 1) for query in range(length)) - length / 2
        assert per_key.causal / 12 * sum(documents) == pytest.approx(seen)
        assert per_key.causal <= per_key.full <= 12 * 3 * most
    every = ModelFlops(matmul_params=5, layers=2, q_heads=3, head_dim=4, sparse=BlockTopK(block=3, top=99))
    assert every.per_token(lengths) == ModelFlops(matmul_params=5, layers=2, q_heads=3, head_dim=4).per_token(lengths)
    assert ModelFlops.from_config(LLAMA3_8B, sparse=TOP).sparse == TOP


def test_layers_with_and_without_a_window_are_priced_apart():
    config = Qwen2Config(**TINY, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    flops = ModelFlops.from_config(config)
    attention = flops.per_token(64).full - 6 * flops.matmul_params
    assert attention == 12 * 48 * (64 + 8 + 8)
    windowed = ModelFlops.from_module(nn.Linear(2, 3), layers=3, q_heads=6, head_dim=8, sliding_window=8)
    assert windowed.per_token(64).full == 6 * 6 + 12 * 48 * 3 * 8


def test_document_lengths_are_those_that_were_packed():
    rows = [[3, 1, 4], [8], [1, 1, 6]]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    kept = position_ids.clone()
    assert document_lengths(position_ids) == [3, 1, 4, 8, 1, 1, 6]
    assert torch.equal(position_ids, kept)
    continued = torch.tensor([[5, 6, 0, 1], [0, 1, 2, 3]])  # the first row starts inside a document
    assert document_lengths(continued) == [2, 2, 4]


def test_a_module_says_what_it_does_not_count():
    note = ModelFlops.from_module(nn.MultiheadAttention(8, 2)).note
    assert note == (
        "weights outside nn.Linear are not counted: in_proj_weight; "
        "attention is not counted: give layers, q_heads and head_dim"
    )


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: ModelFlops.from_config(Qwen2MoeConfig(**TINY)), "model_type='qwen2_moe': only llama"),
        (lambda: ModelFlops.from_config(LlamaConfig(**TINY, num_experts=4)), "num_experts=4: a token does not visit"),
        (
            lambda: ModelFlops.from_config(LlamaConfig(**TINY, layer_types=["linear_attention"] * 3)),
            "layer_types has 'linear_attention'",
        ),
        (lambda: train_flops_per_token(matmul_params=1, lengths=[]), r"lengths=\[\]: FLOPs per token need"),
        (lambda: train_flops_per_token(matmul_params=1, lengths=[4, 0]), r"lengths=\[4, 0\]: FLOPs per token need"),
        (lambda: train_flops_per_token(matmul_params=1, lengths=4, sliding_window=0), "sliding_window=0: a window"),
        (
            lambda: train_flops_per_token(matmul_params=1, lengths=4, sliding_window=2, sparse=TOP),
            "sliding_window=2 and BlockTopK.block=3, top=2.: how many",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(build, message):
    with pytest.raises(MeshkitError, match=message):
        build()


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_a_peak_is_that_of_exactly_this_device_or_unknown(name, tflops):
    assert peak_flops_of(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_cpu_has_no_peak():
    assert peak_flops_per_s(torch.device("cpu")) is None
