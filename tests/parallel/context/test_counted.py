"""Lines of a model that are about all tokens: positions that it counts, the number of tokens, sums and means over them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import Doors, notes_of_counted, refuse_counted
from meshkit.preflight.explain import Message
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import TOKENS as BYTES_TOKENS
from tests.laws.parity.cases import mesh_for
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.parallel.context.test_modules import TOKENS, VOCAB, OwnBlock, OwnModel
from tests.world import pool

TOL = 1e-10
LR = 1e-2


class Counts(OwnBlock):
    """Counts positions itself, divides by the number of tokens, and takes their mean and their sum."""

    def __init__(self) -> None:
        super().__init__(causal=True)
        self.scale = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.arange(x.shape[1], dtype=x.dtype).sin()[:, None]
        x = super().forward(x)
        x = x - x.mean(1, keepdim=True)
        total = self.scale(x).square().sum(dim=-2)
        return x + total[:, None] / x.shape[1]


class Counting(OwnModel):
    """Learned positions from an offset, as BART has them."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(max(TOKENS, BYTES_TOKENS) + 2, 16)
        self.blocks = nn.ModuleList(Counts() for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        positions = torch.arange(2, input_ids.shape[1] + 2, device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = mk.Plan(blocks=("blocks.*",))


def model_and_batch(rows: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Counting().double()
    ids = torch.randint(0, VOCAB, (rows, TOKENS + 1))
    return model, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def error_of_a_run(mesh: str, recompute: str) -> float:
    """The largest difference in loss, gradients and two optimizer steps; 13 tokens, which no number of ranks divides."""
    one, batch = model_and_batch()
    run_model, _ = model_and_batch()
    run = mk.parallelize(run_model, mesh_for(mesh), plan=PLAN, memory=mk.MemoryPolicy(recompute=recompute))
    own = {name: x.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for name, x in batch.items()}
    alone = torch.optim.SGD(one.parameters(), lr=LR)
    split = torch.optim.SGD(run.parameters(), lr=LR)
    worst = 0.0
    for _ in range(2):
        loss = F.cross_entropy(one(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        worst = max(worst, abs(float(run.forward_backward(own, microbatches=2).detach()) - float(loss.detach())))
        expected = {name: param.grad for name, param in one.named_parameters()}
        for name, param in run.named_parameters():
            worst = max(worst, float((full_tensor(param.grad) - expected[name]).abs().max()))
        for optimizer in (alone, split):
            optimizer.step()
            optimizer.zero_grad()
    values = dict(one.named_parameters())
    return max(
        worst, *(float((full_tensor(p) - values[name]).detach().abs().max()) for name, p in run.named_parameters())
    )


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        ("cp=2", "none"),
        ("cp=2", "full"),
        ("cp=3", "none"),
        ("dp_shard=2 cp=2", "full"),
        ("pp=2 cp=2", "none"),
    ],
)
def test_what_counts_tokens_equals_one_device(mesh: str, recompute: str) -> None:
    assert max(pool(MeshSpec.parse(mesh).world_size).run(error_of_a_run, mesh, recompute)) < TOL


def observed(recompute: str) -> tuple[Counter[Message], Counter[Message]]:
    torch.manual_seed(0)
    run = mk.parallelize(Counting(), mesh_for("cp=2"), plan=PLAN, memory=mk.MemoryPolicy(recompute=recompute))
    ids = torch.arange(2 * BYTES_TOKENS).view(2, -1) % VOCAB
    return seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sums_over_the_tokens_are_explained(recompute: str) -> None:
    assert_alike(pool(2).run(observed, recompute))


def test_the_lines_are_named_and_with_a_sequence_refused() -> None:
    resolved = resolve(read_program(Counting()), Strategy(plan=PLAN), MeshSpec(cp=2))
    doors = resolved.reading[1]
    assert not doors.whole
    notes = notes_of_counted(doors.counted, 2)
    assert [note.partition(" at ")[0] for note in notes] == [
        f"cp=2: {each}" for each in ("arange",) * 2 + ("div", "mean", "sum")
    ]
    assert all(note.startswith("cp=2: mean at test_counted.py:") for note in notes if "mean" in note)


class SumOfSome(OwnModel):
    """A sum over tokens that are chosen and counted in one line: which of its sums is over a rank's tokens cannot be told."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids)
        even = [torch.arange(x.shape[1]) % 2 == 0 for _ in range(2)]
        x = x + (even[0][:, None] * x).sum(1, keepdim=True) / even[1].to(x.dtype).sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_sums_of_one_line_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(PlanError, match="SumOfSome cannot be split by its tokens"):
        resolve(read_program(SumOfSome()), Strategy(plan=PLAN), MeshSpec(cp=2))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sequence": True, "compiled": False, "tp": 2}, "sequence=True .* Use sequence=False"),
        ({"sequence": False, "compiled": True, "tp": 1}, "a compiled graph has none. Use compile=False"),
        ({"sequence": False, "compiled": False, "tp": 2}, "a rank of tp=2 has. Use tp=1"),
    ],
)
def test_what_does_not_know_the_lines_is_refused(given: dict[str, Any], text: str) -> None:
    doors = resolve(read_program(Counting()), Strategy(plan=PLAN), MeshSpec(cp=2)).reading[1]
    with pytest.raises(PlanError, match=rf"arange at test_counted.py:\d+ is of all tokens, .*{text}"):
        refuse_counted(doors, **given)
    refuse_counted(Doors(), **given)


class Sliced(OwnModel):
    """Reads its first position before the others."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1)
        return self.head(self.tokens(input_ids) + self.positions(position_ids)) + 0 * steps.sum()


def test_positions_that_are_sliced_first_keep_their_values() -> None:
    doors = resolve(read_program(Sliced()), Strategy(plan=PLAN), MeshSpec(cp=2)).reading[1]
    assert not doors.counted


# ------------------------------------------------------------------------------------ what must be refused as before


class Twice(OwnModel):
    """The offset twice: a rank's part of what is no token's position."""

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        positions = torch.arange(tokens, 2 * tokens, device=input_ids.device) - tokens
        return self.head(self.tokens(input_ids) + self.positions(positions))


class OfSquares(OwnModel):
    """A variance has two sums, of which the second reads the first of each rank."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        return self.head(x / x.var(1, keepdim=True))


class OfFeaturesToo(OwnModel):
    """One line that counts tokens in one call and features in another."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for dim in (1, 2):
            x = x + torch.arange(x.shape[dim], dtype=x.dtype).view(-1, *(1,) * (2 - dim)).sin()
        return self.head(x)


class Returned(OwnModel):
    """A mean that is returned: of no token."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.tokens(input_ids)).mean(1)


class Checkpointed(OwnModel):
    """Counts in a checkpoint of its own, which runs again in backward without the forward around it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        def positioned(x: Tensor) -> Tensor:
            return torch.tanh(x * torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1])

        return self.head(checkpoint(positioned, self.tokens(input_ids), use_reentrant=False))


@pytest.mark.parametrize("model", [Twice, OfSquares, OfFeaturesToo, Returned, Checkpointed])
def test_what_counts_something_else_is_refused(model: type[OwnModel]) -> None:
    with pytest.raises(PlanError, match="cannot be split by its tokens"):
        resolve(read_program(model()), Strategy(plan=mk.Plan(blocks=("blocks.*",))), MeshSpec(cp=2))
