"""Supervised fine-tuning (SFT) as a recipe's first phase: of a preference recipe with checkpoints, of RL as a warm-up."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer

from meshkit.algos.sft import sft_steps
from meshkit.data import Example, ExampleLoader, Record, Tokenizer, encode_completion
from meshkit.initialize import init_weights
from meshkit.metrics import Progress
from meshkit.step import Run, clip_grad_norm

from .flags import TrainFlags
from .session import Session


def sft_phase(run: Run, optimizer: Optimizer, examples: Sequence[Example], config: TrainFlags) -> bool:
    """Take --steps training steps on packed examples, in a `Session` of --out: checkpoints, signals, progress and logs.

    examples: the same on every rank. config: `dataclasses.replace` of the recipe's, with `out` and `steps` of the phase.
    Returns: whether all steps are done; False where a signal ended it. Every rank must call it.
    """
    mesh = run.mesh
    loader = ExampleLoader(
        examples,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        packing="step",
        pad_multiple=mesh.row_multiple,
    )
    # A phase may be shorter than the warm-up of the steps that follow it. One checkpoint is enough: nobody goes back to it.
    config = replace(config, warmup_steps=min(config.warmup_steps, config.steps), keep=1)
    scheduler = config.lr_schedule(optimizer)
    with Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        for step in session.steps():
            batch = next(loader)
            loss = run.forward_backward(batch, microbatches=config.microbatches, step=step)
            norm = clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm)
            session.stop_clock(tokens=mesh.data_ranks * batch["input_ids"].numel())
    return not session.stopped


def warm_up_policy(
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
    is_main: bool = False,
) -> None:
    """SFT from random weights to a model in `folder` that is right now and then, so that rewards have something to find.

    Each form of prompt, such as `00+0=`, comes often enough: a form that is never right earns no reward, and training on the
    others would overwrite what it needs. is_main: whether this rank shows progress. Takes a minute, and is not resumed.
    Every rank must call it.
    """
    init_weights(run.model, seed=seed, plan=run.plan)
    # On completions of the rows themselves, with their end token: what RL then samples ends by itself.
    examples = [example for row in forms_in_balance(rows) for example in _right_answers(row, tokenizer)]
    sizes: dict[str, Any] = {"global_batch": global_batch, "seq_len": seq_len}
    with Progress(total_steps=steps, enabled=is_main) as progress:
        if is_main:
            print(f"first {steps} steps on right answers")
        sft_steps(run, optimizer, examples, steps=steps, seed=seed, each=progress.update, **sizes)
    run.export(folder, tokenizer)


def _right_answers(row: Record, tokenizer: Tokenizer) -> list[Example]:
    """The row's completion; of an environment its demonstrations, of which turns are learnt, and not what answers them."""
    if "demonstrations" not in row.fields:
        return [encode_completion(tokenizer, row.fields["prompt"], row.fields["completion"], source=row.source)]
    examples = []
    for texts in row.fields["demonstrations"]:
        head = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(row.fields["prompt"])
        parts = [head, *(tokenizer.encode(text) + [tokenizer.eos_id] * (n % 2 == 0) for n, text in enumerate(texts))]
        learn = np.concatenate([np.full(len(part), n % 2 == 1) for n, part in enumerate(parts)])
        examples.append(Example(ids=np.concatenate(parts).astype(np.int64), learn=learn, source=row.source))
    return examples


def forms_in_balance(rows: Sequence[Record]) -> list[Record]:
    """The rows, and those of rare forms again: a form that is n times as rare as the most frequent one about sqrt(n) times.

    A form is a prompt without its values: all digits are one, and all letters.
    """
    forms: dict[str, list[Record]] = {}
    for row in rows:
        # "7+12=" is the form "0+00=": for addition, how many digits each number has.
        forms.setdefault(re.sub(r"[a-z]", "a", re.sub(r"\d", "0", row.fields["prompt"])), []).append(row)
    # sqrt, not n: the same few rows as often as all rows of a frequent form would be learnt by heart.
    most = max(map(len, forms.values()), default=0)
    return [*rows, *(row for form in forms.values() for row in form * (math.isqrt(most // len(form)) - 1))]
