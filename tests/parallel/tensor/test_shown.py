"""What a proof has shown of a program is not taken for shown of the same program with other modules in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.rows import refuse_mixed_rows
from meshkit.plan import Plan, column, replicate, row
from meshkit.program import Unproved, example_of, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy


class Mlp(nn.Module):
    """In evaluation what it returns depends on all features of its hidden layer, or on all rows."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.up, self.down, self.over = nn.Linear(8, 16), nn.Linear(16, 8), over

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return self.down(hidden if self.training else hidden.softmax(self.over))


class Net(nn.Module):
    def __init__(self, over: int) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(16, 8), Mlp(over), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(input_ids)))


def test_of_a_layout() -> None:
    program = read_program(Net(over=-1))
    whole = {"embed": replicate(), "head": replicate()}
    strategy = Strategy(plan=Plan(tensor={"mlp.up": column(), "mlp.down": row(), **whole}))
    resolve(program, strategy, MeshSpec.parse("tp=2"))
    program.model.mlp.eval()  # type: ignore[union-attr]  # one module of the model
    with pytest.raises(Unproved):
        resolve(program, strategy, MeshSpec.parse("tp=2"))


def test_of_rows() -> None:
    program = read_program(Net(over=0))
    example = example_of(program.model)
    assert example is not None
    assert refuse_mixed_rows(program, example, blocks=[], closed={})
    program.model.mlp.eval()  # type: ignore[union-attr]  # one module of the model
    with pytest.raises(PlanError, match="mixes the rows"):
        refuse_mixed_rows(program, example, blocks=[], closed={})
