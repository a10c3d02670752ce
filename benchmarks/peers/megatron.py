"""megatron-core: its GPTModel with parallel layers, its loss over the vocabulary's parts, its DDP with gradient buffers.

Without Transformer Engine its attention writes out all scores. The optimizer is torch's fused AdamW, and the norm is added
up here: its own are for CUDA. What it lacks on a CPU is in `_on_a_cpu`: it makes tensors on the current CUDA device, and
forks CUDA's generator around a dropout that is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    Training,
    decay_groups,
    mean_over_ranks,
    repeat,
    transformers_model,
)


def train(work: Training, turns: Turns) -> None:
    with _on_a_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=work.spec.tp, create_gloo_process_groups=False
        )
        model = _model(work)
        _fill(model, transformers_model(work).state_dict(), work)
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
        optimizer = torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
        positions = torch.arange(work.tokens).unsqueeze(0)
        hidden = torch.ones(1, 1, work.tokens, work.tokens, dtype=torch.bool).triu(1)
        params = list(model.parameters())

        def step(input_ids: Tensor, labels: Tensor) -> Tensor:
            wrapped.zero_grad_buffer()
            loss = wrapped(input_ids, positions.expand_as(input_ids), hidden, labels=labels).mean()
            loss.backward()
            wrapped.finish_grad_sync()
            for param in params:
                param.grad = param.main_grad
            _clip(params)
            optimizer.step()
            optimizer.zero_grad()
            return mean_over_ranks(loss)

        repeat(step, work, turns)


@contextmanager
def _on_a_cpu() -> Iterator[None]:
    tracker = SimpleNamespace(fork=lambda *name: nullcontext())
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
    ):
        yield


def _model(work: Training) -> GPTModel:
    sizes = work.config
    config = TransformerConfig(
        num_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_key_value_heads,
        kv_channels=sizes.head_dim,
        layernorm_epsilon=sizes.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=work.spec.tp,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        # Its fused kernels are CUDA's.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=sizes.vocab_size,
        max_sequence_length=work.tokens,
        position_embedding_type="rope",
        rotary_base=sizes.rope.theta,
    )


def _fill(model: GPTModel, values: Mapping[str, Tensor], work: Training) -> None:
    """transformers' values: q, k and v are one matrix, by groups of heads; gate and up another, by ranks of tp."""
    tp, rank, groups = work.spec.tp, parallel_state.get_tensor_model_parallel_rank(), work.config.num_key_value_heads

    def part(value: Tensor, dim: int = 0) -> Tensor:
        return value.chunk(tp, dim=dim)[rank]

    named = {
        "embedding.word_embeddings.weight": part(values["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": values["model.norm.weight"],
        "output_layer.weight": part(values["lm_head.weight"]),
    }
    for index in range(work.config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}.", f"decoder.layers.{index}."
        qkv = [values[f"{theirs}self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "qkv"]
        named |= {
            f"{ours}input_layernorm.weight": values[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": part(torch.cat(qkv, dim=1).flatten(0, 1)),
            f"{ours}self_attention.linear_proj.weight": part(values[f"{theirs}self_attn.o_proj.weight"], dim=1),
            f"{ours}pre_mlp_layernorm.weight": values[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat(
                [part(values[f"{theirs}mlp.{name}_proj.weight"]) for name in ("gate", "up")]
            ),
            f"{ours}mlp.linear_fc2.weight": part(values[f"{theirs}mlp.down_proj.weight"], dim=1),
        }
    params = dict(model.named_parameters())
    assert params.keys() == named.keys(), sorted(params.keys() ^ named.keys())
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(named[name])


def _clip(params: list[nn.Parameter]) -> None:
    """Matrices are split over tp, norms are the same on all its ranks."""
    squares = get_total_norm([param.grad for param in params if param.ndim > 1]).square()
    dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
    whole = get_total_norm([param.grad for param in params if param.ndim == 1])
    clip_grads_with_norm_(params, MAX_NORM, (squares + whole.square()).sqrt())
