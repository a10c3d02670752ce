"""How much of a GPU does a step use: time, MFU and memory of an 8B-shaped model's layers, beside plain torch.

    python benchmarks/gpu_step.py --record              # one GPU, some minutes
    python benchmarks/gpu_step.py --preset tiny         # that it runs, on a CPU
    python benchmarks/gpu_step.py --again               # no GPU: recorded rows beside what is predicted of them now

A case is a loop (meshkit, or transformers' decoder with fully_shard: `peers/plain.py`), a length and what the strategy
says besides. Cases run one after the other, each on the whole device, in one process a loop: a GPU has room for one. Each
compiles its blocks, warms up, and times every step by events of the device, without waiting for it. The median and quartiles
are of steps. The losses of two loops on one work must agree, or nothing is reported. Rows of meshkit have beside them what
`estimate` and `forecast` say of the step on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Column, Table
from rows import environment, spread
from torch import Tensor

import meshkit as mk
from benchmarks.peers.meshkit import adamw, decoder, update
from benchmarks.peers.plain import training_step
from benchmarks.peers.turns import join_world
from benchmarks.peers.work import PRESETS, TOL_LOSS_BF16, Training, transformers_model
from meshkit.metrics import ModelFlops, peak_flops_per_s, peak_memory
from meshkit.models.llama import LLAMA_PLAN
from meshkit.strategy import (
    ActivationOffload,
    ChunkedLoss,
    Fp8,
    MemoryPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    Precision,
    Strategy,
)

RESULTS = Path(__file__).parent / "results" / "gpu_step.jsonl"

VARIANTS: dict[str, MemoryPolicy] = {
    "": MemoryPolicy(),
    "fp8": MemoryPolicy(precision=Precision(fp8=Fp8())),
    "fp8 rowwise": MemoryPolicy(precision=Precision(fp8=Fp8(recipe="rowwise"))),
    "recompute selective": MemoryPolicy(recompute="selective"),
    "recompute full": MemoryPolicy(recompute="full"),
    "offload host": MemoryPolicy(offload=ActivationOffload()),
    "chunked loss": MemoryPolicy(loss=ChunkedLoss(tokens=2048)),
    "optimizer 8bit": MemoryPolicy(optimizer=OptimizerPolicy(states="8bit")),
    "optimizer host": MemoryPolicy(optimizer=OptimizerPolicy(offload=OptimizerOffload())),
    "documents": MemoryPolicy(),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """variant: of VARIANTS. documents: tokens of each of a row's; None is one."""

    loop: Literal["meshkit", "plain"]
    variant: str = ""
    tokens: int
    rows: int
    layers: int
    vocabulary: int

    @property
    def documents(self) -> int | None:
        return self.tokens // 8 if self.variant == "documents" else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    preset: Literal["8b-cut", "tiny"] = "8b-cut"
    loops: tuple[Literal["plain", "meshkit"], ...] = ("plain", "meshkit")
    variants: tuple[str, ...] = tuple(name for name in VARIANTS if name)
    """of meshkit, at the middle length"""
    lengths: tuple[int, ...] = (4096, 8192, 65536)
    layers: int = 4
    vocabulary: int | None = None
    """default: the model's, and a quarter at the longest, whose logits would not fit"""
    warmup: int = 3
    steps: int = 8
    compile: bool = True
    limit_s: float = 1800.0
    """begin no case after so many seconds"""
    record: bool = False
    """append a row per case to benchmarks/results/gpu_step.jsonl"""
    again: bool = False
    """predict the recorded rows again, and run nothing"""


