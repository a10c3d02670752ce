"""How far behind is training whose parameters and gradients travel in a few bits, with and without error feedback?

python -m benchmarks.wires --seeds 0 1 2      # 300 steps of each policy on four ranks; rows go to results/slow_links.jsonl

A Llama of 0.13M parameters learns the bytes of docs/*.md, on dp_shard=4 over gloo. All policies of a seed have its first
values and its data; rows of different commits have other data. Losses are held-out nats per byte; bytes those that leave a
rank on dp_shard in a step, by `explain`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshkit as mk
from benchmarks.rows import environment
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.strategy import DataPolicy

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "slow_links.jsonl"
RANKS, ROWS, TOKENS, HELD_OUT_ROWS, LR = 4, 32, 64, 256, 1e-3
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
POLICIES = {
    "exact": DataPolicy(),
    "int8-int4": DataPolicy(gather="int8", reduce="int4"),
    "int8-int4-no-feedback": DataPolicy(gather="int8", reduce="int4", feedback=False),
    "reduce-int4": DataPolicy(reduce="int4"),
    "reduce-int4-no-feedback": DataPolicy(reduce="int4", feedback=False),
    "int8-int8": DataPolicy(gather="int8", reduce="int8"),
    "fp8-int4": DataPolicy(gather="fp8", reduce="int4"),
    "int4-int4": DataPolicy(gather="int4", reduce="int4"),
}


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and held-out ones: the last tenth."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def rows_of(data: Tensor, starts: Tensor) -> dict[str, Tensor]:
    rows = data[starts.unsqueeze(1) + torch.arange(TOKENS + 1)]
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def bytes_a_step(policy: DataPolicy) -> int:
    """That leave a rank on dp_shard: of a gather and a reduce-scatter as a ring sends them."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    said = mk.explain(
        model, f"dp_shard={RANKS}", plan=LLAMA_PLAN, data=policy, rows=ROWS // RANKS, seq_len=TOKENS
    ).messages
    large = [(each, times) for each, times in said.items() if each.size > 64]
    return round(
        sum(each.size * times * (1 if each.op == "all_to_all" else (RANKS - 1) / RANKS) for each, times in large)
    )


def train(name: str, *, seed: int, steps: int) -> dict[str, Any]:
    """On every rank."""
    began = time.monotonic()
    mesh = mk.init_mesh(f"dp_shard={RANKS}")
    with torch.device("meta"):
        model = Llama(CONFIG)
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN, data=POLICIES[name])
    mk.init_weights(run.model, seed=seed)
    optimizer = mk.adamw(run, lr=LR)
    data, held_out = corpus()
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        starts = torch.randint(0, len(data) - TOKENS, (ROWS,), generator=generator)
        run.forward_backward(rows_of(data, starts.tensor_split(RANKS)[mesh.rank]))
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    starts = torch.arange(HELD_OUT_ROWS) * ((len(held_out) - TOKENS - 1) // HELD_OUT_ROWS)
    batch = rows_of(held_out, starts.tensor_split(RANKS)[mesh.rank])
    with torch.no_grad():
        logits = run.model(batch["input_ids"])
    total = mk.cross_entropy(logits, batch["labels"]) / (HELD_OUT_ROWS * TOKENS)
    torch.distributed.all_reduce(total)
    return {
        "question": "how far behind are quantized wires of FSDP",
        "run": name,
        "policy": str(POLICIES[name]),
        "mesh": f"dp_shard={RANKS}",
        "steps": steps,
        "seed": seed,
        "lr": LR,
        "global_batch": ROWS,
        "held_out_nats_per_byte": round(float(total), 4),
        "bytes_a_step": bytes_a_step(POLICIES[name]),
        "took_s": round(time.monotonic() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        subprocess.run([*command, "-m", "benchmarks.wires", *sys.argv[1:]], check=True)
        return
    for seed in args.seeds:
        for name in args.only:
            row = train(name, seed=seed, steps=args.steps)
            if os.environ["RANK"] == "0":
                line = json.dumps({**environment(), **row})
                with RESULTS.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
