"""What does it cost all ranks together that a forward is read and proved before a first step?

    torchrun --nproc-per-node 8 benchmarks/first_step.py --mesh "pp=2 dp_shard=2 tp=2"
    torchrun --nproc-per-node 2 benchmarks/first_step.py --mesh tp=2 --record     # adds a row to results/first_step.jsonl

Processor seconds of `parallelize`, weights and a first `forward_backward` of a small Llama: summed over ranks, and of the
rank with the most. The first round of a process, which also imports, is left out.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from rows import environment, spread

import meshkit as mk

RESULTS = Path(__file__).parent / "results" / "first_step.jsonl"
MODEL = mk.models.LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    mesh: str
    rounds: int = 5
    record: bool = False
    """append a row to benchmarks/results/first_step.jsonl"""


def seconds_of(mesh: mk.Mesh) -> list[float]:
    """Of every rank."""
    torch.manual_seed(0)
    model = mk.models.Llama(MODEL)
    ids = torch.randint(0, MODEL.vocab_size, (4, 17))
    began = time.process_time()
    run = mk.parallelize(model, mesh)
    mk.init_weights(run.model, seed=0)
    run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, microbatches=2)
    own = torch.tensor([time.process_time() - began], dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [float(each) for each in every]


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    mesh = mk.init_mesh(settings.mesh, device_type="cpu")
    rounds = [seconds_of(mesh) for _ in range(settings.rounds + 1)][1:]
    if dist.get_rank() == 0:
        total, most = spread([sum(each) for each in rounds]), spread([max(each) for each in rounds])
        print(f"{settings.mesh}: {total.median:.2f} s of all ranks, {most.median:.2f} s of one")
        if settings.record:
            row = environment() | {"mesh": settings.mesh, "all_s": asdict(total), "one_s": asdict(most)}
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
