"""A forward that does otherwise for some number of rows: each number that comes is looked at, not two and four alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.parallel.rows import _refuse_other_rows
from meshkit.program import Example, read_program
from tests.laws.parity.cases import mesh_for
from tests.tiny import TINY
from tests.world import pool
from tests.zoo.decoders import Plain


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.embed(input_ids)))
        return out

    def middle(self, x: Tensor) -> Tensor:
        return x * 1.5


class Blocks(Plain):
    """Of several FSDP units, so that ranks meet in each."""

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        return x * 2 if x.shape[0] == 1 else x


class OneRow(Decoder):
    def middle(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x


class Squeezed(Decoder):
    def middle(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True).squeeze()
        return x * (1 + (mean - mean.mean(0))).reshape(len(x), -1, 1) if mean.ndim == 1 else x * (1 + mean[..., None])


class ThreeRows(Decoder):
    def middle(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 3 else x


class Factor(Decoder):
    def middle(self, x: Tensor) -> Tensor:
        return x * (0.5 if x.shape[0] == 6 else 0.25)


class Pairs(Decoder):
    def middle(self, x: Tensor) -> Tensor:
        pairs = x.view(-1, 2, *x.shape[1:])
        return (pairs - pairs.mean(1, keepdim=True)).flatten(0, 1)


REFUSED = [
    (OneRow, 1, r"of 1 rows aten\.mul\.Tensor at test_rows_counted\.py:\d+ runs, unlike of 4"),
    (Squeezed, 1, r"of 1 rows aten\.mean\.dim at .* runs, unlike of 4"),
    (ThreeRows, 3, r"of 3 rows aten\.mul\.Tensor at .* runs, unlike of 4"),
    (Factor, 6, r"of 6 rows aten\.mul\.Tensor at .* computes with other=0\.5, and of 4 with 0\.25"),
    (Pairs, 1, r"of 4 rows its forward runs, and of 1 it does not: .*invalid for input of size"),
]


@pytest.mark.parametrize(("kind", "rows", "expected"), REFUSED)
def test_what_a_forward_does_for_a_number_of_rows_is_seen(kind: type[Decoder], rows: int, expected: str) -> None:
    program = read_program(kind(), None).frozen()
    example = Example((torch.zeros(4, 8, dtype=torch.int64),))
    with pytest.raises(mk.errors.PlanError, match=expected):
        _refuse_other_rows(program, example, [rows], {}, example)
    others = {1, 3, 5, 6, 64} - {rows} - ({3, 5} if kind is Pairs else set())
    for other in others:
        _refuse_other_rows(program, example, [other], {}, example)


def test_a_decoder_does_the_same_for_any_number() -> None:
    program = read_program(mk.models.Llama(TINY), None).frozen()
    example = Example((torch.zeros(4, 8, dtype=torch.int64),))
    _refuse_other_rows(program, example, [1, 3, 7, 512], {}, example)


def stepped(kind: type[Decoder], spec: str, rows: int, choices: dict[str, Any]) -> str:
    """rows: of each data rank."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (rows, 9), generator=torch.Generator().manual_seed(mesh.data_rank))
    try:
        run = mk.parallelize(kind(), mesh)
        run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, **choices)
    except mk.errors.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "spec", "rows", "microbatches"),
    [
        (OneRow, "dp_shard=2", 2, 2),
        (OneRow, "dp_replicate=2", 1, 1),
        (Squeezed, "dp_shard=2", 1, 1),
        (ThreeRows, "dp_shard=2", 3, 1),
        (Factor, "dp_shard=2", 3, 1),  # of all six
        (Pairs, "dp_shard=2", 1, 1),
        (OneRow, "tp=2", 2, 2),
        (OneRow, "cp=2", 4, 1),  # read on one row
    ],
)
def test_it_is_refused_on_every_rank_where_that_number_comes(
    kind: type[Decoder], spec: str, rows: int, microbatches: int
) -> None:
    texts = pool(2).run(stepped, kind, spec, rows, {"microbatches": microbatches})
    assert len({*texts}) == 1 and ("rows of a batch" in texts[0] or "context parallelism" in texts[0]), texts


def stepped_by(spec: str, rows: list[list[int]], microbatches: int, kind: type[nn.Module] = OneRow) -> list[str]:
    """rows: in each step, of each data rank. What the steps say, one after another."""
    mesh, said = mesh_for(spec), list[str]()
    torch.manual_seed(0)
    run = mk.parallelize(kind(), mesh)
    for counts in rows:
        ids = torch.randint(0, 32, (counts[mesh.data_rank], 9), generator=torch.Generator().manual_seed(mesh.data_rank))
        try:
            run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, microbatches=microbatches)
        except mk.MeshkitError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


@pytest.mark.parametrize(
    ("spec", "rows", "microbatches"),
    [
        ("dp_shard=2", [[2, 2], [3, 3], [1, 1]], 1),
        ("tp=2", [[4], [6], [2]], 2),
    ],
)
def test_a_number_that_comes_later_is_seen_then(spec: str, rows: list[list[int]], microbatches: int) -> None:
    for first, second, third in pool(2).run(stepped_by, spec, rows, microbatches):
        assert first == second == "" and "rows of a batch" in third


@pytest.mark.parametrize("rows", [[[3, 1]], [[2, 2], [3, 1]], [[2, 2], [3, 2], [2, 1]]])
def test_a_number_of_one_rank_is_refused_on_all(rows: list[list[int]]) -> None:
    for *_, last in pool(2).run(stepped_by, "dp_shard=2", rows, 1, Blocks, timeout_s=60):
        assert "of 1 rows" in last


@pytest.mark.parametrize(("kind", "rows"), [(OneRow, 2), (ThreeRows, 2), (Decoder, 1), (Decoder, 3)])
def test_it_runs_where_it_does_not(kind: type[Decoder], rows: int) -> None:
    assert pool(2).run(stepped, kind, "dp_shard=2", rows, {}) == ["", ""]
