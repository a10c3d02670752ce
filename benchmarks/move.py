"""What does a move to another strategy cost beside saving and loading: the ratio of their seconds, in one run?

    torchrun --nproc-per-node 2 benchmarks/move.py --before dp_shard=2 --after tp=2
    torchrun --nproc-per-node 4 benchmarks/move.py --before "dp_shard=2 tp=2" --after "pp=2 dp_shard=2" --record

Both begin with a run that has trained a step, and end with one under the other strategy: a move; or a save to disk (a RAM
disk with --folder /dev/shm), a new run and optimizer, and a load. What both do, `parallelize`, is measured apart. Bytes are
summed over ranks: of the plan, of its lower bound, and as they were seen to be sent. Prints one JSON row, of rank 0; --record
adds it to results/move.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig

RESULTS = Path(__file__).parent / "results/move.jsonl"


def build(config: LlamaConfig, mesh: mk.Mesh) -> tuple[mk.Run, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Llama(config)
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN)
    return run, mk.adamw(run, lr=1e-4)


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds until all ranks are through, the result)"""
    dist.barrier()
    began = time.perf_counter()
    result = act()
    dist.barrier()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="dp_shard=2")
    parser.add_argument("--after", default="tp=2")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where checkpoints are written; default: the temporary folder")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    meshes = [mk.init_mesh(options.before), mk.init_mesh(options.after)]
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.hidden // 8,
    )
    folder = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    run, optimizer = build(config, meshes[0])
    mk.init_weights(run.model, seed=0)
    ids = torch.randint(0, config.vocab_size, (4, 65), generator=torch.Generator().manual_seed(0))
    rows = ids.tensor_split(meshes[0].data_ranks)[meshes[0].data_rank]
    run.forward_backward({"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
    optimizer.step()
    optimizer.zero_grad()
    ratios, shares, seconds = [], [], []
    for number in range(options.repeats + 1):
        mesh = meshes[1 - number % 2]  # to and fro

        def save_and_load(mesh: mk.Mesh = mesh, number: int = number) -> None:
            with mk.Checkpointer(f"{folder[0]}/{number}", asynchronous=False) as checkpointer:
                checkpointer.save(1, run, optimizer)
                checkpointer.load(*build(config, mesh))

        saved, _ = timed(save_and_load)
        made, _ = timed(lambda mesh=mesh: build(config, mesh))
        # To observe slows what is observed: only the first, which opens files and groups too.
        with mk.observe(run.mesh) if not number else nullcontext({}) as seen:
            moved, plan = timed(lambda mesh=mesh: run.move(mesh=mesh.spec, optimizer=optimizer))
        if number:
            ratios.append(saved / moved)
            shares.append(made / moved)
            seconds.append(moved)
            continue
        # Beside messages of one byte, by which channels of pp are opened.
        sent = sum(message.size * count for message, count in seen.items() if message.op == "send" and message.size > 1)
        total, planned = torch.tensor(sent), plan
        dist.all_reduce(total)
        assert int(total) == planned.bytes_moved, (int(total), planned.bytes_moved)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
        row = {
            "benchmark": "move",
            "before": options.before,
            "after": options.after,
            "parameters": sum(param.numel() for param in run.full_model.parameters()),
            "save_and_load_over_move": vars(spread(ratios)),
            "parallelize_share_of_move": vars(spread(shares)),
            "move_s": vars(spread(seconds)),
            "bytes_sent": int(total),
            "bytes_planned": planned.bytes_moved,
            "least_bytes": planned.lower_bound_bytes,
            **environment(),
        }
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
