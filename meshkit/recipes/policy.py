"""Setup of reinforcement learning from `RolloutFlags`: tasks, the first policy (SFT warm-up), the inference engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from meshkit.algos.dataflow import PROMPTED, Call, Flow, StreamFlow, Sync, generation_call, rollout_call
from meshkit.algos.policy import RolloutRules
from meshkit.algos.reallocate import prepare_reallocation
from meshkit.algos.rollout import Engine, Sampling, VllmEngine, generate
from meshkit.core import _torch
from meshkit.data import REFERENCE_ALPHABET, PromptLoader, Tokenizer, character_tokenizer, load_tokenizer
from meshkit.errors import PlanError
from meshkit.initialize import init_weights
from meshkit.lora import init as init_adapters
from meshkit.mesh import Mesh, host_ranks, init_mesh
from meshkit.models import config_from_pretrained, load_pretrained
from meshkit.optim import adamw
from meshkit.step import Run

from .flags import PolicyFlags, RolloutFlags, SampledFlags, SamplerFlags
from .prompts import encode_chats, fit_rows, stop_ids
from .sft import warm_up_policy
from .tasks import REFERENCE_TASKS, Tasks, load_tasks, small_model

Build = Callable[[Any], Run]
Config = TypeVar("Config", bound=RolloutFlags)


def actor_and_sampler(config: SamplerFlags) -> dict[str, Mesh]:
    """The meshes "actor" and "sampler", see `mesh_beside`."""
    actor, sampler = mesh_beside(config.mesh, "sampler", config.sampler_mesh, config.sampler_ranks)
    return {"actor": actor, "sampler": sampler}


def mesh_beside(mesh: str, name: str, other: str | None, ranks: int) -> tuple[Mesh, Mesh]:
    """Two meshes: the same one twice, two on the same ranks, or the other on the last ranks alone. Every rank must call it.

    name: of --NAME-mesh and --NAME-ranks, which say the other. Raises: PlanError for ranks of one that has no mesh.
    """
    if ranks and other is None:
        raise PlanError(f"--{name}-ranks {ranks} needs a --{name}-mesh of so many ranks.")
    # Every rank makes both meshes, in one order, since making the process groups of a mesh is collective over the world.
    world_size = init_mesh().spec.world_size
    firsts = range(world_size - ranks)
    first = init_mesh(mesh, ranks=firsts)
    if other is None:
        return first, first
    return first, init_mesh(other, ranks=range(firsts.stop, world_size) if ranks else firsts)


def policy_tasks(config: Config, rules: RolloutRules | None = None) -> tuple[Config, Tasks, Tokenizer, Sampling]:
    """(the flags with rows that hold prompts and answers, the rows with their reward, the tokenizer of --pretrained or of
    characters for reference tasks, how to answer). rules: of the preset, which may let answers be longer.

    Raises: MeshkitError for adapters without --pretrained, --engine vllm without vLLM, dynamic sampling with a sampler apart,
    prompts and answers that do not fit, and a reward that fails at once: before anything is trained.
    """
    config.refuse_adapters()
    if rules is not None and rules.dynamic and getattr(config, "sampler_mesh", None) is not None:
        raise PlanError(
            "dynamic sampling (DAPO) asks again within a step, for which learners and sampler must be one. Leave "
            "--sampler-mesh out, or choose another --preset."
        )
    if config.engine == "vllm":
        VllmEngine.refuse_absence()  # before a model is trained to begin with
    tasks = load_tasks(
        config.task,
        config.data,
        held_out=config.held_out,
        evaluated=config.eval_prompts,
        seed=config.seed,
        reward=config.reward,
        reward_timeout_s=config.reward_timeout_s,
        reward_workers=config.reward_workers,
        max_new_tokens=config.max_new_tokens,
        environment=getattr(config, "environment", ""),
        turns=getattr(config, "turns", None),
    )
    if tasks.environment and getattr(config, "sampler_mesh", None) is not None:
        raise PlanError("episodes in an environment are played by the learners' own policy. Leave --sampler-mesh out.")
    if tasks.environment and rules is not None and rules.overlong:
        raise PlanError(
            "an overlong penalty (DAPO) is of an answer, and an episode has several. Choose another --preset."
        )
    # Characters for reference tasks: with one token a digit a small model learns them in minutes.
    tokenizer = load_tokenizer(config.pretrained) if config.pretrained else character_tokenizer(REFERENCE_ALPHABET)
    tasks = replace(
        tasks,
        train=encode_chats(tasks.train, tokenizer, config.pretrained),
        held_out=encode_chats(tasks.held_out, tokenizer, config.pretrained),
    )
    sampling = Sampling(
        max_new_tokens=(rules or RolloutRules()).limit(tasks.max_new_tokens),
        temperature=config.temperature,
        stop_ids=stop_ids(tokenizer, config.pretrained),
    )
    fitted = fit_rows(config, [*tasks.train, *tasks.held_out], tokenizer, sampling)
    tasks.refuse_failing_reward()
    return fitted, tasks, tokenizer, sampling


def first_policy(config: RolloutFlags, build: Build, tasks: Tasks, tokenizer: Tokenizer) -> Path:
    """The folder that the policy starts from: --pretrained, or a small model in --out after some SFT, right now and then.

    build: the run of a shape, on its mesh, whose every rank calls this. A folder that exists is taken as it is.
    """
    # In --out: a run that continues finds it, and begins at its own checkpoint anyway.
    start = config.pretrained or config.out / "sft-model"
    if not start.exists():
        task, run = REFERENCE_TASKS[config.task], build(small_model(tokenizer.vocab_size))
        warm_up_policy(
            run,
            adamw(run, lr=config.sft_lr or task.sft_lr),
            tasks.train,
            tokenizer,
            start,
            steps=task.sft_steps if config.sft_steps is None else config.sft_steps,
            seed=config.seed,
            seq_len=config.seq_len,
            is_main=dist.get_rank() == 0,
        )
    return start


def run_from(folder: str | os.PathLike[str], build: Build, *, fresh: Sequence[str] = (), seed: int = 0) -> Run:
    """The model of a folder, built on its mesh. fresh: parameters that the folder lacks. seed: of these and of adapters."""
    folder = Path(folder)
    run = build(config_from_pretrained(folder))
    # Before the load, which then overwrites all but the fresh ones: a score head that the folder lacks keeps its first
    # values.
    if fresh:
        init_weights(run.model, seed=seed, plan=run.plan)
    load_pretrained(run.model, folder, fresh=fresh)
    init_adapters(run.model, seed=seed)
    return run


def reference_of(config: PolicyFlags, run: Run, start: str | os.PathLike[str], build: Build) -> Run | None:
    """The reference model, as the policy was before: none without --kl, and with adapters the policy itself without them."""
    if not config.kl:
        return None
    return run if config.lora_rank is not None else run_from(start, build)


def sampler_of(
    config: SamplerFlags,
    meshes: Mapping[str, Mesh],
    actor: Run | None,
    start: str | os.PathLike[str],
    build: Callable[[Mesh, Any], Run],
) -> tuple[Run | None, list[Sync]]:
    """(who writes, the weight syncs): the actor itself and none, or with --sampler-mesh its copy, and one to it.

    meshes: of `actor_and_sampler`. start: the folder that the actor began with. build: the run of a shape on a mesh. Every
    rank of the world calls it. Wire: that of `prepare_reallocation`.
    """
    if config.sampler_mesh is None:
        return actor, []
    host_ranks(_torch.world()).barrier()  # until the folder is written
    sampler = run_from(start, partial(build, meshes["sampler"])) if meshes["sampler"].here else None
    weights = prepare_reallocation(actor, sampler, frozen=False)  # both began with the same folder
    if dist.get_rank() == 0:
        print(weights.plan)
    return sampler, [Sync(name="weights", source="actor", destination="sampler", function=weights)]


def engine_of(config: RolloutFlags, run: Run) -> Engine:
    """The inference engine that writes the rollouts of this run's model, as --engine says."""
    if config.engine == "vllm":
        return VllmEngine(run, gpu_memory_utilization=config.vllm_memory)
    return partial(generate, run)


