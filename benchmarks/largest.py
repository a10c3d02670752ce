"""The largest Llama that trains at sequence 4096 on one GPU, and its tokens/s: (a) as it is, (b) with full recompute,
(c) with the optimizer on the host besides.

python benchmarks/largest.py                          # on one GPU
python benchmarks/largest.py --predict-for 80         # anywhere: what `estimate` says of a GPU of 80 GiB

Layers of Llama-3-8B are added until `estimate` says that the next one does not fit; on a GPU that many are then trained,
and one less for as long as memory does not suffice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from memory import predict, run_of
from rows import environment

import meshkit as mk
from meshkit.models import LLAMA3_8B, LlamaConfig

SEQ_LEN, STEPS, MARGIN = 4096, 5, 0.95  # of the memory: workspaces of kernels and fragmentation take the rest
FULL = mk.MemoryPolicy(recompute="full", precision=mk.strategy.Precision())
WAYS = {
    "nothing": mk.MemoryPolicy(precision=mk.strategy.Precision()),
    "full recompute": FULL,
    "and optimizer on the host": dataclasses.replace(
        FULL, optimizer=mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload())
    ),
}


def shape_of(layers: int) -> LlamaConfig:
    return dataclasses.replace(LLAMA3_8B, num_hidden_layers=layers)


def most_layers(policy: mk.MemoryPolicy, device_bytes: int) -> int:
    """By the line through two predictions: every layer costs the same."""
    one, five = (
        predict(shape_of(layers), policy, rows=1, seq_len=SEQ_LEN, kernels="cuda").peak_bytes for layers in (2, 6)
    )
    each = (five - one) / 4
    return max(0, int(2 + (MARGIN * device_bytes - one) / each))


def tokens_per_s(layers: int, policy: mk.MemoryPolicy, mesh: mk.Mesh) -> float:
    run = run_of(shape_of(layers), policy, mesh)
    optimizer = mk.adamw(run, lr=1e-4)
    ids = torch.randint(LLAMA3_8B.vocab_size, (1, SEQ_LEN))
    began = 0.0
    for step in range(STEPS + 2):
        if step == 2:
            torch.cuda.synchronize()
            began = time.monotonic()
        run.forward_backward({"input_ids": ids, "labels": ids})
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return STEPS * SEQ_LEN / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict-for", type=float, default=None, metavar="GIB")
    options = parser.parse_args()
    measured = options.predict_for is None
    memory = torch.cuda.get_device_properties(0).total_memory if measured else int(options.predict_for * 2**30)
    start = {name: most_layers(policy, memory) for name, policy in WAYS.items()}  # before there is a world
    mesh = mk.init_mesh("dp_shard=1") if measured else None
    for name, policy in WAYS.items():
        layers, speed = start[name], None
        while mesh is not None and layers > 0:
            try:
                speed = tokens_per_s(layers, policy, mesh)
                break
            except torch.cuda.OutOfMemoryError:
                layers -= 1
                torch.cuda.empty_cache()
        with torch.device("meta"):
            billions = sum(param.numel() for param in mk.models.Llama(shape_of(layers)).parameters()) / 1e9
        print(
            f"{name:28} {layers:4} layers, {billions:6.2f} billion parameters; predicted {start[name]}; tokens/s {speed}"
        )
        if measured:
            row = {"benchmark": "largest", "way": name, "layers": layers, "predicted_layers": start[name]}
            row |= {"billions": round(billions, 3), "tokens_per_s": speed, **environment()}
            with (Path(__file__).parent / "results" / "largest.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
