"""Is reinforcement learning with meshkit faster than with TRL's GRPOTrainer, and generation than transformers' generate?

    python benchmarks/rl.py                          # whole steps; CPU: 2 gloo ranks; needs trl and datasets
    python benchmarks/rl.py --part generation        # answers alone

One Llama with the same weights, the same sums to add, written character by character, groups of the same size. A step of
training draws the answers, rewards each by how many of its characters are right, and takes one step of GRPO on all of them.
TRL draws with transformers' `generate`, one batch of all answers of a rank, which runs until the last one ends. Draws are not
the same, so the losses are not either: both must write the same number of tokens, within `TOL_TOKENS`, or nothing is reported
(the loss itself is held against TRL's in tests/algos). Blocks of a few steps alternate; ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import statistics
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
from torch import Tensor

import meshkit as mk
from benchmarks.peers.meshkit import adamw, decoder, update
from benchmarks.peers.turns import Block, Leave, Turns, compare, join_world, resident_bytes, take_turns, world
from benchmarks.peers.work import RL_LEARNING_RATE, reward, transformers_decoder
from meshkit.algos.policy import PRESETS, pack_rollouts, policy_count, policy_objective, step_advantages
from meshkit.algos.rollout import Prompt, Rollout, Sampling, generate
from meshkit.data import REFERENCE_ALPHABET, Record, Tokenizer, addition_tasks, character_tokenizer
from meshkit.models import LLAMA_PLAN, LlamaConfig

RESULTS = Path(__file__).parent / "results" / "rl.jsonl"

TOL_TOKENS = 0.1  # relative: lengths are drawn


@dataclass(frozen=True, kw_only=True)
class Settings:
    part: Literal["training", "generation"] = "training"
    prompts: int = 16
    """of a step"""
    samples: int = 8
    """answers to each"""
    max_new_tokens: int = 64
    digits: int = 8
    """of the numbers to add"""
    hidden: int = 128
    layers: int = 4
    mesh: str = "dp_shard=2"
    zero: int = 2
    seq_len: int = 512
    """tokens of a row, in which meshkit packs the answers"""
    rounds: int = 7
    warmup: int = 2
    steps: int = 3
    """Steps of a block."""
    record: bool = False
    """Append a row to benchmarks/results/rl.jsonl."""

    @property
    def all_steps(self) -> int:
        """One more than are measured, so that no loop ends before its last turn."""
        return self.warmup + self.rounds * self.steps + 1

    @property
    def peer(self) -> str:
        return "trl" if self.part == "training" else "transformers"

    def config(self, tokenizer: Tokenizer) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=self.hidden // 64,
            head_dim=32,
        )


# ------------------------------------------------------------------------------------------------------ the loops


def run_rank(rank: int, loop: str, records: list[Record], settings: Settings, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if loop == "trl":
        importlib.import_module("benchmarks.peers.trl")  # before memory is counted
    imported_bytes = resident_bytes()
    device = join_world(rank, mk.MeshSpec.parse(settings.mesh).world_size, folder)
    turns = Turns(pipe, device, warmup=settings.warmup, steps=settings.steps, imported_bytes=imported_bytes)
    tokenizer = character_tokenizer(REFERENCE_ALPHABET)
    with suppress(Leave):
        LOOPS[loop](records, tokenizer, settings, turns)
    dist.destroy_process_group()


def with_meshkit(records: list[Record], tokenizer: Tokenizer, settings: Settings, turns: Turns) -> None:
    mesh = mk.init_mesh(settings.mesh, device_type="cpu")
    config, loss = settings.config(tokenizer), PRESETS["GRPO"]
    loss = dataclasses.replace(loss, kl=dataclasses.replace(loss.kl, coefficient=0.0))
    run = mk.parallelize(decoder(transformers_decoder(config), config), mesh, plan=LLAMA_PLAN, zero=settings.zero)
    optimizer = adamw(run, RL_LEARNING_RATE)
    sampling = Sampling(max_new_tokens=settings.max_new_tokens, stop_ids=(tokenizer.eos_id,))
    for step in range(settings.all_steps):
        batch_rows = prompts_of_rank(records, step, mesh.data_rank, mesh.data_ranks, settings)
        prompts = [
            Prompt(ids=tokenizer.encode(records[key].fields["prompt"]), key=key, fields=records[key].fields)
            for key in batch_rows
        ]
        written = generate(run, prompts, sampling=sampling, samples=settings.samples)
        if settings.part == "training":
            batch = pack_rollouts([rewarded(each, tokenizer) for each in written], seq_len=settings.seq_len)
            batch |= step_advantages(mesh, batch, loss).values
            run.forward_backward(batch, loss=policy_objective(mesh, batch, loss), count=policy_count(loss))
            update(run, optimizer)
        turns.end_step(on_all_ranks(sum(len(each.ids) for each in written)))


def rewarded(written: Rollout, tokenizer: Tokenizer) -> Rollout:
    ids = written.ids if written.truncated else written.ids[:-1]
    return dataclasses.replace(written, reward=reward(tokenizer.decode(ids.tolist()), written.fields["completion"]))


def with_trl(records: list[Record], tokenizer: Tokenizer, settings: Settings, turns: Turns) -> None:
    from benchmarks.peers import trl

    trl.train_grpo(
        transformers_decoder(settings.config(tokenizer), use_cache=True),
        records,
        reward,
        tokenizer,
        turns,
        prompts=settings.prompts,
        samples=settings.samples,
        max_new_tokens=settings.max_new_tokens,
        learning_rate=RL_LEARNING_RATE,
    )


@torch.no_grad()
def with_transformers(records: list[Record], tokenizer: Tokenizer, settings: Settings, turns: Turns) -> None:
    """One call of `generate` for all answers of a rank, prompts padded on the left, as TRL calls it."""
    model = transformers_decoder(settings.config(tokenizer), use_cache=True).eval()
    for step in range(settings.all_steps):
        batch_rows = prompts_of_rank(records, step, dist.get_rank(), dist.get_world_size(), settings)
        prompts = [
            tokenizer.encode(records[key].fields["prompt"]) for key in batch_rows for _ in range(settings.samples)
        ]
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        generated = model.generate(
            input_ids=padded,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=0,
        )[:, longest:]
        ended = (generated == tokenizer.eos_id).cumsum(1)
        written = (ended - (generated == tokenizer.eos_id).long() == 0).sum()  # the first eos is part of an answer
        turns.end_step(on_all_ranks(int(written)))


LOOPS = {"meshkit": with_meshkit, "trl": with_trl, "transformers": with_transformers}


def prompts_of_rank(records: list[Record], step: int, rank: int, ranks: int, settings: Settings) -> range:
    count = settings.prompts // ranks
    first = step * settings.prompts + rank * count
    return range(first, first + count)


def on_all_ranks(count: int) -> Tensor:
    total = torch.tensor(float(count))
    dist.all_reduce(total)
    return total


# ------------------------------------------------------------------------------------------------------ reporting


def measures(taken: list[Block], settings: Settings) -> dict[str, Any]:
    """A loop's own numbers, medians over its turns."""
    samples = settings.prompts * settings.samples * settings.steps
    return {
        "samples_per_s": round(statistics.median(samples / block.wall_s for block in taken), 2),
        "tokens_per_s": round(
            statistics.median(sum(block.values[-settings.steps :]) / block.wall_s for block in taken), 1
        ),
        "cpu_ms_per_sample": round(statistics.median(1e3 * block.cpu_s / samples for block in taken), 2),
        "peak_bytes": int(statistics.median(block.peak_bytes for block in taken)),
    }


