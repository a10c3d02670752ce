"""The training step of torchtitan 0.3.0: its model, its `parallelize_llama`, its loss, optimizer and clipping.

What `torchtitan.trainer.Trainer` does around them is done here as `Trainer.__init__` and `train_step` do it, without data
loader, checkpoints and logging. What is not its default, so that every loop does the same work: torch's causal attention
instead of flex, which does not train on a CPU; logits in one piece instead of chunks; nothing is recomputed; norms do not
decay; no CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import _build_qwen3_moe_layers, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import Trainer

import meshkit as mk
from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    WEIGHT_DECAY,
    Training,
    repeat,
    transformers_model,
)
from meshkit.models.layers import Llama3Scaling


def train(work: Training, turns: Turns) -> None:
    values = transformers_model(work).state_dict()
    _train(work, turns, _llama_config(work), parallelize_llama, Llama3StateDictAdapter, values)


def moe(work: Training, turns: Turns) -> None:
    values, experts = transformers_model(work).state_dict(), {}
    for name in [
        name for name in values if ".mlp.experts." in name
    ]:  # stacked, as torchtitan has them, and gate with up
        target = name.removeprefix("model.").partition(".mlp.")[0] + ".moe.routed_experts.inner_experts."
        if name.endswith("gate_up_proj"):
            experts[f"{target}w1_EFD"], experts[f"{target}w3_EFD"] = values.pop(name).chunk(2, dim=1)
        else:
            experts[f"{target}w2_EDF"] = values.pop(name)
    _train(work, turns, _moe_config(work), parallelize_qwen3, Qwen3StateDictAdapter, values, experts)


def _train(
    work: Training,
    turns: Turns,
    model_config: Any,
    parallelize: Any,
    adapter: Any,
    values: dict[str, Tensor],
    own_values: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """values: by transformers' names; own_values: by torchtitan's."""
    config = _config(work)
    torch.autograd.set_multithreading_enabled(False)  # init_distributed sets it, had the world not been joined before
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    loss_fn = config.loss.build(compile_config=config.compile)
    with cpu_shims(work):
        dims = ParallelDims.from_config(config.parallelism, work.spec.world_size)
        model_config.update_from_config(config=config)
        with torch.device("meta"):
            model = model_config.build()
        options = {
            "parallel_dims": dims,
            "training": config.training,
            "parallelism": config.parallelism,
            "compile_config": config.compile,
            "ac_config": config.activation_checkpoint,
            "dump_folder": config.dump_folder,
        }
        schedule = None
        if dims.pp_enabled:
            schedule, parts, first, last = pipeline_llm(
                model,
                **options,
                device=turns.device,
                model_config=model_config,
                parallelize_fn=parallelize,
                loss_fn=loss_fn,
            )
        else:
            parts = [parallelize(model, **options)]
        values = adapter(model_config, None).from_hf(values) | dict(own_values)
        for part in parts:
            part.to_empty(device=work.device_type)
            with torch.no_grad():
                part.init_weights()
            _fill(part.train(), values)
    optimizers = config.optimizer.build(model_parts=parts)
    train_context = dist_utils.get_spmd_context(parallel_dims=dims)
    garbage = GarbageCollection(gc_freq=config.training.gc_freq)
    steps = 0

    def forward_backward(input_ids: Tensor, labels: Tensor, valid_tokens: Tensor) -> Tensor:
        inputs, labels, _ = annotate_input_spmd_types(dims, input_ids, labels, {})
        with train_context():
            loss, _ = loss_fn(parts[0](inputs), labels, valid_tokens)
            loss.backward()
        return loss.detach()

    def pipelined(input_ids: Tensor, labels: Tensor, valid_tokens: Tensor) -> Tensor:
        rows = [
            annotate_input_spmd_types(dims, *row, {}) for row in zip(input_ids.split(1), labels.split(1), strict=True)
        ]
        losses: list[Tensor] = []
        with train_context():
            schedule.step(
                arg_mbs=[(inputs,) for inputs, _, _ in rows] if first else None,
                kwarg_mbs=[{} for _ in rows],
                target_mbs=[targets for _, targets, _ in rows] if last else None,
                losses=losses if last else None,
                loss_kwargs={"global_valid_tokens": valid_tokens},
                return_outputs=False,
            )
        loss = torch.stack(losses).sum().detach() if last else torch.zeros(())
        return dist_utils.dist_sum_tensor(loss, dims.get_mesh("pp"))

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        garbage.run(steps)
        optimizers.zero_grad()
        valid_tokens = (labels != IGNORE_INDEX).sum()
        if dims.dp_enabled:
            valid_tokens = dist_utils.dist_sum_tensor(valid_tokens, dims.get_mesh("batch"))
        loss = (pipelined if dims.pp_enabled else forward_backward)(input_ids, labels, valid_tokens)
        dist_utils.clip_grad_norm_(
            [param for part in parts for param in part.parameters()],
            config.training.max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        optimizers.step()
        # Of this rank it is the sum over the tokens of all ranks.
        return dist_utils.dist_sum_tensor(loss, dims.get_mesh("loss")) if dims.dp_cp_enabled else loss

    with cpu_shims(work):
        repeat(step, work, turns)


@contextmanager
def cpu_shims(work: Training) -> Iterator[None]:
    """All that torchtitan lacks on a CPU; on CUDA nothing is changed.

    - Without a GPU it takes "cuda" for the device of its meshes.
    - It sets FSDP's gradient_divide_factor, and FSDP then asks for a scaled sum (PREMUL_SUM), which gloo has not: each
      unit is told to sum plainly, and divides by 1.0 itself.
    - Experts are computed in bf16 whatever the precision of the rest: here as their input is.
    - Tokens are exchanged by a list of tensors of unequal sizes, which gloo refuses: here in one tensor.
    """
    if work.device_type != "cpu":
        yield
        return
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_plain_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    def experts_as_given(self: GroupedExperts, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        w1, w2, w3 = ((each.to_local() if isinstance(each, DTensor) else each).transpose(-2, -1) for each in weights)
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        h_RF = F.silu(self._grouped_mm(A=x_RD, B_t=w1, offs=ends)) * self._grouped_mm(A=x_RD, B_t=w3, offs=ends)
        return self._grouped_mm(A=h_RF, B_t=w2, offs=ends)

    def all_to_all_in_one(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
        received = torch.cat(outputs)
        sizes = [len(each) for each in outputs], [len(each) for each in inputs]
        dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
        for output, part in zip(outputs, received.split(sizes[0]), strict=True):
            output.copy_(part)

    with (
        mock.patch.object(GroupedExperts, "forward", experts_as_given),
        mock.patch.object(dist, "all_to_all", all_to_all_in_one),
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        mock.patch.object(FSDPModule, "set_gradient_divide_factor", set_factor_of_plain_sum),
    ):
        yield


def _fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replicated, for the hook that puts q, k and v together cannot do it with parts; the copy takes this rank's part."""
    targets = model.state_dict()
    of_part = {name: values[name] for name in targets if name in values}
    for name, value in of_part.items():
        if isinstance(target := targets[name], DTensor):
            replicated = [Replicate()] * target.device_mesh.ndim
            of_part[name] = DTensor.from_local(value, target.device_mesh, replicated, run_check=False)
    model.load_state_dict(of_part)


