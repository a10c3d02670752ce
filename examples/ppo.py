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
from typing import Any, Literal

import torch.distributed as dist
import tyro

import meshkit as mk
from meshkit.algos.dataflow import (
    PROMPTED,
    ROLLOUT,
    Call,
    Flow,
    Sample,
    Sync,
    log_prob_call,
    reward_call,
    rollout_call,
    rollout_of,
)
from meshkit.algos.policy import (
    GAE,
    PRESETS,
    PolicyLoss,
    critic_values,
    pack_rollouts,
    policy_count,
    policy_metrics,
    policy_objective,
    policy_sums,
    step_advantages,
    value_metrics,
    value_objective,
    value_sums,
)
from meshkit.algos.reallocate import prepare_reallocation
from meshkit.algos.rewards import Scores, model_scores, score_on_mesh
from meshkit.algos.rollout import REFERENCE, Engine, Rollout, Sampling, VllmEngine, generate, label_log_probs
from meshkit.data import REFERENCE_ALPHABET, PromptLoader, character_tokenizer, load_tokenizer, take_segments
from meshkit.errors import PlanError
from meshkit.launch import run_main
from meshkit.metrics import Logger, Meter, Progress, show_samples
from meshkit.models import (
    RewardModel,
    build_model,
    config_from_pretrained,
    load_pretrained,
    meta_parameters,
    model_plan,
    reward_plan,
)
from meshkit.recipes.evaluation import SAMPLE_NAMES, greedy_score, sample_rows
from meshkit.recipes.export import export_model
from meshkit.recipes.tasks import REFERENCE_TASKS, load_tasks, small_model, warm_up_policy
from meshkit.schedule_lr import lr_schedule


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes of actor, critic and reference, as "dp_shard=2 tp=2"; -1 is the ranks that are left"""
    sampler_mesh: str | None = None
    """of a copy of the actor that writes the answers; default: the actor itself writes"""
    sampler_ranks: int = 0
    """so many ranks, the last ones, are the sampler's alone; 0: it shares all of them"""
    staleness: int = 0
    """so many steps the sampler runs ahead, with weights that are as much older"""
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
    reward_model: Path | None = None
    """score answers with the reward model of this folder instead; evaluation keeps --reward"""
    reward_timeout_s: float = 10.0
    """of each answer"""
    out: Path = Path("runs/ppo")
    """checkpoints, logs and the final model"""

    preset: str = "PPO"
    """a loss of meshkit.algos.policy with GAE"""
    kl: float = 0.0
    """weight of the KL to the model at the beginning; 0 needs no reference"""
    prompts: int = 128
    """of one step, over all ranks"""
    samples: int = 4
    """answers to each"""
    epochs: int = 2
    """times that a step's answers are learnt from"""
    minibatches: int = 1
    """optimizer steps of each of them"""
    decay: float = 0.95
    """lambda of GAE"""
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """default: the task's, 256 with --data"""
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
    steps: int = 150
    lr: float = 5e-4
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 10
    critic_lr: float = 1e-3
    """constant"""
    critic_warmup: int = 5
    """steps in which only the critic learns"""
    clip: float = 1.0
    seed: int = 0

    recompute: Literal["none", "activation", "selective", "full"] = "none"
    precision: Literal["fp32", "bf16"] = "fp32"
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`"""
    eval_every: int = 20
    eval_prompts: int = 512
    save_every: int = 50


def in_parts(config: Config, mesh: mk.Mesh, shape: Any, *, scores: bool = False) -> mk.Run:
    """A model in parts, without values; with `scores` one that gives a number for each token."""
    with meta_parameters():
        model = RewardModel(shape) if scores else build_model(shape)
    plan = reward_plan(shape) if scores else model_plan(shape)
    precision = mk.Precision() if config.precision == "bf16" else None
    memory = mk.MemoryPolicy(recompute=config.recompute, precision=precision)
    return mk.parallelize(model, mesh, plan=plan, memory=memory, schedule=config.schedule)


def load(config: Config, mesh: mk.Mesh, folder: Path, *, scores: bool = False, fresh: tuple[str, ...] = ()) -> mk.Run:
    """The model of a folder; parameters that are `fresh` begin from nothing."""
    run = in_parts(config, mesh, config_from_pretrained(folder), scores=scores)
    if fresh:
        mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    load_pretrained(run.model, folder, fresh=fresh)
    return run


def main() -> None:
    config = tyro.cli(Config)
    loss = policy_of(config)
    if config.engine == "vllm":
        VllmEngine.refuse_absence()  # before a model is trained to begin with

    # ---------------------------------------------------------------------------------------------- who: the meshes
    world = mk.init_mesh()
    learners = range(world.spec.world_size - config.sampler_ranks)
    meshes = {"actor": mk.init_mesh(config.mesh, ranks=learners)}
    meshes["sampler"] = meshes["actor"]
    if config.sampler_mesh is not None:
        apart = range(learners.stop, world.spec.world_size) if config.sampler_ranks else learners
        meshes["sampler"] = mk.init_mesh(config.sampler_mesh, ranks=apart)
    actor_mesh, sampler_mesh = meshes["actor"], meshes["sampler"]
    speaks = world.rank == 0
    say = print if speaks else lambda *_: None
    for name, mesh in meshes.items():
        say(f"{name}  {mesh.describe()}")

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
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed)
    say(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- the models
    start = config.pretrained or config.out / "sft-model"
    actor = critic = reference = judge = sampler = None  # a rank has those of its meshes
    if actor_mesh.here:
        if not start.exists():
            task, first = REFERENCE_TASKS[config.task], in_parts(config, actor_mesh, small_model(tokenizer.vocab_size))
            steps = task.sft_steps if config.sft_steps is None else config.sft_steps
            how = {"steps": steps, "seed": config.seed, "seq_len": config.seq_len, "speaks": speaks}
            warm_up_policy(first, mk.adamw(first, lr=task.sft_lr), tasks.train, tokenizer, start, **how)
        actor = load(config, actor_mesh, start)
        critic = load(config, actor_mesh, start, scores=True, fresh=("score.weight",))
        reference = load(config, actor_mesh, start) if config.kl else None
        judge = load(config, actor_mesh, config.reward_model, scores=True) if config.reward_model else None
        optimizer, critic_optimizer = mk.adamw(actor, lr=config.lr), mk.adamw(critic, lr=config.critic_lr)
        how = {"kind": config.lr_kind, "warmup_steps": config.warmup_steps, "min_factor": 0.1}
        scheduler = lr_schedule(optimizer, total_steps=config.steps, **how)
        actor_sums, critic_sums = policy_sums(actor_mesh), value_sums(actor_mesh)
        guard = mk.NonFiniteGuard()
    dist.barrier()  # the folder is there
    syncs = []
    if config.sampler_mesh is None:
        sampler = actor
    else:
        sampler = load(config, sampler_mesh, start) if sampler_mesh.here else None
        weights = prepare_reallocation(actor, sampler)
        say(weights.plan)
        syncs = [Sync(name="weights", source="actor", destination="sampler", function=weights)]

    engine: Engine | None = None
    if sampler is not None and config.engine == "vllm":
        engine = VllmEngine(sampler, gpu_memory_utilization=config.vllm_memory)
    elif sampler is not None:
        engine = partial(generate, sampler)

    # ---------------------------------------------------------------------------------------------- what they do
    scalars: dict[str, float] = {}

    def scores(rollouts: list[Rollout]) -> Scores:
        if judge is not None:
            return model_scores(judge, [rollout.tokens for rollout in rollouts], seq_len=config.seq_len)
        return score_on_mesh(meshes[judges], rollouts, tasks.score).own

    def learn(samples: list[Sample]) -> None:
        """Advantages over the whole step; then each minibatch teaches the critic, and after its warm-up the actor."""
        rollouts = [rollout_of(sample, looked_at) for sample in samples]
        batch = pack_rollouts(rollouts, seq_len=config.seq_len, values=looked_at, pad_multiple=actor_mesh.row_multiple)
        advantages = step_advantages(actor_mesh, batch, loss)
        batch |= advantages.values
        scalars.update(reward=advantages.reward, unscored=advantages.unscored, tokens=advantages.tokens)
        whose = batch["groups"] % config.minibatches  # whole prompts, so that every mesh has the same minibatches
        for part in [*range(config.minibatches)] * config.epochs:
            own = take_segments(batch, batch["segment_ids"][(batch["ends"] > 0) & (whose == part)].tolist())
            objective = value_objective(actor_mesh, own, metrics=critic_sums)
            found = critic.forward_backward(own, microbatches=config.microbatches, loss=objective)
            scalars["value_loss"] = found.item()
            if guard.allows(critic, mk.clip_grad_norm(critic, config.clip), step=flow.iteration + 1):
                critic_optimizer.step()
            critic_optimizer.zero_grad()
            if flow.iteration < config.critic_warmup:
                continue
            objective = policy_objective(actor_mesh, own, loss, temperature=config.temperature, metrics=actor_sums)
            count = policy_count(loss)
            found = actor.forward_backward(own, microbatches=config.microbatches, loss=objective, count=count)
            norm = mk.clip_grad_norm(actor, config.clip)
            scalars.update(loss=found.item(), grad_norm=norm.item(), lr=scheduler.get_last_lr()[0])
            if guard.allows(actor, norm, step=flow.iteration + 1):
                optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        scalars.update({f"policy/{name}": value for name, value in policy_metrics(actor_sums).items()})
        scalars.update({f"critic/{name}": value for name, value in value_metrics(critic_sums).items()})

    log_probs = partial(label_log_probs, temperature=config.temperature)
    look = partial(log_prob_call, on="actor", seq_len=config.seq_len, microbatches=config.microbatches)
    looks = [look("old_log_probs", actor, log_probs), look("old_values", critic, critic_values)]
    looks += [look(REFERENCE, reference, log_probs)] if config.kl else []
    looked_at, judges = [call.name for call in looks], "actor" if config.reward_model else "sampler"
    write = {"sampling": sampling, "samples": config.samples, "seed": config.seed}
    flow = Flow(
        meshes,
        [
            rollout_call(engine, tokenizer, on="sampler", **write),
            reward_call(scores, on=judges),
            *looks,
            Call(name="learn", on="actor", function=learn, needs=(*ROLLOUT, "reward", *looked_at), stage="train"),
        ],
        source=lambda step: [{"key": key, "fields": row.fields} for key, row in prompts.of_step(step)],
        fields=PROMPTED,
        total=config.steps,
        syncs=syncs,
        staleness=config.staleness,
    )
    say(flow.describe())

    def held_out_score() -> float:
        """Of the sampler's greedy answers; the same on every rank of the world."""
        found = [0.0]
        if sampler_mesh.here:
            found = [greedy_score(sampler, tasks.held_out, tokenizer, tasks.score, sampling=sampling, engine=engine)]
        dist.broadcast_object_list(found, src=sampler_mesh.ranks[0])
        return found[0]

    # ---------------------------------------------------------------------------------------------- where we stopped
    saves = {name: mk.Checkpointer(config.out / "checkpoints" / name, keep=2) for name in ("actor", "critic")}
    saved = [max(set(saves["actor"].steps()) & set(saves["critic"].steps()), default=0)]
    dist.broadcast_object_list(saved, src=0)
    if saved[0]:
        if actor_mesh.here:
            saves["actor"].load(actor, optimizer, scheduler=scheduler, step=saved[0], config=config)
            saves["critic"].load(critic, critic_optimizer, step=saved[0], config=config)
        flow.load_state_dict(saves["actor"].extra(saved[0]))
        for sync in syncs:
            sync.function()
    if flow.iteration >= config.steps:
        say(f"{config.out} has its {config.steps} steps; give more --steps to go on, or another --out to begin anew")
        return
    say(f"resume from step {saved[0]}" if saved[0] else f"held out before the first step: {held_out_score():.3f}")

    # ---------------------------------------------------------------------------------------------- the loop
    with (
        mk.SaveOnSignal() as signals,
        Progress(total_steps=config.steps, start_step=saved[0], enabled=speaks) as progress,
        Logger(config.out, start_step=saved[0], enabled=speaks, also=[progress.update]) as logger,
    ):
        meter = Meter(total_steps=config.steps, start_step=saved[0], devices=world.spec.world_size, device=world.device)
        leaving = False
        while flow.iteration < config.steps and not leaving:
            scalars.clear()
            samples = flow.step()
            step = flow.iteration
            scalars.update({f"seconds/{name}": took for name, took in flow.seconds.items()})
            reading = meter.step(int(scalars.get("tokens", 0)))  # of all ranks; those that do not learn log nothing
            with meter.paused():
                if step % config.eval_every == 0 or step == config.steps:
                    scalars["held_out"] = held_out_score()
                    say(f"step {step}: held out {scalars['held_out']:.3f}, reward {scalars.get('reward', 0):.3f}")
                    if speaks:
                        rows = sample_rows(map(rollout_of, samples))
                        show_samples(step, SAMPLE_NAMES, rows, logger)
                logger.log(step, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(world)
                if step % config.save_every == 0 or step == config.steps or leaving:
                    state = flow.state_dict()
                    if actor_mesh.here:
                        saves["actor"].save(step, actor, optimizer, scheduler=scheduler, config=config, extra=state)
                        saves["critic"].save(step, critic, critic_optimizer, config=config)
        for checkpoints in saves.values():
            checkpoints.wait()

    # ---------------------------------------------------------------------------------------------- what came of it
    if flow.iteration < config.steps:
        say(f"{signals.received or 'a signal on another rank'}: saved step {step}; start again to go on")
        return
    export = config.out / f"model-{config.steps}"
    if actor_mesh.here:
        export_model(actor, export, tokenizer)
    say(f"\nheld out, {len(tasks.held_out)} prompts: {scalars['held_out']:.3f}; model in {export}")


# ---------------------------------------------------------------------------------------------- parts of the above
def policy_of(config: Config) -> PolicyLoss:
    """The preset, with the KL and the lambda that were asked for."""
    if config.sampler_ranks and config.sampler_mesh is None:
        raise PlanError(f"--sampler-ranks {config.sampler_ranks} needs a --sampler-mesh of so many ranks.")
    loss = PRESETS.get(config.preset)
    if loss is None or not isinstance(loss.advantage, GAE):
        fitting = ", ".join(name for name, preset in PRESETS.items() if isinstance(preset.advantage, GAE))
        raise PlanError(f"--preset {config.preset} is not a loss with a critic. Choose from {fitting}.")
    kl = dataclasses.replace(loss.kl, coefficient=config.kl)
    return dataclasses.replace(loss, kl=kl, advantage=dataclasses.replace(loss.advantage, decay=config.decay))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
