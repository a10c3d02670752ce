"""Is post-training with meshkit faster and smaller than with TRL's trainers?

    python benchmarks/post_training.py --task sft                            # CPU: 2 gloo ranks; needs trl and datasets
    python benchmarks/post_training.py --task sft --packing rows             # rows packed beforehand, for both
    python benchmarks/post_training.py --task dpo --reference precomputed

One Llama, the same weights and the same examples in the same steps: bodies of functions of Python's standard library, asked
for by signature and docstring, of 10 to 500 tokens; for DPO the real body against a wrong one. TRL is run as
`trl.py` says, in microbatches of several sizes, each a loop of its own; meshkit packs each step into few rows. The
first losses must agree, or nothing is reported. Blocks of a few steps alternate between the loops; a ratio is taken within a
round, and its median over rounds is printed with its quartiles. Tokens are those of examples, padding is not counted.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Column, Table
from rows import environment

import meshkit as mk
from benchmarks.peers.meshkit import adamw, decoder, update
from benchmarks.peers.turns import (
    Block,
    Leave,
    Turns,
    compare,
    join_world,
    refuse_other_losses,
    resident_bytes,
    take_turns,
    world,
)
from benchmarks.peers.work import transformers_decoder
from meshkit.algos.preference import PreferenceLoss, count_pairs, preference_objective
from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.data import ExampleLoader, Tokenizer, encode_pair, fit, train_tokenizer
from meshkit.data._cursor import permute
from meshkit.data.bins import first_fit_decreasing
from meshkit.data.examples import Unit, encode_completion, members, unit_length
from meshkit.data.tasks.standard_library import function_tasks, preference_tasks
from meshkit.models import LLAMA_PLAN, LlamaConfig, Rope

RESULTS = Path(__file__).parent / "results" / "post_training.jsonl"

PROOF_STEPS = 5  # so many first losses must agree; after that rounding errors may have grown
TOL_LOSS = 1e-5  # relative: only the order of sums differs, which AdamW's first steps amplify
BETA = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    task: Literal["sft", "dpo"] = "sft"
    packing: Literal["step", "rows"] = "step"
    """step: the samples of a step are examples or pairs, which meshkit packs and TRL pads. rows (sft): they are rows of
    seq_len tokens, filled beforehand, for both."""
    reference: Literal["live", "precomputed"] = "live"
    """dpo: the reference runs in every step, or before the first one."""
    samples: int | None = None
    """Of a global batch: examples, pairs or rows. None: 32 examples, 16 pairs or 8 rows."""
    seq_len: int = 512
    """Tokens of a row; longer samples are left out."""
    vocab: int = 8016
    """With 256 features the head is to the blocks as in a model of half a billion parameters."""
    layers: int = 6
    mesh: str = "dp_shard=2"
    zero: int = 2
    microbatches: int = 1
    """meshkit's."""
    chunk: int = 512
    """Tokens of a chunk of meshkit's loss."""
    trl_rows: tuple[int, ...] = (16, 4, 1)
    """Samples of a rank in a microbatch of TRL, a loop for each."""
    rounds: int = 7
    warmup: int = 3
    steps: int = 4
    """Steps of a block."""
    record: bool = False
    """Append a row per comparison to benchmarks/results/post_training.jsonl."""

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            rope=Rope(theta=500_000.0),
        )

    @property
    def global_batch(self) -> int:
        return self.samples or (16 if self.task == "dpo" else 32 if self.packing == "step" else 8)

    @property
    def all_steps(self) -> int:
        """One more than are measured, so that no loop ends before its last turn."""
        return self.warmup + self.rounds * self.steps + 1


@dataclass(frozen=True, kw_only=True)
class Data:
    """units: all of them. steps: what `ExampleLoader` takes in each step, by rows: a unit each, or those of a packed row."""

    tokenizer: Tokenizer
    units: Sequence[Unit]
    steps: list[list[list[Unit]]]

    def tokens(self, steps: range) -> int:
        return sum(unit_length(unit) for step in steps for row in self.steps[step] for unit in row)


