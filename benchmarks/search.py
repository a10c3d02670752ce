"""How long does a search take, and how much memory, for 70B on 512 ranks, 405B on 16,384 and DeepSeek-V3 on 2,048?

    python benchmarks/search.py                          # each in a process of its own, one after the other
    python benchmarks/search.py --models 70b --record    # adds rows to results/search.jsonl
    python benchmarks/search.py --plain                  # of rows of shardings the ZeRO stages alone
    python benchmarks/search.py --mix                    # mixtures of two modes of recompute too
    python benchmarks/search.py --processes 2            # one more traces ahead

The default space on the datasheet of H100s with 80 GiB, bf16, the model's own plan. CPU seconds and GiB
are of the process that searches, which has one thread; with one process, on a machine with nothing else, they are the seconds
that it takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rows import environment
from torch import nn

import meshkit as mk
from meshkit.strategy import DataPolicy, Precision

RESULTS = Path(__file__).parent / "results/search.jsonl"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    config: Any
    ranks: int
    sequences: int
    seq_len: int
    limit_s: float
    """processor seconds that a search may take on two cores"""
    end_s: float | None = None
    """after which it is ended with the best so far"""

    def model(self) -> nn.Module:
        made = mk.models.DeepseekV3 if isinstance(self.config, mk.models.DeepseekV3Config) else mk.models.Llama
        with torch.device("meta"):
            model = made(self.config)
        # Buffers, as the bias of a router, may not be on meta.
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, torch.zeros_like(buffer, device="cpu"))
        return model


CASES = {
    "70b": Case(config=mk.models.LLAMA3_70B, ranks=512, sequences=1024, seq_len=8192, limit_s=60),
    "405b": Case(config=mk.models.LLAMA31_405B, ranks=16384, sequences=2048, seq_len=8192, limit_s=120),
    "deepseek-v3": Case(
        config=mk.models.DEEPSEEK_V3, ranks=2048, sequences=15360, seq_len=4096, limit_s=120, end_s=110
    ),
}


def measured(name: str, plain: bool, mix: bool, processes: int) -> dict[str, Any]:
    case, model = CASES[name], CASES[name].model()
    fixed = mk.Strategy(plan=mk.models.model_plan(case.config), memory=mk.MemoryPolicy(precision=Precision()))
    batch = mk.Batch(sequences=case.sequences, seq_len=case.seq_len)
    began, cpu = time.perf_counter(), time.process_time()
    said = 0.0

    def progress(priced: int, left: int, best: object) -> None:
        nonlocal said
        now = time.process_time() - cpu
        if now > said + 10:
            said = now
            print(f"{now:.0f} CPU s: {priced:,} priced, {left:,} left, best {best}", flush=True)

    found = mk.search(
        model,
        "h100",
        batch,
        world=case.ranks,
        space=mk.Space(data=(DataPolicy(),) if plain else mk.Space().data, mix=mix),
        device_memory=80 * GIB,
        fixed=fixed,
        limit_s=case.end_s,
        processes=processes,
        progress=progress,
    )
    print(found, flush=True)
    return {
        "model": name,
        "plain": plain,
        "mix": mix,
        "processes": processes,
        "ranks": case.ranks,
        "batch": asdict(batch),
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "limit_s": case.limit_s,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "gap": round(found.gap, 4),
        "priced": len(found.tried),
        "refused": sum(found.refused.values()),
        "unfit": found.unfit,
        "cut": found.cut,
        "best": found.flags,
        "forecast_s": None if found.winner is None else round(found.winner.seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--mix", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measured, name, options.plain, options.mix, options.processes)
            row = environment() | found.result()
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
