"""What does it cost that a model's program is read and proved before a run, for a 70B model and for each step?

    python benchmarks/reading.py                     # a 70B and a 671B model on meta, one process, one thread; minutes
    python benchmarks/reading.py --models 70b        # one of them
    python benchmarks/reading.py --record            # adds rows to results/reading.jsonl

Decided for every mesh: all that `parallelize` does before it changes the model, on one rank, without values; processor
seconds beside those of the same model with 2 blocks, which says what blocks that are alike add. A model of transformers,
which declares nothing of meshkit's. Every step afterwards: what a forward of a split model does to see that its arguments
are those that were proved, in microseconds a call, of 200 calls.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from rows import Spread, environment, spread
from torch import nn

import meshkit as mk
from benchmarks.peers.work import TINY
from meshkit._guards import guards_of
from meshkit.core.asked_once import AskedOnce
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve

RESULTS = Path(__file__).parent / "results" / "reading.jsonl"
FEW = 2  # blocks of the model that says what one costs
CALLS = 200

LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK_671B: dict[str, Any] = {"num_hidden_layers": 61}  # the defaults are DeepSeek-V3's
Name = Literal["70b", "671b"]
MESHES: dict[Name, list[str]] = {
    "70b": ["dp_shard=8", "tp=8", "tp=8, sequence", "pp=8", "cp=8", "pp=4 tp=8"],
    "671b": ["tp=8", "pp=16", "ep=64 dp_shard=64"],
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    models: tuple[Name, ...] = ("70b", "671b")
    rounds: int = 3
    record: bool = False
    """append rows to benchmarks/results/reading.jsonl"""


def build(name: Name, blocks: int | None = None) -> nn.Module:
    """On meta. blocks: instead of all."""
    sizes = {**(LLAMA_70B if name == "70b" else DEEPSEEK_671B), **({"num_hidden_layers": blocks} if blocks else {})}
    with mk.models.meta_parameters():
        if name == "70b":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


def decide(model: nn.Module, mesh: str) -> tuple[Resolved, float]:
    """What was decided, and processor seconds."""
    sizes, _, sequence = mesh.partition(", ")
    begin = time.process_time()
    strategy = mk.Strategy(sequence=bool(sequence))
    resolved = resolve(read_program(model).frozen(), strategy, mk.MeshSpec.parse(sizes))
    return resolved, time.process_time() - begin


def measure(name: Name, mesh: str, rounds: int) -> dict[str, Spread]:
    """In turns, so that both see the same machine."""
    models = {"all": build(name), "few": build(name, 5 if name == "671b" else FEW)}  # three of DeepSeek's are dense
    times: dict[str, list[float]] = {which: [] for which in models}
    for _ in range(rounds):
        for which, model in models.items():
            if which == "few" and "pp" in mesh:
                continue  # fewer blocks than stages
            times[which].append(decide(model, mesh)[1])
    return {which: spread(values) for which, values in times.items() if values}


def each_step() -> Spread:
    """Microseconds of the guards of a split model, which look at the arguments of its forward."""

    class Nothing(nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            return input_ids

    resolved, _ = decide(mk.models.Llama(TINY), "dp_shard=2 tp=2")
    bare, watched = Nothing(), Nothing()
    for guard in guards_of(resolved, AskedOnce(None)):
        watched.register_forward_pre_hook(guard, with_kwargs=True)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    seconds: dict[str, list[float]] = {"bare": [], "watched": []}
    for _ in range(20):
        for which, model in (("bare", bare), ("watched", watched)):
            begin = time.perf_counter()
            for _ in range(CALLS):
                model(ids)
            seconds[which].append(time.perf_counter() - begin)
    return spread([(b - a) / CALLS * 1e6 for a, b in zip(seconds["bare"], seconds["watched"], strict=True)])


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(1)
    table = Table("model", "mesh", "processor seconds", "with few blocks")
    rows = []
    hook = each_step()  # first: it also loads what the first reading would
    for name in settings.models:
        for mesh in MESHES[name]:
            measured = measure(name, mesh, settings.rounds)
            few = f"{measured['few'].median:.1f}" if "few" in measured else "–"
            all_ = measured["all"]
            table.add_row(name, mesh, f"{all_.median:.1f} ({all_.low:.1f} to {all_.high:.1f})", few)
            rows.append({"model": name, "mesh": mesh, **{which: asdict(value) for which, value in measured.items()}})
    Console().print(table)
    print(f"each call of the model afterwards: {hook.median:.1f} µs ({hook.low:.1f} to {hook.high:.1f})")
    if settings.record:
        load = round(os.getloadavg()[0], 1)
        with RESULTS.open("a") as file:
            for row in [*rows, {"model": "any", "mesh": "dp_shard=2 tp=2", "us_a_call": asdict(hook)}]:
                file.write(
                    json.dumps({**environment(), "transformers": transformers.__version__, "load": load, **row}) + "\n"
                )


if __name__ == "__main__":
    main()
