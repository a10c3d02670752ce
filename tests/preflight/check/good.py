"""Models without mistakes, each with a mesh and the choices of a run: what `check` must be silent about."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.models.llama import LLAMA_PLAN
from meshkit.models.moe import moe_plan
from meshkit.preflight.check import Report
from tests.laws.parity import test_expert_families as families
from tests.laws.parity import test_transformers
from tests.laws.parity.cases import Cell, Moe, batches, build, mesh_for, plan_of


@dataclass(frozen=True, kw_only=True)
class Good:
    """model: what `check` gets; choices: its keywords."""

    model: Any
    mesh: str
    batch: dict[str, Tensor]
    choices: dict[str, Any] = field(default_factory=dict)

    def check(self) -> Report:
        """On the ranks of a test's world."""
        return mk.check(self.model, mesh_for(self.mesh), batch=self.batch, **self.choices)


def of_cell(cell: Cell, **choices: Any) -> Good:
    return Good(
        model=partial(build, cell), mesh=cell.mesh, batch=batches(cell)[0], choices={"plan": plan_of(cell), **choices}
    )


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.Dropout(0.3), nn.Linear(6, 1))


def mlp_without_seed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1))


def run_without_seed() -> Report:
    """As after one torch.manual_seed at the top of a script."""
    torch.manual_seed(7)
    return mk.check(mlp_without_seed, mesh_for("dp_shard=2"), batch=points(), loss=squared_error, count=examples)


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


def examples(batch: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(batch["x"]))


def points(rows: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 6, generator=generator)
    return {"x": x, "y": x.square().mean(-1, keepdim=True)}


def on_meta(cell: Cell) -> nn.Module:
    with torch.device("meta"):
        return mk.models.Llama(build(cell).config)


def adapted(mesh: mk.Mesh, cell: Cell) -> mk.Run:
    """Frozen weights and adapters, attached and parallelized by the user's own function."""
    model = build(cell)
    plan = mk.lora.attach(model, plan_of(cell), rank=3, alpha=5.0, seed=4)
    return mk.parallelize(model, mesh, plan=plan)


def in_bf16_compiled(mesh: mk.Mesh, cell: Cell) -> mk.Run:
    precision = mk.MemoryPolicy(precision=mk.strategy.Precision())
    return mk.parallelize(build(cell).float(), mesh, plan=plan_of(cell), memory=precision, compile="eager")


TIED = Cell(mesh="dp_shard=2 tp=2", tied=True, vocab=61)
LORA = Cell(mesh="dp_shard=2 tp=2")
EXPERTS = Cell(mesh="dp_shard=4 ep=2", layers=2, moe=Moe(balance=0.1))

GOOD: dict[str, Good] = {
    "dense": of_cell(Cell(mesh="dp_shard=2 tp=2"), sequence=True, microbatches=2),
    "replicas": of_cell(Cell(mesh="dp_replicate=2 dp_shard=2", documents=True), zero=2, microbatches=2),
    "tied": of_cell(TIED),
    "meta": Good(
        model=partial(on_meta, TIED), mesh="dp_shard=2 tp=2", batch=batches(TIED)[0], choices={"plan": LLAMA_PLAN}
    ),
    "instance": Good(model=build(TIED), mesh=TIED.mesh, batch=batches(TIED)[0], choices={"plan": LLAMA_PLAN}),
    "experts": of_cell(EXPERTS),
    "experts_tensor": of_cell(Cell(mesh="tp=4 ep=2 etp=2", moe=Moe(shared=24)), sequence=True),
    "latent": Good(
        model=partial(families.build, "deepseek"),
        mesh="dp_shard=2 tp=2 ep=2",
        batch=families.batch_of("deepseek"),
        choices={"plan": moe_plan(families.CONFIGS["deepseek"]), "loss": families.loss_of("deepseek")},
    ),
    "mlp": Good(model=mlp, mesh="dp_shard=2 tp=2", batch=points(), choices={"loss": squared_error, "count": examples}),
    "mlp_few_rows": Good(
        model=mlp, mesh="dp_shard=4", batch=points(3), choices={"loss": squared_error, "count": examples}
    ),
    "transformers": Good(
        model=partial(test_transformers.build, "Qwen2"),
        mesh="dp_shard=2 tp=2",
        batch=batches(Cell(mesh="", vocab=61))[0],
        choices={"sequence": True},
    ),
    "pipeline": of_cell(Cell(mesh="pp=2 dp_shard=2", layers=4), microbatches=3),
    "pipeline_split": of_cell(
        Cell(mesh="pp=2 tp=2", layers=4, tied=True), pipeline=mk.strategy.PipelinePolicy(schedule="zbv"), microbatches=3
    ),
    "context": of_cell(Cell(mesh="cp=2 tp=2", documents=True), memory=mk.MemoryPolicy(recompute="selective")),
    "chunked_bf16": of_cell(
        Cell(mesh="dp_shard=4"),
        memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5), precision=mk.strategy.Precision()),
    ),
    "fp32": of_cell(Cell(mesh="dp_shard=2 tp=2"), dtype=torch.float32),
    "offload": of_cell(
        Cell(mesh="dp_shard=2 tp=2"),
        memory=mk.MemoryPolicy(
            recompute="full",
            optimizer=mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload()),
            offload=mk.strategy.ActivationOffload(),
        ),
    ),
    "own_bf16": Good(
        model=partial(in_bf16_compiled, cell=LORA),
        mesh=LORA.mesh,
        batch=batches(LORA)[0],
        choices={"dtype": torch.float32},
    ),
    "adapters": Good(model=partial(adapted, cell=LORA), mesh=LORA.mesh, batch=batches(LORA)[0]),
}


def run(name: str) -> Report:
    return GOOD[name].check()
