"""Reinforcement learning with a verifier on a mesh: GRPO and its relatives, from prompts to a Hugging Face folder.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/grpo.py --mesh "dp_shard=2 tp=2"
another task    torchrun --nproc-per-node 4 examples/grpo.py --task reversal --out runs/reversal
another loss    torchrun --nproc-per-node 4 examples/grpo.py --preset DAPO
your model      torchrun --nproc-per-node 8 examples/grpo.py --mesh "dp_shard=4 tp=2" --pretrained Qwen2.5-1.5B/ \
                    --data questions.jsonl --reward arithmetic --max-new-tokens 512 --seq-len 2048 --lr 1e-6 --precision bf16
with vLLM       torchrun --nproc-per-node 8 examples/grpo.py --engine vllm ...
is it sound?    torchrun --nproc-per-node 2 examples/grpo.py --mesh "tp=2" --selftest

Without --pretrained a small model first learns the task from some right answers, until it is right now and then; then it
writes `samples` answers to each prompt, and those that are better than the others of their group become more probable. DAPO
brings all of its four parts: clip-higher, a mean over tokens, dynamic sampling, and the overlong penalty. Rows
have a `prompt`, and a `completion` or what else the reward reads. A run that finds a checkpoint in --out continues from it,
on whatever mesh it is started. --selftest takes steps of size 0 and stops if the trainer does not find the log-probabilities
that the generator had. Reversal goes from about a half of the held-out prompts right to 0.98 in the 300 steps of the
defaults, addition from 0.43 to 0.96 with --prompts 64 --samples 8 --lr 3e-4 --steps 1000 (benchmarks/results/grpo.jsonl).
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

import meshkit as mk
from meshkit.algos.policy import (
    GAE,
    PRESETS,
    ROLLOUT_RULES,
    GroupAdvantage,
    PolicyLoss,
    policy_batch,
    policy_count,
    policy_metrics,
    policy_objective,
    policy_sums,
    step_rollouts,
)
from meshkit.algos.rewards import MeshScores, score_on_mesh
from meshkit.algos.rollout import Engine, Sampling, VllmEngine, encode_prompts, generate
from meshkit.data import REFERENCE_ALPHABET, PromptLoader, character_tokenizer, load_tokenizer
from meshkit.errors import PlanError, StepError
from meshkit.launch import run_main
from meshkit.metrics import Logger, Meter, Progress, show_samples
from meshkit.models import build_model, config_from_pretrained, load_pretrained, meta_parameters, model_plan
from meshkit.recipes.evaluation import SAMPLE_NAMES, greedy_score, sample_rows
from meshkit.recipes.export import export_model
from meshkit.recipes.tasks import REFERENCE_TASKS, load_tasks, small_model, warm_up_policy
from meshkit.schedule_lr import lr_schedule

TOL_SELFTEST = 1e-5  # of log-probabilities in fp32: generator and trainer sum in another order


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_shard=2 tp=2"; -1 is the ranks that are left"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, trained here first"""
    task: Literal["addition", "reversal", "countdown"] = "addition"
    """without --data"""
    data: tuple[Path, ...] = ()
    """JSONL, Parquet or Arrow files with prompts and what the reward reads; needs --pretrained"""
    held_out: float = 0.05
    """part of the rows that is only evaluated on"""
    reward: Literal["exact", "arithmetic", "countdown", "unit-tests"] | None = None
    """default: the task's; "exact" with --data"""
    reward_timeout_s: float = 10.0
    """of each answer"""
    fail_fast: bool = False
    """stop if an answer cannot be scored; else such answers are left out, counted and shown"""
    out: Path = Path("runs/grpo")
    """checkpoints, logs and the final model"""

    preset: str = "GRPO"
    """a loss of meshkit.algos.policy that needs no critic"""
    kl: float = 0.0
    """weight of the preset's KL to the model at the beginning, in place of its own; 0 needs no reference"""
    entropy: float = 0.0
    """weight of a bonus for uncertain predictions"""
    prompts: int = 32
    """of one step, over all ranks"""
    samples: int = 16
    """answers to each"""
    updates: int = 1
    """optimizer steps on the answers of a step"""
    sampling_rounds: int = 10
    """with dynamic sampling (DAPO): at most so many times are answers written in a step, to --prompts prompts each time"""
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """default: the task's, 256 with --data; with an overlong penalty (DAPO) a quarter more is written, at a cost"""
    engine: Literal["meshkit", "vllm"] = "meshkit"
    """who writes the answers; vllm (installed apart) gets the weights of each step, and all of them on every rank"""
    vllm_memory: float = 0.3
    """the part of a GPU that vllm may take"""
    seq_len: int = 64
    """tokens of a row, in which answers are packed"""
    microbatches: int = 1
    """parts a rank runs its rows in, one after the other"""
    sft_steps: int | None = None
    """without --pretrained: steps on right answers before; default: the task's"""
    sft_lr: float | None = None
    steps: int = 300
    lr: float = 5e-4
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 10
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

    selftest: bool = False
    """two steps at a learning rate of 0, of which nothing is kept: ratios must be 1, and generator and trainer agree"""
    eval_every: int = 20
    eval_prompts: int = 512
    save_every: int = 50


