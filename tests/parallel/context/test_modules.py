"""Context parallelism of modules nobody at meshkit wrote: their own attention, alone or in a whole run."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import attention_shape
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.step import next_token_loss
from meshkit.strategy import Strategy
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.parallel.context.compared import worst_difference
from tests.world import pool

TOL = 1e-10
ROWS, TOKENS, VOCAB = 3, 13, 17


class OwnAttention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(16, 48), nn.Linear(16, 16), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).flatten(-2))


class OwnBlock(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.attn, self.mlp = OwnAttention(causal), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class OwnModel(nn.Module):
    """Learned positions, and F.scaled_dot_product_attention called as anybody would."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, 16), nn.Embedding(TOKENS, 16)
        self.blocks = nn.ModuleList(OwnBlock(causal) for _ in range(2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_and_batch(causal: bool = True) -> tuple[OwnModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = OwnModel(causal).double()
    ids = torch.randint(0, VOCAB, (ROWS, TOKENS + 1))
    return model, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


PLAN = mk.Plan(blocks=("blocks.*",), attention=("blocks.*.attn",))


def errors_of_a_run(mesh: str, causal: bool, recompute: str, microbatches: int, of_rows: bool = False) -> float:
    one, batch = model_and_batch(causal)
    F.cross_entropy(one(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
    expected = {name: p.grad for name, p in one.named_parameters()}
    model, batch = model_and_batch(causal)
    run = mk.parallelize(model, mesh_for(mesh), plan=PLAN, memory=mk.MemoryPolicy(recompute=recompute))
    own = {name: x.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for name, x in batch.items()}
    mask = None if causal else mk.Mask.full(TOKENS)
    if of_rows:
        mask = [mk.Mask.full(TOKENS)] * len(own["labels"])
    run.forward_backward(own, microbatches=microbatches, mask=mask)
    return max(float((full_tensor(p.grad) - expected[name]).abs().max()) for name, p in run.named_parameters())


@pytest.mark.parametrize(
    ("mesh", "causal", "recompute"),
    thin(
        [
            (mesh, *choice)
            for mesh in ("cp=2", "cp=3", "cp=4", "dp_shard=2 cp=2")
            for choice in ((True, "none"), (False, "none"), (True, "full"), (True, "selective"))
        ],
        3,
    ),
)
def test_a_module_with_its_own_attention_equals_one_device(mesh: str, causal: bool, recompute: str) -> None:
    ranks = 2 if mesh == "cp=2" else 3 if mesh == "cp=3" else 4
    assert max(pool(ranks).run(errors_of_a_run, mesh, causal, recompute, 2)) <= TOL


def test_a_microbatch_without_rows_is_harmless_whatever_way_the_masks_of_rows_look() -> None:
    assert max(pool(4).run(errors_of_a_run, "dp_shard=2 cp=2", False, "none", ROWS, True)) <= TOL


def errors_of_interleaved_microbatches() -> float:
    """Two forwards, then two backwards with recompute, as a pipeline runs them: each must see its own split."""
    _, batch = model_and_batch()
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    one, _ = model_and_batch()
    for half in halves:
        F.cross_entropy(one(half["input_ids"]).flatten(0, 1), half["labels"].flatten(), reduction="sum").backward()
    model, _ = model_and_batch()
    axis = mesh_for("cp=2")["cp"]
    mk.context_parallel(model, axis, attention=["blocks.*.attn"])
    mk.recompute(model, blocks=["blocks.0", "blocks.1"])
    losses = [next_token_loss(model, mk.split_batch(model, half)) for half in halves]
    for loss in losses:
        loss.backward()
    worst = 0.0
    for (_, mine), (_, theirs) in zip(model.named_parameters(), one.named_parameters(), strict=True):
        total = mine.grad.clone()
        torch.distributed.all_reduce(total)
        worst = max(worst, float((total - theirs.grad).abs().max()))
    return worst


def test_recompute_sees_the_split_of_its_own_microbatch() -> None:
    assert max(pool(2).run(errors_of_interleaved_microbatches)) <= TOL


class CountsPositions(OwnModel):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


class WithoutPositions(OwnModel):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def error_of_stages(kind: type[OwnModel]) -> float:
    _, batch = model_and_batch()
    torch.manual_seed(0)
    one, model = kind().double(), kind().double()
    model.load_state_dict(one.state_dict())
    return worst_difference(one, model, batch, "pp=2 cp=2", plan=PLAN, recompute="none", microbatches=2)


@pytest.mark.parametrize("kind", [CountsPositions, WithoutPositions])
def test_stages_of_a_model_that_takes_no_positions_equal_one_device(kind: type[OwnModel]) -> None:
    assert max(pool(4).run(error_of_stages, kind)) <= TOL


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"tp": 2}, {"dp_shard": 2}, {"pp": 2}])
@pytest.mark.parametrize("way", ["method", "wrapper"])
def test_a_model_that_is_compiled_as_a_whole_is_refused(way: str, mesh: dict[str, int]) -> None:
    model: nn.Module = OwnModel()
    if way == "method":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    with pytest.raises(PlanError, match="compiled as a whole.*compile=True, which compiles its blocks"):
        resolve(read_program(model), Strategy(), MeshSpec(**mesh))


def error_of_a_compiled_model() -> float:
    """Compiled after context_parallel: before, it is refused."""
    one, batch = model_and_batch()
    model, _ = model_and_batch()
    axis = mesh_for("cp=2")["cp"]
    with pytest.raises(PlanError, match="compile what it returns"):
        mk.context_parallel(torch.compile(model, backend="eager"), axis)  # type: ignore[arg-type]
    mk.context_parallel(model, axis)
    model.compile(backend="eager")
    with warnings.catch_warnings():  # dynamo asks inner tensors for their .grad where a graph breaks, which warns
        warnings.simplefilter("ignore")
        loss = next_token_loss(model, mk.split_batch(model, batch)).detach()
    torch.distributed.all_reduce(loss)
    expected = F.cross_entropy(one(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return abs(float(loss) - float(expected.detach()))


def test_what_context_parallel_returns_may_be_compiled() -> None:
    assert max(pool(2).run(error_of_a_compiled_model)) <= TOL


def test_a_config_whose_layers_differ_has_a_shape_all_the_same() -> None:
    class Config:
        num_attention_heads, hidden_size = 4, 64

        @property
        def head_dim(self) -> int:
            raise RuntimeError("layers differ")

    shape = attention_shape(Config(), None, torch.float32)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 4, 16)
