"""What does a checkpoint in memory in every step cost: its share of a step's processor time, in one run?

    torchrun --nproc-per-node 2 benchmarks/in_memory.py --mesh dp_shard=2
    torchrun --nproc-per-node 2 benchmarks/in_memory.py --mesh dp_shard=2 --tokens 8192 --record

A save copies weights and moments once and sums their words; the step computes with each weight for each token. So its share
falls with the tokens of a rank, and with the ranks that share the weights. Steps with and without a save take turns. Prints
one JSON row, of rank 0; --record adds it to results/in_memory.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig

RESULTS = Path(__file__).parent / "results/in_memory.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp_shard=2")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank in a step")
    parser.add_argument("--repeats", type=int, default=9, help="of a step with and one without")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    mesh = mk.init_mesh(options.mesh)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.hidden // 8,
    )
    torch.manual_seed(0)
    model = Llama(config)
    parameters = sum(param.numel() for param in model.parameters())
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN)
    optimizer = mk.adamw(run, lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (options.tokens // 512, 513))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    folder = [tempfile.mkdtemp() if mesh.rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    checkpointer = mk.Checkpointer(folder[0], memory=mk.checkpoint.InMemory())
    shares = []
    for number in range(options.repeats + 2):
        spent = []
        for saves in (False, True):
            began = time.process_time()
            optimizer.zero_grad()
            run.forward_backward(batch)
            mk.clip_grad_norm(run, 1.0)
            optimizer.step()
            if saves:
                checkpointer.save_in_memory(number + 1, run, optimizer)
                checkpointer.wait_in_memory()  # and its thread's work
            spent.append(time.process_time() - began)
        if number >= 2:  # the first two reserve the slots
            shares.append(spent[1] / spent[0] - 1)
    checkpointer.close()
    if mesh.rank == 0:
        row = {
            "benchmark": "in_memory",
            "mesh": options.mesh,
            "parameters": parameters,
            "tokens_of_a_rank": options.tokens,
            "share": vars(spread(shares)),
            **environment(),
        }
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
