"""PyTorch alone, by hand: transformers' decoder with DDP, fully_shard, parallelize_module, pipelining and DCP."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
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
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaForCausalLM

from benchmarks.peers.plain_context import context_parallel
from benchmarks.peers.plain_pipeline import pipeline_step
from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    Reading,
    Saving,
    Step,
    Training,
    checksum,
    decay_groups,
    ids_of_one_step,
    mean_over_ranks,
    poison,
    repeat,
    transformers_decoder,
    transformers_model,
)


def train(work: Training, turns: Turns) -> None:
    repeat(training_step(work), work, turns)


moe = train  # transformers' decoder with experts, which it computes by grouped products


def training_step(work: Training) -> Step:
    if work.spec.pp > 1:
        return _with_optimizer(*pipeline_step(work))
    if work.spec.cp > 1:
        return _context_step(work)
    spec, model = work.spec, transformers_model(work)
    sizes = spec.sizes(("dp_replicate", "dp_shard", "tp"))
    mesh = init_device_mesh(work.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tensor = spec.tp > 1
    if tensor:
        # parallelize_module's outputs are views; nothing here writes into one.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        mesh["dp_shard", "tp"]._flatten("dp_shard_tp")  # lets DTensor reduce a norm in one step, as its warning asks
        _parallelize_by_hand(model, mesh["tp"], sequence=work.sequence)
    if work.compile:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    forward: nn.Module = model
    if spec.dp_replicate > 1 or (spec.dp_shard > 1 and work.zero == 1):
        assert not work.bf16
        # Gradients are views of buckets, and the graph is that of the first step: DDP's two options for speed.
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    elif spec.dp_shard > 1 or work.bf16:
        shard_by_hand(model, mesh["dp_shard"], bf16=work.bf16, reshard=work.zero == 3)
    optimizer = optimizer_of(model, shards=spec.dp_shard if work.zero == 1 else 1)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        # Given, for with sequence parallelism the embedding's output is a part of the sequence.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        logits = forward(input_ids=input_ids, position_ids=positions).logits
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
        return mean_over_ranks(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return step


def _with_optimizer(modules: nn.Module, forward_backward: Step) -> Step:
    optimizer = optimizer_of(modules)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = forward_backward(input_ids, labels)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _context_step(work: Training) -> Step:
    forward, positions = context_parallel(work)

    def forward_backward(input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = forward(input_ids=input_ids[:, positions], position_ids=positions.unsqueeze(0)).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, positions].flatten())
        loss.backward()
        clip_grad_norm_(forward.parameters(), MAX_NORM)
        return mean_over_ranks(loss)

    return _with_optimizer(forward, forward_backward)


def optimizer_of(model: nn.Module, *, shards: int = 1) -> torch.optim.Optimizer:
    """Fused AdamW; with shards each rank has the state of a part of the parameters (ZeRO-1)."""
    options = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "fused": True}
    if shards == 1:
        return torch.optim.AdamW(decay_groups(model), **options)
    return ZeroRedundancyOptimizer(decay_groups(model), optimizer_class=torch.optim.AdamW, **options)


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


def shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh, *, bf16: bool, reshard: bool) -> None:
    """Blocks, embedding and head each on their own, as torchtitan wraps them; the head is kept for the backward."""
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _clip_mixed(groups: Iterable[list[Tensor]]) -> None:
    """clip_grad_norm_ refuses parameters of two meshes, or DTensors beside plain ones; matrices and norms differ so."""
    groups_of_params = list(groups)
    norms = [get_total_norm([param.grad for param in group if param.grad is not None]) for group in groups_of_params]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups_of_params:
        clip_grads_with_norm_(group, MAX_NORM, total)


# ------------------------------------------------------------------------------------------------ files of a run, data


def save(work: Saving, turns: Turns) -> None:
    """torch.distributed.checkpoint (DCP), waiting for the disk."""
    model, optimizer = _half_a_gigabyte(work)
    for step in count(1):
        dcp.save(_state_dict(model, optimizer), checkpoint_id=turns.folder / f"step-{step}")
        if dist.get_rank() == 0:
            shutil.rmtree(turns.folder / f"step-{step - 1}", ignore_errors=True)
        turns.end_step(checksum(_state(model, optimizer)))


def load(work: Saving, turns: Turns) -> None:
    model, optimizer = _half_a_gigabyte(work)
    dcp.save(_state_dict(model, optimizer), checkpoint_id=turns.folder / "step")
    while True:
        poison(_state(model, optimizer))
        state = _state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=turns.folder / "step")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        turns.end_step(checksum(_state(model, optimizer)))


def _half_a_gigabyte(work: Saving) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """After one step, which has made the moments."""
    model = transformers_decoder(work.config)
    shard_by_hand(model, init_device_mesh("cpu", (work.spec.dp_shard,)), bf16=False, reshard=True)
    optimizer, ids = optimizer_of(model), ids_of_one_step(work)
    F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [*model.parameters(), *moments]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, file: Path, work: Reading) -> None:
        self._ids, self._tokens = np.memmap(file, dtype=np.uint16, mode="r"), work.tokens

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._tokens

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self._tokens
        ids = torch.from_numpy(self._ids[first : first + self._tokens + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def read(work: Reading, turns: Turns) -> None:
    """A DataLoader over rows of a mapped file, in this process."""
    file = turns.folder / "tokens.bin"
    work.ids.tofile(file)
    loader = DataLoader(Rows(file, work), batch_size=work.rows, shuffle=True)
    while True:
        total = torch.zeros((), dtype=torch.int64)
        for input_ids, labels in loader:
            total += input_ids.sum() + labels.sum()
        turns.end_step(total.double())
