"""PPO on a mesh: a critic, a reference, and a dataflow whose generation may have ranks or a layout of its own.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_shard=2 tp=2"
another task    torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_replicate=4" --task reversal --out runs/ppo-reversal
generation in   torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_shard=2 tp=2" --sampler-mesh "dp_shard=4"
 its own layout
on its own      torchrun --nproc-per-node 4 examples/ppo.py --mesh "dp_shard=2" --sampler-mesh "dp_shard=2" \
 ranks, ahead       --sampler-ranks 2 --staleness 1 --preset DECOUPLED_PPO
your model      torchrun --nproc-per-node 8 examples/ppo.py --mesh "dp_shard=8" --pretrained Qwen2.5-1.5B/ \
                    --data questions.jsonl --reward arithmetic --max-new-tokens 512 --seq-len 2048 --lr 1e-6 --precision bf16

Without --pretrained a small model first learns the task from right answers, until it is right now and then. In each step the
actor writes answers, they are scored, critic and reference look at them, and actor and critic learn. --reward-model takes the
scores from a folder of examples/reward_model.py. A run that finds checkpoints in --out continues from them, with the answers
that were pending, on whatever meshes it is started. Reversal goes from about a half of the held-out prompts right to 0.99 in
150 steps, addition from 0.43 to 0.98 with --lr 3e-4 --steps 500 in 12 min 22 s of 2 cores (benchmarks/results/ppo.jsonl).
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import tyro

import meshkit as mk
from meshkit.algos import dataflow, policy
from meshkit.algos.reallocate import prepare_reallocation
from meshkit.algos.rewards import Scores, model_scores, score_on_mesh
from meshkit.algos.rollout import REFERENCE, Rollout, Sampling, label_log_probs
from meshkit.data import PromptLoader, take_segments
from meshkit.launch import run_main
from meshkit.recipes import (
    ParallelFlags,
    RolloutFlags,
    Session,
    StepFlags,
    engine_of,
    export_model,
    first_policy,
    greedy_score,
    policy_tasks,
    print0,
    refuse_missing_engine,
    show_rollouts,
)


@dataclass(frozen=True, kw_only=True)
class Config(StepFlags, ParallelFlags, RolloutFlags):
    sampler_mesh: str | None = None
    """of a copy of the actor that writes the answers; default: the actor itself writes"""
    sampler_ranks: int = 0
    """so many ranks, the last ones, are the sampler's alone; 0: it shares all of them"""
    staleness: int = 0
    """so many steps the sampler runs ahead, with weights that are as much older"""
    reward_model: Path | None = None
    """score answers with the reward model of this folder instead; evaluation keeps --reward"""
    preset: str = "PPO"
    """a loss of meshkit.algos.policy with GAE"""
    kl: float = 0.0
    """weight of the KL to the model at the beginning; 0 needs no reference"""
    epochs: int = 2
    """times that a step's answers are learnt from"""
    minibatches: int = 1
    """optimizer steps of each of them"""
    decay: float = 0.95
    """lambda of GAE"""
    critic_lr: float = 1e-3
    """constant"""
    critic_warmup: int = 5
    """steps in which only the critic learns"""
    sequence: bool = False
    prompts: int = 128
    samples: int = 4
    out: Path = Path("runs/ppo")
    seq_len: int = 64
    steps: int = 150
    lr: float = 5e-4
    warmup_steps: int = 10
    eval_every: int = 20


def in_parts(config: Config, mesh: mk.Mesh, shape: Any, *, scores: bool = False) -> mk.Run:
    """A model in parts, without values; with `scores` one that gives a number for each token."""
    with mk.models.meta_parameters():
        model = mk.models.RewardModel(shape) if scores else mk.models.build_model(shape)
    plan = mk.models.reward_plan(shape) if scores else mk.models.model_plan(shape)
    return mk.parallelize(model, mesh, **config.strategy(plan=plan))


def load(config: Config, mesh: mk.Mesh, folder: Path, *, scores: bool = False, fresh: tuple[str, ...] = ()) -> mk.Run:
    """The model of a folder; parameters that are `fresh` begin from nothing."""
    run = in_parts(config, mesh, mk.models.config_from_pretrained(folder), scores=scores)
    if fresh:
        mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    mk.models.load_pretrained(run.model, folder, fresh=fresh)
    return run


