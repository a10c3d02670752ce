"""Setup of reinforcement learning from `RolloutFlags`: tasks, the first policy (SFT warm-up), the inference engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from meshkit.algos.dataflow import (
    PROMPTED,
    Call,
    Flow,
    StreamFlow,
    Sync,
    generation_call,
    log_prob_call,
    rollout_call,
)
from meshkit.algos.policy import RolloutRules
from meshkit.algos.reallocate import prepare_reallocation
from meshkit.algos.rollout import (
    REFERENCE,
    Engine,
    Sampling,
    VllmEngine,
    features_of,
    generate,
    has_paged_cache,
    label_log_probs,
    most_fingerprint_bytes,
)
from meshkit.algos.shardcast.command import read_secret
from meshkit.algos.workers import GIVES, VerifyPolicy, WorkerFlow, WorkerPolicy, prompt_of, read_answers
from meshkit.core import _torch
from meshkit.data import REFERENCE_ALPHABET, PromptLoader, Tokenizer, character_tokenizer, load_tokenizer
from meshkit.errors import PlanError
from meshkit.initialize import init_weights
from meshkit.lora import init as init_adapters
from meshkit.mesh import Mesh, host_ranks, init_mesh
from meshkit.models import config_from_pretrained, load_pretrained
from meshkit.optim import adamw
from meshkit.step import Run

from .flags import CriticFlags, RolloutFlags, SampledFlags, SamplerFlags
from .prompts import encode_chats, fit_rows, stop_ids
from .sft import warm_up_policy
from .tasks import REFERENCE_TASKS, Tasks, load_tasks, small_model

Build = Callable[[Any], Run]
Config = TypeVar("Config", bound=RolloutFlags)
Sampled = TypeVar("Sampled", bound=SampledFlags)


def policy_meshes(config: SampledFlags) -> dict[str, Mesh]:
    """The meshes "actor", "reference" and "sampler", and with a critic "critic": see `meshes_beside`. Rank 0 prints them.

    Every rank must call it. Raises: PlanError for a mesh of a reference model without --kl, and for --stream without ranks of
    its own, without staleness, with vLLM, or with another mesh that learns.
    """
    if config.reference_mesh is not None and not config.kl:
        raise PlanError(
            f'--reference-mesh "{config.reference_mesh}": without --kl there is no reference model. Give a --kl, or leave '
            "the mesh out."
        )
    others = {"critic": (config.critic_mesh, config.critic_ranks)} if isinstance(config, CriticFlags) else {}
    others |= {"reference": (config.reference_mesh, config.reference_ranks)}
    for wrong, why in (
        (not config.sampler_ranks, "needs --sampler-ranks of its own"),
        (not config.staleness, "needs a --staleness of at least 1, the most updates between writing and learning"),
        (
            config.engine != "meshkit",
            f"needs --engine meshkit, whose answers go on with new weights, not {config.engine}",
        ),
        (
            any(mesh is not None for mesh, _ in others.values()),
            "has one mesh that writes and one that learns. Leave --reference-mesh and --critic-mesh out",
        ),
    ):
        if config.stream and wrong:
            raise PlanError(f"--stream {why}.")
    if config.worker_port is None and (config.worker_verify or config.validator_secret is not None):
        raise PlanError(
            "--worker-verify and --validator-secret are of answers that workers write. Give a --worker-port, or leave them "
            "out."
        )
    if config.worker_port is not None:
        _refuse_odd_workers(config, [mesh for mesh, _ in others.values()])
    others |= {"sampler": (config.sampler_mesh, config.sampler_ranks)}
    actor, beside = meshes_beside(config.mesh, others)
    meshes = {"actor": actor} | beside
    for mesh in {id(mesh): mesh for mesh in meshes.values()}.values() if dist.get_rank() == 0 else ():
        print(f"{', '.join(name for name, each in meshes.items() if each is mesh)}  {mesh.describe()}")
    return meshes


def _refuse_odd_workers(config: SampledFlags, meshes: Sequence[str | None]) -> None:
    for wrong, why in (
        (config.worker_secret is None, "needs a --worker-secret, a file with a text that workers know too"),
        (
            config.worker_verify and config.validator_secret is None,
            "with --worker-verify needs a --validator-secret, a file with a text that validators know, and workers do not",
        ),
        (
            config.validator_secret is not None and not config.worker_verify,
            "has a --validator-secret, which nobody uses without --worker-verify. Give both, or neither",
        ),
        (not config.staleness, "needs a --staleness of at least 1, the most updates between writing and learning"),
        (
            config.stream or config.sampler_mesh is not None,
            "has workers that write. Leave --stream and --sampler-mesh out",
        ),
        (
            any(mesh is not None for mesh in meshes),
            "has one mesh that learns. Leave --reference-mesh and --critic-mesh out",
        ),
        (config.routing_replay == "rollout", "has workers that send no choices of experts. Use --routing-replay old"),
        (config.lora_rank is not None, "publishes whole models, and adapters are none. Leave --lora-rank out"),
    ):
        if wrong:
            raise PlanError(f"--worker-port {config.worker_port} {why}.")


def meshes_beside(mesh: str, others: Mapping[str, tuple[str | None, int]]) -> tuple[Mesh, dict[str, Mesh]]:
    """(a mesh on the first ranks, others by their names): each is the first itself, or another on the same ranks, or on ranks
    of its own, which follow in the order of the names. Every rank must call it.

    others: (mesh, ranks) of --NAME-mesh and --NAME-ranks. Raises: PlanError for ranks of one that has no mesh, and where none
    are left for the first.
    """
    for name, (other, ranks) in others.items():
        if ranks and other is None:
            raise PlanError(f"--{name}-ranks {ranks} needs a --{name}-mesh of so many ranks.")
    # Every rank makes all meshes, in one order, since making the process groups of a mesh is collective over the world.
    world_size, apart = init_mesh().spec.world_size, sum(ranks for _, ranks in others.values())
    if apart >= world_size:
        told = " and ".join(f"--{name}-ranks {ranks}" for name, (_, ranks) in others.items() if ranks)
        raise PlanError(f"{told} of {world_size} ranks leave none to learn. Start more ranks, or give fewer.")
    firsts = range(world_size - apart)
    first, used, meshes = init_mesh(mesh, ranks=firsts), firsts.stop, {}
    for name, (other, ranks) in others.items():
        if other is None:
            meshes[name] = first
        else:
            meshes[name] = init_mesh(other, ranks=range(used, used + ranks) if ranks else firsts)
            used += ranks
    return first, meshes


def policy_tasks(config: Config, rules: RolloutRules | None = None) -> tuple[Config, Tasks, Tokenizer, Sampling]:
    """(the flags with rows that hold prompts and answers, the rows with their reward, the tokenizer of --pretrained or of
    characters for reference tasks, how to answer). rules: of the preset, which may let answers be longer.

    Raises: MeshkitError for adapters without --pretrained, --engine vllm without vLLM, dynamic sampling with a model apart,
    prompts and answers that do not fit, and a reward that fails at once: before anything is trained.
    """
    config.refuse_adapters()
    apart = isinstance(config, SampledFlags) and config.in_calls
    if rules is not None and rules.dynamic and apart:
        raise PlanError(
            "dynamic sampling (DAPO) asks again within a step, for which all models must be on the learners' mesh. Leave "
            "--sampler-mesh, --reference-mesh and --worker-port out, or choose another --preset."
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
    if tasks.environment and apart:
        raise PlanError(
            "episodes in an environment are played and judged on the learners' mesh. Leave --sampler-mesh, --reference-mesh "
            "and --worker-port out."
        )
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


def first_policy(config: RolloutFlags, mesh: Mesh, build: Build, tasks: Tasks, tokenizer: Tokenizer) -> Path:
    """The folder that the policy starts from: --pretrained, or a small model in --out after some SFT, right now and then.

    mesh, build: where it is trained, and the run of a shape there. A folder that exists is taken as it is.
    Every rank of the world calls it, and returns when the folder is there. Wire: a barrier of hosts.
    """
    # In --out: a run that continues finds it, and begins at its own checkpoint anyway.
    start = config.pretrained or config.out / "sft-model"
    if mesh.here and not start.exists():
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
    host_ranks(_torch.world()).barrier()
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


def reference_of(
    config: Sampled,
    meshes: Mapping[str, Mesh],
    actor: Run | None,
    start: str | os.PathLike[str],
    build: Callable[[Sampled, Mesh, Any], Run],
) -> tuple[Run | None, list[Call]]:
    """(the reference model, as the policy was before; the call that adds its log-probabilities as `REFERENCE`): none without
    --kl, and no model on ranks without it. With adapters it is the policy itself without them, or on --reference-mesh a model
    that has none.

    meshes: of `policy_meshes`. start: of `first_policy`. build: the run of a shape on a mesh, by flags.
    """
    if not config.kl:
        return None, []
    apart = config.reference_mesh is not None
    reference = actor
    if apart or config.lora_rank is None:
        build_reference = partial(build, replace(config, lora_rank=None), meshes["reference"])
        reference = run_from(start, build_reference) if meshes["reference"].here else None
    call = log_prob_call(
        REFERENCE,
        reference,
        partial(label_log_probs, temperature=config.temperature),
        on="reference" if apart else "actor",
        tokens_per_microbatch=config.tokens_per_microbatch,
        microbatches=config.microbatches,
        adapters=apart or config.lora_rank is None,
    )
    return reference, [call]


def sampler_of(
    config: SamplerFlags,
    meshes: Mapping[str, Mesh],
    actor: Run | None,
    start: str | os.PathLike[str],
    build: Callable[[Mesh, Any], Run],
) -> tuple[Run | None, list[Sync]]:
    """(who writes, the weight syncs): the actor itself and none, or with --sampler-mesh its copy, and one to it.

    meshes: of `policy_meshes`. start: of `first_policy`. build: the run of a shape on a mesh. Every rank of the world calls
    it. Wire: that of `prepare_reallocation`.
    """
    if config.sampler_mesh is None:
        return actor, []
    sampler = run_from(start, partial(build, meshes["sampler"])) if meshes["sampler"].here else None
    weights = prepare_reallocation(actor, sampler, frozen=False)  # both began with the same folder
    if dist.get_rank() == 0:
        print(weights.plan)
    return sampler, [Sync(name="weights", source="actor", destination="sampler", function=weights)]


def records_routing(config: RolloutFlags) -> bool:
    """Whether the generator records the experts that its routers choose."""
    return getattr(config, "routing_replay", "none") == "rollout"


def engine_of(config: RolloutFlags, run: Run) -> Engine:
    """The inference engine that writes the rollouts of this run's model, as --engine says."""
    if config.engine == "vllm":
        return VllmEngine(run, gpu_memory_utilization=config.vllm_memory)
    return partial(generate, run, routing=records_routing(config))


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
) -> Flow | StreamFlow | WorkerFlow:
    """The dataflow of a policy recipe: `samples` rollouts of each prompt, then `calls`. --stream and --worker-port say which.

    meshes: of `policy_meshes`. sampler, engine: None on ranks without it. prompts: of one data rank of one, since the
    flow shares them out.
    """
    options: dict[str, Any] = {"on": "sampler", "sampling": sampling, "samples": config.samples, "seed": config.seed}
    given: dict[str, Any] = {
        "source": lambda step: [{"key": key, "fields": row.fields} for key, row in prompts.of_step(step)],
        "fields": PROMPTED,
        "total": config.steps,
        "staleness": config.staleness,
    }
    if config.worker_port is not None:
        return _worker_flow(config, meshes, sampler, tokenizer, sampling, calls, given)
    given["syncs"] = syncs
    if not config.stream:
        return Flow(meshes, [rollout_call(engine, tokenizer, **options), *calls], **given)
    options |= {"tokens": config.stream_tokens, "routing": records_routing(config)}
    write = generation_call(sampler, tokenizer, **options)
    return StreamFlow(meshes, write, calls, **given)


