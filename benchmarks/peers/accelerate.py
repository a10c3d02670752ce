"""accelerate: transformers' decoder prepared by its FSDP2 plugin, or for DDP."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    Training,
    decay_groups,
    repeat,
    transformers_model,
)


def train(work: Training, turns: Turns) -> None:
    accelerator = sharded_accelerator(work) if work.spec.dp_shard > 1 else Accelerator(cpu=work.device_type == "cpu")
    model = transformers_model(work)
    if work.compile:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    kinds = {"dp_shard": FSDPModule, "dp_replicate": DistributedDataParallel}
    assert all(isinstance(model, kind) for axis, kind in kinds.items() if getattr(work.spec, axis) > 1)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean")

    repeat(step, work, turns)


def sharded_accelerator(work: Training) -> Accelerator:
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
        return Accelerator(cpu=work.device_type == "cpu", fsdp_plugin=plugin)
