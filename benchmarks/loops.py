"""One training step, written by several hands: meshkit, PyTorch alone, accelerate, torchtitan.

Every loop starts from the weights that transformers draws for seed 0, clips the gradient norm at `MAX_NORM`, takes a
step of fused AdamW with weight decay on matrices only, and returns the mean loss over all ranks. All labels count.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import LlamaConfig, LlamaForCausalLM

import meshkit as mk
from meshkit.models.huggingface.folder import config_to_dict
from meshkit.models.llama import LLAMA_PLAN

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every loop does alike. rows: of the global batch."""

    config: mk.models.LlamaConfig
    mesh: mk.MeshSpec
    rows: int
    tokens: int
    sequence: bool
    bf16: bool
    compile: bool
    device_type: str


# input_ids and labels of this rank, both [rows of this rank, tokens] -> mean loss over all ranks, detached
Step = Callable[[Tensor, Tensor], Tensor]


def transformers_model(work: Work) -> LlamaForCausalLM:
    """The same fp32 values in every process: drawn on the device from one seed."""
    return transformers_llama(work.config, work.device_type)


def transformers_llama(
    config: mk.models.LlamaConfig, device_type: str = "cpu", *, use_cache: bool = False
) -> LlamaForCausalLM:
    theirs = LlamaConfig.from_dict({**config_to_dict(config), "use_cache": use_cache, "pad_token_id": None})
    torch.manual_seed(0)
    with torch.device(device_type):
        return LlamaForCausalLM(theirs).train()


# ------------------------------------------------------------------------------------------------------- meshkit


def meshkit_llama(work: Work) -> Step:
    """meshkit's decoder with its own plan."""
    return _meshkit_step(meshkit_model(transformers_model(work), work.config), LLAMA_PLAN, work)


def meshkit_model(source: LlamaForCausalLM, config: mk.models.LlamaConfig) -> mk.models.Llama:
    """meshkit's decoder around the parameters of `source` themselves: nothing is held twice and a tied one stays tied."""
    with torch.device("meta"):
        model = mk.models.Llama(config)
    values = source.state_dict(keep_vars=True)
    model.load_state_dict({name.removeprefix("model."): values.pop(name) for name in list(values)}, assign=True)
    return model


def meshkit_transformers(work: Work) -> Step:
    """transformers' decoder in meshkit's hands: what is left of a difference is not the model's code."""
    return _meshkit_step(transformers_model(work), None, work)


def _meshkit_step(model: nn.Module, plan: mk.Plan | None, work: Work) -> Step:
    run = mk.parallelize(
        model,
        mk.init_mesh(work.mesh, device_type=work.device_type),
        plan=plan,
        memory=mk.MemoryPolicy(precision=mk.strategy.Precision() if work.bf16 else None),
        sequence=work.sequence,
        compile=work.compile,
    )
    optimizer = mk.adamw(run, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = run.forward_backward({"input_ids": input_ids, "labels": labels})
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# --------------------------------------------------------------------------------------------------------- plain


def plain(work: Work) -> Step:
    """transformers' decoder with torch's parallelize_module and fully_shard, by hand."""
    sizes = work.mesh.sizes(("dp_replicate", "dp_shard", "tp"))
    mesh = init_device_mesh(work.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = mesh["dp_replicate", "dp_shard"] if work.mesh.dp_replicate > 1 else mesh["dp_shard"]
    tensor = work.mesh.tp > 1
    model = transformers_model(work)
    if tensor:
        # parallelize_module's outputs are views; nothing here writes into one.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        mesh["dp_shard", "tp"]._flatten("dp_shard_tp")  # lets DTensor reduce a norm in one step, as its warning asks
        _parallelize_by_hand(model, mesh["tp"], sequence=work.sequence)
    if work.compile:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    if data.size() > 1 or work.bf16:
        _shard_by_hand(model, data, bf16=work.bf16)
    groups = _decay_groups(model)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        # Given, for with sequence parallelism the embedding's output is a part of the sequence.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        logits = model(input_ids=input_ids, position_ids=positions).logits
        if tensor:
            with loss_parallel():
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                loss.backward()
            _clip_mixed(group["params"] for group in optimizer.param_groups)
        else:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        return loss / dist.get_world_size()

    return step


def _parallelize_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Without sequence parallelism the norms stay plain tensors, as torch's tutorials leave them: the fastest way."""
    stream = Shard(1) if sequence else Replicate()
    of_model: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    of_layer: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if sequence:
        of_model["model.norm"] = SequenceParallel()
        of_layer |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        of_layer["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        of_layer["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
    parallelize_module(model, mesh, of_model)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight  # parallelize_module has untied them
    for layer in model.model.layers:
        parallelize_module(layer, mesh, of_layer)


def _shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh, *, bf16: bool) -> None:
    """Blocks, embedding and head each on their own, as torchtitan wraps them; the head is kept for the backward."""
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _clip_mixed(groups: Iterable[list[Tensor]]) -> None:
    """clip_grad_norm_ refuses parameters of two meshes, or DTensors beside plain ones; matrices and norms differ so."""
    groups_of_params = list(groups)
    norms = [get_total_norm([param.grad for param in group if param.grad is not None]) for group in groups_of_params]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups_of_params:
        clip_grads_with_norm_(group, MAX_NORM, total)


def _decay_groups(model: nn.Module) -> list[dict[str, object]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]


# ---------------------------------------------------------------------------------------------------- accelerate


def accelerate(work: Work) -> Step:
    """transformers' decoder prepared by accelerate's FSDP2 plugin."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if work.bf16 else None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )
    create = AcceleratorState.__init__

    def create_sharded(self: AcceleratorState, *args: object, **kwargs: object) -> None:
        """On a CPU accelerate drops the plugin and falls back to DDP without a word."""
        create(self, *args, **kwargs)
        self.fsdp_plugin, self.distributed_type = plugin, DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", create_sharded):
        accelerator = Accelerator(cpu=work.device_type == "cpu", fsdp_plugin=plugin)
    model = transformers_model(work)
    if work.compile:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(_decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean")

    return step


# ---------------------------------------------------------------------------------------------------- torchtitan


def torchtitan(work: Work) -> Step:
    """torchtitan's own decoder, sharded and trained by its own parts."""
    from loops_torchtitan import torchtitan

    return torchtitan(work)


LOOPS: dict[str, Callable[[Work], Step]] = {
    "meshkit": meshkit_llama,
    "meshkit_transformers": meshkit_transformers,
    "plain": plain,
    "accelerate": accelerate,
    "torchtitan": torchtitan,
}

# Loops named after a package of their own -> the module that imports it. A rank imports it before its memory is counted.
PEERS = {"accelerate": "accelerate", "torchtitan": "loops_torchtitan"}


def reason_to_skip(loop: str, work: Work) -> str | None:
    """Why this loop cannot do this work here; None if it can."""
    if loop in PEERS and importlib.util.find_spec(loop) is None:
        return f"{loop} is not installed"
    if loop == "accelerate" and (work.mesh.tp > 1 or work.mesh.dp_replicate > 1):
        return "compared on dp_shard alone"
    return None
