"""Is a training step with meshkit as fast and as small as a plain PyTorch loop?

    python benchmarks/step_time.py                                                 # CPU: 2 gloo ranks, FSDP
    python benchmarks/step_time.py --mesh "dp_shard=2 tp=2" --sequence             # CPU: 4 gloo ranks
    python benchmarks/step_time.py --preset 8b-cut --mesh dp_shard=1 --rounds 2    # one GPU: bf16, blocks compiled

Every loop of `loops.py` has its own ranks; blocks of a few steps alternate between the loops. The first losses must
agree, or nothing is reported. A ratio is taken within a round, where the load of the machine is nearly the same for both,
and its median over rounds is printed with its quartiles.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import interleaved_timing
import torch
import torch.distributed as dist
import transformers
import tyro
from interleaved_timing import Block, compare, join_world, refuse_other_losses, reset_peak, resident_bytes
from loops import LOOPS, PEERS, Work, reason_to_skip
from rich.console import Console
from rich.table import Column, Table
from rows import Spread, environment
from torch import Tensor

import meshkit as mk
from meshkit.metrics import ModelFlops, peak_flops_per_s, peak_memory
from meshkit.models import LLAMA3_8B, LLAMA32_1B, LlamaConfig, Rope

RESULTS = Path(__file__).parent / "results" / "step_time.jsonl"

PROOF_STEPS = 13  # so many first losses must agree; after that rounding errors may have grown
# Relative. fp32: only the order of sums differs. bf16: kernels also round at different places.
TOL_LOSS_FP32, TOL_LOSS_BF16 = 2e-6, 1e-2


@dataclass(frozen=True, kw_only=True)
class Preset:
    """rows: of the global batch."""

    config: LlamaConfig
    rows: int
    tokens: int


PRESETS = {
    "tiny": Preset(  # 5.8 million parameters
        config=LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            rope=Rope(theta=500_000.0),
        ),
        rows=8,
        tokens=256,
    ),
    "1b": Preset(config=LLAMA32_1B, rows=2, tokens=4096),
    "8b-cut": Preset(config=LLAMA3_8B, rows=2, tokens=4096),  # as many layers as fit
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared, on what work. None: what the preset or the device implies."""

    preset: Literal["tiny", "1b", "8b-cut"] = "tiny"
    mesh: str = "dp_shard=2"
    """Axes dp_replicate, dp_shard, tp; as many ranks as they multiply to are started here."""
    sequence: bool = False
    """Sequence parallelism on tp."""
    loops: tuple[Literal["meshkit", "meshkit_transformers", "plain", "accelerate", "torchtitan"], ...] = (
        "meshkit",
        "plain",
        "accelerate",
    )
    """Loops of loops.py; ratios are of the first to the others."""
    rounds: int = 11
    warmup: int = 3
    steps: int = 4
    """Steps of a block."""
    rows: int | None = None
    """Rows of the global batch."""
    tokens: int | None = None
    """Tokens of a row."""
    layers: int | None = None
    bf16: bool | None = None
    """bf16 compute over fp32 masters, gradients reduced in fp32; None: on CUDA."""
    compile: bool | None = None
    """torch.compile of each block; None: on CUDA."""
    record: bool = False
    """Append a row per comparison to benchmarks/results/step_time.jsonl."""


# ------------------------------------------------------------------------------------------------ a world of ranks


def world(loop: str, work: Work, settings: Settings) -> AbstractContextManager[Callable[[], Block]]:
    """Fresh ranks of one loop, warmed up: see `interleaved_timing.world`."""
    return interleaved_timing.world(run_rank, (loop, work, settings), ranks=work.mesh.world_size)


def run_rank(rank: int, loop: str, work: Work, settings: Settings, folder: str, pipe: Connection) -> None:
    if module := PEERS.get(loop):  # ranks of the others are not to hold it, nor is a fork to follow its threads
        importlib.import_module(module)
    imported_bytes = resident_bytes()
    device = join_world(rank, work.mesh.world_size, folder, device_type=work.device_type)
    step = LOOPS[loop](work)
    losses = [step(*batch_of_rank(index, work, device)).item() for index in range(settings.warmup)]
    reset_peak(device)
    done = settings.warmup
    pipe.send("warm")
    while pipe.recv() == "run":
        batches = [batch_of_rank(done + index, work, device) for index in range(settings.steps)]
        done += settings.steps
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        tensors = [step(*batch) for batch in batches]
        losses += [loss.item() for loss in tensors]  # waits for the device
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peaks = peak_memory(device)
        peak = peaks["peak_allocated_bytes"] if device.type == "cuda" else peaks["peak_rss_bytes"] - imported_bytes
        pipe.send(Block(values=losses, wall_s=wall, cpu_s=cpu, peak_bytes=peak))
        losses = []
    dist.destroy_process_group()


