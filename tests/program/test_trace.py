"""The trace: operators with their owners, what tensors share memory, modules that read values, and nothing changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.program import ReadingError, trace
from meshkit.program._records import tensors


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 6), nn.ModuleList(Block(6) for _ in range(2))
        self.seen = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return (x @ self.embed.weight.T) / 8


IDS = torch.zeros(2, 5, dtype=torch.int64)


def test_operators_have_the_module_that_runs_them_and_their_line() -> None:
    read = trace(Model(), (IDS,), {})
    owners = [(read.calls[operation.call].name, operation.name) for operation in read.operations]
    assert ("embed", "aten.embedding.default") in owners
    assert ("blocks.1", "aten.gelu.default") in owners
    assert owners[-1] == ("", "aten.div.Tensor")
    assert read.operations[-1].where.startswith("test_trace.py:")
    assert [call.name for call in read.calls] == [
        "",
        "embed",
        *(f"blocks.{i}{n}" for i in (0, 1) for n in ("", ".up", ".down")),
    ]
    (out,) = tensors(read.output)
    assert out.shape == (2, 5, 11)


def test_a_linear_layer_is_a_product_and_a_sum() -> None:
    names = [operation.name for operation in trace(nn.Linear(3, 4), (torch.zeros(2, 5, 3),), {}).operations]
    assert "aten.addmm.default" not in names
    assert names.count("aten.mm.default") == names.count("aten.add.Tensor") == 1


def test_views_share_the_storage_of_what_they_look_at() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = x.split(2, dim=-1)
            return first + second.clone()

    read = trace(Views(), (torch.zeros(3, 4),), {})
    (summed,) = [operation for operation in read.operations if operation.name == "aten.add.Tensor"]
    first, second = tensors(summed.args)
    assert read.storages[first.storage].source == "input 0" and first.stride == (4, 1)
    assert read.storages[second.storage].source.startswith("op ")


def test_the_model_is_as_it_was() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace(model, (IDS,), {})
    assert model.seen == 0 and not model._forward_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_module_that_reads_values_is_one_operation() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nonzero(x[..., 0] > 0)
            return x + self.linear(x) * len(rows)

    model = nn.Sequential(nn.Linear(6, 6), Chosen(), nn.Tanh())
    names = [operation.name for operation in trace(model, (torch.zeros(2, 6),), {}).operations]
    assert "closed" in names and "aten.nonzero.default" not in names


def test_a_model_that_branches_on_a_value_is_refused_with_its_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(PlanError, match=r"Branch at test_trace.py:\d+: what runs next depends on a tensor's values"):
        trace(Branch(), (torch.zeros(2),), {})


def test_what_the_forward_raises_names_the_module() -> None:
    with pytest.raises(ReadingError, match="^blocks.0.up at "):
        model = Model()
        model.blocks[0].up = nn.Linear(7, 12)
        trace(model, (IDS,), {})


def test_a_model_on_meta_is_read() -> None:
    with torch.device("meta"):
        model = Model()
    assert len(trace(model, (IDS,), {}).operations) == len(trace(Model(), (IDS,), {}).operations)
