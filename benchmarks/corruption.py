"""What do checks for silent data corruption cost: the guard's share of a step's processor time, in one run?

    torchrun --nproc-per-node 2 benchmarks/corruption.py --mesh dp_shard=2
    torchrun --nproc-per-node 2 benchmarks/corruption.py --mesh dp_replicate=2 --tokens 8192 --record

The guard sums words of weights, moments and gradients, and runs a microbatch again in every --replay-every steps; the step
computes with each weight for each token. So its share falls with the tokens of a rank, and with the ranks that share the
weights. Prints one JSON row, of rank 0; --record adds it to results/corruption.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.faults import CorruptionGuard
from meshkit.faults.rest import AtRest
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig

RESULTS = Path(__file__).parent / "results/corruption.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp_shard=2")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank in a step")
    parser.add_argument("--every-steps", type=int, default=10)
    parser.add_argument("--replay-every", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, help="of that many steps")
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
    spent, inside = [0.0], [False]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return function(*args, **kwargs)
            began, inside[0] = time.process_time(), True
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - began
                inside[0] = False

        return inner

    watched = {
        CorruptionGuard: ("_before_step", "_after_step", "check"),
        AtRest: ("begin", "end"),
        mk.Run: ("_repeat",),
    }
    shares = []
    with ExitStack() as patches:
        for owner, names in watched.items():
            functions = {name: counted(getattr(owner, name)) for name in names}
            patches.enter_context(mock.patch.multiple(owner, **functions))
        guard = CorruptionGuard(run, optimizer, every_steps=options.every_steps, replay_every=options.replay_every)
        for repeat in range(options.repeats + 1):
            spent[0], began = 0.0, time.process_time()
            for step in range(1, options.every_steps + 1):
                optimizer.zero_grad()
                run.forward_backward(batch)
                mk.clip_grad_norm(run, 1.0)
                optimizer.step()
                guard.check(step)
            if repeat:  # the first builds what is built once
                shares.append(spent[0] / (time.process_time() - began - spent[0]))
    if mesh.rank == 0:
        row = {
            "benchmark": "corruption",
            "mesh": options.mesh,
            "parameters": parameters,
            "tokens_of_a_rank": options.tokens,
            "every_steps": options.every_steps,
            "replay_every": options.replay_every,
            "share": vars(spread(shares)),
            **environment(),
        }
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
