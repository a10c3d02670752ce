"""Batches of rows: groups of answers that begin together and grow until the last of them ends, for `Rows` of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshkit.algos.rollout._answers import draw_tokens, rollouts_of
from meshkit.algos.rollout._cache import CachePolicy
from meshkit.algos.rollout._engine import Reason, Sampling, Stopping
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.algos.rollout._rows import Rows
from meshkit.core.rng import stream_of
from meshkit.errors import PlanError
from meshkit.step import Run


@dataclass(eq=False)
class Row:
    """One answer in progress."""

    prompt: int
    sample: int
    stream: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """Samples of a prompt that begin together."""

    prompt: int
    samples: range
    tokens: int  # of the prompt


class RowsGeneration:
    """One call of `generate` for a model whose rows are of a kind."""

    def __init__(
        self,
        run: Run,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        samples: int,
        seed: int,
        stopping: Stopping,
        policy: CachePolicy,
        rows: Rows,
    ) -> None:
        self._run, self._rows, self._prompts, self._seed = run, rows, prompts, seed
        self._sampling, self._stopping = sampling, stopping
        self._waiting = deque(batches(prompts, samples, sampling.max_new_tokens, policy, mixed=rows.mixed))
        self._growing: list[Row] = []
        self._ended: list[tuple[Row, Reason]] = []

    @property
    def done(self) -> bool:
        return not self._waiting and not self._growing

    def step(self) -> None:
        """One forward, and a token for each row in it."""
        if self._growing:
            ids = torch.tensor([row.ids[-1] for row in self._growing], device=self._run.mesh.device)
            logits, held = self._rows.grow(ids)
            reads = torch.arange(len(self._growing), device=self._run.mesh.device)
        elif self._waiting:
            logits, held, reads = self._begin(self._waiting.popleft())
        else:
            self._rows.idle()
            return
        draw_tokens(self._run, logits, reads, self._growing, self._sampling, held=held)
        kept = []
        for index, row in enumerate(self._growing):
            reason = self._stopping.reason(row.ids)
            if reason is None:
                kept.append(index)
            else:
                self._ended.append((row, reason))
        if kept and len(kept) < len(self._growing):
            self._rows.keep(torch.tensor(kept, device=self._run.mesh.device))
        self._growing = [self._growing[index] for index in kept]

    def _begin(self, batch: Sequence[Part]) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(logits, held, which of the logits each row reads): one row of logits a prompt, which its samples draw from."""
        counts = [len(part.samples) for part in batch]
        self._growing = [
            Row(part.prompt, sample, stream_of("generate", self._seed, self._prompts[part.prompt].key, sample))
            for part in batch
            for sample in part.samples
        ]
        logits, held = self._rows.begin([torch.from_numpy(self._prompts[part.prompt].ids) for part in batch], counts)
        numbers = torch.tensor(counts, device=self._run.mesh.device)
        reads = torch.arange(len(batch), device=self._run.mesh.device).repeat_interleave(numbers)
        return logits, held, reads

    def rollouts(self) -> list[Rollout]:
        """In the order of (prompt, sample)."""
        return rollouts_of(self._run, self._prompts, self._ended, self._stopping)


def batches(
    prompts: Sequence[Prompt], samples: int, new_tokens: int, policy: CachePolicy, *, mixed: bool
) -> list[list[Part]]:
    """What begins together, shortest prompts first. mixed: prompts of several lengths may.

    Raises: PlanError for a cache without room for one answer.
    """
    made: list[list[Part]] = []
    for part in sorted(_parts(prompts, samples, new_tokens, policy), key=lambda part: part.tokens):
        batch = made[-1] if made else []
        rows = len(part.samples) + sum(len(each.samples) for each in batch)
        fits = (
            rows <= policy.max_sequences
            and (len(batch) + 1) * part.tokens <= policy.prefill_tokens
            and (policy.max_tokens is None or rows * (part.tokens + new_tokens - 1) <= policy.max_tokens)
            and (mixed or all(each.tokens == part.tokens for each in batch))
        )
        if batch and fits:
            batch.append(part)
        else:
            made.append([part])
    return made


def _parts(prompts: Sequence[Prompt], samples: int, new_tokens: int, policy: CachePolicy) -> list[Part]:
    made = []
    for index, prompt in enumerate(prompts):
        length = len(prompt.ids)
        together = min(samples, policy.max_sequences)
        if policy.max_tokens is not None:
            together = min(together, policy.max_tokens // (length + new_tokens - 1))
        if not together:
            raise PlanError(
                f"generate: a prompt of {length} ids and {new_tokens} new tokens need a cache of {length + new_tokens - 1} "
                f"tokens, but CachePolicy(max_tokens={policy.max_tokens}). Give more, or ask for fewer."
            )
        made += [
            Part(index, range(first, min(first + together, samples)), length) for first in range(0, samples, together)
        ]
    return made
