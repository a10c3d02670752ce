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

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import meshkit as mk
from meshkit.algos import policy, rewards, rollout, sft
from meshkit.data import Example, PromptLoader
from meshkit.recipes import (
    ParallelFlags,
    RolloutFlags,
    Session,
    engine_of,
    first_policy,
    greedy_score,
    policy_tasks,
    print0,
    report_unscored,
    run_from,
    show_rollouts,
    small_model,
)


@dataclass(frozen=True, kw_only=True)
class Config(ParallelFlags, RolloutFlags):
    task: Literal["addition", "reversal", "countdown"] = "reversal"
    out: Path = Path("runs/rejection_sampling")
    rounds: mk.recipes.Count = 40
    """of writing and learning; --prompts, --eval-every, --save-every and --warmup-steps are of a round, or rounds"""
    prompts: int = 256
    samples: int = 4
    best: mk.recipes.Count = 1
    """the most answers to keep of each prompt"""
    threshold: mk.recipes.Finite = 1.0
    """the least score to keep"""
    epochs: mk.recipes.Count = 2
    """passes over the answers of a round"""
    global_batch: mk.recipes.Count = 32
    """answers of one optimizer step, over all ranks"""
    lr: float = 5e-4
    warmup_steps: int = 2
    weight_decay: float = 0.0
    eval_every: int = 5
    save_every: int = 10


def build(config: Config, mesh: mk.Mesh, shape: Any = None) -> mk.Run:
    """The sharded model, without values; `python -m meshkit estimate` runs it too, with the small model's shape."""
    shape = shape or config.shape(small_model())
    with mk.models.meta_parameters():
        model = mk.models.build_model(shape)
    plan = config.adapted(model, mk.models.model_plan(shape), seed=config.seed)
    return mk.parallelize(model, mesh, config.parallel(plan=plan))


def main() -> None:
    config = Config.parse()

    # ---------------------------------------------------------------------------------------------- the mesh
    mesh = mk.init_mesh(config.mesh)
    print0(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- tasks and prompts
    config, tasks, tokenizer, sampling = policy_tasks(config)
    share = {"rank": mesh.data_rank, "ranks": mesh.data_ranks}
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed, **share)
    print0(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- the first model
    build_run = partial(build, config, mesh)
    run = run_from(first_policy(config, mesh, build_run, tasks, tokenizer), build_run, seed=config.seed)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    print0(f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters")
    write = engine_of(config, run)

    def held_out_score() -> float:
        return greedy_score(run, tasks.held_out, tokenizer, tasks.score, sampling=sampling, engine=write)

    # ---------------------------------------------------------------------------------------------- the loop
    with Session(run, config, optimizer=optimizer, loader=prompts, unit="round") as session:
        if session.start == 0:
            print0(f"held out before the first round: {held_out_score():.3f}")
        for step in session.steps():
            # Write rollouts, score them, and keep the best ones, the same on all ranks.
            batch = rollout.encode_prompts(next(prompts), tokenizer)
            written = write(batch, sampling=sampling, samples=config.samples, seed=config.seed, decode=tokenizer.decode)
            scores = rewards.score_on_mesh(mesh, written, tasks.score, fail_fast=config.fail_fast)
            scored = torch.tensor([each.reward for each in scores.rollouts], dtype=torch.float64)
            groups = torch.tensor([each.key for each in scores.rollouts], dtype=torch.int64)
            chosen = policy.select_best(scored, groups, best=config.best) & policy.select_above(
                scored, config.threshold
            )
            selected = [
                learnt_example(each) for each, keep in zip(scores.rollouts, chosen.tolist(), strict=True) if keep
            ]
            kept = [example for part in mk.mesh.gather_over_data(mesh, selected) for example in part]

            # Learn from them.
            session.log(kept=len(kept), **scores.scalars())
            if kept:
                sft.sft_steps(
                    run,
                    optimizer,
                    kept,
                    steps=-(-len(kept) * config.epochs // config.global_batch),
                    global_batch=config.global_batch,
                    seq_len=config.seq_len,
                    seed=config.seed + step,
                    microbatches=config.microbatches,
                    clip=config.clip,
                    warmup_steps=config.warmup_steps,
                    each=lambda _, scalars: session.log(**scalars),
                )
            session.stop_clock(tokens=scores.tokens)
            report_unscored(step, sum(scores.unscored.values()), scores.answers, scores.first_unscored, unit="round")
            if session.evaluates(step):
                session.log(held_out=held_out_score())
                print0(f"round {step}: held out {session.scalars['held_out']:.3f}, reward {scores.mean:.3f}")
                show_rollouts(step, scores.rollouts, session.logger)
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    export = config.out / config.export_name(config.rounds)
    run.export(export, tokenizer, base=config.pretrained)
    print0(f"\nheld out, {len(tasks.held_out)} prompts: {session.scalars['held_out']:.3f}; model in {export}")


def learnt_example(written: rollout.Rollout) -> Example:
    """The rollout as if it were data: only what the model wrote is learnt, its end too."""
    return Example(ids=written.tokens, learn=np.arange(len(written.tokens)) >= len(written.prompt_ids))


if __name__ == "__main__":
    mk.run_main(main)