def main() -> None:
    config = tyro.cli(Config)
    loss = policy_of(config)
    refuse_missing_engine(config)

    # ---------------------------------------------------------------------------------------------- who: the meshes
    world = mk.init_mesh()
    learners = range(world.spec.world_size - config.sampler_ranks)
    meshes = {"actor": mk.init_mesh(config.mesh, ranks=learners)}
    meshes["sampler"] = meshes["actor"]
    if config.sampler_mesh is not None:
        apart = range(learners.stop, world.spec.world_size) if config.sampler_ranks else learners
        meshes["sampler"] = mk.init_mesh(config.sampler_mesh, ranks=apart)
    actor_mesh, sampler_mesh = meshes["actor"], meshes["sampler"]
    for name, mesh in meshes.items():
        print0(f"{name}  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- what is asked
    tasks, tokenizer = policy_tasks(config, seed=config.seed)
    limit = tasks.max_new_tokens
    sampling = Sampling(max_new_tokens=limit, temperature=config.temperature, stop_ids=(tokenizer.eos_id,))
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed)
    print0(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- the models
    start = config.pretrained or config.out / "sft-model"
    actor = critic = reference = judge = sampler = engine = None  # a rank has those of its meshes
    if actor_mesh.here:
        sizes = {"seq_len": config.seq_len, "seed": config.seed}
        first_policy(config, lambda shape: in_parts(config, actor_mesh, shape), tasks, tokenizer, start, **sizes)
        actor = load(config, actor_mesh, start)
        critic = load(config, actor_mesh, start, scores=True, fresh=("score.weight",))
        reference = load(config, actor_mesh, start) if config.kl else None
        judge = load(config, actor_mesh, config.reward_model, scores=True) if config.reward_model else None
        optimizer = mk.adamw(actor, lr=config.lr, weight_decay=config.weight_decay)
        critic_optimizer = mk.adamw(critic, lr=config.critic_lr, weight_decay=config.weight_decay)
        scheduler = config.lr_schedule(optimizer)
        actor_sums, critic_sums = policy.policy_sums(actor_mesh), policy.value_sums(actor_mesh)
    dist.barrier()  # the folder is there
    syncs = []
    if config.sampler_mesh is None:
        sampler = actor
    else:
        sampler = load(config, sampler_mesh, start) if sampler_mesh.here else None
        weights = prepare_reallocation(actor, sampler)
        print0(weights.plan)
        syncs = [dataflow.Sync(name="weights", source="actor", destination="sampler", function=weights)]
    if sampler is not None:
        engine = engine_of(config, sampler)

    # ---------------------------------------------------------------------------------------------- what they do
    def scores(rollouts: list[Rollout]) -> Scores:
        if judge is not None:
            return model_scores(judge, [rollout.tokens for rollout in rollouts], seq_len=config.seq_len)
        return score_on_mesh(meshes[judges], rollouts, tasks.score, fail_fast=config.fail_fast).own

    def learn(samples: list[dataflow.Sample]) -> None:
        """Advantages over the whole step; then each minibatch teaches the critic, and after its warm-up the actor."""
        rollouts = [dataflow.rollout_of(sample, looked_at) for sample in samples]
        batch = policy.pack_rollouts(
            rollouts, seq_len=config.seq_len, values=looked_at, pad_multiple=actor_mesh.row_multiple
        )
        advantages = policy.step_advantages(actor_mesh, batch, loss)
        batch |= advantages.values
        session.log(reward=advantages.reward, unscored=advantages.unscored, tokens=advantages.tokens)
        whose = batch["groups"] % config.minibatches  # whole prompts, so that every mesh has the same minibatches
        for part in [*range(config.minibatches)] * config.epochs:
            own = take_segments(batch, batch["segment_ids"][(batch["ends"] > 0) & (whose == part)].tolist())
            objective = policy.value_objective(actor_mesh, own, metrics=critic_sums)
            session.log(value_loss=critic.forward_backward(own, microbatches=config.microbatches, loss=objective))
            if session.guard.allows(critic, mk.clip_grad_norm(critic, config.clip), step=flow.iteration + 1):
                critic_optimizer.step()
            critic_optimizer.zero_grad()
            if flow.iteration < config.critic_warmup:
                continue
            objective = policy.policy_objective(
                actor_mesh, own, loss, temperature=config.temperature, metrics=actor_sums
            )
            how = {"loss": objective, "count": policy.policy_count(loss), "microbatches": config.microbatches}
            with session.trace_pipeline(actor):
                loss_value = actor.forward_backward(own, **how)
            norm = mk.clip_grad_norm(actor, config.clip)
            session.log(loss=loss_value, grad_norm=norm, lr=scheduler.get_last_lr()[0])
            if session.guard.allows(actor, norm, step=flow.iteration + 1):
                optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        session.log(**{f"policy/{name}": value for name, value in policy.policy_metrics(actor_sums).items()})
        session.log(**{f"critic/{name}": value for name, value in policy.value_metrics(critic_sums).items()})

    log_probs = partial(label_log_probs, temperature=config.temperature)
    look = partial(dataflow.log_prob_call, on="actor", seq_len=config.seq_len, microbatches=config.microbatches)
    looks = [look("old_log_probs", actor, log_probs), look("old_values", critic, policy.critic_values)]
    looks += [look(REFERENCE, reference, log_probs)] if config.kl else []
    looked_at, judges = [call.name for call in looks], "actor" if config.reward_model else "sampler"
    write = {"sampling": sampling, "samples": config.samples, "seed": config.seed}
    flow = dataflow.Flow(
        meshes,
        [
            dataflow.rollout_call(engine, tokenizer, on="sampler", **write),
            dataflow.reward_call(scores, on=judges),
            *looks,
            dataflow.Call(
                name="learn", on="actor", function=learn, needs=(*dataflow.ROLLOUT, "reward", *looked_at), stage="train"
            ),
        ],
        source=lambda step: [{"key": key, "fields": row.fields} for key, row in prompts.of_step(step)],
        fields=dataflow.PROMPTED,
        total=config.steps,
        syncs=syncs,
        staleness=config.staleness,
    )
    print0(flow.describe())

    def held_out_score() -> float:
        """Of the sampler's greedy answers; the same on every rank of the world."""
        score = [0.0]
        if sampler_mesh.here:
            score = [greedy_score(sampler, tasks.held_out, tokenizer, tasks.score, sampling=sampling, engine=engine)]
        dist.broadcast_object_list(score, src=sampler_mesh.ranks[0])
        return score[0]

    # ---------------------------------------------------------------------------------------------- where we stopped
    saves = {name: mk.Checkpointer(config.out / "checkpoints" / name, keep=config.keep) for name in ("actor", "critic")}
    saved = [max(set(saves["actor"].steps()) & set(saves["critic"].steps()), default=0)]
    dist.broadcast_object_list(saved, src=0)
    if saved[0]:
        if actor_mesh.here:
            saves["actor"].load(actor, optimizer, scheduler=scheduler, step=saved[0], config=config)
            saves["critic"].load(critic, critic_optimizer, step=saved[0], config=config)
        flow.load_state_dict(saves["actor"].extra(saved[0]))
        for sync in syncs:
            sync.function()

    # ---------------------------------------------------------------------------------------------- the loop
    with saves["actor"], saves["critic"], Session(world, config, start=flow.iteration) as session:
        if session.start == 0:
            print0(f"held out before the first step: {held_out_score():.3f}")
        for step in session.steps():
            samples = flow.step()
            session.log(**{f"seconds/{name}": seconds for name, seconds in flow.seconds.items()})
            session.stop_clock(tokens=int(session.scalars.get("tokens", 0)))  # ranks that do not learn have none
            if session.evaluates(step):
                session.log(held_out=held_out_score())
                reward = session.scalars.get("reward", 0.0)
                print0(f"step {step}: held out {session.scalars['held_out']:.3f}, reward {reward:.3f}")
                show_rollouts(step, map(dataflow.rollout_of, samples), session.logger)
            if session.saves(step):
                state = flow.state_dict()
                if actor_mesh.here:
                    saves["actor"].save(step, actor, optimizer, scheduler=scheduler, config=config, extra=state)
                    saves["critic"].save(step, critic, critic_optimizer, config=config)
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- what came of it
    export = config.out / f"model-{config.steps}"
    if actor_mesh.here:
        export_model(actor, export, tokenizer)
    print0(f"\nheld out, {len(tasks.held_out)} prompts: {session.scalars['held_out']:.3f}; model in {export}")


# ---------------------------------------------------------------------------------------------- parts of the above
def policy_of(config: Config) -> policy.PolicyLoss:
    """The preset, with the KL and the lambda that were asked for."""
    if config.sampler_ranks and config.sampler_mesh is None:
        raise mk.PlanError(f"--sampler-ranks {config.sampler_ranks} needs a --sampler-mesh of so many ranks.")
    loss = policy.PRESETS.get(config.preset)
    if loss is None or not isinstance(loss.advantage, policy.GAE):
        fitting = ", ".join(name for name, preset in policy.PRESETS.items() if isinstance(preset.advantage, policy.GAE))
        raise mk.PlanError(f"--preset {config.preset} is not a loss with a critic. Choose from {fitting}.")
    kl = dataclasses.replace(loss.kl, coefficient=config.kl)
    return dataclasses.replace(loss, kl=kl, advantage=dataclasses.replace(loss.advantage, decay=config.decay))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
