"""A step's memory in time under four policies, to one scale, for docs/memory.md. Runs anywhere in a minute.

python benchmarks/memory_pictures.py docs/pictures/memory.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import meshkit as mk
from meshkit.models import LLAMA32_1B, LLAMA_PLAN, Llama
from meshkit.preflight.estimate import svg

POLICIES = {
    "fp32": mk.MemoryPolicy(),
    "bf16": mk.MemoryPolicy(precision=mk.strategy.Precision()),
    "bf16, selective recompute": mk.MemoryPolicy(recompute="selective", precision=mk.strategy.Precision()),
    "bf16, full recompute": mk.MemoryPolicy(recompute="full", precision=mk.strategy.Precision()),
}


def main() -> None:
    with torch.device("meta"):
        model = Llama(LLAMA32_1B)
    estimates = {
        name: mk.estimate(model, "dp_shard=8", plan=LLAMA_PLAN, rows=1, seq_len=8192, memory=policy)
        for name, policy in POLICIES.items()
    }
    path = Path(sys.argv[1])
    path.write_text(svg(estimates), encoding="utf-8")
    for name, estimate in estimates.items():
        print(f"{name:28} {estimate.peak_bytes:>15,} bytes in the {estimate.where.removeprefix('the ')}")


if __name__ == "__main__":
    main()
