"""Batches of rows: groups of answers that begin together and grow until the last of them ends, for `Rows` of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from meshkit.algos.rollout._answers import Answer, Group, draw_tokens, groups_of, noise_of
from meshkit.algos.rollout._cache import CachePolicy
from meshkit.algos.rollout._engine import Sampling, Stopping
from meshkit.algos.rollout._rows import Rows
from meshkit.errors import PlanError
from meshkit.step import Run


class RowsWriter:
    """Writes answers a token at a time, by a model whose rows are of a kind; see `Writer`. rows: may be exchanged by others
    between `drop` and `add`.
    """

    def __init__(self, run: Run, sampling: Sampling, stopping: Stopping, policy: CachePolicy, rows: Rows) -> None:
        self._run, self.rows = run, rows
        self._sampling, self._stopping, self._policy = sampling, stopping, policy
        self._waiting: deque[list[Group]] = deque()
        self._growing: list[Answer] = []
        self._drawn = torch.empty(0, dtype=torch.int64)  # the last token of each
        self._noise = noise_of([], run.mesh.device)

    @property
    def done(self) -> bool:
        return not self._waiting and not self._growing

    def add(self, answers: Sequence[Answer], *, first: bool = False) -> None:
        new = batches(answers, self._sampling.max_new_tokens, self._policy, mixed=self.rows.mixed)
        self._waiting = deque([*new, *self._waiting] if first else [*self._waiting, *new])

    def drop(self) -> list[Answer]:
        dropped, self._growing = self._growing, []
        return dropped

    def step(self, version: int) -> list[Answer]:
        if self._growing:
            (logits, held), reads = self.rows.grow(self._drawn), None
        elif self._waiting:
            logits, held, reads = self._begin(self._waiting.popleft())
            self._noise = noise_of(self._growing, self._run.mesh.device)
        else:
            self.rows.idle()
            return []
        self._drawn = draw_tokens(
            self._run, logits, reads, self._growing, self._noise, self._sampling, version=version, held=held
        )
        for answer in self._growing:
            answer.reason = self._stopping.reason(answer.ids)
        kept = [index for index, answer in enumerate(self._growing) if answer.reason is None]
        if kept and len(kept) < len(self._growing):
            index = torch.tensor(kept, device=self._run.mesh.device)
            self.rows.keep(index)
            self._drawn = self._drawn[index]
        ended = [answer for answer in self._growing if answer.reason is not None]
        if ended:
            self._growing = [self._growing[index] for index in kept]
            self._noise = noise_of(self._growing, self._run.mesh.device)
        return ended

    def _begin(self, batch: Sequence[Group]) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(logits, held, which of the logits each row reads): one row of logits a group, which its answers draw from."""
        counts = [len(group.answers) for group in batch]
        self._growing = [answer for group in batch for answer in group.answers]
        logits, held = self.rows.begin([torch.from_numpy(group.tokens) for group in batch], counts)
        numbers = torch.tensor(counts, device=self._run.mesh.device)
        reads = torch.arange(len(batch), device=self._run.mesh.device).repeat_interleave(numbers)
        return logits, held, reads


def batches(answers: Sequence[Answer], new_tokens: int, policy: CachePolicy, *, mixed: bool) -> list[list[Group]]:
    """What begins together, shortest first. mixed: groups of several lengths may.

    Raises: PlanError for a cache without room for one answer.
    """
    made: list[list[Group]] = []
    parts = [part for group in groups_of(answers) for part in group.parts(_together(group, new_tokens, policy))]
    for part in sorted(parts, key=lambda part: len(part.tokens)):
        batch, tokens = made[-1] if made else [], len(part.tokens)
        rows = len(part.answers) + sum(len(each.answers) for each in batch)
        # Of a resumed answer fewer new tokens are left: what it may have at most is that of its prompt.
        most = max(len(each.answers[0].prompt.ids) for each in [*batch, part]) + new_tokens - 1
        fits = (
            rows <= policy.max_sequences
            and (len(batch) + 1) * tokens <= policy.prefill_tokens
            and (policy.max_tokens is None or rows * most <= policy.max_tokens)
            and (mixed or all(len(each.tokens) == tokens for each in batch))
        )
        if batch and fits:
            batch.append(part)
        else:
            made.append([part])
    return made


def _together(group: Group, new_tokens: int, policy: CachePolicy) -> int:
    length, together = len(group.answers[0].prompt.ids), min(len(group.answers), policy.max_sequences)
    if policy.max_tokens is not None:
        together = min(together, policy.max_tokens // (length + new_tokens - 1))
    if not together:
        raise PlanError(
            f"generate: a prompt of {length} ids and {new_tokens} new tokens need a cache of {length + new_tokens - 1} "
            f"tokens, but CachePolicy(max_tokens={policy.max_tokens}). Give more, or ask for fewer."
        )
    return together