def prepare(settings: Settings) -> Data:
    if settings.task == "sft":
        records = function_tasks().train
        texts = ["{prompt}{completion}".format(**record.fields) for record in records]
    else:
        records = preference_tasks().train
        texts = ["{prompt}{chosen}".format(**record.fields) for record in records]
    tokenizer = train_tokenizer(texts, vocab_size=settings.vocab)
    if settings.task == "sft":
        rows = (record.fields for record in records)
        units: list[Unit] = [encode_completion(tokenizer, row["prompt"], row["completion"]) for row in rows]
    else:
        units = [encode_pair(record.fields, tokenizer) for record in records]
    units = fit(units, seq_len=settings.seq_len, truncate="drop")
    samples = [[unit] for unit in units]
    if settings.packing == "rows":
        bins = first_fit_decreasing([unit_length(unit) for unit in units], settings.seq_len)
        samples = [[units[index] for index in indices] for indices in bins]
    size = settings.global_batch
    order = [permute(index, len(samples), seed=0, epoch=0) for index in range(settings.all_steps * size)]
    steps = [[samples[index] for index in order[first : first + size]] for first in range(0, len(order), size)]
    return Data(tokenizer=tokenizer, units=units, steps=steps)


# ------------------------------------------------------------------------------------------------------ the loops


def run_rank(rank: int, loop: str, data: Data, settings: Settings, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if loop != "meshkit":
        importlib.import_module("benchmarks.peers.trl")  # before memory is counted
    imported_bytes = resident_bytes()
    device = join_world(rank, mk.MeshSpec.parse(settings.mesh).world_size, folder)
    turns = Turns(pipe, device, warmup=settings.warmup, steps=settings.steps, imported_bytes=imported_bytes)
    train = train_with_meshkit if loop == "meshkit" else train_with_trl
    with suppress(Leave):
        train(loop, data, settings, turns)
    dist.destroy_process_group()


def train_with_meshkit(loop: str, data: Data, settings: Settings, turns: Turns) -> None:
    mesh = mk.init_mesh(settings.mesh, device_type="cpu")
    config = settings.config

    def start() -> mk.Run:
        return mk.parallelize(
            decoder(transformers_decoder(config), config),
            mesh,
            plan=LLAMA_PLAN,
            memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=settings.chunk)),
            zero=settings.zero,
        )

    run = start()
    optimizer = adamw(run)
    loader = ExampleLoader(
        data.units,
        seq_len=settings.seq_len,
        global_batch=settings.global_batch,
        seed=0,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        packing=settings.packing,
        max_steps=settings.all_steps,
    )
    batches = iter(loader)
    reference = start() if settings.task == "dpo" else None
    if reference is not None and settings.reference == "precomputed":
        batches = iter([{**batch, REFERENCE: token_values(reference, batch)} for batch in loader])
        reference = None
    for batch in batches:
        if settings.task == "sft":
            loss = run.forward_backward(batch, microbatches=settings.microbatches)
        else:
            if reference is not None:
                batch[REFERENCE] = token_values(reference, batch)
            loss = run.forward_backward(
                batch,
                loss=preference_objective(mesh, batch, PreferenceLoss(kind="sigmoid", beta=BETA)),
                count=count_pairs,
                microbatches=settings.microbatches,
            )
        update(run, optimizer)
        turns.end_step(loss)


def train_with_trl(loop: str, data: Data, settings: Settings, turns: Turns) -> None:
    from benchmarks.peers import trl

    rows = int(loop.removeprefix("trl/"))
    model = transformers_decoder(settings.config)
    if settings.task == "sft":
        trl.train_sft(model, data.steps, data.tokenizer, turns, rows=rows)
        return
    trl.train_dpo(
        model,
        transformers_decoder(settings.config).eval(),
        [[unit for row in step for unit in row] for step in data.steps],
        data.tokenizer,
        turns,
        rows=rows,
        beta=BETA,
        precomputed=settings.reference == "precomputed",
    )


# ------------------------------------------------------------------------------------------------------ reporting


