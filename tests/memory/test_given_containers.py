"""What blocks add to a list, a dict or an object that they are given: as on one device, or refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs


class Kept:
    """Keys of the layers before, in a list of its own."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Summed:
    """The sum of the keys of the layers before, which each layer replaces."""

    def __init__(self) -> None:
        self.keys = torch.zeros(())


class Named(NamedTuple):
    keys: list[Tensor]


@dataclass
class Data:
    """FSDP copies these too."""

    keys: list[Tensor] = field(default_factory=list)


def named() -> Named:
    return Named([])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, before: Any) -> Tensor:
        key = self.key(x)
        if isinstance(before, Summed):
            before.keys = before.keys + key
            summed = before.keys
        elif isinstance(before, dict):
            before[len(before)] = [key]  # nested
            summed = torch.stack([each[0] for each in before.values()]).sum(0)
        else:
            keys = before.keys if isinstance(before, Kept | Named | Data) else before
            keys.append(key)
            summed = torch.stack(list(keys)).sum(0)
        return x + torch.tanh(self.query(x) * summed)


class Model(nn.Module):
    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self.embed, self.head, self.kind = nn.Embedding(32, 16), nn.Linear(16, 32), kind
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x, before = self.embed(input_ids), self.kind()
        for layer in self.layers:
            x = layer(x, before=before)
        return self.head(x)


def with_default() -> defaultdict[int, list[Tensor]]:
    return defaultdict(list)


def built(kind: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind).double()


def errors(kind: Callable[[], Any], mesh: str, recompute: str, microbatches: int) -> dict[str, float]:
    ids = torch.randint(0, 32, (6, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    one = built(kind)
    F.cross_entropy(one(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
    run = mk.parallelize(built(kind), mesh_for(mesh), memory=mk.MemoryPolicy(recompute=recompute))
    run.forward_backward(own_rows(batch, run.mesh), microbatches=microbatches)
    grads = {name: param.grad for name, param in one.named_parameters()}
    return {name: difference(gradient_of(param), grads[name]) for name, param in run.named_parameters()}


def refusal(kind: Callable[[], Any], mesh: str, recompute: str) -> str:
    try:
        errors(kind, mesh, recompute, 1)
    except mk.errors.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2", "dp_replicate=2", "tp=2", "cp=2"])
def test_what_blocks_add_to_a_list_or_dict_is_there_for_the_next(mesh: str) -> None:
    """FSDP hands copies on, and so does a checkpoint: keys of other layers were lost, silently."""
    ranks = mk.mesh.MeshSpec.parse(mesh).world_size
    for kind, recompute, microbatches in (
        (list, "none", 2),
        (dict, "none", 1),
        (Data, "none", 1),
        (list, "full", 1),
        (named, "full", 1),
        (OrderedDict, "full", 1),
        (deque, "full", 1),
        (dict, "selective", 2),
    ):
        for found in pool(ranks).run(errors, kind, mesh, recompute, microbatches):
            assert max(found.values()) <= TOL_FP64, (kind, recompute, found)


def test_a_dict_with_a_default_is_refused_where_fsdp_makes_no_copy() -> None:
    for text in pool(2).run(refusal, with_default, "dp_shard=2", "none"):
        if text:
            assert "called with a defaultdict, of which FSDP can make no copy. Give it a dict." in text
        else:  # on torch 2.11
            assert all(
                max(found.values()) <= TOL_FP64 for found in pool(2).run(errors, with_default, "dp_shard=2", "none", 1)
            )


@pytest.mark.parametrize("kind", [Kept, Summed])
def test_an_object_that_blocks_change_is_refused_where_they_run_again(kind: Callable[[], Any]) -> None:
    for found in pool(2).run(errors, kind, "dp_shard=2", "none", 1):
        assert max(found.values()) <= TOL_FP64
    for text in pool(2).run(refusal, kind, "dp_shard=2", "full"):
        assert f"the forward of a Block changes a {kind.__name__} that it is given, and would do so again" in text
