"""Is a pipeline step with meshkit as fast as torch.distributed.pipelining's?

    python benchmarks/pipeline.py                                    # CPU: 4 gloo ranks, 1F1B, interleaved and ZBV
    python benchmarks/pipeline.py --ranks 2 --schedules zbv          # one schedule, a core for each of two ranks
    torchrun --nproc-per-node 4 benchmarks/pipeline.py               # ranks that are there already

Forwards and backwards of all microbatches of one Llama, cut at the same layers for both: meshkit cuts the model, and each
of torch's stages is a module of the same layers. First both must give the same loss and the same gradients, or no ratio is
reported. Both loops live in the same ranks and take blocks of a few steps in turn; a ratio is taken within a round, where the
load of the machine is nearly the same for both, and its median over rounds is printed with its quartiles.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from rows import Spread, environment, spread
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.profiler import ProfilerActivity, profile

import meshkit as mk
from meshkit.faults import run_main
from meshkit.loss import cross_entropy
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.models.layers import rope_tables

RESULTS = Path(__file__).parent / "results" / "pipeline.jsonl"
TOL_FP32 = 1e-5  # relative, of the loss and of each gradient's largest value: only the order of sums differs

Name = Literal["1f1b", "interleaved", "zbv"]
THEIRS = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = 4
    """processes to start, unless torchrun has"""
    schedules: tuple[Name, ...] = ("1f1b", "interleaved", "zbv")
    """interleaved and zbv have two stages a rank"""
    hidden: int = 256
    """a multiple of 64: heads have 32 dims, and two share keys and values"""
    layers: int = 8
    """at least the number of stages"""
    vocab: int = 4096
    tokens: int = 256
    """of a row"""
    microbatches: int = 8
    rows: int = 1
    """of a microbatch"""
    rounds: int = 9
    steps: int = 3
    """of a block: in a round each loop takes one block"""
    warmup: int = 2
    record: bool = False
    """append a row for each schedule to benchmarks/results/pipeline.jsonl"""

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=self.hidden // 64,
            head_dim=32,
        )


@dataclass(frozen=True)
class Loop:
    """step(input_ids, labels): all gradients of the mean loss, which is returned by a rank that knows it."""

    step: Callable[[Tensor, Tensor], Tensor | None]
    modules: Sequence[nn.Module]

    def named_gradients(self) -> dict[str, Tensor]:
        named_parameters = (named for module in self.modules for named in module.named_parameters())
        return {name: param.grad for name, param in named_parameters if param.grad is not None}

    def run(self, input_ids: Tensor, labels: Tensor) -> Tensor | None:
        for module in self.modules:
            module.zero_grad()
        return self.step(input_ids, labels)


# ---------------------------------------------------------------------------------------------------- the loops


def both_loops(name: Name, settings: Settings, mesh: mk.Mesh) -> tuple[mk.Run, dict[str, Loop]]:
    torch.manual_seed(0)
    model = Llama(settings.config)
    twin = copy.deepcopy(model)
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN, pipeline=mk.strategy.PipelinePolicy(schedule=name))

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        return run.forward_backward({"input_ids": input_ids, "labels": labels}, microbatches=settings.microbatches)

    return run, {"meshkit": Loop(step, [run.model]), "torch": torch_loop(name, twin, run, settings, mesh)}


class Stage(nn.Module):
    """Some layers of a Llama under their own names, and the embedding or the head where they are among the modules."""

    def __init__(self, model: Llama, modules: Sequence[str], tokens: int, device: torch.device) -> None:
        super().__init__()
        config = model.config
        self.embed_tokens = model.embed_tokens if "embed_tokens" in modules else None
        indices = [name.removeprefix("layers.") for name in modules if name.startswith("layers.")]
        self.layers = nn.ModuleDict({index: model.layers[int(index)] for index in indices})
        self.norm = model.norm if "norm" in modules else None
        self.lm_head = model.lm_head if "lm_head" in modules else None
        positions = torch.arange(tokens, device=device).unsqueeze(0)
        cos, sin = rope_tables(config.rope, positions, config.head_dim, dtype=torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_tokens(x) if self.embed_tokens is not None else x
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin, None)
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


def torch_loop(name: Name, model: Llama, run: mk.Run, settings: Settings, mesh: mk.Mesh) -> Loop:
    """The same layers on the same ranks. Losses are divided by the tokens of the step, so its gradients are not scaled."""
    assert run.pipeline is not None
    cut = run.pipeline.cut
    stages_of_rank = cut.stages_of(run.pipeline.rank)
    modules = [Stage(model, cut.stages.modules_of(stage), settings.tokens, mesh.device) for stage in stages_of_rank]
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(module.to(mesh.device), stage, cut.stages.count, mesh.device, group=group)
        for stage, module in zip(stages_of_rank, modules, strict=True)
    ]
    tokens = settings.microbatches * settings.rows * settings.tokens
    schedule = THEIRS[name](
        stages[0] if name == "1f1b" else stages,
        settings.microbatches,
        loss_fn=lambda logits, labels: cross_entropy(logits, labels) / tokens,
        scale_grads=False,
    )
    mapped = stages[0].stage_index_to_group_rank
    assert tuple(mapped[stage] for stage in range(cut.stages.count)) == cut.placement, f"{name}: stages on other ranks"
    first, last = 0 in stages_of_rank, cut.stages.count - 1 in stages_of_rank

    def step(input_ids: Tensor, labels: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (input_ids,) if first else ()
        schedule.step(*inputs, target=labels if last else None, losses=losses if last else None, return_outputs=False)
        return torch.stack(losses).sum().detach() if last else None

    return Loop(step, modules)


def batch_of(settings: Settings, mesh: mk.Mesh) -> tuple[Tensor, Tensor]:
    """input_ids and labels of the step, the same on every rank."""
    rows = settings.microbatches * settings.rows
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, settings.vocab, (rows, settings.tokens + 1), generator=generator).to(mesh.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# --------------------------------------------------------------------------------------------------- the same work?


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Relative: of the loss, and of the gradient that differs most from its own largest value."""

    loss: float
    gradient: float