def batch_of_rank(step: int, work: Work, device: torch.device) -> tuple[Tensor, Tensor]:
    """(input_ids, labels) of one step for this rank. tp is the innermost axis: its ranks read the same rows."""
    # Of few ids, so that there is something to learn and a wrong gradient shows in the losses.
    ids = torch.randint(0, 256, (work.rows, work.tokens + 1), generator=torch.Generator().manual_seed(step))
    ids_of_rank = ids.chunk(work.mesh.world_size // work.mesh.tp)[dist.get_rank() // work.mesh.tp].to(device)
    return ids_of_rank[:, :-1].contiguous(), ids_of_rank[:, 1:].contiguous()


# ------------------------------------------------------------------------------------------------------ comparing


def resolve(settings: Settings) -> Work:
    """The work that the settings mean on this machine. Raises: SystemExit for work that does not fit it."""
    preset = PRESETS[settings.preset]
    cuda = torch.cuda.is_available()
    mesh = mk.MeshSpec.parse(settings.mesh)
    if min(mesh.sizes().values()) < 1 or mesh.pp * mesh.cp * mesh.ep * mesh.etp > 1:
        raise SystemExit(f"--mesh {settings.mesh!r}: give sizes of dp_replicate, dp_shard and tp, none of them -1.")
    rows, tokens = settings.rows or preset.rows, settings.tokens or preset.tokens
    data_ranks = mesh.world_size // mesh.tp
    if rows % data_ranks:
        raise SystemExit(
            f"--rows {rows}: the plain loop averages over ranks, so {data_ranks} data ranks must divide it."
        )
    if cuda and mesh.world_size > torch.cuda.device_count():
        raise SystemExit(
            f"--mesh {settings.mesh!r} needs {mesh.world_size} GPUs; there are {torch.cuda.device_count()}."
        )
    layers = settings.layers or preset.config.num_hidden_layers
    if settings.preset == "8b-cut" and settings.layers is None:
        layers = min(layers, layers_that_fit(preset.config, mesh=mesh, own_tokens=rows // data_ranks * tokens))
    return Work(
        config=dataclasses.replace(preset.config, num_hidden_layers=layers),
        mesh=mesh,
        rows=rows,
        tokens=tokens,
        sequence=settings.sequence,
        bf16=cuda if settings.bf16 is None else settings.bf16,
        compile=cuda if settings.compile is None else settings.compile,
        device_type="cuda" if cuda else "cpu",
    )


def layers_that_fit(config: LlamaConfig, *, mesh: mk.MeshSpec, own_tokens: int) -> int:
    """Layers that train within 85 % of a GPU; what is gathered in bf16 is in the other 15 %.

    A parameter takes 16 bytes (fp32 value, gradient and AdamW's two moments), a logit 16 (bf16 and fp32, its softmax,
    fp32 and bf16 gradient), and a token in each layer what backward needs in bf16: 5 hidden sizes of the residual stream
    and norms, 4 sizes of the heads, 4 of the feed-forward.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--preset 8b-cut fits layers to a GPU, and there is none: give --layers.")
    room = 0.85 * torch.cuda.get_device_properties(0).total_memory
    heads = config.num_attention_heads * config.head_dim
    matmuls = ModelFlops.from_config(dataclasses.replace(config, num_hidden_layers=1)).matmul_params
    vocabulary = config.vocab_size * config.hidden_size
    shards = mesh.dp_shard * mesh.tp
    saved = 2 * (5 * config.hidden_size + 4 * heads + 4 * config.intermediate_size) / mesh.tp
    fixed = 16 * 2 * vocabulary / shards + own_tokens * 16 * config.vocab_size / mesh.tp
    per_layer = 16 * (matmuls - vocabulary) / shards + own_tokens * saved
    if (layers := int((room - fixed) / per_layer)) < 1:
        raise SystemExit(
            f"--preset 8b-cut: not one layer fits with {own_tokens} tokens a GPU. Lower --rows or --tokens."
        )
    return layers


def alternate(loops: list[str], work: Work, settings: Settings) -> dict[str, list[Block]]:
    """Blocks of every loop in turn, in the opposite order every second round, so that a drifting load favours nobody.

    On a CPU each loop's ranks live through all rounds. A GPU has room for one loop: its ranks start anew every round.
    """
    blocks: dict[str, list[Block]] = {loop: [] for loop in loops}
    with ExitStack() as stack:
        alive = {}
        if work.device_type == "cpu":
            alive = {loop: stack.enter_context(world(loop, work, settings)) for loop in loops}
        for index in range(settings.rounds):
            for loop in loops if index % 2 == 0 else reversed(loops):
                if loop in alive:
                    blocks[loop].append(alive[loop]())
                else:
                    with world(loop, work, settings) as block:
                        blocks[loop].append(block())
    return blocks


def measures(taken: list[Block], work: Work, steps: int) -> dict[str, Any]:
    """A loop's own numbers, medians over its turns."""
    rate = statistics.median(work.rows * work.tokens * steps / block.wall_s for block in taken)
    out: dict[str, Any] = {
        "tokens_per_s": round(rate, 1),
        "cpu_ms_per_step": round(statistics.median(1e3 * block.cpu_s / steps for block in taken), 1),
        "peak_bytes": int(statistics.median(block.peak_bytes for block in taken)),
    }
    if work.device_type == "cuda" and (peak := peak_flops_per_s(torch.device("cuda"))) is not None:
        flops = ModelFlops.from_config(work.config).per_token(work.tokens)
        scale = rate / (peak * work.mesh.world_size)
        out |= {"mfu_full": flops.full * scale, "mfu_causal": flops.causal * scale}
    return out


# ------------------------------------------------------------------------------------------------------ reporting


def loops_table(measured: dict[str, dict[str, Any]]) -> Table:
    columns = {
        "tokens/s": lambda value: f"{value['tokens_per_s']:.0f}",
        "CPU ms/step": lambda value: f"{value['cpu_ms_per_step']:.0f}",
        "peak MiB": lambda value: f"{value['peak_bytes'] / 2**20:.1f}",
    }
    if all("mfu_full" in value for value in measured.values()):
        columns |= {
            "MFU full": lambda value: f"{value['mfu_full']:.1%}",
            "MFU causal": lambda value: f"{value['mfu_causal']:.1%}",
        }
    table = Table("loop", *(Column(title, justify="right") for title in columns))
    for loop, value in measured.items():
        table.add_row(loop, *(cell(value) for cell in columns.values()))
    return table


def ratios_table(ratios: dict[str, dict[str, Spread]]) -> Table:
    table = Table("ratio", "tokens/s", "CPU time", "peak memory")
    for title, spreads in ratios.items():
        table.add_row(
            title, *(f"{spread.median:.3f} [{spread.low:.3f}, {spread.high:.3f}]" for spread in spreads.values())
        )
    return table


def main(settings: Settings) -> None:
    console = Console(soft_wrap=True, width=110)
    work = resolve(settings)
    console.print(
        f"{settings.preset}: {work.config.num_hidden_layers} layers, {work.rows} x {work.tokens} tokens a step, "
        f"{work.mesh.world_size} ranks, mesh {settings.mesh!r}, {'bf16' if work.bf16 else 'fp32'}, {work.device_type}"
    )
    loops = []
    for loop in settings.loops:
        if reason := reason_to_skip(loop, work):
            console.print(f"{loop}: skipped, {reason}")
        else:
            loops.append(loop)
    multiprocessing.set_forkserver_preload(["loops"])  # imported once, shared by all ranks
    loadavg = [round(os.getloadavg()[0], 1)]
    blocks = alternate(loops, work, settings)
    loadavg.append(round(os.getloadavg()[0], 1))
    losses, worst = refuse_other_losses(
        blocks, steps=PROOF_STEPS, tolerance=TOL_LOSS_BF16 if work.bf16 else TOL_LOSS_FP32
    )

    measured = {loop: measures(taken, work, settings.steps) for loop, taken in blocks.items()}
    first, *others = loops
    ratios = {other: compare(blocks[first], blocks[other]) for other in others}
    console.print("losses:", " ".join(f"{loss:.6f}" for loss in losses))
    console.print(f"all loops within {worst:.1e} of each other; load average {loadavg[0]:.1f} to {loadavg[1]:.1f}")
    console.print(loops_table(measured))
    console.print(ratios_table({f"{first} / {other}": compared for other, compared in ratios.items()}))
    if settings.record:
        common = {
            **environment(),
            "transformers": transformers.__version__,
            **{name: getattr(settings, name) for name in ("preset", "mesh", "warmup", "rounds", "steps")},
            **{name: getattr(work, name) for name in ("rows", "tokens", "sequence", "bf16", "compile")},
            "ranks": work.mesh.world_size,
            "layers": work.config.num_hidden_layers,
            "loadavg": loadavg,
            "loss_difference": worst,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            for other, compared in ratios.items():
                spreads = {name: dataclasses.asdict(spread) for name, spread in compared.items()}
                versions = {"peer_version": importlib.metadata.version(other)} if other in PEERS else {}
                file.write(
                    json.dumps({**common, **versions, **spreads, first: measured[first], other: measured[other]}) + "\n"
                )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
