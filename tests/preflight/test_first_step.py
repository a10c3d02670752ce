"""What a model makes in its first step and keeps is in no forecast and no estimate of its steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.preflight.estimate import MemoryProfiles, kept_of_blocks
from meshkit.preflight.forecast import profile_model
from meshkit.program import read_program
from meshkit.resolve import resolve

WIDTH, TOKENS = 32, 64


def table() -> Tensor:
    return torch.outer(torch.arange(float(TOKENS)), torch.ones(WIDTH)).cos()


class Block(nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="meta")
        self.table = None if kept else table()

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = table()
        return x + torch.tanh(self.linear(x)) * self.table


class Model(nn.Module):
    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH, device="meta")
        self.layers = nn.ModuleList(Block(kept) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, device="meta")

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_table_that_the_first_step_makes_is_no_part_of_a_step() -> None:
    strategy = mk.Strategy(mesh="dp_shard=2", microbatches=1)
    found = []
    for kept in (True, False):
        resolved = resolve(read_program(Model(kept=kept)), strategy, strategy.mesh_for())
        profile = profile_model(resolved, rows=2, seq_len=TOKENS)
        bytes_ = kept_of_blocks(resolved, rows=2, seq_len=TOKENS, profiles=MemoryProfiles())
        found.append(([repr(each) for each in profile.blocks.values()], bytes_))
    assert found[0] == found[1]