def differences(loops: dict[str, Loop], batch: tuple[Tensor, Tensor], mesh: mk.Mesh) -> Differences:
    ours, theirs = (loops[name].run(*batch) for name in ("meshkit", "torch"))
    mine, other = (loops[name].named_gradients() for name in ("meshkit", "torch"))
    assert ours is not None and mine.keys() == other.keys(), f"other parameters: {sorted(mine.keys() ^ other.keys())}"
    worst = torch.tensor(
        [
            0.0 if theirs is None else relative(ours, theirs.double()),
            max(relative(grad, other[name]) for name, grad in mine.items()),
        ],
        device=mesh.device,
    )
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    loss, gradient = worst.tolist()
    return Differences(loss=loss, gradient=gradient)


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, kw_only=True)
class Block:
    """Seconds a step: of the slowest rank, and the processor time of the busiest."""

    wall_s: float
    busiest_cpu_s: float


def block(loop: Loop, batch: tuple[Tensor, Tensor], settings: Settings, mesh: mk.Mesh) -> Block:
    """Every step begins on all ranks at once, as after an optimizer that clips gradients."""
    taken = torch.zeros(2, dtype=torch.float64)
    for _ in range(settings.steps):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loop.run(*batch)
        if mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        step = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
        step = step.to(mesh.device)
        dist.all_reduce(step, dist.ReduceOp.MAX)
        taken += step.cpu()
    wall_s, busiest_cpu_s = (taken / settings.steps).tolist()
    return Block(wall_s=wall_s, busiest_cpu_s=busiest_cpu_s)


