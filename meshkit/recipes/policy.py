"""What reinforcement learning begins with, as `RolloutFlags` say: tasks, the first policy, who writes rollouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshkit.algos.rollout import Engine, VllmEngine, generate
from meshkit.data import REFERENCE_ALPHABET, Tokenizer, character_tokenizer, load_tokenizer
from meshkit.optimizer import adamw
from meshkit.step import Run

from .flags import RolloutFlags
from .tasks import REFERENCE_TASKS, Tasks, load_tasks, small_model, warm_up_policy


def policy_tasks(config: RolloutFlags, *, seed: int) -> tuple[Tasks, Tokenizer]:
    """The rows and their reward, and the tokenizer of --pretrained, or of characters for the reference tasks."""
    tasks = load_tasks(
        config.task,
        config.data,
        held_out=config.held_out,
        evaluated=config.eval_prompts,
        seed=seed,
        reward=config.reward,
        reward_timeout_s=config.reward_timeout_s,
        max_new_tokens=config.max_new_tokens,
    )
    tokenizer = load_tokenizer(config.pretrained) if config.pretrained else character_tokenizer(REFERENCE_ALPHABET)
    return tasks, tokenizer


def first_policy(
    config: RolloutFlags,
    build: Callable[[Any], Run],
    tasks: Tasks,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    seed: int,
) -> Path:
    """The folder that the policy starts from: --pretrained, or `folder` with a small model that is right now and then.

    build: the run of a shape, on its mesh, whose every rank calls this. A `folder` that exists is taken as it is.
    """
    start = config.pretrained or folder
    if not start.exists():
        task, run = REFERENCE_TASKS[config.task], build(small_model(tokenizer.vocab_size))
        warm_up_policy(
            run,
            adamw(run, lr=config.sft_lr or task.sft_lr),
            tasks.train,
            tokenizer,
            start,
            steps=task.sft_steps if config.sft_steps is None else config.sft_steps,
            seed=seed,
            seq_len=seq_len,
            speaks=dist.get_rank() == 0,
        )
    return start


def refuse_missing_engine(config: RolloutFlags) -> None:
    """Raises: MeshkitError for --engine vllm without vLLM, before a model is trained to begin with."""
    if config.engine == "vllm":
        VllmEngine.refuse_absence()


def engine_of(config: RolloutFlags, run: Run) -> Engine:
    """Who writes the rollouts of this run's model."""
    if config.engine == "vllm":
        return VllmEngine(run, gpu_memory_utilization=config.vllm_memory)
    return partial(generate, run)