def cases(settings: Settings) -> list[Case]:
    """Of each loop; the last length, where attention is most of the work, with half of the layers."""
    preset, found = PRESETS[settings.preset], []
    middle = settings.lengths[len(settings.lengths) // 2]
    for loop in settings.loops:
        for variant in ("", *settings.variants) if loop == "meshkit" else ("",):
            for tokens in settings.lengths if variant in ("", "fp8") else (middle,):
                longest = tokens == settings.lengths[-1] and tokens > middle
                vocabulary = settings.vocabulary or preset.config.vocab_size // (4 if longest else 1)
                found.append(
                    Case(
                        loop=loop,
                        variant=variant,
                        tokens=tokens,
                        rows=max(1, middle // tokens),
                        layers=max(1, settings.layers // (2 if longest else 1)),
                        vocabulary=vocabulary,
                    )
                )
    return found


def work_of(case: Case, settings: Settings) -> Training:
    cuda = torch.cuda.is_available()
    config = dataclasses.replace(
        PRESETS[settings.preset].config, num_hidden_layers=case.layers, vocab_size=case.vocabulary
    )
    return Training(
        config=config,
        mesh="dp_shard=1",
        rows=case.rows,
        tokens=case.tokens,
        bf16=True,
        compile=settings.compile,
        device_type="cuda" if cuda else "cpu",
    )


def strategy_of(case: Case, *, compile: bool) -> Strategy:
    memory = VARIANTS[case.variant]
    return Strategy(
        memory=dataclasses.replace(memory, precision=memory.precision or Precision()), plan=LLAMA_PLAN, compile=compile
    )


def batch_of(step: int, case: Case, device: torch.device) -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (case.rows, case.tokens + 1), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if case.documents is not None:
        batch["position_ids"] = (torch.arange(case.tokens) % case.documents).expand(case.rows, -1).contiguous()
    return {name: tensor.to(device) for name, tensor in batch.items()}


def timed(case: Case, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Seconds of each step, losses, and the most bytes that were allocated and reserved."""
    began, work = time.perf_counter(), work_of(case, settings)
    if case.loop == "plain":
        by_hand = training_step(work)

        def step(batch: dict[str, Tensor]) -> Tensor:
            return by_hand(batch["input_ids"], batch["labels"])
    else:
        run = mk.parallelize(
            decoder(transformers_model(work), work.config),
            mk.init_mesh(work.mesh, device_type=work.device_type),
            strategy=strategy_of(case, compile=work.compile),
        )
        optimizer = adamw(run)

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = run.forward_backward(batch)
            update(run, optimizer)
            return loss

    losses = [float(step(batch_of(index, case, device))) for index in range(settings.warmup)]
    made_s = time.perf_counter() - began
    batches = [batch_of(settings.warmup + index, case, device) for index in range(settings.steps)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    told = []
    for batch in batches:
        told.append(step(batch))
        clock.tick()
    seconds = clock.seconds()
    return {
        "seconds": seconds,
        "losses": losses + [float(loss) for loss in told],
        "made_s": made_s,
        **peak_memory(device),
    }


class Clock:
    """Seconds between ticks: the device's, which the host runs ahead of, or the host's where it is the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_device, self._ticks = device.type == "cuda", list[Any]()
        self.tick()

    def tick(self) -> None:
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if self._on_device:
            torch.cuda.synchronize()
            return [one.elapsed_time(other) / 1e3 for one, other in pairwise(self._ticks)]
        return [other - one for one, other in pairwise(self._ticks)]


def run_loop(chosen: list[Case], settings: Settings, folder: str, pipe: Connection) -> None:
    """The process of one loop: a case after the other."""
    device = join_world(0, 1, folder, device_type="cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    for case in chosen:
        if time.perf_counter() - began > settings.limit_s:
            break
        try:
            pipe.send((case, timed(case, settings, device)))
        except (RuntimeError, mk.MeshkitError) as error:  # one that does not fit, or is refused here
            pipe.send((case, {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}))
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    pipe.send(None)
    dist.destroy_process_group()


def row_of(case: Case, told: dict[str, Any], settings: Settings) -> dict[str, Any]:
    row: dict[str, Any] = {"benchmark": "gpu_step", "preset": settings.preset, **dataclasses.asdict(case)}
    if "error" in told:
        return row | {"error": told["error"]}
    seconds = spread(told.pop("seconds"))
    tokens_per_s = case.rows * case.tokens / seconds.median
    row |= {"step_s": dataclasses.asdict(seconds), "tokens_per_s": round(tokens_per_s, 1), **told}
    peak = peak_flops_per_s(torch.device("cuda")) if torch.cuda.is_available() else None
    if peak is not None:
        flops = ModelFlops.from_config(work_of(case, settings).config).per_token(case.documents or case.tokens)
        row |= {
            "mfu_full": round(flops.full * tokens_per_s / peak, 4),
            "mfu_causal": round(flops.causal * tokens_per_s / peak, 4),
        }
    return row


SHEETS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100"}


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Of a row of meshkit, by nothing but the model and the strategy: bytes, and seconds on the datasheet of its GPU."""
    fields = {field.name: row[field.name] for field in dataclasses.fields(Case)}
    case = Case(**fields)
    config = work_of(case, Settings(preset=row["preset"])).config
    with torch.device("meta"):
        model = mk.models.Llama(config)
    strategy, batch = strategy_of(case, compile=True), mk.Batch(sequences=case.rows, seq_len=case.tokens)
    said = mk.estimate(model, "dp_shard=1", strategy, rows=case.rows, seq_len=case.tokens)
    found: dict[str, Any] = {"peak_bytes": said.peak_bytes, "reserved_bytes": said.reserved_bytes}
    if (sheet := SHEETS.get(row["gpu"])) is not None:
        forecast = mk.forecast(model, strategy, sheet, batch, spec="dp_shard=1")
        found |= {"sheet": sheet, "step_s": round(forecast.seconds, 4), "unpriced": list(forecast.profile.unpriced)}
    return found


def again() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for row in rows:
        if row["loop"] == "meshkit" and "error" not in row:
            row["predicted"] = predicted(row)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def refuse_other_losses(rows: list[dict[str, Any]]) -> None:
    """Two loops on one work learn the same."""
    works: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in rows:
        if not row["variant"] and "losses" in row:
            works.setdefault((row["tokens"], row["layers"]), {})[row["loop"]] = row["losses"]
    for work, losses in works.items():
        one, *others = losses.values()
        for other in others:
            for mine, theirs in zip(one, other, strict=True):
                if abs(mine - theirs) > TOL_LOSS_BF16 * abs(theirs):
                    raise SystemExit(f"the loops differ at {work}: {losses}")


def table_of(rows: list[dict[str, Any]]) -> Table:
    names = "rows", "tokens", "s/step", "forecast", "tokens/s", "MFU full", "causal", "GiB", "estimate", "reserved"
    right = [Column(name, justify="right") for name in names]
    table = Table("loop", "variant", *right)
    for row in rows:
        if "error" in row:
            table.add_row(row["loop"], row["variant"], str(row["rows"]), f"{row['tokens']:,}", row["error"][:60])
            continue
        gib = [f"{row.get(key, 0) / 2**30:.2f}" for key in ("peak_allocated_bytes", "peak_reserved_bytes")]
        mfu = [f"{row[key]:.1%}" if key in row else "" for key in ("mfu_full", "mfu_causal")]
        step_s, said = row["step_s"]["median"], row.get("predicted", {})
        off_s = f"{said['step_s'] / step_s - 1:+.1%}" if "step_s" in said else ""
        off = (
            f"{said['peak_bytes'] / row['peak_allocated_bytes'] - 1:+.1%}"
            if "peak_allocated_bytes" in row and said
            else ""
        )
        size = [str(row["rows"]), f"{row['tokens']:,}"]
        rate = f"{row['tokens_per_s']:,.0f}"
        table.add_row(row["loop"], row["variant"], *size, f"{step_s:.4f}", off_s, rate, *mfu, gib[0], off, gib[1])
    return table


def main(settings: Settings) -> None:
    if settings.again:
        Console(width=150).print(table_of(again()))
        return
    context, rows, began = multiprocessing.get_context("spawn"), [], time.perf_counter()
    for loop in settings.loops:
        chosen = [case for case in cases(settings) if case.loop == loop]
        here, there = context.Pipe()
        left = dataclasses.replace(settings, limit_s=settings.limit_s - (time.perf_counter() - began))
        with tempfile.TemporaryDirectory() as folder:
            process = context.Process(target=run_loop, args=(chosen, left, folder, there), daemon=True)
            process.start()
            there.close()
            try:
                while (told := here.recv()) is not None:
                    rows.append({**environment(), **row_of(*told, settings)})
                    if loop == "meshkit" and "error" not in rows[-1] and settings.preset != "tiny":
                        rows[-1]["predicted"] = predicted(rows[-1])
                    print(json.dumps({key: rows[-1][key] for key in rows[-1] if key != "losses"}), flush=True)
            except EOFError:
                print(f"{loop}: the process ended", flush=True)
            process.join(30)
    refuse_other_losses(rows)
    Console(width=150).print(table_of(rows))
    if settings.record:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
