"""Muon on every mesh is Muon on one device, which is torch's on matrices; what it sends is what its plans say."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshkit as mk
from meshkit.core.model_state import copies_of
from meshkit.core.sharding import local_tensor
from meshkit.moe.aux_loss import collect
from meshkit.optim import WholeMatrices, orthogonalise
from meshkit.preflight.observe import Peak
from tests.compare_shards import computed_once, difference
from tests.laws.parity.cases import Cell, Moe, batches, build, mesh_for, own_rows, plan_of, start
from tests.world import pool

LR, TOL = 1e-2, 1e-9  # fp64; Newton-Schulz makes small singular values up to some thousand times as large
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def is_matrix(name: str, param: Tensor) -> bool:
    return param.ndim > 1 and name.startswith("layers.")


def plain_muon(param: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    """By the definition, of one matrix, in the dtype of the parameter."""
    momentum.mul_(0.95).add_(gradient, alpha=1 - 0.95)
    update = (1 - 0.95) * gradient + 0.95 * momentum
    a, b, c = COEFFICIENTS
    x = update / update.norm()
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    param.mul_(1 - LR * 0.1).sub_(x * LR * 0.2 * max(param.shape) ** 0.5)


@lru_cache(maxsize=2)
def reference(cell: Cell) -> dict[str, Tensor]:
    """The parameters after a plain loop on one device."""
    model = build(cell)
    named = dict(model.named_parameters())
    others = {name: param for name, param in named.items() if not is_matrix(name, param)}
    adam = torch.optim.AdamW(
        [
            {"params": [param for param in others.values() if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in others.values() if param.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
    )
    momenta = {name: torch.zeros_like(param) for name, param in named.items() if name not in others}
    for batch in batches(cell):
        with collect() as found:
            logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        (loss + found.total() / (batch["labels"] != -100).sum()).backward()
        with torch.no_grad():
            for name, momentum in momenta.items():
                param = named[name]
                assert param.grad is not None
                every = [(param, param.grad, momentum)]
                if param.ndim == 3:
                    every = list(zip(param, param.grad, momentum, strict=True))
                for one in every:
                    plain_muon(*one)
        adam.step()
        model.zero_grad()
    return {name: param.detach() for name, param in named.items()}


def worst(run: mk.Run, wanted: dict[str, Tensor]) -> float:
    copies = copies_of(run.model)
    return max(difference(param, wanted[copies.get(name, name)]) for name, param in run.named_parameters())


def trained(cell: Cell, folder: str = "") -> float:
    """The farthest of the parameters from one device. folder: the last step is taken by a run that goes on from there."""
    wanted = computed_once(reference, cell)
    run = start(cell)
    optimizer = mk.muon(run, lr=LR, dtype=None)
    for number, batch in enumerate(batches(cell)):
        if folder and number == 2:
            with mk.Checkpointer(folder) as checkpoints:
                checkpoints.load(run, optimizer)
        elif folder:
            continue
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        optimizer.step()
        optimizer.zero_grad()
    return worst(run, wanted)


def saved(cell: Cell, folder: str) -> None:
    run = start(cell)
    optimizer = mk.muon(run, lr=LR, dtype=None)
    for batch in batches(cell)[:2]:
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        optimizer.step()
        optimizer.zero_grad()
    with mk.Checkpointer(folder) as checkpoints:
        checkpoints.save(2, run, optimizer)


MESHES = [
    "tp=1",
    "dp_shard=2",
    "dp_shard=3",  # uneven shards
    "dp_replicate=2",
    "tp=2",
    "cp=2",
    "pp=2",
    "dp_shard=2 tp=2",
    "dp_replicate=2 dp_shard=2",
    "pp=2 dp_shard=2",
]


def ranks_of(mesh: str) -> int:
    return mk.MeshSpec.parse(mesh).world_size


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_device(mesh: str) -> None:
    cell = Cell(mesh=mesh, layers=4 if "pp" in mesh else 2)
    assert max(pool(ranks_of(mesh)).run(trained, cell)) <= TOL


@pytest.mark.parametrize("mesh", ["tp=1", "dp_shard=2", "dp_shard=2 ep=2", "dp_shard=4 ep=2", "tp=2 etp=2", "tp=2"])
def test_experts_are_matrices_of_their_own(mesh: str) -> None:
    assert max(pool(ranks_of(mesh)).run(trained, Cell(mesh=mesh, layers=3, moe=Moe()))) <= TOL


def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    pool(2).run(saved, Cell(mesh="dp_shard=2"), str(tmp_path))
    assert max(pool(4).run(trained, Cell(mesh="dp_shard=2 tp=2"), str(tmp_path))) <= TOL


def beside_torchs() -> float:
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 24), (24, 8), (16, 16))]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in matrices]
    mesh = mk.init_mesh("tp=1")
    whole = WholeMatrices(mesh, {str(index): param for index, param in enumerate(matrices)}, dtype=torch.bfloat16)
    optimizer = torch.optim.Muon(theirs, lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    gradients = {str(index): torch.randn_like(param) for index, param in enumerate(matrices)}
    for index, param in enumerate(theirs):
        param.grad = gradients[str(index)].clone()
    optimizer.step()
    whole.apply(gradients, orthogonalise)
    farthest = 0.0
    for index, (before, after) in enumerate(zip(matrices, theirs, strict=True)):
        update = (before - after).detach() / (0.2 * max(before.shape) ** 0.5)
        farthest = max(farthest, float((update - gradients[str(index)]).abs().max()))
    return farthest


def test_in_bf16_it_is_torchs() -> None:
    """To a few bf16 roundings of five iterations: theirs are fused products."""
    assert pool(1).run(beside_torchs)[0] < 0.05


def sent(mesh: str) -> tuple[int, int, float]:
    """(bytes of the plans from this rank, its work, and the mean of all)"""
    run = start(Cell(mesh=mesh, layers=4))
    optimizer = mk.muon(run, lr=LR)
    run.forward_backward(own_rows(batches(Cell(mesh=mesh, layers=4))[0], run.mesh))
    rank = run.mesh.ranks[run.mesh.rank]
    said = sum(size for plan in optimizer.whole.plans for (sender, _), size in plan.links.items() if sender == rank)
    seen = 0
    real = torch.distributed.batch_isend_irecv

    def counting(operations: list[Any]) -> list[Any]:
        nonlocal seen
        seen += sum(each.tensor.numel() for each in operations if each.op is torch.distributed.isend)
        return real(operations)

    torch.distributed.batch_isend_irecv = counting
    try:
        optimizer.step()
    finally:
        torch.distributed.batch_isend_irecv = real
    return said, seen, optimizer.whole.plans[0].bytes_moved


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2 tp=2", "dp_replicate=2"])
def test_what_is_sent_is_what_the_plans_say(mesh: str) -> None:
    for said, seen, moved in pool(ranks_of(mesh)).run(sent, mesh):
        assert said == seen
        assert seen or mesh == "dp_replicate=2"
        assert moved == 0 or mesh != "dp_replicate=2"  # replicas have all of it; only results travel


def shared_out() -> list[int]:
    run = start(Cell(mesh="dp_shard=4", layers=4))
    whole = mk.muon(run, lr=LR).whole
    _, owners = whole._layouts
    return [
        sum(torch.Size(each.shape).numel() for each in owners.tensors.values() if rank in each.regions)
        for rank in range(4)
    ]


def test_ranks_have_about_equally_many_matrices() -> None:
    elements = pool(4).run(shared_out)[0]
    assert max(elements) <= 1.2 * sum(elements) / 4


def refusals() -> list[str]:
    said = []
    for memory in (
        mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(states="8bit")),
        mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload())),
    ):
        run = start(Cell(mesh="tp=1", memory=memory))
        with pytest.raises(mk.errors.PlanError) as error:
            mk.muon(run, lr=LR)
        said.append(str(error.value))
    run = mk.parallelize(torch.nn.Linear(4, 4), mesh_for("tp=1"))
    with pytest.raises(mk.errors.PlanError) as error:
        mk.muon(run, lr=LR)
    return [*said, str(error.value)]


def test_refusals() -> None:
    bits, host, blocks = pool(1).run(refusals)[0]
    assert "in few bits" in bits and bits == host
    assert blocks.startswith("muon: the run has no matrices in blocks.")


def measured() -> tuple[int, int]:
    """(the most bytes of a step beside the model's, as measured; peak of the estimate) of this rank"""
    cell = Cell(mesh="dp_shard=2", layers=4, hidden_mlp=320)
    run = start(cell)
    optimizer = mk.muon(run, lr=LR)
    batch = own_rows(batches(cell)[0], run.mesh)
    rows, tokens = batch["input_ids"].shape
    for _ in range(2):  # the first makes the state
        with Peak() as peak:
            run.forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()
    held = sum(local_tensor(param).nbytes for param in run.parameters())
    held += sum(local_tensor(each).nbytes for state in optimizer.state.values() for each in state.values())
    return peak.bytes + held, rows * tokens


def estimated(rows: int) -> int:
    cell = Cell(mesh="dp_shard=2", layers=4, hidden_mlp=320)
    found = mk.estimate(
        build(cell),
        "dp_shard=2",
        mk.Strategy(plan=plan_of(cell)),
        rows=rows,
        seq_len=cell.tokens,
        kernels="cpu",
        optimizer=lambda run: mk.muon(run, lr=LR),
    )
    return found.peak_bytes


def test_an_estimate_knows_what_a_step_holds() -> None:
    peak, tokens = pool(2).run(measured)[0]
    said = estimated(tokens // Cell(mesh="tp=1").tokens)
    assert said == pytest.approx(peak, rel=0.1)
