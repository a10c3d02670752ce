"""PyTorch alone, pp: transformers' layers as stages of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM

from benchmarks.peers.work import MAX_NORM, Step, Training, transformers_model

SCHEDULES = {"1f1b": Schedule1F1B, "zbv": ScheduleZBVZeroBubble}


class Stage(nn.Module):
    """Some layers, and the embedding or the head where they are among them; rotary tables are made once."""

    def __init__(self, model: LlamaForCausalLM, layers: range, tokens: int) -> None:
        super().__init__()
        last = layers.stop == model.config.num_hidden_layers
        self.embed_tokens = model.model.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[index] for index in layers)
        self.norm = model.model.norm if last else None
        self.lm_head = model.lm_head if last else None
        hidden = torch.empty(1, tokens, model.config.hidden_size)
        cos, sin = model.model.rotary_emb(hidden, torch.arange(tokens).unsqueeze(0))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_tokens(x) if self.embed_tokens is not None else x
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=(self.cos, self.sin))
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


def pipeline_step(work: Training) -> tuple[nn.Module, Step]:
    """(the stages of this rank, without an optimizer yet; what runs and clips their gradients)."""
    model, rank, ranks = transformers_model(work), dist.get_rank(), dist.get_world_size()
    assert work.stages is not None
    edges = [sum(work.stages[:index]) for index in range(len(work.stages) + 1)]
    # ZBV is V-shaped: the last stage is where the first one is.
    indices = (rank,) if work.schedule == "1f1b" else (rank, 2 * ranks - 1 - rank)
    modules = [Stage(model, range(edges[index], edges[index + 1]), work.tokens) for index in indices]
    count = len(work.stages)
    stages = [
        PipelineStage(module, index, count, torch.device("cpu")) for index, module in zip(indices, modules, strict=True)
    ]
    tokens = work.rows * work.tokens

    def mean_part(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / tokens

    # Losses are divided by the tokens of the step, so its gradients are not scaled.
    schedule = SCHEDULES[work.schedule](
        stages[0] if work.schedule == "1f1b" else stages, work.microbatches, loss_fn=mean_part, scale_grads=False
    )
    first, last = 0 in indices, count - 1 in indices

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(
            *((input_ids,) if first else ()),
            target=labels if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        loss = torch.stack(losses).sum().detach() if last else torch.zeros(())
        clip_over_stages(modules, loss)
        return loss

    return nn.ModuleList(modules), step


def clip_over_stages(modules: Sequence[nn.Module], loss: Tensor) -> None:
    """The norm of all stages; in the same message the loss gets to every rank."""
    params = [param for module in modules for param in module.parameters()]
    norm = get_total_norm([param.grad for param in params if param.grad is not None])
    message = torch.stack((norm.square(), loss))
    dist.all_reduce(message)
    loss.copy_(message[1])
    clip_grads_with_norm_(params, MAX_NORM, message[0].sqrt())
