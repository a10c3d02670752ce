"""Tasks on which reinforcement learning shows in minutes on a CPU, with the small model that learns them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from meshkit.algos.rewards import Reward, UnitTests, arithmetic, countdown, exact_match
from meshkit.algos.teach import teach
from meshkit.data import (
    Record,
    TaskSplits,
    Tokenizer,
    addition_tasks,
    countdown_tasks,
    encode_completion,
    reversal_tasks,
)
from meshkit.initialize import init_weights
from meshkit.metrics import Progress
from meshkit.models import LlamaConfig, save_pretrained
from meshkit.step import Run

VERIFIERS: dict[str, Reward] = {
    "exact": exact_match,
    "arithmetic": arithmetic,
    "countdown": countdown,
    "unit-tests": UnitTests(),
}
"""by the names that recipes have for them"""

SMALL_MODEL = LlamaConfig(
    vocab_size=64,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=24,
    max_position_embeddings=256,
)


@dataclass(frozen=True, kw_only=True)
class ReferenceTask:
    """Rows to learn from, how they are checked, and how long a small model learns them before it is rewarded."""

    rows: Callable[..., TaskSplits]
    reward: str
    """of VERIFIERS"""
    max_new_tokens: int
    sft_steps: int
    sft_lr: float


REFERENCE_TASKS = {
    "addition": ReferenceTask(rows=addition_tasks, reward="exact", max_new_tokens=4, sft_steps=440, sft_lr=1e-3),
    "reversal": ReferenceTask(
        rows=partial(reversal_tasks, shortest=3, longest=5),
        reward="exact",
        max_new_tokens=6,
        sft_steps=110,
        sft_lr=1e-3,
    ),
    "countdown": ReferenceTask(rows=countdown_tasks, reward="countdown", max_new_tokens=10, sft_steps=800, sft_lr=3e-3),
}


def small_model(vocab_size: int | None = None) -> LlamaConfig:
    """SMALL_MODEL for this vocabulary."""
    return dataclasses.replace(SMALL_MODEL, vocab_size=vocab_size or SMALL_MODEL.vocab_size)


def begin(
    run: Run,
    optimizer: Optimizer,
    rows: Sequence[Record],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    steps: int,
    seed: int,
    global_batch: int = 64,
    seq_len: int = 64,
    speaks: bool = False,
) -> None:
    """From random weights to a model in `folder` that is right now and then: what rewards need to begin with.

    Prompts of each form, such as `00+0=`, come often enough: one that is never right earns nothing, and while it does not
    the others overwrite what it needs. speaks: whether this rank shows its progress. Takes a minute, and is not resumed.
    Every rank must call it.
    """
    init_weights(run.model, seed=seed, plan=run.plan)
    examples = [
        encode_completion(tokenizer, row.fields["prompt"], row.fields["completion"], source=row.source)
        for row in forms_in_balance(rows)
    ]
    size: dict[str, Any] = {"global_batch": global_batch, "seq_len": seq_len}
    with Progress(total_steps=steps, enabled=speaks) as progress:
        if speaks:
            print(f"first {steps} steps on right answers")
        teach(run, optimizer, examples, steps=steps, seed=seed, each=progress.update, **size)
    config: Any = run.full_model.config
    save_pretrained(run.model, config, folder)


def forms_in_balance(rows: Sequence[Record]) -> list[Record]:
    """The rows, and those of rare forms again: a form that is n times as rare as the most frequent one about sqrt(n) times.

    A form is a prompt without its values: all digits are one, and all letters.
    """
    forms: dict[str, list[Record]] = {}
    for row in rows:
        forms.setdefault(re.sub(r"[a-z]", "a", re.sub(r"\d", "0", row.fields["prompt"])), []).append(row)
    most = max(map(len, forms.values()), default=0)
    return [*rows, *(row for form in forms.values() for row in form * (math.isqrt(most // len(form)) - 1))]
