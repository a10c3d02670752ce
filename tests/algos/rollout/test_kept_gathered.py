"""What `generate` does to FSDP's units while it holds their parameters, and that it undoes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.parallel.data import after_inference, kept_gathered
from tests.world import pool

TINY = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)


def hooks(model: nn.Module) -> list[Any]:
    """Of all modules, before and after forward, in the order in which they are called."""
    tables = [own for child in model.modules() for own in (child._forward_pre_hooks, child._forward_hooks)]
    return [hook for own in tables for hook in own.values()]


def watched(precision: mk.strategy.Precision | None) -> dict[str, Any]:
    """Forwards before, inside and after, and what an error inside leaves."""
    torch.manual_seed(0)
    run = mk.parallelize(
        Llama(TINY), mk.init_mesh("dp_shard=2"), plan=LLAMA_PLAN, zero=3, memory=mk.MemoryPolicy(precision=precision)
    )
    ids, before = torch.arange(4)[None], hooks(run.model)
    logits = []
    with torch.no_grad():
        logits.append(run.model(ids))
        with pytest.raises(KeyError), kept_gathered(run.model):
            logits.append(run.model(ids))
            inside = hooks(run.model)
            raise KeyError
        logits.append(run.model(ids))
    after_inference(run.model)
    return {
        "same logits": all(torch.equal(logits[0], each) for each in logits),
        "same hooks": hooks(run.model) == before,
        "shards": all(isinstance(param, DTensor) for param in run.model.parameters()),
        "units": sum(isinstance(child, FSDPModule) for child in run.model.modules()),
        "replaced": sum(one != other for one, other in zip(inside, before, strict=True)),
    }


def test_forwards_between_gathering_and_freeing_ask_nothing_of_fsdp_and_hooks_come_back() -> None:
    for found in pool(2).run(watched, None):
        units, replaced = found.pop("units"), found.pop("replaced")
        assert all(found.values()), found
        assert replaced == 2 * units > 0


def test_units_that_cast_their_inputs_keep_their_hooks() -> None:
    for found in pool(2).run(watched, mk.strategy.Precision()):
        assert found.pop("units") > found.pop("replaced") == 0
        assert all(found.values()), found
