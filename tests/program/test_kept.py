"""Readings that a program keeps: the same for what is the same, and no more than a few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshkit.program import Example, Program, without_values
from meshkit.program._program import KEPT


class Model(nn.Module):
    """A norm that may be frozen, and a number of calls that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.calls = nn.Embedding(8, 4), nn.BatchNorm1d(4), 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.embed(input_ids).flatten(0, 1))


def example(tokens: int) -> Example:
    return Example((torch.empty(2, tokens, dtype=torch.int64, device="meta"),))


def test_what_is_alike_is_read_once() -> None:
    program = Program(without_values(Model()))
    first = program.read(example(8), {})
    assert program.read(example(8), {}) is first
    assert program.read(example(9), {}) is not first
    assert program.read(example(8), {"norm": "experts"}) is not first
    program.modules["norm"].eval()
    assert program.read(example(8), {}) is not first


def test_only_the_last_are_kept() -> None:
    program = Program(without_values(Model()))
    first = program.read(example(8), {})
    for tokens in range(9, 8 + KEPT):
        program.read(example(tokens), {})
    assert program.read(example(8), {}) is first  # and is the last now
    program.read(example(100), {})
    assert program.read(example(8), {}) is first
    for tokens in range(200, 200 + KEPT):
        program.read(example(tokens), {})
    assert program.read(example(8), {}) is not first


def test_later_sizes_are_read_once_where_nothing_has_changed() -> None:
    class Counting(Model):
        read = 0

        def forward(self, input_ids: Tensor) -> Tensor:
            Counting.read += 1
            return self.norm(self.embed(input_ids).flatten(0, 1))

    program = Program(without_values(Counting()))
    program.read(example(8), {})
    assert Counting.read == 2
    program.read(example(9), {})
    assert Counting.read == 3


def test_later_sizes_are_read_twice_where_something_has_changed() -> None:
    class Counting(Model):
        read = 0

        def forward(self, input_ids: Tensor) -> Tensor:
            Counting.read += 1
            return super().forward(input_ids)  # which counts its calls; nothing depends on them

    program = Program(without_values(Counting()))
    program.read(example(8), {})
    program.read(example(9), {})
    assert Counting.read == 4
