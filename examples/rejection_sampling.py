"""Rejection sampling on a mesh: a model writes answers, and is fine-tuned on those that are right. Read it top to bottom.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/rejection_sampling.py --mesh "dp_shard=2 tp=2"
another task    torchrun --nproc-per-node 4 examples/rejection_sampling.py --task addition --out runs/addition
all right ones  torchrun --nproc-per-node 4 examples/rejection_sampling.py --best 4
your model      torchrun --nproc-per-node 8 examples/rejection_sampling.py --mesh "dp_shard=8" --pretrained Qwen2.5-1.5B/ \
                    --data questions.jsonl --reward arithmetic --max-new-tokens 512 --seq-len 2048 --lr 1e-6 --precision bf16

Without --pretrained a small model first learns the task from right answers, until it is right now and then. In each round
it writes `samples` answers to each prompt. Of each prompt the `best` ones with a score of at least `threshold` are kept, and
those of all ranks are learnt as if they were data, `epochs` times, from the weights of the round before. A run that finds a
checkpoint in --out continues from it, on whatever mesh it is started. Reversal goes from about a half of the held-out prompts
right to between 0.87 and 0.92 in the 40 rounds of the defaults (benchmarks/results/rejection_sampling.jsonl).
Source: STaR, Zelikman et al. 2022 (2203.14465); Llama 2, Touvron et al. 2023 (2307.09288); ReST-EM, Singh et al. 2023
(2312.06585), which begins each round from the first weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

import meshkit as mk
from meshkit.algos.policy import select_above, select_best
from meshkit.algos.rewards import score_on_mesh
from meshkit.algos.rollout import Rollout, Sampling, encode_prompts, generate
from meshkit.algos.sft import sft_steps
from meshkit.collectives import gather_over_data
from meshkit.data import REFERENCE_ALPHABET, Example, PromptLoader, character_tokenizer, load_tokenizer
from meshkit.launch import run_main
from meshkit.metrics import Logger, Meter, Progress, show_samples
from meshkit.models import build_model, config_from_pretrained, load_pretrained, meta_parameters, model_plan
from meshkit.recipes.evaluation import SAMPLE_NAMES, greedy_score, sample_rows
from meshkit.recipes.export import export_model
from meshkit.recipes.tasks import REFERENCE_TASKS, load_tasks, small_model, warm_up_policy


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_shard=2 tp=2"; -1 is the ranks that are left"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, trained here first"""
    task: Literal["addition", "reversal", "countdown"] = "reversal"
    """without --data"""
    data: tuple[Path, ...] = ()
    """JSONL, Parquet or Arrow files with prompts and what the reward reads; needs --pretrained"""
    held_out: float = 0.05
    """part of the rows that is only evaluated on"""
    reward: Literal["exact", "arithmetic", "countdown", "unit-tests"] | None = None
    """default: the task's; "exact" with --data"""
    reward_timeout_s: float = 10.0
    """of each answer"""
    out: Path = Path("runs/rejection_sampling")
    """checkpoints, logs and the final model"""

    rounds: int = 40
    prompts: int = 256
    """of one round, over all ranks"""
    samples: int = 4
    """answers to each"""
    best: int = 1
    """answers kept of each prompt, at most"""
    threshold: float = 1.0
    """the least score that is kept"""
    epochs: int = 2
    """times that the answers of a round are learnt"""
    global_batch: int = 32
    """answers of one optimizer step, over all ranks"""
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """default: the task's, 256 with --data"""
    seq_len: int = 64
    """tokens of a row, in which answers are packed"""
    microbatches: int = 1
    """parts a rank runs its rows in, one after the other"""
    sft_steps: int | None = None
    """without --pretrained: steps on right answers before; default: the task's"""
    lr: float = 5e-4
    warmup_steps: int = 2
    """of each round"""
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0

    zero: Literal[1, 2, 3] | None = None
    """sharding over dp_shard; default 3, with pp 1"""
    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    recompute: Literal["none", "activation", "selective", "full"] = "none"
    precision: Literal["fp32", "bf16"] = "fp32"
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`"""
    eval_every: int = 5
    """rounds"""
    eval_prompts: int = 512
    save_every: int = 10
    """rounds"""


def build(config: Config, mesh: mk.Mesh, shape: Any = None) -> mk.Run:
    """The model in parts, without values; `python -m meshkit estimate` runs it too, with the small model's shape."""
    shape = shape or (config_from_pretrained(config.pretrained) if config.pretrained else small_model())
    with meta_parameters():
        model = build_model(shape)
    precision = mk.Precision() if config.precision == "bf16" else None
    return mk.parallelize(
        model,
        mesh,
        plan=model_plan(shape),
        memory=mk.MemoryPolicy(recompute=config.recompute, precision=precision),
        zero=config.zero,
        sequence=config.sequence,
        schedule=config.schedule,
    )


def main() -> None:
    config = tyro.cli(Config)

    # ---------------------------------------------------------------------------------------------- who: the mesh
    mesh = mk.init_mesh(config.mesh)
    speaks = mesh.rank == 0
    say = print if speaks else lambda *_: None
    say(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- what is asked
    tasks = load_tasks(
        config.task,
        config.data,
        held_out=config.held_out,
        evaluated=config.eval_prompts,
        seed=config.seed,
        reward=config.reward,
        reward_timeout_s=config.reward_timeout_s,
        max_new_tokens=config.max_new_tokens,
    )
    tokenizer = load_tokenizer(config.pretrained) if config.pretrained else character_tokenizer(REFERENCE_ALPHABET)
    sampling = Sampling(
        max_new_tokens=tasks.max_new_tokens, temperature=config.temperature, stop_ids=(tokenizer.eos_id,)
    )
    share = {"rank": mesh.data_rank, "ranks": mesh.data_ranks}
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed, **share)
    say(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- something to begin with
    first = config.pretrained or config.out / "sft-model"
    if not first.exists():
        task, run = REFERENCE_TASKS[config.task], build(config, mesh, small_model(tokenizer.vocab_size))
        steps = task.sft_steps if config.sft_steps is None else config.sft_steps
        how = {"steps": steps, "seed": config.seed, "seq_len": config.seq_len, "speaks": speaks}
        warm_up_policy(run, mk.adamw(run, lr=task.sft_lr), tasks.train, tokenizer, first, **how)
    run = build(config, mesh, config_from_pretrained(first))
    load_pretrained(run.model, first)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    say(f"model {sum(p.numel() for p in run.whole.parameters()):,} parameters")

    def held_out_score() -> float:
        return greedy_score(run, tasks.held_out, tokenizer, tasks.score, sampling=sampling)

    # ---------------------------------------------------------------------------------------------- where we stopped
    checkpoints = mk.Checkpointer(config.out / "checkpoints", keep=2)
    start = checkpoints.resume(run, optimizer, loader=prompts, config=config)
    if start >= config.rounds:
        say(f"{config.out} has its {start} rounds; give more --rounds to go on, or another --out to begin anew")
        return
    say(f"resume from round {start}" if start else f"held out before the first round: {held_out_score():.3f}")

    # ---------------------------------------------------------------------------------------------- the loop
    with (
        checkpoints,
        mk.SaveOnSignal() as signals,
        Progress(total_steps=config.rounds, start_step=start, enabled=speaks) as progress,
        Logger(config.out, start_step=start, enabled=speaks, also=[progress.update]) as logger,
    ):
        meter = Meter(total_steps=config.rounds, start_step=start, devices=mesh.spec.world_size, device=mesh.device)
        for round in range(start + 1, config.rounds + 1):
            # What the model writes, what that is worth, and which of it all ranks keep.
            asked = encode_prompts(next(prompts), tokenizer)
            written = generate(
                run, asked, sampling=sampling, samples=config.samples, seed=config.seed, decode=tokenizer.decode
            )
            scores = score_on_mesh(mesh, written, tasks.score)
            rewards = torch.tensor([rollout.reward for rollout in scores.rollouts], dtype=torch.float64)
            groups = torch.tensor([rollout.key for rollout in scores.rollouts], dtype=torch.int64)
            chosen = select_best(rewards, groups, best=config.best) & select_above(rewards, config.threshold)
            own = [lesson(each) for each, keep in zip(scores.rollouts, chosen.tolist(), strict=True) if keep]
            kept = [example for part in gather_over_data(mesh, own) for example in part]

            # What it learns from that.
            scalars = {"reward": scores.mean, "kept": len(kept), "answer_tokens": scores.tokens / scores.answers}
            scalars |= {f"unscored/{kind}": count for kind, count in scores.unscored.items()}
            if kept:
                sft_steps(
                    run,
                    optimizer,
                    kept,
                    steps=-(-len(kept) * config.epochs // config.global_batch),
                    global_batch=config.global_batch,
                    seq_len=config.seq_len,
                    seed=config.seed + round,
                    microbatches=config.microbatches,
                    clip=config.clip,
                    warmup_steps=config.warmup_steps,
                    each=lambda _, learnt, into=scalars: into.update(learnt),
                )
            reading = meter.step(scores.tokens)
            with meter.paused():
                if scores.first_unscored is not None:
                    say(f"round {round}: {sum(scores.unscored.values())} without a score, {scores.first_unscored}")
                if round % config.eval_every == 0 or round == config.rounds:
                    scalars["held_out"] = held_out_score()
                    say(f"round {round}: held out {scalars['held_out']:.3f}, reward {scores.mean:.3f}")
                    if speaks:
                        show_samples(round, SAMPLE_NAMES, sample_rows(scores.rollouts), logger)
                logger.log(round, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(mesh)
                if round % config.save_every == 0 or round == config.rounds or leaving:
                    checkpoints.save(round, run, optimizer, loader=prompts, config=config)
            if leaving and round < config.rounds:
                say(f"{signals.received or 'a signal on another rank'}: saved round {round}; start again to go on")
                return

    # ---------------------------------------------------------------------------------------------- what came of it
    export = config.out / f"model-{config.rounds}"
    export_model(run, export, tokenizer)
    say(f"\nheld out, {len(tasks.held_out)} prompts: {scalars['held_out']:.3f}; model in {export}")


def lesson(rollout: Rollout) -> Example:
    """The rollout as if it were data: only what the model wrote is learnt, its end too."""
    return Example(ids=rollout.tokens, learn=np.arange(len(rollout.tokens)) >= len(rollout.prompt_ids))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
