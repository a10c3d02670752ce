"""The simulator against real ranks: the time of a step whose messages carry clocks, and activations that are really alive."""

from __future__ import annotations

import json
import time
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.models.llama import LLAMA_PLAN
from meshkit.parallel.pipeline import Row, Schedule, Times, simulate, text, times_of, trace, weight_gradient
from meshkit.parallel.pipeline.schedules import NAMES, named
from tests.laws.parity.cases import Cell, batches, build, mesh_for, start
from tests.world import RankError, pool, run_ranks

RANKS, MICROBATCHES = 4, 8
FORWARD, INPUT, WEIGHT = 6.0, 9.0, 5.0  # of all stages of a rank together, in ticks: sums of their halves are exact
TICK_S = 0.0075  # of a clock that sleeps


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


class Clock:
    """This rank's time in ticks, from `start` on. Messages carry the time they were made at: load adds none."""

    def __init__(self) -> None:
        self.now: float | None = None  # it stands
        self.sleeps = False

    def start(self, *, sleeps: bool = False) -> None:
        self.now, self.sleeps = 0.0, sleeps

    def stop(self) -> float:
        now, self.now = self.now, None
        assert now is not None
        return now

    def spend(self, ticks: float, after: Tensor) -> Tensor:
        """When these ticks are over, which begin after `after` at the earliest: in its shape. While it stands, `after`."""
        if self.now is None:
            return after.clone()
        self.now = max(self.now, float(after.max())) + ticks
        if self.sleeps:
            time.sleep(ticks * TICK_S)
        return torch.full_like(after, self.now)


account, clock = Account(), Clock()


class Activation:
    def __init__(self) -> None:
        account.hold(self)


class Timed(torch.autograd.Function):
    """Takes and gives the time as its values. Holds an activation until its input gradient, one until its weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, last: bool) -> Tensor:
        ctx.share, ctx.last, ctx.for_input, ctx.for_weight = share, last, Activation(), Activation()
        return clock.spend(FORWARD * share, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        after = torch.zeros_like(grad) if ctx.last else grad  # the loss has no clock
        clock.spend(INPUT * ctx.share, after)
        weight_gradient(
            partial(spend_for_weight, ctx.for_weight, WEIGHT * ctx.share)
        )  # at once, where a backward is one task
        return clock.spend(0.0, after), None, None


def spend_for_weight(activation: Activation, ticks: float) -> None:
    clock.spend(ticks, torch.zeros(1))


class TimedBlock(nn.Module):
    def __init__(self, share: float, last: bool) -> None:
        super().__init__()
        self.share, self.last = share, last
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Timed.apply(x * self.scale, self.share, self.last)
        return out


class TimedBlocks(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4)
        nn.init.zeros_(self.first.weight)  # a step begins at 0
        self.blocks = nn.ModuleList(TimedBlock(RANKS / stages, index == stages - 1) for index in range(stages))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        for block in self.blocks:
            x = block(x)
        return x


def total(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(part["input_ids"]).sum()
    return out


@dataclass(frozen=True)
class Step:
    """Of one rank: when its work ended and when the simulator says all end, its activations, and the trace of both."""

    ended: float
    simulated: float
    alive: int
    counted: int
    trace: str


def timed(stages: int, ranks: int, schedule: str = "1f1b") -> mk.Run:
    return mk.parallelize(
        TimedBlocks(stages),
        mesh_for(f"pp={ranks}"),
        plan=mk.Plan(blocks=("blocks.*",)),
        pipeline=mk.strategy.PipelinePolicy(schedule=schedule),
    )


def halved(schedule: Schedule) -> Schedule:
    """With the halves of FB rows in rows of their own: a run sends what its F made before its B begins."""
    ranks = (
        [Row(rank, task.stage, task.op, task.microbatch) for row in rows for task in row.tasks]
        for rank, rows in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def of_schedule(name: str) -> Step:
    stages = named(name)(RANKS, MICROBATCHES).stages
    run = timed(stages, RANKS, name)
    batch = {"input_ids": torch.ones(MICROBATCHES, 2, dtype=torch.long)}
    step = partial(run.forward_backward, batch, loss=total, count=lambda b: torch.tensor(1))
    step(microbatches=MICROBATCHES)  # connections are made now, and the program is read
    assert run.pipeline is not None
    schedule = run.pipeline.schedule(MICROBATCHES)
    share = RANKS / stages
    simulation = simulate(
        halved(schedule),
        Times(f_s=FORWARD * share, i_s=INPUT * share, w_s=WEIGHT * share, freed_by_i=1.0, freed_by_w=1.0),
    )
    clock.start()
    account.peak = account.live
    assert account.live == 0
    with run.pipeline.record() as recording:
        step(microbatches=MICROBATCHES)
    return Step(
        clock.stop(),
        simulation.makespan_s,
        account.peak,
        int(simulation.peak_units[run.pipeline.rank]),
        trace(simulation, recording.gather()),
    )


@cache
def real(name: str) -> list[Step]:
    """Of each rank."""
    return pool(RANKS).run(of_schedule, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_step_takes_as_long_as_simulated(name: str) -> None:
    assert max(step.ended for step in real(name)) == real(name)[0].simulated


@pytest.mark.parametrize("name", NAMES)
def test_activations_alive_are_those_of_the_simulator(name: str) -> None:
    assert [step.alive for step in real(name)] == [step.counted for step in real(name)]


def test_zero_bubble_schedules_beat_1f1b() -> None:
    names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv")
    took = {name: max(step.ended for step in real(name)) for name in names}
    assert took["zb-h2"] < took["zb-h1"] < took["1f1b"] <= took["gpipe"]
    assert took["zbv"] < took["interleaved"]


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_of_a_real_step_has_every_task_beside_the_simulated_one(name: str) -> None:
    lanes: dict[int, list[str]] = {0: [], 1: []}
    for event in json.loads(real(name)[0].trace)["traceEvents"]:
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
    run = timed(2, 2)
    assert run.pipeline is not None
    batch = {"input_ids": torch.ones(3, 2, dtype=torch.long)}
    step = partial(run.forward_backward, batch, loss=total, count=lambda b: torch.tensor(1))
    step(microbatches=3)
    clock.start(sleeps=True)
    with run.pipeline.record() as recording:
        step(microbatches=3)
    clock.stop()
    times = times_of(recording.gather(), run.pipeline.schedule(3))
    assert isinstance(times.f_s, tuple) and isinstance(times.b_s, tuple)
    assert "rank 1" in text(simulate(run.pipeline.schedule(3), times))
    return times.f_s[1], times.b_s[0]


def test_measured_times_go_into_the_simulator() -> None:
    for forward, backward in pool(2).run(times_and_shares):  # never less than slept, whatever the load
        assert 2 * FORWARD * TICK_S <= forward < backward
        assert backward >= 2 * (INPUT + WEIGHT) * TICK_S


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
