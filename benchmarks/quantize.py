"""How fast is the quantization of what travels, against a copy of the same bytes?

    python benchmarks/quantize.py --record

One tensor of fp32 (a delta of local updates) to int8 and int4 and back, as it is and compiled. Rates are bytes read and
written over seconds; the ratio is to the rate of a copy in the same process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Column, Table
from rows import environment, spread

from meshkit.core.block_quantization import BLOCK, BlockWire, dequantize_blocks, quantize_blocks

RESULTS = Path(__file__).parent / "results" / "quantize.jsonl"
WIRES: tuple[BlockWire, ...] = ("int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Settings:
    mib: int = 1024
    """of fp32"""
    repeats: int = 20
    record: bool = False
    """append a row to benchmarks/results/quantize.jsonl"""


def seconds_of(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def main(settings: Settings) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.randn(settings.mib * 2**20 // 4 // BLOCK, BLOCK, device=device)
    other = torch.empty_like(values)
    copy = spread(
        [2 * values.nbytes / s / 1e9 for s in seconds_of(lambda: other.copy_(values), settings.repeats, device)]
    )
    row = {**environment(), "benchmark": "quantize", "mib": settings.mib, "copy_gb_per_s": asdict(copy), "rates": {}}
    for wire in WIRES:
        packed = quantize_blocks(values, wire)
        moved = values.nbytes + packed.nbytes
        for how in ("eager", "compiled"):
            there, back = quantize_blocks, dequantize_blocks
            if how == "compiled":
                there, back = torch.compile(there), torch.compile(back)
            for name, call in (
                ("quantize", lambda there=there, wire=wire: there(values, wire)),
                ("dequantize", lambda back=back, wire=wire, packed=packed: back(packed, wire, torch.float32)),
            ):
                try:
                    rate = spread([moved / s / 1e9 for s in seconds_of(call, settings.repeats, device)])
                except torch._dynamo.exc.TorchDynamoException as error:  # Inductor of torch 2.11 cannot, on CUDA
                    print(f"{wire} {name} {how}: {type(error).__name__}", flush=True)
                    continue
                row["rates"][f"{wire} {name} {how}"] = {**asdict(rate), "of_copy": round(rate.median / copy.median, 3)}
    table = Table("what", Column("GB/s", justify="right"), Column("of a copy", justify="right"))
    table.add_row("copy", f"{copy.median:,.0f}", "1")
    for name, rate in row["rates"].items():
        table.add_row(name, f"{rate['median']:,.0f}", f"{rate['of_copy']:.2f}")
    Console().print(table)
    if settings.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
