"""Proximal policy optimization (PPO) on a mesh: actor, critic, reference model, and generation on any ranks or layout.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_shard=2 tp=2"
another task    torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_replicate=4" --task reversal --out runs/ppo-reversal
generation in   torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_shard=2 tp=2" --sampler-mesh "dp_shard=4"
 its own layout
on its own      torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_shard=2" --sampler-mesh "dp_shard=2" \
 ranks, ahead       --sampler-ranks 2 --staleness 1 --preset DECOUPLED_PPO
without a stop  the same with --staleness 4 --stream
critic apart    torchrun --nproc-per-node 4 examples/ppo.py --mesh "tp=2" --critic-mesh "dp_shard=2" --critic-ranks 2
your model      torchrun --nproc-per-node 8 examples/ppo.py --mesh "dp_shard=8" --pretrained Qwen2.5-1.5B/ \
                    --data questions.jsonl --reward arithmetic --max-new-tokens 512 --lr 1e-6 --precision bf16

Without --pretrained a small model first learns the task from right answers, until it is right now and then. In each step the
actor writes answers, they are scored, critic and reference model evaluate them, and actor and critic learn. --reward-model
takes the scores from a folder of examples/reward_model.py. A run that finds checkpoints in --out continues from them, with
the answers that were pending, on whatever meshes it is started. Reversal goes from about a half of the held-out prompts right
to 0.99 in 150 steps, addition from 0.43 to 0.98 with --lr 3e-4 --steps 500 in 12 min 22 s of 2 cores
(benchmarks/results/ppo.jsonl).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import meshkit as mk
from meshkit.algos import dataflow, policy, rewards, rollout
from meshkit.data import PromptLoader
from meshkit.recipes import (
    CriticFlags,
    Session,
    engine_of,
    first_policy,
    greedy_score,
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


@dataclass(frozen=True, kw_only=True)
class Config(CriticFlags):
    reward_model: Path | None = None
    """score answers with the reward model of this folder instead; evaluation keeps --reward"""
    preset: str = "PPO"
    epochs: mk.recipes.Count = 2
    """passes over the answers of a step"""
    minibatches: mk.recipes.Count = 1
    """optimizer steps of a pass"""
    decay: mk.recipes.Share = 0.95
    """lambda of GAE"""
    sequence: bool = False
    prompts: int = 128
    samples: int = 4
    out: Path = Path("runs/ppo")
    steps: int = 150
    lr: float = 5e-4
    warmup_steps: int = 10
    eval_every: int = 20


def build(config: Config, mesh: mk.Mesh, shape: Any, *, scores: bool = False) -> mk.Run:
    """A sharded model, without values; with `scores` one that gives a number for each token."""
    with mk.models.meta_parameters():
        model = mk.models.RewardModel(shape) if scores else mk.models.build_model(shape)
    plan = (
        mk.models.reward_plan(shape) if scores else config.adapted(model, mk.models.model_plan(shape), seed=config.seed)
    )
    return mk.parallelize(model, mesh, config.parallel(plan=plan))


def main() -> None:
    config = Config.parse()
    loss = config.policy_loss(critic=True)
    loss = dataclasses.replace(loss, advantage=dataclasses.replace(loss.advantage, decay=config.decay))

    # ---------------------------------------------------------------------------------------------- the meshes
    world, meshes = mk.init_mesh(), policy_meshes(config)
    actor_mesh, critic_mesh, sampler_mesh = meshes["actor"], meshes["critic"], meshes["sampler"]
    print0(f"loss  {config.describe_loss()}")

    # ---------------------------------------------------------------------------------------------- tasks and prompts
    config, tasks, tokenizer, sampling = policy_tasks(config)
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed)
    print0(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- the models
    start = first_policy(config, actor_mesh, partial(build, config, actor_mesh), tasks, tokenizer)
    actor = critic = reward_model = None  # on ranks that have none
    optimizer = critic_optimizer = scheduler = None
    if actor_mesh.here:
        actor = run_from(start, partial(build, config, actor_mesh), seed=config.seed)
        optimizer = mk.adamw(actor, lr=config.lr, weight_decay=config.weight_decay)
        scheduler = config.lr_schedule(optimizer, after=config.critic_warmup)
        actor_sums = policy.policy_sums(actor_mesh)
        if config.reward_model:
            reward_model = run_from(config.reward_model, partial(build, config, actor_mesh, scores=True))
    if critic_mesh.here:
        build_critic = partial(build, config, critic_mesh, scores=True)
        critic = run_from(start, build_critic, fresh=("score.weight",), seed=config.seed)
        critic_optimizer = mk.adamw(critic, lr=config.critic_lr, weight_decay=config.weight_decay)
        critic_sums = policy.value_sums(critic_mesh)
    _, reference_calls = reference_of(config, meshes, actor, start, build)
    sampler, syncs = sampler_of(config, meshes, actor, start, partial(build, config))
    engine = engine_of(config, sampler) if sampler is not None else None

    # ---------------------------------------------------------------------------------------------- calls of the dataflow
    sizes = {"tokens_per_microbatch": config.tokens_per_microbatch, "microbatches": config.microbatches}

    def scores(rollouts: list[rollout.Rollout]) -> rewards.Scores:
        if reward_model is not None:
            return rewards.model_scores(reward_model, [each.tokens for each in rollouts], **sizes)
        return rewards.score_on_mesh(meshes[rewards_on], rollouts, tasks.score, fail_fast=config.fail_fast).local

    def step_of(run: mk.Run, samples: list[dataflow.Sample]) -> policy.PolicyBatch:
        """The answers, shared out by tokens, with advantages over the whole step."""
        rollouts = [dataflow.rollout_of(sample, value_names) for sample in samples]
        options = {"minibatches": config.minibatches, "routing": config.routing_replay if run is actor else "none"}
        return policy.policy_batch(run, rollouts, loss, values=value_names, **options, **sizes)

    def learn_values(samples: list[dataflow.Sample]) -> None:
        """The critic learns from each minibatch."""
        for minibatch, count in step_of(critic, samples).minibatches * config.epochs:
            objective = policy.value_objective(critic_mesh, minibatch, metrics=critic_sums)
            session.log(value_loss=critic.forward_backward(minibatch, loss=objective, microbatches=count))
            if session.guard.allows(critic, mk.clip_grad_norm(critic, config.clip), step=flow.iteration + 1):
                critic_optimizer.step()
            critic_optimizer.zero_grad()
        session.log(**{f"critic/{name}": value for name, value in policy.value_metrics(critic_sums).items()})

    def learn(samples: list[dataflow.Sample]) -> None:
        """The actor learns from each minibatch, after the critic's warm-up."""
        answers = step_of(actor, samples)
        advantages = answers.advantages
        session.log(reward=advantages.reward, unscored=advantages.unscored, tokens=advantages.tokens)
        session.log(tokens_max_over_mean=answers.balance.max_over_mean)
        if advantages.unscored:
            reason = dataflow.first_unscored(actor_mesh, samples)
            report_unscored(flow.iteration + 1, advantages.unscored, advantages.answers, reason)
        if flow.iteration < config.critic_warmup:
            return
        for minibatch, count in answers.minibatches * config.epochs:
            objective = policy.policy_objective(
                actor_mesh, minibatch, loss, temperature=config.temperature, metrics=actor_sums
            )
            options = {"loss": objective, "count": policy.policy_count(loss), "microbatches": count}
            with session.trace_pipeline(actor):
                loss_value = actor.forward_backward(minibatch, **options)
            norm = mk.clip_grad_norm(actor, config.clip)
            session.log(loss=loss_value, grad_norm=norm, lr=scheduler.get_last_lr()[0])
            if session.guard.allows(actor, norm, step=flow.iteration + 1):
                optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        session.log(**{f"policy/{name}": value for name, value in policy.policy_metrics(actor_sums).items()})

    replay = config.routing_replay == "rollout"
    log_probs = partial(rollout.label_log_probs, temperature=config.temperature, replay=replay)
    critic_on = "actor" if config.critic_mesh is None else "critic"
    value_calls = [
        dataflow.log_prob_call("old_log_probs", actor, log_probs, on="actor", **sizes),
        dataflow.log_prob_call("old_values", critic, policy.critic_values, on=critic_on, **sizes),
        *reference_calls,
    ]
    value_names = [each.name for each in value_calls]
    rewards_on = "actor" if config.reward_model or config.sampler_mesh is None else "sampler"
    needs = (*dataflow.ROLLOUT, "reward", "unscored", *value_names)
    calls = [
        dataflow.reward_call(scores, on=rewards_on),
        *value_calls,
        dataflow.Call(name="learn_values", on=critic_on, function=learn_values, needs=needs, stage="train"),
        dataflow.Call(name="learn", on="actor", function=learn, needs=needs, stage="train"),
    ]
    flow = rollout_flow(config, meshes, sampler, tokenizer, sampling, prompts, calls, syncs, engine=engine)
    print0(flow.describe())

    options = {"sampling": sampling, "engine": engine, "mesh": sampler_mesh}
    held_out_score = partial(greedy_score, sampler, tasks.held_out, tokenizer, tasks.score, **options)

    # ---------------------------------------------------------------------------------------------- the loop
    parts = {"actor": (actor, optimizer, scheduler), "critic": (critic, critic_optimizer, None)}
    with Session(world, config, parts=parts, loader=flow) as session:
        if session.start == 0:
            print0(f"held out before the first step: {held_out_score():.3f}")
        for sync in syncs if session.start else ():
            sync.function()  # the sampler gets the resumed weights
        for step in session.steps():
            samples = flow.step()
            session.log(**{f"seconds/{name}": seconds for name, seconds in flow.seconds.items()})
            session.stop_clock(tokens=int(session.scalars.get("tokens", 0)))  # ranks that do not learn have none
            if session.evaluates(step):
                session.log(held_out=held_out_score())
                reward = session.scalars.get("reward", 0.0)
                print0(f"step {step}: held out {session.scalars['held_out']:.3f}, reward {reward:.3f}")
                show_rollouts(step, map(dataflow.rollout_of, samples), session.logger)
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    export = config.out / config.export_name(config.steps)
    if actor_mesh.here:
        actor.export(export, tokenizer, base=config.pretrained)
    print0(f"\nheld out, {len(tasks.held_out)} prompts: {session.scalars['held_out']:.3f}; model in {export}")


planned_calls = mk.recipes.planned_ppo  # python -m meshkit plan-rl examples/ppo.py

if __name__ == "__main__":
    mk.run_main(main)
