"""Lines that read some tokens of a row for others: short convolutions, shifts, running sums, and the hybrids that have them.
On cp equal to one device, with each message explained; what is not known is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import notes_of_counted, refuse_counted
from meshkit.preflight.explain import Message
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import TOKENS as BYTES_TOKENS
from tests.laws.parity.cases import mesh_for
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.parallel.context.compared import worst_difference
from tests.parallel.context.test_by_hand import error_of_a_zoo_model
from tests.parallel.context.test_modules import ROWS, TOKENS, VOCAB, OwnBlock, OwnModel
from tests.world import pool
from tests.zoo import causal
from tests.zoo.shrink import DATA_IDS

TOL = 1e-10
LONGEST = 32  # as many as the model is read on, and more


class Mixer(nn.Module):
    """Of [rows, tokens, 16], what it does along the tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "convolved":
            self.padded = nn.Conv1d(16, 16, 3, padding=2, groups=16)
        if kind == "convolved_apart":
            self.dilated = nn.Conv1d(16, 16, 2, padding=3, dilation=3)
        if kind == "convolved_twice":
            self.bare, self.again = nn.Conv1d(16, 16, 2), nn.Conv1d(16, 16, 2, groups=4)
        if kind == "with_strides":
            self.strided = nn.Conv1d(16, 16, 2, stride=2)
        if kind == "joined":
            self.first = nn.Parameter(torch.randn(1, 1, 16))
        if kind == "of_a_table":
            self.table = nn.Parameter(torch.randn(LONGEST, 16))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = getattr(self, self.kind)(x)
        return x + mixed / 4

    def convolved(self, x: Tensor) -> Tensor:
        return self.padded(x.mT)[..., : x.shape[1]].mT

    def convolved_apart(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        spread = self.dilated(input=x.mT)
        return spread[:, :, :tokens].mT

    def convolved_twice(self, x: Tensor) -> Tensor:
        return self.again(self.bare(F.pad(x.mT, (2, 0)))).mT

    def of_the_last(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 3, 0))
        return before[:, -x.shape[1] - 1 : -1]

    def shifted(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1)) * x

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.expand(x.shape[0], 1, -1), x[:, :-1].tanh()], dim=1)

    def of_the_next(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        return torch.cat((x[:, 1:], first), 1)

    def averaged(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    def from_the_end(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1]).flip(0)[:, None]

    def of_two(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1)) + F.pad(x, (0, 0, 2, -2))

    def summed(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / 7

    def rolled(self, x: Tensor) -> Tensor:
        return torch.roll(x, 2, 1)

    def turned(self, x: Tensor) -> Tensor:
        return x.flip(1)

    def of_a_table(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[1]] * x

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    # What nothing is known of.

    def every_other(self, x: Tensor) -> Tensor:
        return x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]]

    def with_strides(self, x: Tensor) -> Tensor:
        return F.pad(self.strided(x.mT), (x.shape[1] - x.shape[1] // 2, 0)).mT

    def one_line(self, x: Tensor) -> Tensor:
        return torch.cat((x[:, 1:], x[:, :1]), 1)

    def rolled_flat(self, x: Tensor) -> Tensor:
        return torch.roll(x, 1)

    # Of a batch as one row, which is of the tokens of all where a rank has as many as a row.

    def mean_of_all_rows(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return (flat - flat.mean(0)).view_as(x)

    def counted_over_rows(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return (flat + torch.arange(flat.shape[0]).sin()[:, None]).view_as(x)

    # By functions that somebody has compiled.

    def compiled(self, x: Tensor) -> Tensor:
        rolled = torch.compile(_rolled, backend="eager")(x)
        return torch.compile(_summed, backend="eager")(rolled)

    def narrowed(self, x: Tensor) -> Tensor:
        return F.pad(x.narrow(1, 0, x.shape[1] - 1), (0, 0, 1, 0))


def _rolled(x: Tensor) -> Tensor:
    return x.roll(1, 1)


def _summed(x: Tensor) -> Tensor:
    return x.cumsum(1) / 9


class Block(OwnBlock):
    def __init__(self, kind: str) -> None:
        super().__init__(causal=True)
        self.mixer = Mixer(kind)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mixer(x))


class Model(OwnModel):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions = nn.Embedding(LONGEST, 16)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))


PLAN = mk.Plan(blocks=("blocks.*",))
KINDS = (
    *("convolved", "convolved_apart", "convolved_twice", "of_the_last", "shifted", "joined", "of_the_next"),
    *("of_two", "compiled", "averaged", "from_the_end", "summed", "rolled", "turned", "of_a_table"),
)


def error_of_a_run(kind: str, mesh: str, recompute: str, microbatches: int) -> float:
    """The largest difference in loss and gradients; 13 tokens, which no number of ranks divides."""
    torch.manual_seed(0)
    one, model = Model(kind).double(), Model(kind).double()
    model.load_state_dict(one.state_dict())
    ids = torch.randint(0, VOCAB, (2 * ROWS, TOKENS + 1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    return worst_difference(one, model, batch, mesh, plan=PLAN, recompute=recompute, microbatches=microbatches)


@pytest.mark.parametrize(
    ("kind", "mesh", "recompute", "microbatches"),
    [
        *((kind, "cp=2", "none", 1) for kind in KINDS),
        ("convolved", "cp=3", "full", 2),
        ("convolved_twice", "dp_shard=2 cp=2", "full", 1),
        ("joined", "pp=2 cp=2", "none", 2),
        ("of_the_last", "cp=4", "none", 1),
    ],
)
def test_lines_that_move_tokens_equal_one_device(kind: str, mesh: str, recompute: str, microbatches: int) -> None:
    ranks = MeshSpec.parse(mesh).world_size
    assert max(pool(ranks).run(error_of_a_run, kind, mesh, recompute, microbatches)) < TOL


@pytest.mark.parametrize("kind", ["every_other", "with_strides", "one_line", "narrowed", "rolled_flat"])
def test_what_is_not_known_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="cannot be split by its tokens"):
        resolve(read_program(Model(kind)), Strategy(plan=PLAN), MeshSpec(cp=2))


def test_calls_on_one_line_are_told_to_be_parted() -> None:
    with pytest.raises(PlanError, match=r"slice at test_moved.py:\d+ is called more than once.*on a line of its own"):
        resolve(read_program(Model("one_line")), Strategy(plan=PLAN), MeshSpec(cp=2))


def observed(kind: str, recompute: str) -> tuple[Counter[Message], Counter[Message]]:
    torch.manual_seed(0)
    run = mk.parallelize(Model(kind), mesh_for("cp=2"), plan=PLAN, memory=mk.MemoryPolicy(recompute=recompute))
    ids = torch.arange(2 * BYTES_TOKENS).view(2, -1) % VOCAB
    return seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1)


@pytest.mark.parametrize(
    ("kind", "recompute"), [("convolved", "none"), ("convolved_twice", "full"), ("from_the_end", "none")]
)
def test_what_is_gathered_is_explained(kind: str, recompute: str) -> None:
    assert_alike(pool(2).run(observed, kind, recompute))


def test_the_lines_are_named_and_with_tp_refused() -> None:
    doors = resolve(read_program(Model("convolved")), Strategy(plan=PLAN), MeshSpec(cp=2)).reading[1]
    notes = notes_of_counted(doors.counted, 2)
    said = [
        note.partition(" at ")[0].partition("cp=2: ")[2] for note in notes if "reads some tokens for others" in note
    ]
    assert sorted(said) == ["convolution", "slice"]
    with pytest.raises(PlanError, match="Use tp=1"):
        refuse_counted(doors, sequence=False, compiled=False, tp=2)


def said_of_rows_end_to_end(kind: str, of_rows: int) -> str:
    """Rows with other documents, of which a rank has as many tokens as a row has."""
    rows, tokens = of_rows, 8
    model = Model(kind).double()
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(0))
    run = mk.parallelize(model, mesh_for("cp=2"), plan=PLAN)
    documents = mk.Mask.documents([tokens - row for row in range(rows)] + [rows * (rows - 1) // 2])
    with pytest.raises(PlanError) as error:
        run.forward_backward({"input_ids": ids, "labels": ids}, mask=documents)
    return str(error.value)


@pytest.mark.parametrize("kind", ["mean", "convolved", "from_the_end"])
def test_rows_that_are_laid_end_to_end_are_refused(kind: str) -> None:
    assert all("laid end to end" in text for text in pool(2).run(said_of_rows_end_to_end, kind, 2))


def said_of_rows_as_one(kind: str) -> str:
    """Two rows on two ranks: flattened, a rank has as many tokens as a row."""
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    run = mk.parallelize(Model(kind).double(), mesh_for("cp=2"), plan=PLAN)
    with pytest.raises(PlanError) as error:
        run.forward_backward({"input_ids": ids, "labels": ids})
    return str(error.value)


@pytest.mark.parametrize("kind", ["mean_of_all_rows", "counted_over_rows"])
def test_rows_that_are_flattened_are_no_row(kind: str) -> None:
    assert all("is of 12 now, where there are 6 tokens" in text for text in pool(2).run(said_of_rows_as_one, kind))


# ------------------------------------------------------------------------------------------------- models of transformers


@pytest.mark.parametrize(
    ("kind", "mesh", "recompute"),
    [
        ("lfm2", "dp_shard=2 cp=2", "none"),
        ("lfm2_moe", "cp=2", "none"),
        ("zaya", "cp=3", "none"),
        ("gemma4_unified", "cp=2", "none"),
        ("git", "cp=2", "none"),
    ],
)
def test_models_of_transformers_equal_one_device(kind: str, mesh: str, recompute: str) -> None:
    ranks = MeshSpec.parse(mesh).world_size
    assert max(pool(ranks).run(error_of_a_zoo_model, kind, mesh, recompute)) < TOL


def said_of_a_mask_of_ones() -> str:
    batch = {name: torch.randint(*DATA_IDS, (2, 12)) for name in ("input_ids", "labels")}
    run = mk.parallelize(causal.build("lfm2"), mesh_for("cp=2"))
    with pytest.raises(PlanError) as error:
        run.forward_backward(batch | {"attention_mask": torch.ones(2, 12, dtype=torch.int64)})
    assert float(run.forward_backward(batch).detach()) > 0
    return str(error.value)


def test_a_mask_that_the_model_reads_beside_attention_is_told_to_be_left_away() -> None:
    for text in pool(2).run(said_of_a_mask_of_ones):
        assert "Without the batch's attention_mask it can be: leave it away where it hides nothing" in text