def answer_tokens(taken: list[Block]) -> float:
    """Of a step, over all of them."""
    return statistics.mean(value for block in taken for value in block.values)


def main(settings: Settings) -> None:
    console = Console(soft_wrap=True, width=110)
    ranks = mk.MeshSpec.parse(settings.mesh).world_size
    if settings.prompts % ranks:
        raise SystemExit(f"--prompts {settings.prompts}: {ranks} ranks must divide it.")
    records = addition_tasks(digits=settings.digits).train[: settings.prompts * settings.all_steps]
    multiprocessing.set_forkserver_preload(["benchmarks.peers.work"])  # imported once, shared by all ranks
    loops = ("meshkit", settings.peer)
    loadavg = [round(os.getloadavg()[0], 1)]
    with ExitStack() as stack:
        given = {loop: (run_rank, (loop, records, settings)) for loop in loops}
        worlds = {loop: stack.enter_context(world(*each, ranks=ranks)) for loop, each in given.items()}
        blocks = take_turns(worlds, settings.rounds)
    loadavg.append(round(os.getloadavg()[0], 1))
    tokens = {loop: answer_tokens(taken) for loop, taken in blocks.items()}
    ours, theirs = tokens.values()
    console.print(", ".join(f"{loop} writes {count:.0f} tokens a step" for loop, count in tokens.items()))
    if not abs(ours - theirs) <= TOL_TOKENS * theirs:
        raise SystemExit("not the same work.")
    measured = {loop: measures(taken, settings) for loop, taken in blocks.items()}
    ratio = compare(*blocks.values())
    console.print(f"load average {loadavg[0]:.1f} to {loadavg[1]:.1f}")
    titles = ("samples/s", "answer tokens/s", "CPU ms/sample", "peak MiB")
    table = Table("loop", *(Column(title, justify="right") for title in titles))
    for loop, value in measured.items():
        *numbers, peak = value.values()
        table.add_row(loop, *(f"{number:.1f}" for number in numbers), f"{peak / 2**20:.1f}")
    console.print(table)
    table = Table("ratio", "time", "CPU time", "peak memory")
    table.add_row(" / ".join(loops), *(f"{one.median:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in ratio.values()))
    console.print(table)
    if settings.record:
        peers = {"trl", "transformers", "accelerate"} if settings.part == "training" else {"transformers"}
        row = {
            **environment(),
            **{f"{name}_version": importlib.metadata.version(name) for name in sorted(peers)},
            **{name: value for name, value in dataclasses.asdict(settings).items() if name != "record"},
            "loadavg": loadavg,
            "answer_tokens_per_step": tokens,
            **{name: dataclasses.asdict(one) for name, one in ratio.items()},
            **measured,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
