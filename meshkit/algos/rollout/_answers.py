"""Answers in progress: the next token of each, the same on all ranks of a data rank, and rollouts of those that ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.rollout._engine import Reason, Sampling, Stopping
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.algos.rollout._sampler import choose, streams
from meshkit.loss.vocab_parallel import wide_dtype
from meshkit.step import Run


class Answer(Protocol):
    """prompt: its number. stream: of its random numbers. ids, log_probs: of the tokens so far."""

    @property
    def prompt(self) -> int: ...

    sample: int
    stream: int
    ids: list[int]
    log_probs: list[float]


def draw_tokens(
    run: Run,
    logits: Tensor | None,
    rows: Tensor,
    answers: Sequence[Answer],
    sampling: Sampling,
    *,
    held: Tensor | None = None,
) -> None:
    """Append a token to each answer, the same one on all ranks of a data rank.

    logits: [rows, V], of the ranks of tp each with its part; None on stages of pp but the last. rows: [N], the row that each
    answer reads. held: [rows] bool, where ranks of cp have logits of some rows each; None: each has all.
    Wire: what `choose` sends, and two numbers per answer over tp, cp and pp.
    """
    mesh = run.mesh
    drawn = torch.zeros(2, len(answers), dtype=torch.float64, device=mesh.device)
    if logits is not None:
        base = torch.tensor([answer.stream for answer in answers], device=mesh.device)
        positions = torch.tensor([len(answer.ids) for answer in answers], device=mesh.device)
        drawn[0], drawn[1] = choose(logits, rows, streams(base, positions), sampling)
    # One rank decides for all: the last bits of logits may differ between ranks, and another token would be drawn.
    last_stage = 0 if run.pipeline is None else run.pipeline.cut.ends[1]
    for axis, decider in (("tp", 0), ("cp", 0), ("pp", last_stage)):
        if mesh[axis].size() == 1:
            continue
        if axis == "cp" and held is not None:
            dist.all_reduce(drawn.masked_fill_(~held[rows], 0.0), group=mesh[axis].get_group())
        else:
            dist.broadcast(drawn, group=mesh[axis].get_group(), group_src=decider)
    for answer, id, log_prob in zip(answers, *drawn.tolist(), strict=True):
        answer.ids.append(int(id))
        answer.log_probs.append(log_prob)


def rollouts_of(
    run: Run, prompts: Sequence[Prompt], ended: Sequence[tuple[Answer, Reason]], stopping: Stopping
) -> list[Rollout]:
    """In the order of (prompt, sample)."""
    precision = run.resolved.memory.precision
    dtype = next(run.model.parameters()).dtype if precision is None else precision.compute
    # As wide as `choose` computed them, which rounds nothing that the trainer will compare with.
    wide = np.float64 if wide_dtype(dtype) == torch.float64 else np.float32
    return [
        Rollout(
            prompt_ids=prompt.ids,
            ids=np.array(answer.ids, np.int64),
            log_probs=np.array(answer.log_probs, wide),
            text=stopping.text(answer.ids),
            key=prompt.key,
            fields=prompt.fields,
            truncated=reason == "length",
        )
        for answer, reason in sorted(ended, key=lambda pair: (pair[0].prompt, pair[0].sample))
        for prompt in [prompts[answer.prompt]]
    ]
