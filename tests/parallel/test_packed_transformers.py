"""Packed documents of transformers' models do not see each other, on any mesh, with the cache that they make by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.rollout import token_values
from meshkit.core.gradient import gradient_of
from tests.compare_shards import difference
from tests.world import pool

transformers = pytest.importorskip("transformers")

TOL_FP64 = 1e-10
LENGTHS = (5, 7)
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = ("Llama", "Qwen3", "Mistral")


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **HEADS, head_dim=8)
    assert config.use_cache
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (2, length + 1), generator=generator) for length in LENGTHS]


def packed() -> dict[str, Tensor]:
    documents = rows()
    return {
        "input_ids": torch.cat([each[:, :-1] for each in documents], 1),
        "labels": torch.cat([each[:, 1:] for each in documents], 1),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1).contiguous(),
    }


def alone(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(loss with its graph, log-probabilities) of the documents one by one."""
    found = []
    for each in rows():
        logits = model(each[:, :-1]).logits.log_softmax(-1)
        found.append(logits.gather(-1, each[:, 1:, None])[..., 0])
    values = torch.cat(found, 1)
    return -values.mean(), values.detach()


def differences(name: str, mesh: str, choices: dict[str, Any]) -> dict[str, float]:
    """From the documents alone on one device: of the loss, of gradients, and of log-probabilities."""
    one, run = model_of(name), mk.parallelize(model_of(name), mk.init_mesh(mesh), **choices)
    mine = slice(run.mesh.data_rank, None, run.mesh.data_ranks)
    part = {name: value[mine] for name, value in packed().items()}
    loss, values = alone(one)
    loss.backward()
    found = {"loss": abs(float(run.forward_backward(part)) - float(loss.detach()))}
    found["values"] = float((token_values(run, part).cpu() - values[mine]).abs().max())
    wanted = dict(one.named_parameters())
    return found | {name: difference(gradient_of(param), wanted[name].grad) for name, param in run.named_parameters()}


MESHES = {
    "one": (1, "tp=1", {}),
    "dp_shard=2": (2, "dp_shard=2", {}),
    "tp=2": (2, "tp=2", {}),
    "tp=2 sequence": (2, "tp=2", {"sequence": True}),
    "cp=2": (2, "cp=2", {}),
    "pp=2": (2, "pp=2", {}),
    "recompute": (1, "tp=1", {"memory": mk.MemoryPolicy(recompute="full")}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_documents_in_one_row_are_those_alone(mesh: str, name: str) -> None:
    ranks, spec, choices = MESHES[mesh]
    for found in pool(ranks).run(differences, name, spec, choices):
        assert max(found.values()) <= TOL_FP64, max(found.items(), key=lambda item: item[1])
