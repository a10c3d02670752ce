"""Reinforcement learning with a verifier on a mesh: GRPO and its relatives, from prompts to a Hugging Face folder.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/grpo.py --mesh "dp_shard=2 tp=2"
another task    torchrun --nproc-per-node 4 examples/grpo.py --task reversal; in turns: --task guessing --lr 1e-3
another loss    torchrun --nproc-per-node 4 examples/grpo.py --preset DAPO
your model      torchrun --nproc-per-node 8 examples/grpo.py --mesh "dp_shard=4 tp=2" --pretrained Qwen2.5-1.5B/ \
                    --data questions.jsonl --reward arithmetic --max-new-tokens 512 --lr 1e-6 --precision bf16
on other ranks, torchrun --nproc-per-node 4 examples/grpo.py --mesh "dp_shard=2" --sampler-mesh "dp_shard=2" \
 without a stop     --sampler-ranks 2 --stream --staleness 4 --correction tis
with vLLM       torchrun --nproc-per-node 8 examples/grpo.py --engine vllm ...
is it sound?    torchrun --nproc-per-node 2 examples/grpo.py --mesh "tp=2" --selftest

Without --pretrained a small model first learns the task from some right answers, until it is right now and then; then it
writes `samples` answers to each prompt, and those that are better than the others of their group become more probable. DAPO
brings all of its four parts: clip-higher, a mean over tokens, dynamic sampling, and the overlong penalty. Rows have a
`prompt`, a text or messages for the model's chat template, and a `completion` or what else the reward reads. A run that finds
a checkpoint in --out continues from it, on whatever mesh it is started. --selftest takes steps of size 0 and stops if the
trainer does not find the log-probabilities that the generator had. Reversal goes from about a half of the held-out prompts
right to 0.98 in the 300 steps of the defaults, addition from 0.43 to 0.96 with --prompts 64 --samples 8 --lr 3e-4
--steps 1000 (benchmarks/results/grpo.jsonl).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import meshkit as mk
from meshkit.algos import dataflow, policy, rewards, rollout
from meshkit.data import PromptLoader
from meshkit.recipes import (
    EnvironmentFlags,
    Session,
    first_policy,
    greedy_score,
    playing_engine,
    policy_meshes,
    policy_tasks,
    print0,
    reference_of,
    report_unscored,
    rollout_flow,
    run_from,
    sampler_of,
    show_rollouts,
)

TOL_RATIO = 1e-5  # two forwards of one batch
TOL_GAP = {"fp32": 1e-5, "bf16": 5e-2}  # of log-probabilities: docs/generation.md, what decode and prefill differ by


@dataclass(frozen=True, kw_only=True)
class Config(EnvironmentFlags):
    entropy: mk.recipes.NotNegative = 0.0
    """weight of a bonus for uncertain predictions"""
    updates: mk.recipes.Count = 1
    """optimizer steps on the answers of a step"""
    sampling_rounds: mk.recipes.Count = 10
    """with dynamic sampling (DAPO): the most rounds of generation in a step, each of --prompts prompts"""
    selftest: bool = False
    """two steps at a learning rate of 0, without checkpoints: ratios must be 1, and generator and trainer agree"""
    out: Path = Path("runs/grpo")
    steps: int = 300
    lr: float = 5e-4
    warmup_steps: int = 10
    weight_decay: float = 0.0
    eval_every: int = 20


def build(config: Config, mesh: mk.Mesh, shape: Any) -> mk.Run:
    """The sharded model, without values."""
    with mk.models.meta_parameters():
        model = mk.models.build_model(shape)
    plan = config.adapted(model, mk.models.model_plan(shape), seed=config.seed)
    return mk.parallelize(model, mesh, config.parallel(plan=plan))


def main() -> None:
    config = Config.parse()
    loss = dataclasses.replace(config.policy_loss(critic=False), entropy=config.entropy)
    rules = policy.ROLLOUT_RULES[config.preset]
    config = dataclasses.replace(config, lr=0.0, warmup_steps=0, steps=2) if config.selftest else config

    # ---------------------------------------------------------------------------------------------- the mesh
    world, meshes = mk.init_mesh(), policy_meshes(config)
    mesh, apart = meshes["actor"], config.in_calls
    print0(f"loss  {config.describe_loss()}")

    # ---------------------------------------------------------------------------------------------- tasks and prompts
    config, tasks, tokenizer, sampling = policy_tasks(config, rules)
    loss = loss.for_answers(sampling.max_new_tokens * tasks.turns)
    share = {} if apart else {"rank": mesh.data_rank, "ranks": mesh.data_ranks}  # a dataflow shares them out itself
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed, **share)
    print0(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- the first model
    build_run = partial(build, config, mesh)
    start = first_policy(config, mesh, build_run, tasks, tokenizer)
    run = optimizer = scheduler = None  # on ranks that do not learn
    if mesh.here:
        run = run_from(start, build_run, seed=config.seed)
        optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
        scheduler = config.lr_schedule(optimizer)
        sums = policy.policy_sums(mesh)
        print0(f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters")
    reference, reference_calls = reference_of(config, meshes, run, start, build)
    values = [call.name for call in reference_calls] if apart else []  # what rollouts have when they are learnt
    sampler, syncs = sampler_of(config, meshes, run, start, partial(build, config))
    write = playing_engine(config, sampler, tasks, tokenizer) if sampler is not None else None

    def scored(rollouts: list[rollout.Rollout]) -> rewards.MeshScores:
        return rewards.score_on_mesh(mesh, rollouts, tasks.score, fail_fast=config.fail_fast)

    def ask() -> rewards.MeshScores:
        """Rollouts of the next prompts, with their rewards."""
        batch = rollout.encode_prompts(next(prompts), tokenizer)
        options = {"sampling": sampling, "samples": config.samples, "seed": config.seed, "decode": tokenizer.decode}
        return scored(write(batch, **options))

    def held_out_score() -> float:
        options = {"sampling": sampling, "engine": write, "mesh": meshes["sampler"]}
        return greedy_score(sampler, tasks.held_out, tokenizer, tasks.score, **options)

    # ---------------------------------------------------------------------------------------------- one step
    def learn(ask: Callable[[], rewards.MeshScores]) -> rewards.MeshScores:
        """Learn from the rollouts that `ask` gives."""
        limits = {"max_new_tokens": tasks.max_new_tokens, "rounds": config.sampling_rounds}
        scores, rollouts = policy.step_rollouts(mesh, ask, rules, prompts=config.prompts, **limits)
        sizes = {"tokens_per_microbatch": config.tokens_per_microbatch, "microbatches": config.microbatches}
        needs = {"reference": None if apart else reference, "snapshot": config.updates > 1 or config.selftest}
        how = {"temperature": config.temperature, "values": values, "routing": config.routing_replay}
        batch, advantages, microbatches, balance, _ = policy.policy_batch(run, rollouts, loss, **sizes, **needs, **how)
        for _ in range(config.updates):
            objective = policy.policy_objective(mesh, batch, loss, temperature=config.temperature, metrics=sums)
            options = {"loss": objective, "count": policy.policy_count(loss), "microbatches": microbatches}
            with session.trace_pipeline(run):
                loss_value = run.forward_backward(batch, **options)
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        metrics = policy.policy_metrics(sums)
        if config.selftest:
            check_selftest(metrics, step, "fp32" if config.parallel().memory.precision is None else "bf16")
        session.log(loss=loss_value, grad_norm=norm, **metrics, **scores.scalars())
        session.log(learnt_answers=advantages.answers / max(scores.answers, 1))
        session.log(microbatches=microbatches, tokens_max_over_mean=balance.max_over_mean)
        session.log(uniform_groups=advantages.uniform / max(advantages.groups, 1))
        report_unscored(step, sum(scores.unscored.values()), scores.answers, scores.first_unscored)
        return scores

    def learn_samples(samples: list[dataflow.Sample]) -> None:
        nonlocal scores
        scores = learn(lambda: scored([dataflow.rollout_of(each, values) for each in samples]))

    # ---------------------------------------------------------------------------------------------- the loop
    state = {"optimizer": optimizer, "scheduler": scheduler, "loader": prompts}
    if apart:
        needs = (*dataflow.ROLLOUT, *values)
        call = dataflow.Call(name="learn", on="actor", function=learn_samples, needs=needs, stage="train")
        calls = [*reference_calls, call]
        flow = rollout_flow(config, meshes, sampler, tokenizer, sampling, prompts, calls, syncs, engine=write)
        print0(flow.describe())
        state = {"parts": {"actor": (run, optimizer, scheduler)}, "loader": flow}
    with Session(world if apart else run, config, **state, writes=not config.selftest) as session:
        if session.start == 0:
            print0(f"held out before the first step: {held_out_score():.3f}")
        for sync in syncs if session.start else ():
            sync.function()  # the sampler gets the resumed weights
        for step in session.steps():
            if apart:
                flow.step()  # which calls learn_samples
            else:
                scores = learn(ask)
            session.stop_clock(tokens=scores.tokens if mesh.here else 0)
            if session.evaluates(step):
                session.log(held_out=held_out_score())
                reward = session.scalars.get("reward", 0.0)
                print0(f"step {step}: held out {session.scalars['held_out']:.3f}, reward {reward:.3f}")
                show_rollouts(step, scores.rollouts if mesh.here else [], session.logger)
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    if config.selftest:
        print0(
            f"selftest passed: ratios are 1, log-probabilities differ by {session.scalars['rollout_gap_max']:.1e} at most"
        )
        return
    export = config.out / config.export_name(config.steps)
    if mesh.here:
        run.export(export, tokenizer, base=config.pretrained)
    print0(f"\nheld out, {len(tasks.held_out)} prompts: {session.scalars['held_out']:.3f}; model in {export}")


# ---------------------------------------------------------------------------------------------- selftest
def check_selftest(metrics: dict[str, float], step: int, dtype: str) -> None:
    """Refuse a difference between generator and trainer; the weights have not changed, so each number should be 0."""
    differences = {
        "clipped": (metrics["clipped_low"] + metrics["clipped_high"], TOL_RATIO),
        "ratio_max - 1": (abs(metrics["ratio_max"] - 1), TOL_RATIO),
        "rollout_gap_max": (metrics["rollout_gap_max"], TOL_GAP[dtype]),
    }
    if wrong := [
        f"{name} is {value:.1e}, above {tol}" for name, (value, tol) in differences.items() if not value <= tol
    ]:
        raise mk.errors.StepError(
            f"selftest in {dtype}, step {step}: {', '.join(wrong)}. Generator and trainer do not compute the same policy: "
            "compare --precision, the temperature, and the model's folder."
        )


if __name__ == "__main__":
    mk.run_main(main)
