"""The training step of torchtitan 0.3.0: its model, its `parallelize_llama`, its loss, optimizer and clipping.

What `torchtitan.trainer.Trainer` does around them is done here as `Trainer.__init__` and `train_step` do it, without data
loader, checkpoints and logging. What is not its default, so that every loop does the same work: torch's causal attention
instead of flex, which does not train on a CPU; logits in one piece instead of chunks; nothing is recomputed; norms do not
decay; no CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from loops import BETAS, EPS, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Step, Work, transformers_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import Trainer

from meshkit.models.layers import Llama3Scaling


def torchtitan(work: Work) -> Step:
    config = Trainer.Config(
        training=TrainingConfig(
            seq_len=work.tokens,
            max_norm=MAX_NORM,
            mixed_precision_param="bfloat16" if work.bf16 else "float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=work.mesh.dp_replicate,
            data_parallel_shard_degree=work.mesh.dp_shard,
            tensor_parallel_degree=work.mesh.tp,
            enable_sequence_parallel=work.sequence,
        ),
        compile=CompileConfig(enable=work.compile, components=["model"]),
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(global_vocab_size=work.config.vocab_size),
        optimizer=_optimizers(),
    )
    torch.autograd.set_multithreading_enabled(False)  # init_distributed sets it, had the world not been joined before
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    with cpu_shims(work):
        dims = ParallelDims.from_config(config.parallelism, work.mesh.world_size)
        model = _model(work, dims, config)
    loss_fn = config.loss.build(compile_config=config.compile)
    optimizers = config.optimizer.build(model_parts=[model])
    train_context = dist_utils.get_spmd_context(parallel_dims=dims)
    garbage = GarbageCollection(gc_freq=config.training.gc_freq)
    steps = 0

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        garbage.run(steps)
        optimizers.zero_grad()
        valid_tokens = (labels != IGNORE_INDEX).sum()
        if dims.dp_enabled:
            valid_tokens = dist_utils.dist_sum_tensor(valid_tokens, dims.get_mesh("batch"))
        inputs, labels, _ = annotate_input_spmd_types(dims, input_ids, labels, {})
        with train_context():
            loss, _ = loss_fn(model(inputs), labels, valid_tokens)
            loss.backward()
        dist_utils.clip_grad_norm_(model.parameters(), config.training.max_norm, foreach=True)
        optimizers.step()
        loss = loss.detach()  # this rank's sum over the tokens of all ranks
        return dist_utils.dist_sum_tensor(loss, dims.get_mesh("loss")) if dims.dp_cp_enabled else loss

    return step


@contextmanager
def cpu_shims(work: Work) -> Iterator[None]:
    """All that torchtitan lacks on a CPU; on CUDA nothing is changed.

    - Without a GPU it takes "cuda" for the device of its meshes.
    - It sets FSDP's gradient_divide_factor, and FSDP then asks for a scaled sum (PREMUL_SUM), which gloo has not: each
      unit is told to sum plainly, and divides by 1.0 itself.
    """
    if work.device_type != "cpu":
        yield
        return
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_plain_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    with (
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        mock.patch.object(FSDPModule, "set_gradient_divide_factor", set_factor_of_plain_sum),
    ):
        yield


def _model(work: Work, dims: ParallelDims, config: Trainer.Config) -> Llama3Model:
    """Sharded as `Trainer` shards it, then with transformers' values."""
    model_config = _model_config(work)
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    model.to_empty(device=work.device_type)
    with torch.no_grad():
        model.init_weights()
    model.train()
    values = Llama3StateDictAdapter(model_config, None).from_hf(transformers_model(work).state_dict())
    # Replicated, for the hook that puts q, k and v together cannot do it with parts; the copy takes this rank's part.
    targets = model.state_dict()
    for name, value in values.items():
        if isinstance(target := targets[name], DTensor):
            replicated = [Replicate()] * target.device_mesh.ndim
            values[name] = DTensor.from_local(value, target.device_mesh, replicated, run_check=False)
    model.load_state_dict(values)
    return model


def _model_config(work: Work) -> Llama3Model.Config:
    """torchtitan's Llama of these sizes, as its registry builds it: q, k and v are one product."""
    sizes, scaling = work.config, work.config.rope.scaling
    rope = ComplexRoPE.Config(dim=sizes.head_dim, max_seq_len=work.tokens, theta=sizes.rope.theta)
    if isinstance(scaling, Llama3Scaling):
        rope.scaling, rope.scaling_factor = "llama", scaling.factor
        rope.low_freq_factor, rope.high_freq_factor = scaling.low_freq_factor, scaling.high_freq_factor
        rope.original_max_position_embeddings = scaling.original_max_position_embeddings
    layers = _build_llama3_layers(
        n_layers=sizes.num_hidden_layers,
        dim=sizes.hidden_size,
        n_heads=sizes.num_attention_heads,
        n_kv_heads=sizes.num_key_value_heads,
        hidden_dim=sizes.intermediate_size,
        rope=rope,
        attn_backend="flex",
    )
    drawn = {"weight": torch.nn.init.ones_}  # the values are loaded
    norm = RMSNorm.Config(normalized_shape=sizes.hidden_size, eps=sizes.rms_norm_eps, param_init=drawn)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention_norm.eps = layer.ffn_norm.eps = sizes.rms_norm_eps
    return Llama3Model.Config(
        dim=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        enable_weight_tying=sizes.tie_word_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=sizes.vocab_size, embedding_dim=sizes.hidden_size, param_init=drawn
        ),
        norm=norm,
        lm_head=Linear.Config(in_features=sizes.hidden_size, out_features=sizes.vocab_size, param_init=drawn),
        layers=layers,
    )


def _optimizers() -> OptimizersContainer.Config:
    """torchtitan's default decays norms as well; its own groups by name keep them out, as in the other loops."""
    adamw = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS}
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": decay})
            for pattern, decay in ((r"norm\.weight$", 0.0), (r".*", WEIGHT_DECAY))
        ],
        implementation="fused",
    )