def measures(taken: list[Block], data: Data, settings: Settings) -> dict[str, Any]:
    """A loop's own numbers, medians over its turns."""
    first = settings.warmup
    counts = [
        data.tokens(range(first + turn * settings.steps, first + (turn + 1) * settings.steps))
        for turn in range(len(taken))
    ]
    turns = list(zip(counts, taken, strict=True))
    return {
        "tokens_per_s": round(statistics.median(tokens / block.wall_s for tokens, block in turns), 1),
        "cpu_ms_per_1000_tokens": round(statistics.median(1e6 * block.cpu_s / tokens for tokens, block in turns), 1),
        "peak_bytes": int(statistics.median(block.peak_bytes for block in taken)),
    }


def main(settings: Settings) -> None:
    console = Console(soft_wrap=True, width=110)
    data = prepare(settings)
    samples_of_rank = settings.global_batch // mk.MeshSpec.parse(settings.mesh).world_size
    if refused := [rows for rows in settings.trl_rows if samples_of_rank % rows]:
        raise SystemExit(
            f"--trl-rows {refused}: a rank has {samples_of_rank} samples in a step, which these do not divide."
        )
    longest = max(len(example) for unit in data.units for example in members(unit))
    mean = data.tokens(range(settings.all_steps)) / settings.all_steps
    console.print(
        f"{settings.task}, {settings.packing}: {len(data.units)} units, {mean:.0f} tokens a step in the mean, the longest "
        f"example {longest}"
    )
    multiprocessing.set_forkserver_preload(["benchmarks.peers.work"])  # imported once, shared by all ranks
    loops = ["meshkit", *(f"trl/{rows}" for rows in settings.trl_rows)]
    loadavg = [round(os.getloadavg()[0], 1)]
    with ExitStack() as stack:
        ranks = mk.MeshSpec.parse(settings.mesh).world_size
        worlds = {loop: stack.enter_context(world(run_rank, (loop, data, settings), ranks=ranks)) for loop in loops}
        blocks = take_turns(worlds, settings.rounds)
    loadavg.append(round(os.getloadavg()[0], 1))
    losses, worst = refuse_other_losses(blocks, steps=PROOF_STEPS, tolerance=TOL_LOSS)
    measured = {loop: measures(taken, data, settings) for loop, taken in blocks.items()}
    ratios = {loop: compare(blocks["meshkit"], blocks[loop]) for loop in loops[1:]}
    console.print("losses:", " ".join(f"{loss:.6f}" for loss in losses))
    console.print(f"all loops within {worst:.1e} of each other; load average {loadavg[0]:.1f} to {loadavg[1]:.1f}")
    table = Table("loop", *(Column(title, justify="right") for title in ("tokens/s", "CPU ms/1000 tokens", "peak MiB")))
    for loop, value in measured.items():
        cells = (
            f"{value['tokens_per_s']:.0f}",
            f"{value['cpu_ms_per_1000_tokens']:.0f}",
            f"{value['peak_bytes'] / 2**20:.1f}",
        )
        table.add_row(loop, *cells)
    console.print(table)
    table = Table("meshkit /", "time", "CPU time", "peak memory")
    for loop, ratio in ratios.items():
        table.add_row(loop, *(f"{one.median:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in ratio.values()))
    console.print(table)
    if settings.record:
        common = {
            **environment(),
            **{f"{name}_version": importlib.metadata.version(name) for name in ("trl", "transformers", "accelerate")},
            **{
                name: value
                for name, value in dataclasses.asdict(settings).items()
                if name not in ("record", "trl_rows")
            },
            "global_batch": settings.global_batch,
            "loadavg": loadavg,
            "loss_difference": worst,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            for loop, ratio in ratios.items():
                spreads = {name: dataclasses.asdict(one) for name, one in ratio.items()}
                row = {
                    **common,
                    "trl_rows": int(loop.removeprefix("trl/")),
                    **spreads,
                    "meshkit": measured["meshkit"],
                    "trl": measured[loop],
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
