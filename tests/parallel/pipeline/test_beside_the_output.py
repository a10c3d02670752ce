"""What a loss reads beside the logits: what blocks of other stages keep, or leave by hooks, is refused and never left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from tests.world import RankError, pool


@dataclass
class Output:
    logits: Tensor
    aux: Tensor


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.aux = way, None
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.way in ("attribute", "summed by the model", "in an object"):
            self.aux = y.logsumexp(-1)
        return x + self.down(F.gelu(y))


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.store = way, []
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(way) for _ in range(4))
        if way == "hook":
            for block in self.blocks:
                block.up.register_forward_hook(lambda module, args, output: self.store.append(output))

    def forward(self, input_ids: Tensor) -> Any:
        self.store.clear()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if self.way == "summed by the model":
            return self.head(x), sum(block.aux for block in self.blocks)
        if self.way == "in an object":
            return Output(self.head(x), sum(block.aux for block in self.blocks))
        return self.head(x)


def seeded(way: str) -> Model:
    torch.manual_seed(0)
    return Model(way)


def with_penalty(model: Any, part: dict[str, Any]) -> Tensor:
    output = model(part["input_ids"])
    if isinstance(output, Output):
        output = output.logits, output.aux
    logits, aux = output if isinstance(output, tuple) else (output, None)
    loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    found = [] if aux is None else [aux]
    found += [block.aux for block in model.modules() if isinstance(block, Block) and block.aux is not None]
    return loss + sum(each.sum() for each in [*found, *model.store])


def of_all_routers(model: Any, part: dict[str, Any]) -> Tensor:
    output = model(part["input_ids"], output_router_logits=True)
    loss = F.cross_entropy(output.logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    return loss + sum(each.logsumexp(-1).sum() for each in output.router_logits)


def balanced(model: Any, part: dict[str, Any]) -> Tensor:
    output = model(part["input_ids"], output_router_logits=True)
    loss = F.cross_entropy(output.logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    return loss + output.aux_loss


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def step(make: Callable[..., nn.Module], args: tuple[str, ...], loss: Any) -> float:
    run = mk.parallelize(make(*args), mk.init_mesh("pp=2"))
    extra = {} if loss is None else {"loss": loss}
    return run.forward_backward(batch(), **extra).item()


@pytest.mark.parametrize("way", ["attribute", "hook", "summed by the model", "in an object"])
def test_what_a_block_of_another_stage_keeps_is_refused(way: str) -> None:
    with pytest.raises(RankError, match="of stage 0, (and the loss is computed by the last|which does not return it)"):
        pool(2).run(step, Model, (way,), with_penalty)


@pytest.mark.parametrize("loss", [of_all_routers, balanced])
def test_what_hooks_gather_of_all_layers_has_no_values_on_the_last_stage(loss: Any) -> None:
    """transformers gathers router_logits by hooks: those of this stage's layers alone."""
    with pytest.raises(RankError, match="no values on the last stage"):
        pool(2).run(step, mixtral, (), loss)


@pytest.mark.parametrize("way", ["attribute", "hook"])
def test_what_blocks_keep_is_no_matter_to_a_loss_of_this_library(way: str) -> None:
    given, model = batch(), seeded(way)
    loss = F.cross_entropy(model(given["input_ids"]).flatten(0, 1), given["labels"].flatten())
    for found in pool(2).run(step, seeded, (way,), None):
        assert abs(found - loss.item()) < 1e-5


def test_a_loss_of_logits_does_not_mind() -> None:
    given = batch()
    model = mixtral()
    loss = F.cross_entropy(model(given["input_ids"]).logits.flatten(0, 1), given["labels"].flatten())
    for found in pool(2).run(step, mixtral, (), None):
        assert abs(found - loss.item()) < 1e-5
