"""What does moving activations off the device cost, and what does it free?

    python benchmarks/offload.py                                     # CPU: memory against the disk, seconds
    python benchmarks/offload.py --device cuda --hidden 4096 --layers 8 --tokens 8192

Forward and backward of the same Llama blocks, in bf16 on a GPU and fp32 on a CPU, with each policy; gradients must be equal
to the last bit, or no ratio is reported. On a GPU memory is the allocator's peak of a step. On a CPU it is what the process
holds more after forward, and the most that waited in staging memory for the disk; malloc is told to give back what is freed,
and the host tier, which frees nothing there, is left out. All live in one process and take steps in turn; the ratio of times
is taken within a round. `waited` is the time that compute or the host waited for copies and files: what was not hidden.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rows import environment, spread
from torch import Tensor, nn

import meshkit as mk
from meshkit.memory.offload import Offload, offload_of
from meshkit.models import Llama, LlamaConfig

RESULTS = Path(__file__).parent / "results" / "offload.jsonl"
Mode = Literal["none", "full", "selective"]
POLICIES: tuple[tuple[Mode, Literal["host", "disk"] | None], ...] = (
    ("none", None),
    ("none", "host"),
    ("none", "disk"),
    ("selective", None),
    ("selective", "host"),
    ("full", None),
    ("full", "host"),
    ("full", "disk"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: Literal["cpu", "cuda"] = "cpu"
    hidden: int = 256
    layers: int = 8
    tokens: int = 1024
    rows: int = 1
    rounds: int = 5
    ahead: int = 1
    folder: Path | None = None
    """of the disk's files; default: the system's for temporary files"""
    record: bool = False
    """append a row for each policy to benchmarks/results/offload.jsonl"""


def build(settings: Settings, mode: Mode, to: Literal["host", "disk"] | None) -> tuple[nn.Module, Offload | None]:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 7 // 2,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 64,
        num_key_value_heads=max(1, settings.hidden // 256),
        head_dim=64,
    )
    torch.manual_seed(0)
    model = Llama(config).to(settings.device, torch.bfloat16 if settings.device == "cuda" else torch.float32)
    blocks = [f"layers.{index}" for index in range(settings.layers)]
    mk.recompute(model, blocks=blocks, mode=mode)
    if to is not None:
        policy = mk.strategy.ActivationOffload(
            to=to, ahead=settings.ahead, folder=settings.folder if to == "disk" else None, staging=64 << 20
        )
        mk.offload_activations(model, blocks=blocks, policy=policy)
    return model, offload_of(model)


def step(model: nn.Module, ids: Tensor) -> tuple[float, int]:
    """(seconds, bytes of memory: see above)"""
    on_gpu = ids.is_cuda
    model.zero_grad()
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else resident_bytes()
    start = time.perf_counter()
    loss = model(ids).float().square().mean()
    memory_bytes = 0 if on_gpu else resident_bytes() - before
    loss.backward()
    if on_gpu:
        torch.cuda.synchronize()
        memory_bytes = torch.cuda.max_memory_allocated() - before
    return time.perf_counter() - start, memory_bytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    settings = tyro.cli(Settings)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    ids = torch.randint(0, 1024, (settings.rows, settings.tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(settings.device)
    policies = [policy for policy in POLICIES if settings.device == "cuda" or policy[1] != "host"]
    models = {policy: build(settings, *policy) for policy in policies}
    for policy, (model, _) in models.items():
        step(model, ids)
        for ours, first in zip(model.parameters(), models[POLICIES[0]][0].parameters(), strict=True):
            assert torch.equal(ours.grad, first.grad), f"{policy} changes gradients"  # type: ignore[arg-type]  # not None
    seconds: dict[object, list[float]] = {policy: [] for policy in policies}
    waited: dict[object, list[float]] = {policy: [] for policy in policies}
    memory_bytes: dict[object, int] = {}
    for _ in range(settings.rounds):
        for policy, (model, offload) in models.items():
            took, memory_bytes[policy] = step(model, ids)
            seconds[policy].append(took)
            if offload is not None:
                offload.end_step()
                waited[policy].append(offload.last_step.waited_s)

    table = Table("recompute", "offload", "memory MiB", "out MiB", "time / none", "quartiles", "waited s")
    for policy, (_, offload) in models.items():
        ratios = spread([mine / first for mine, first in zip(seconds[policy], seconds[POLICIES[0]], strict=True)])
        staged = offload.tier.memory.arena.peak_bytes if offload is not None and not ids.is_cuda else 0
        row = {
            "recompute": policy[0],
            "offload": policy[1] or "none",
            "memory_mib": round((memory_bytes[policy] + staged) / 2**20, 1),
            "stored_mib": round(offload.last_step.stored_bytes / 2**20, 1) if offload is not None else 0.0,
            "time_ratio": asdict(ratios),
            "step_s": round(statistics.median(seconds[policy]), 4),
            "waited_s": round(statistics.median(waited[policy]), 4) if offload is not None else 0.0,
        }
        table.add_row(
            row["recompute"],
            row["offload"],
            f"{row['memory_mib']:,}",
            f"{row['stored_mib']:,}",
            f"{ratios.median:.3f}",
            f"{ratios.low:.3f} to {ratios.high:.3f}",
            f"{row['waited_s']:.3f} of {row['step_s']:.3f}",
        )
        if settings.record:
            shape = {name: value for name, value in asdict(settings).items() if name not in ("record", "folder")}
            with RESULTS.open("a") as file:
                file.write(json.dumps({**environment(), **shape, **row}) + "\n")
    Console().print(table)
    for (_, to), (_, offload) in models.items():
        if offload is not None and to == "disk":
            Console().print(offload.report())
            break


if __name__ == "__main__":
    main()