def build(config: Config, mesh: mk.Mesh, shape: Any) -> mk.Run:
    """The model in parts, without values."""
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


def load(config: Config, mesh: mk.Mesh, folder: Path) -> mk.Run:
    run = build(config, mesh, config_from_pretrained(folder))
    load_pretrained(run.model, folder)
    return run


def main() -> None:
    config = tyro.cli(Config)
    loss, rules = policy_of(config), ROLLOUT_RULES[config.preset]
    if config.engine == "vllm":
        VllmEngine.refuse_absence()  # before a model is trained to begin with
    if config.selftest:
        config = dataclasses.replace(config, lr=0.0, warmup_steps=0, steps=2)

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
    limit = rules.limit(tasks.max_new_tokens)
    sampling = Sampling(max_new_tokens=limit, temperature=config.temperature, stop_ids=(tokenizer.eos_id,))
    share = {"rank": mesh.data_rank, "ranks": mesh.data_ranks}
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed, **share)
    say(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- something to begin with
    first = config.pretrained or config.out / "sft-model"
    if not first.exists():
        task, run = REFERENCE_TASKS[config.task], build(config, mesh, small_model(tokenizer.vocab_size))
        steps = task.sft_steps if config.sft_steps is None else config.sft_steps
        how = {"steps": steps, "seed": config.seed, "seq_len": config.seq_len, "speaks": speaks}
        warm_up_policy(run, mk.adamw(run, lr=config.sft_lr or task.sft_lr), tasks.train, tokenizer, first, **how)
    run = load(config, mesh, first)
    reference = load(config, mesh, first) if config.kl else None
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = lr_schedule(
        optimizer, kind=config.lr_kind, warmup_steps=config.warmup_steps, total_steps=config.steps, min_factor=0.1
    )
    say(f"model {sum(p.numel() for p in run.whole.parameters()):,} parameters")

    write: Engine = partial(generate, run)
    if config.engine == "vllm":
        write = VllmEngine(run, gpu_memory_utilization=config.vllm_memory)

    def ask() -> MeshScores:
        """What the model writes to the next prompts, and what that is worth."""
        asked = encode_prompts(next(prompts), tokenizer)
        rollouts = write(asked, sampling=sampling, samples=config.samples, seed=config.seed, decode=tokenizer.decode)
        return score_on_mesh(mesh, rollouts, tasks.score, fail_fast=config.fail_fast)

    def held_out_score() -> float:
        return greedy_score(run, tasks.held_out, tokenizer, tasks.score, sampling=sampling, engine=write)

    # ---------------------------------------------------------------------------------------------- where we stopped
    checkpoints = mk.Checkpointer(config.out / "checkpoints", keep=2)
    start = 0
    if not config.selftest:
        start = checkpoints.resume(run, optimizer, scheduler=scheduler, loader=prompts, config=config)
    if start >= config.steps:
        say(f"{config.out} has its {start} steps; give more --steps to go on, or another --out to begin anew")
        return
    say(f"resume from step {start}" if start else f"held out before the first step: {held_out_score():.3f}")

    # ---------------------------------------------------------------------------------------------- the loop
    guard = mk.NonFiniteGuard()
    sums = policy_sums(mesh)
    with (
        checkpoints,
        mk.SaveOnSignal() as signals,
        Progress(total_steps=config.steps, start_step=start, enabled=speaks) as progress,
        Logger(config.out, start_step=start, enabled=speaks and not config.selftest, also=[progress.update]) as logger,
    ):
        meter = Meter(total_steps=config.steps, start_step=start, devices=mesh.spec.world_size, device=mesh.device)
        for step in range(start + 1, config.steps + 1):
            scores, rollouts = step_rollouts(
                mesh,
                ask,
                rules,
                prompts=config.prompts,
                max_new_tokens=tasks.max_new_tokens,
                rounds=config.sampling_rounds,
            )
            batch, advantages = policy_batch(
                run,
                rollouts,
                loss,
                seq_len=config.seq_len,
                temperature=config.temperature,
                reference=reference,
                snapshot=config.updates > 1 or config.selftest,
                microbatches=config.microbatches,
            )
            for _ in range(config.updates):
                objective = policy_objective(mesh, batch, loss, temperature=config.temperature, metrics=sums)
                found = run.forward_backward(
                    batch, microbatches=config.microbatches, loss=objective, count=policy_count(loss)
                )
                norm = mk.clip_grad_norm(run, config.clip)
                if guard.allows(run, norm, step=step):
                    optimizer.step()
                optimizer.zero_grad()
            lr = scheduler.get_last_lr()[0]
            scheduler.step()
            seen = policy_metrics(sums)
            if config.selftest:
                check_selftest(seen, step)
            scalars = {"loss": found.item(), "grad_norm": norm.item(), "lr": lr, "reward": scores.mean, **seen}
            scalars |= {f"unscored/{kind}": count for kind, count in scores.unscored.items()}
            scalars["learnt_answers"] = advantages.answers / max(scores.answers, 1)
            scalars["uniform_groups"] = advantages.uniform / max(advantages.groups, 1)
            scalars["answer_tokens"] = scores.tokens / max(scores.answers, 1)
            reading = meter.step(scores.tokens)
            with meter.paused():
                if scores.first_unscored is not None:
                    say(f"step {step}: {sum(scores.unscored.values())} without a score, {scores.first_unscored}")
                if step % config.eval_every == 0 or step == config.steps:
                    scalars["held_out"] = held_out_score()
                    say(f"step {step}: held out {scalars['held_out']:.3f}, reward {scores.mean:.3f}")
                    if speaks:
                        show_samples(step, SAMPLE_NAMES, sample_rows(scores.rollouts), logger)
                logger.log(step, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(mesh)
                saving = step % config.save_every == 0 or step == config.steps or leaving
                if saving and not config.selftest:
                    checkpoints.save(step, run, optimizer, scheduler=scheduler, loader=prompts, config=config)
            if leaving and step < config.steps:
                say(f"{signals.received or 'a signal on another rank'}: saved step {step}; start again to go on")
                return

    # ---------------------------------------------------------------------------------------------- what came of it
    if config.selftest:
        say(f"selftest passed: ratios are 1, log-probabilities differ by {seen['rollout_gap_max']:.1e} at most")
        return
    export = config.out / f"model-{config.steps}"
    export_model(run, export, tokenizer)
    say(f"\nheld out, {len(tasks.held_out)} prompts: {scalars['held_out']:.3f}; model in {export}")


# ---------------------------------------------------------------------------------------------- parts of the above
def policy_of(config: Config) -> PolicyLoss:
    """The preset, with the KL and entropy that were asked for; what it needs and this recipe has not is refused."""
    if config.preset not in PRESETS:
        raise PlanError(f"--preset {config.preset} is not known. Choose from {', '.join(PRESETS)}.")
    loss = PRESETS[config.preset]
    greedy = isinstance(loss.advantage, GroupAdvantage) and loss.advantage.baseline == "greedy"
    if isinstance(loss.advantage, GAE) or greedy:
        needs = "greedy answers as a baseline" if greedy else "a critic"
        raise PlanError(f"--preset {config.preset} needs {needs}, which this recipe has not. Choose another.")
    kl = dataclasses.replace(loss.kl, coefficient=config.kl)
    return dataclasses.replace(loss, kl=kl, entropy=config.entropy)


def check_selftest(seen: dict[str, float], step: int) -> None:
    """With weights that do not change."""
    off = {
        "clipped": seen["clipped_low"] + seen["clipped_high"],
        "ratio_max - 1": abs(seen["ratio_max"] - 1),
        "rollout_gap_max": seen["rollout_gap_max"],
    }
    if wrong := {name: value for name, value in off.items() if not value <= TOL_SELFTEST}:
        raise StepError(
            f"selftest, step {step}: {wrong}, and each should be at most {TOL_SELFTEST}. Generator and trainer do not "
            "compute the same policy: compare --precision, the temperature, and the model's folder."
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