def rollout_flow(
    config: SampledFlags,
    meshes: Mapping[str, Mesh],
    sampler: Run | None,
    tokenizer: Tokenizer,
    sampling: Sampling,
    prompts: PromptLoader,
    calls: Sequence[Call],
    syncs: Sequence[Sync],
    *,
    engine: Engine | None,
) -> Flow | StreamFlow:
    """The dataflow of a policy recipe: `samples` rollouts of each prompt by the sampler, then `calls`; --stream says which.

    meshes: of `actor_and_sampler`. sampler, engine: None on ranks without it. prompts: of one data rank of one, since the
    flow shares them out. Raises: PlanError for --stream without ranks of its own, without staleness, or with vLLM.
    """
    options: dict[str, Any] = {"on": "sampler", "sampling": sampling, "samples": config.samples, "seed": config.seed}
    given: dict[str, Any] = {
        "source": lambda step: [{"key": key, "fields": row.fields} for key, row in prompts.of_step(step)],
        "fields": PROMPTED,
        "total": config.steps,
        "syncs": syncs,
        "staleness": config.staleness,
    }
    if not config.stream:
        return Flow(meshes, [rollout_call(engine, tokenizer, **options), *calls], **given)
    for wrong, why in (
        (not config.sampler_ranks, "needs --sampler-ranks of its own"),
        (not config.staleness, "needs a --staleness of at least 1, the most updates between writing and learning"),
        (
            config.engine != "meshkit",
            f"needs --engine meshkit, whose answers go on with new weights, not {config.engine}",
        ),
    ):
        if wrong:
            raise PlanError(f"--stream {why}.")
    write = generation_call(sampler, tokenizer, tokens=config.stream_tokens, **options)
    return StreamFlow(meshes, write, calls, **given)