def peak_bytes(loop: Loop, batch: tuple[Tensor, Tensor], mesh: mk.Mesh) -> int:
    """The most that one step holds beyond parameters, gradients included: of the rank with the most."""
    for module in loop.modules:
        module.zero_grad()
    if mesh.device_type == "cpu":
        peak = cpu_peak_bytes(loop, batch)
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loop.run(*batch)
        peak = torch.cuda.max_memory_allocated() - before
    most = torch.tensor([peak], device=mesh.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def cpu_peak_bytes(loop: Loop, batch: tuple[Tensor, Tensor]) -> int:
    """From torch's profiler, which notes every allocation: the resident set is shared by both loops."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop.run(*batch)
    results = profiler.profiler.kineto_results
    notes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(notes, key=lambda note: note[0]):
        live += change
        peak = max(peak, live)
    return peak


def compare(settings: Settings) -> None:
    mesh = mk.init_mesh("pp=-1")
    batch = batch_of(settings, mesh)
    table = Table(
        "schedule", "speed", "processor time of the busiest rank", "peak memory", "ms a step", "blocks a stage"
    )
    for name in settings.schedules:
        run, loops = both_loops(name, settings, mesh)
        difference = differences(loops, batch, mesh)
        if mesh.rank == 0:
            print(
                f"{name}: loss differs by {difference.loss:.1e}, gradients by {difference.gradient:.1e} at most",
                flush=True,
            )
        if not max(difference.loss, difference.gradient) <= TOL_FP32:  # true for nan as well
            text = f"{name}: more than {TOL_FP32:.0e}, so it is not the same work: no ratio."
            raise SystemExit(text if mesh.rank == 0 else 1)
        for loop in loops.values():
            for _ in range(settings.warmup):
                loop.run(*batch)
        peaks = {who: peak_bytes(loop, batch, mesh) for who, loop in loops.items()}
        blocks: dict[str, list[Block]] = {who: [] for who in loops}
        for index in range(settings.rounds):
            for who in loops if index % 2 == 0 else reversed(loops):
                blocks[who].append(block(loops[who], batch, settings, mesh))
        if mesh.rank:
            continue
        rounds = list(zip(blocks["meshkit"], blocks["torch"], strict=True))
        speed = spread([theirs.wall_s / ours.wall_s for ours, theirs in rounds])
        busiest = spread([ours.busiest_cpu_s / theirs.busiest_cpu_s for ours, theirs in rounds])
        memory = peaks["meshkit"] / peaks["torch"]
        step_ms = {who: statistics.median(1e3 * one.wall_s for one in taken) for who, taken in blocks.items()}
        assert run.pipeline is not None
        sizes = [len(names) for names in run.pipeline.cut.stages.blocks]
        table.add_row(
            name,
            shown(speed),
            shown(busiest),
            f"{memory:.2f}",
            " / ".join(f"{value:.1f}" for value in step_ms.values()),
            " ".join(map(str, sizes)),
        )
        if settings.record:
            record(
                settings,
                schedule=name,
                mesh=f"pp={mesh.spec.pp}",
                blocks_of_stages=sizes,
                differences=asdict(difference),
                speed_ratio=asdict(speed),
                busiest_rank_cpu_ratio=asdict(busiest),
                peak_memory_ratio=round(memory, 4),
                peak_bytes=peaks,
                step_ms={who: round(value, 2) for who, value in step_ms.items()},
                busiest_cpu_ms={
                    who: round(statistics.median(1e3 * one.busiest_cpu_s for one in taken), 2)
                    for who, taken in blocks.items()
                },
            )
    if mesh.rank == 0:
        console = Console(soft_wrap=True, width=120)
        console.print("meshkit over torch: speed above 1, processor time and memory below 1 are in favour of meshkit")
        console.print(table)


def shown(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def record(settings: Settings, **measured: Any) -> None:
    row = {**environment(), **asdict(settings), "loadavg": round(os.getloadavg()[0], 1), **measured}
    del row["schedules"]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


# ------------------------------------------------------------------------------------------------------ the ranks


def run_rank(rank: int, settings: Settings, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_main(lambda: compare(settings))


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(settings: Settings) -> None:
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler speaks of CUDA on a CPU
    if "RANK" in os.environ:
        run_main(lambda: compare(settings))
    else:
        torch.multiprocessing.start_processes(run_rank, (settings, free_port()), nprocs=settings.ranks)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