def _config(work: Training) -> Trainer.Config:
    spec, layers = work.spec, iter(range(work.config.num_hidden_layers))
    stages = None
    if work.stages is not None:
        stages = [[f"layers.{next(layers)}" for _ in range(count)] for count in work.stages]
        stages[0].insert(0, "tok_embeddings")
        stages[-1] += ["norm", "lm_head"]
    return Trainer.Config(
        training=TrainingConfig(
            seq_len=work.tokens,
            local_batch_size=work.rows // (spec.dp_replicate * spec.dp_shard),
            max_norm=MAX_NORM,
            mixed_precision_param="bfloat16" if work.bf16 else "float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=spec.dp_replicate,
            data_parallel_shard_degree=spec.dp_shard,
            tensor_parallel_degree=spec.tp,
            enable_sequence_parallel=work.sequence,
            expert_parallel_degree=spec.ep,
            pipeline_parallel_degree=spec.pp,
            pipeline_parallel_schedule={"1f1b": "1F1B", "zbv": "ZBVZeroBubble"}[work.schedule],
            module_fqns_per_model_part=stages,
        ),
        compile=CompileConfig(enable=work.compile, components=["model"]),
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(global_vocab_size=work.config.vocab_size),
        optimizer=_optimizers(),
    )


def _llama_config(work: Training) -> Llama3Model.Config:
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
    return Llama3Model.Config(**_around(work, layers), enable_weight_tying=sizes.tie_word_embeddings)


def _moe_config(work: Training) -> Qwen3Model.Config:
    """Its Qwen3-MoE, without a bias that balances: no other loop has one."""
    sizes = work.config
    assert isinstance(sizes, mk.models.Qwen3MoeConfig)
    layers = _build_qwen3_moe_layers(
        n_layers=sizes.num_hidden_layers,
        dim=sizes.hidden_size,
        n_heads=sizes.num_attention_heads,
        n_kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        moe_hidden_dim=sizes.moe_intermediate_size,
        num_experts=sizes.num_experts,
        top_k=sizes.num_experts_per_tok,
        rope=CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=work.tokens, theta=sizes.rope.theta),
        attn_backend="flex",
        moe_comm_backend="standard",
    )
    for layer in layers:
        layer.moe.load_balance_coeff = None
        layer.attention.qk_norm.eps = sizes.rms_norm_eps
    return Qwen3Model.Config(**_around(work, layers))


def _around(work: Training, layers: list[Any]) -> dict[str, Any]:
    """Layers and what is around them, with torch's causal attention; the values are loaded."""
    sizes, drawn = work.config, {"weight": torch.nn.init.ones_}
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention_norm.eps = layer.ffn_norm.eps = sizes.rms_norm_eps
    return {
        "dim": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "tok_embeddings": Embedding.Config(
            num_embeddings=sizes.vocab_size, embedding_dim=sizes.hidden_size, param_init=drawn
        ),
        "norm": RMSNorm.Config(normalized_shape=sizes.hidden_size, eps=sizes.rms_norm_eps, param_init=drawn),
        "lm_head": Linear.Config(in_features=sizes.hidden_size, out_features=sizes.vocab_size, param_init=drawn),
        "layers": layers,
    }


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