def _worker_flow(
    config: SampledFlags,
    meshes: Mapping[str, Mesh],
    actor: Run | None,
    tokenizer: Tokenizer,
    sampling: Sampling,
    calls: Sequence[Call],
    given: dict[str, Any],
) -> WorkerFlow:
    """Workers write, whose samplings, seeds and precision are those of the flags."""
    assert config.worker_port is not None and config.worker_secret is not None
    verify, features = _verification(config, actor, sampling)
    told = {"sampling": asdict(sampling), "samples": config.samples, "seed": config.seed, "precision": config.precision}
    served = WorkerPolicy(
        port=config.worker_port,
        folder=config.out / "weights-of-workers",
        secret=read_secret(config.worker_secret, verb="--worker-secret"),
        lease_s=config.worker_lease,
        tokens=config.samples * sampling.max_new_tokens,
        settings=told,
        gives=GIVES,
        verify=verify,
    )

    def publish(folder: Path) -> None:
        assert actor is not None  # on a rank of its mesh
        actor.export(folder, tokenizer)

    return WorkerFlow(
        meshes,
        calls,
        served,
        publish=publish,
        first=partial(prompt_of, tokenizer=tokenizer),
        read=partial(read_answers, tokenizer=tokenizer, sampling=sampling, samples=config.samples, features=features),
        **given,
    )


def _verification(
    config: SampledFlags, actor: Run | None, sampling: Sampling
) -> tuple[VerifyPolicy | None, int | None]:
    """(how rollouts are verified, the features of the model's head): of --worker-verify.

    Raises: PlanError for a model whose generation gives no fingerprints.
    """
    if not config.worker_verify:
        return None, None
    assert actor is not None and config.validator_secret is not None  # all ranks are of its mesh
    if not has_paged_cache(actor):
        raise PlanError(
            f"--worker-verify: {type(actor.full_model).__name__} does not attend by a `mask`, and no fingerprints are read "
            "from forwards over its own cache. Leave --worker-verify and --validator-secret out."
        )
    of_answer = most_fingerprint_bytes(sampling.max_new_tokens, config.staleness + 1)
    secret = read_secret(config.validator_secret, verb="--validator-secret")
    policy = VerifyPolicy(secret=secret, fingerprint_bytes=config.samples * of_answer)
    return policy, features_of(actor, asked="--worker-verify")
