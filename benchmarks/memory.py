"""Is the peak that `estimate` predicts the one that a GPU measures? Eight configurations of one Llama, one row each.

python benchmarks/memory.py                    # on one GPU, max_memory_allocated beside the prediction
python benchmarks/memory.py --device cpu       # anywhere: the same tracker on a real step, at a small size

Needs no launcher: a world of one rank. Rows go to results/memory.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import environment

import meshkit as mk
from meshkit.models import LLAMA32_1B, LLAMA_PLAN, Llama, LlamaConfig
from meshkit.preflight.estimate import Estimate, measure

SMALL = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
)


def policies() -> Iterator[tuple[str, mk.MemoryPolicy]]:
    """Recompute, offload, loss and optimizer, two by two."""
    precision = mk.strategy.Precision()
    for recompute in ("none", "full"):
        yield f"recompute {recompute}", mk.MemoryPolicy(recompute=recompute, precision=precision)
    yield "recompute selective", mk.MemoryPolicy(recompute="selective", precision=precision)
    yield "fp32", mk.MemoryPolicy()
    full = mk.MemoryPolicy(recompute="full", precision=precision)
    yield "full, chunked loss", dataclasses.replace(full, loss=mk.strategy.ChunkedLoss())
    yield "full, activations on the host", dataclasses.replace(full, offload=mk.strategy.ActivationOffload())
    offloaded = mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload())
    yield "full, optimizer on the host", dataclasses.replace(full, optimizer=offloaded)
    yield (
        "full, chunked loss, both on the host",
        dataclasses.replace(
            full, loss=mk.strategy.ChunkedLoss(), offload=mk.strategy.ActivationOffload(), optimizer=offloaded
        ),
    )


def predict(shape: LlamaConfig, policy: mk.MemoryPolicy, *, rows: int, seq_len: int, kernels: Any) -> Estimate:
    with torch.device("meta"):
        model = Llama(shape)
    return mk.estimate(model, "dp_shard=1", plan=LLAMA_PLAN, rows=rows, seq_len=seq_len, memory=policy, kernels=kernels)


def run_of(shape: LlamaConfig, policy: mk.MemoryPolicy, mesh: mk.Mesh) -> mk.Run:
    with torch.device("meta"):
        model = Llama(shape)
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN, memory=policy)
    mk.init_weights(run.model, seed=0)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    shape, seq_len = (LLAMA32_1B, options.seq_len) if on_gpu else (SMALL, min(options.seq_len, 256))
    predicted = {
        name: predict(shape, policy, rows=options.rows, seq_len=seq_len, kernels=options.device)
        for name, policy in policies()
    }
    mesh = mk.init_mesh("dp_shard=1", device_type=options.device)
    results = Path(__file__).parent / "results" / "memory.jsonl"
    for name, policy in policies():
        run = run_of(shape, policy, mesh)
        measured = measure(run, mk.adamw(run, lr=1e-4), rows=options.rows, seq_len=seq_len)
        prediction = predicted[name].beside(measured)
        row = {
            "benchmark": "memory",
            "configuration": name,
            "model_layers": shape.num_hidden_layers,
            "rows": options.rows,
            "seq_len": seq_len,
            "predicted_bytes": prediction.peak_bytes,
            "measured_bytes": measured,
            "ratio": round(prediction.peak_bytes / measured, 4),
            "where": prediction.where,
            **environment(),
        }
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name:40} predicted {prediction.peak_bytes:>15,}  measured {measured:>15,}  ratio {row['ratio']}")
        del run
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
