"""The simulator against real ranks: time of stages that sleep, and activations that are really alive."""

from __future__ import annotations

import json
import time
import weakref
from datetime import timedelta
from functools import cache, partial
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.models.llama import LLAMA_PLAN
from meshkit.parallel.pipeline import Times, simulate, text, times_of, trace, weight_gradient
from meshkit.parallel.pipeline.schedules import NAMES, named
from tests.laws.parity.cases import Cell, batches, build, mesh_for, start
from tests.world import RankError, pool, run_ranks

RANKS, MICROBATCHES = 4, 8
ATTEMPTS = 8
F_S, I_S, W_S = 0.045, 0.0675, 0.0375  # of all stages of a rank together


class Account:
    """Activations that are alive, and the most there were."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def hold(self, owner: object, units: int = 1) -> None:
        self.live += units
        self.peak = max(self.peak, self.live)
        weakref.finalize(owner, self._free, units)

    def _free(self, units: int) -> None:
        self.live -= units


account = Account()


class Activation:
    def __init__(self) -> None:
        account.hold(self)


class Sleep(torch.autograd.Function):
    """Holds one activation until its input gradient, and another until its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share, ctx.for_input, ctx.for_weight = share, Activation(), Activation()
        time.sleep(F_S * share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(I_S * ctx.share)
        weight_gradient(partial(sleep_for_weight, ctx.for_weight, W_S * ctx.share))
        return grad, None


def sleep_for_weight(activation: Activation, seconds: float) -> None:
    time.sleep(seconds)


class Sleeper(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Sleep.apply(x * self.scale, self.share)
        return out


class Sleepers(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Sleeper(RANKS / stages) for _ in range(stages))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        for block in self.blocks:
            x = block(x)
        return x


def total(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(part["input_ids"]).sum()
    return out


Real = tuple[float, float, list[int], str]


def of_schedule(name: str) -> Real:
    """Measured and simulated makespan, peak of activations on this rank, and the trace of both."""
    stages = named(name)(RANKS, MICROBATCHES).stages
    model = Sleepers(stages)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    run = mk.parallelize(
        model,
        mesh_for(f"pp={RANKS}"),
        plan=mk.Plan(blocks=("blocks.*",)),
        pipeline=mk.strategy.PipelinePolicy(schedule=name),
    )
    batch = {"input_ids": torch.ones(MICROBATCHES, 2, dtype=torch.long)}
    step = partial(run.forward_backward, batch, loss=total, count=lambda b: torch.tensor(1))
    step(microbatches=MICROBATCHES)  # connections are made now, and the program is read
    assert run.pipeline is not None
    schedule = run.pipeline.schedule(MICROBATCHES)
    share = RANKS / stages
    simulation = simulate(
        schedule,
        Times(f_s=F_S * share, i_s=I_S * share, w_s=W_S * share, freed_by_i=1.0, freed_by_w=1.0),
    )
    makespan = inf
    for _ in range(ATTEMPTS):  # a busy machine only ever adds time
        account.peak = account.live
        assert account.live == 0
        with run.pipeline.record() as recording:
            step(microbatches=MICROBATCHES)
        measured = recording.gather()
        makespan = min(makespan, max(m.end_s for m in measured) - min(m.start_s for m in measured))
        if makespan <= 1.07 * simulation.makespan_s:
            break
    peaks = [account.peak, int(simulation.peak_units[run.pipeline.rank])]
    return makespan, simulation.makespan_s, peaks, trace(simulation, measured)


@cache
def real(name: str) -> list[Real]:
    """Of each rank."""
    return pool(RANKS).run(of_schedule, name)


@pytest.mark.alone
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_sleeping_stages_takes_as_long_as_simulated(name: str) -> None:
    measured, simulated, _, _ = real(name)[0]
    assert measured == pytest.approx(simulated, rel=0.1)


@pytest.mark.alone
@pytest.mark.parametrize("name", NAMES)
def test_activations_alive_are_those_of_the_simulator(name: str) -> None:
    for _, _, (alive, counted), _ in real(name):
        assert alive == counted


@pytest.mark.alone
def test_zero_bubble_schedules_beat_1f1b() -> None:
    names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv")
    measured = {name: real(name)[0][0] for name in names}
    assert measured["zb-h1"] < measured["1f1b"] < measured["gpipe"] * 1.02
    assert measured["zb-h2"] < measured["zb-h1"]
    assert measured["zbv"] < measured["interleaved"]


@pytest.mark.alone
@pytest.mark.parametrize("name", NAMES)
def test_the_trace_of_a_real_step_has_every_task_beside_the_simulated_one(name: str) -> None:
    lanes: dict[int, list[str]] = {0: [], 1: []}
    for event in json.loads(real(name)[0][3])["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["tid"]] += event["name"].split("+")
    assert sorted(lanes[0]) == sorted(lanes[1])


def bytes_alive(cell: Cell) -> tuple[int, float]:
    """Peak bytes that autograd saves in a step on this rank, and what the simulator makes of those of one forward."""
    run = start(cell)
    assert run.pipeline is not None
    batch = {name: tensor[:4] for name, tensor in batches(cell)[0].items()}
    weights = {param.untyped_storage().data_ptr() for param in run.parameters()}
    counts: list[int] = []

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            own = tensor.untyped_storage().data_ptr() not in weights
            found.hold(self, tensor.numel() * tensor.element_size() if own else 0)

    found = Account()
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        run.forward_backward({name: tensor[:1] for name, tensor in batch.items()}, microbatches=1)
        counts.append(found.peak)
        assert found.live == 0
        found = Account()
        run.forward_backward(batch, microbatches=4)
    schedule = run.pipeline.schedule(4)
    (stage,) = schedule.stages_of(run.pipeline.rank)
    per_stage = tuple(float(counts[0]) if other == stage else 0.0 for other in range(schedule.stages))
    simulation = simulate(schedule, Times(freed_by_i=per_stage, freed_by_w=0.0))
    return found.peak, simulation.peak_units[run.pipeline.rank]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bytes_alive_in_a_real_model_are_those_of_the_simulator(schedule: str) -> None:
    cell = Cell(mesh="pp=4", layers=4, schedule=schedule)
    for rank, (alive, counted) in enumerate(pool(4).run(bytes_alive, cell)):
        assert alive == counted, f"rank {rank}"


def times_and_shares() -> tuple[float, float]:
    model = Sleepers(2)
    run = mk.parallelize(
        model,
        mesh_for("pp=2"),
        plan=mk.Plan(blocks=("blocks.*",)),
        pipeline=mk.strategy.PipelinePolicy(schedule="1f1b"),
    )
    assert run.pipeline is not None
    batch = {"input_ids": torch.ones(3, 2, dtype=torch.long)}
    with run.pipeline.record() as recording:
        run.forward_backward(batch, microbatches=3, loss=total, count=lambda b: torch.tensor(1))
    times = times_of(recording.gather(), run.pipeline.schedule(3))
    assert isinstance(times.f_s, tuple) and isinstance(times.b_s, tuple)
    assert "rank 1" in text(simulate(run.pipeline.schedule(3), times))
    return times.f_s[1], times.b_s[0]


def test_measured_times_go_into_the_simulator() -> None:
    for forward, backward in pool(2).run(times_and_shares):
        assert forward == pytest.approx(2 * F_S, rel=0.3)
        assert backward == pytest.approx(2 * (I_S + W_S), rel=0.3)


def stall(mesh: str) -> None:
    mk.init_mesh(mesh, timeout=timedelta(seconds=3))
    run = mk.parallelize(build(Cell(mesh=mesh, layers=4)), mk.init_mesh(mesh), plan=LLAMA_PLAN)
    if run.pipeline is not None and run.pipeline.rank == 0:
        run.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: time.sleep(60))
    run.forward_backward(batches(Cell(mesh=mesh))[0], microbatches=2)


def test_a_rank_that_stalls_ends_the_others_and_says_where() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"pp rank 1 waited for 0F0 \(stage 0, microbatch 0\) from pp rank 0") as caught:
        run_ranks(2, stall, "pp=2", timeout_s=60)
    assert "pipeline '1f1b': pp rank 1, stage 1, F of microbatch 0" in str(caught.value)
    assert time.monotonic() - began < 30


def given_table(microbatches: int) -> tuple[float, float, str]:
    """A table of one's own: trains, evaluates, and refuses another number of microbatches."""
    cell = Cell(mesh="pp=2", layers=4)
    table = named("zb-h1")(2, 3)
    run = mk.parallelize(
        build(cell), mesh_for("pp=2"), plan=LLAMA_PLAN, pipeline=mk.strategy.PipelinePolicy(schedule=table)
    )
    batch = batches(cell)[0]
    loss, count = run.evaluate(batch)
    trained = run.forward_backward(batch, microbatches=3)
    try:
        run.forward_backward(batch, microbatches=microbatches)
    except mk.errors.PlanError as error:
        return float(loss / count), float(trained), str(error)
    return float(loss / count), float(trained), "accepted"


def test_a_table_of_ones_own_runs() -> None:
    for evaluated, trained, refused in pool(2).run(given_table, 2):
        assert evaluated == pytest.approx(trained, rel=1e-10)
        assert refused.startswith(
            "pipeline: the table 'zb-h1' is for 2 ranks and 3 microbatches, but the run has 2 and 2."
        )
