"""What a model does to the memory of its parameters is refused where a mesh would lose it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.writes import refuse_shared_memory
from meshkit.program import read_program
from meshkit.resolve import resolve
from tests.zoo.decoders import Plain

MESHES = [MeshSpec(dp_shard=2), MeshSpec(tp=2), MeshSpec(cp=2), MeshSpec(pp=2)]


class Changed(Plain):
    """change: of the model, in its forward."""

    def __init__(self, change: Callable[[Plain], None]) -> None:
        super().__init__()
        self.change = change

    def body(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().body(x)


@torch.no_grad()
def clamps(model: Plain) -> None:
    model.norm.weight.clamp_(-0.5, 0.5)


@torch.no_grad()
def copies(model: Plain) -> None:
    weight = model.layers[0].mlp.down.weight
    weight.copy_(F.normalize(weight, dim=1))


def gives_data(model: Plain) -> None:
    weight = model.layers[0].mlp.up.weight
    weight.data = F.normalize(weight.data, dim=1)


def resolved(model: nn.Module, spec: MeshSpec) -> None:
    resolve(read_program(model), mk.Strategy(), spec)


@pytest.mark.parametrize("spec", MESHES, ids=str)
@pytest.mark.parametrize("change", [clamps, copies, gives_data])
def test_writes_in_forward_are_refused_on_every_axis(change: Callable[[Plain], None], spec: MeshSpec) -> None:
    with pytest.raises(PlanError, match="which would be lost|second call"):
        resolved(Changed(change), spec)


@pytest.mark.parametrize("spec", MESHES, ids=str)
@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"max_norm": 1.0}, "writes into its parameter 'embed_tokens.weight'|max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"sparse": True}, "sparse"),
    ],
)
def test_tables_whose_gradient_is_of_a_batch_or_sparse_are_refused(option: dict, match: str, spec: MeshSpec) -> None:
    model = Plain()
    size = model.embed_tokens.weight.shape
    model.embed_tokens = nn.Embedding(*size, **option)
    with pytest.raises(PlanError, match=match):
        resolved(model, spec)


def test_shared_memory_is_refused_and_ties_are_not() -> None:
    tied = Plain()
    tied.lm_head.weight = tied.embed_tokens.weight
    refuse_shared_memory(tied)
    flat = Plain()  # parts of one buffer that do not overlap
    whole = torch.zeros(flat.norm.weight.numel() * 2)
    flat.norm.weight.data, flat.norm.bias.data = whole.chunk(2)
    refuse_shared_memory(flat)

    by_data = Plain()
    by_data.lm_head.weight.data = by_data.embed_tokens.weight.data
    of_buffer = Plain()
    of_buffer.register_buffer("gate", of_buffer.norm.weight.data)
    by_view = Plain()
    by_view.kept = {"decode": [by_view.embed_tokens.weight.t()]}
    for model in (by_data, of_buffer, by_view):
        with pytest.raises(PlanError, match="share memory"):
            refuse_shared_memory(model)
