"""Scheduler (continuous batching): which groups begin in a step, which sequences grow, which pages of the KV cache they use.

The samples of a prompt begin together: the prompt is computed once, they share its full pages, and each has its own copy of a
partly filled last page. The pages that they may need at most are reserved when they begin, so no answer is ever preempted.
All this is numbers on the host: ranks with the same prompts decide the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshkit.algos.rollout._answers import Answer, Group, groups_of
from meshkit.algos.rollout._cache import CachePolicy, Pages
from meshkit.algos.rollout._engine import Sampling
from meshkit.algos.rollout._prefixes import Known, Prefixes
from meshkit.errors import PlanError


@dataclass(eq=False)
class Growing:
    """One answer whose keys and values are in the cache.

    table: its pages, then its last page again up to the most pages any sequence may need.
    """

    group: Group
    answer: Answer
    cached: int  # tokens of the prompt and of the answer that are in the KV cache
    table: np.ndarray
    pages: int

    def add_page(self, page: int) -> None:
        self.table[self.pages :] = page
        self.pages += 1


@dataclass(eq=False)
class Beginning:
    """A group whose tokens are computed in this step. table: the pages of its tokens, of which the first `known` are in the
    cache already.
    """

    group: Group
    members: list[Growing]
    table: np.ndarray
    known: int


@dataclass(eq=False)
class Step:
    """begins: tokens of groups that are not known (prefill). grows: one token each (decode), shortest sequence first.
    copies: (from, to), pages to copy after the step; copies_before: those in which a known prefix ends, before it.
    """

    begins: list[Beginning]
    grows: list[Growing]
    copies: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    copies_before: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    @property
    def draws(self) -> list[Growing]:
        """The sequences whose next tokens the step's logits give."""
        return [member for begin in self.begins for member in begin.members] + self.grows

    @property
    def draws_per_row(self) -> list[int]:
        """How many sequences read each row of logits."""
        return [len(begin.members) for begin in self.begins] + [1] * len(self.grows)


class Scheduler:
    """prefixes: of a cache that stays."""

    def __init__(self, sampling: Sampling, policy: CachePolicy, pages: Pages, prefixes: Prefixes | None = None) -> None:
        self._prefixes = prefixes
        self._policy, self._pages, self._new_tokens = policy, pages, sampling.max_new_tokens
        self._reserved = self._table = 0
        self.growing: list[Growing] = []
        self._waiting: deque[Group] = deque()

    @property
    def done(self) -> bool:
        return not self._waiting and not self.growing

    def add(self, answers: Sequence[Answer], *, first: bool = False) -> None:
        """Let answers wait for their turn, or come first. Raises: PlanError if there is no room for one of them."""
        parts = [part for group in groups_of(answers) for part in group.parts(self._together(group))]
        waiting = [*parts, *self._waiting] if first else [*self._waiting, *parts]
        self._waiting = deque(waiting)
        # The table of every sequence has room for the longest, so that those of a block stack.
        self._table = max([self._table, *(self._most_pages(part) for part in parts)])
        for sequence in self.growing:
            sequence.table = np.pad(sequence.table, (0, self._table - len(sequence.table)), mode="edge")

    def drop(self) -> list[Answer]:
        """Give all pages back, as if nothing had been computed; returns the answers that were growing."""
        dropped, self.growing = self.growing, []
        for sequence in dropped:
            for page in sequence.table[: sequence.pages]:
                self._pages.give_back(int(page))
        self._reserved = 0
        return [sequence.answer for sequence in dropped]

    def next_step(self) -> Step:
        """What to compute next: all growing sequences, and waiting groups while there is room for them."""
        # By length: `_past` cuts the row into blocks of similar ones.
        grows = sorted(self.growing, key=lambda sequence: sequence.cached)
        step = Step([], grows)
        tokens, sequences = 0, len(grows)
        if self._prefixes is not None:
            self._prefixes.settle()
        # In order, without overtaking: a long prompt would otherwise wait for ever behind short ones.
        while self._waiting:
            group = self._waiting[0]
            known = Known(0, [], None) if self._prefixes is None else self._prefixes.find(group.tokens)
            length, members = len(group.tokens) - known.tokens, len(group.answers)
            need = self._need(group, members)
            if sequences + members > self._policy.max_sequences:
                break
            # The first prompt of a step may be longer than the limit: it would never begin otherwise.
            if step.begins and tokens + length > self._policy.prefill_tokens:
                break
            if self._policy.max_pages is not None and self._reserved + need > self._policy.max_pages:
                break
            self._waiting.popleft()
            step.begins.append(self._begin(group, known, step))
            self._reserved += need
            tokens, sequences = tokens + length, sequences + members
        for sequence in grows:
            # All its pages are full: the token of this step opens another, which was reserved at the beginning.
            if sequence.cached == sequence.pages * self._policy.page_tokens:
                sequence.add_page(self._pages.take())
            sequence.cached += 1
        self.growing = step.draws
        return step

    def end(self, ended: Sequence[Growing]) -> None:
        """Free the pages of these sequences, and what was reserved for them."""
        for sequence in ended:
            if self._prefixes is not None:
                tokens = np.concatenate([sequence.answer.prompt.ids, np.array(sequence.answer.ids, np.int64)])
                self._prefixes.add(tokens[: sequence.cached], sequence.table, computed=True)
            for page in sequence.table[: sequence.pages]:
                self._pages.give_back(int(page))
            sequence.group.growing -= 1
            # Shared pages stay reserved until the last sample of the group has ended.
            self._reserved -= self._need(sequence.group, 1) - (
                self._shared(sequence.group) if sequence.group.growing else 0
            )
        ended_ids = set(map(id, ended))
        self.growing = [sequence for sequence in self.growing if id(sequence) not in ended_ids]

    def _begin(self, group: Group, known: Known, step: Step) -> Beginning:
        length, copies = len(group.tokens), step.copies
        # Shared before any other is taken, which may evict what nobody uses.
        prompt_pages = [self._pages.share(page) for page in known.full]
        prompt_pages += [self._pages.take() for _ in range(self._policy.pages(length) - len(known.full))]
        if known.begun is not None:
            step.copies_before[0].append(known.begun)
            step.copies_before[1].append(prompt_pages[len(known.full)])
        full = self._shared(group)
        members: list[Growing] = []
        for answer in group.answers:
            sequence = Growing(group, answer, length, np.zeros(self._table, np.int64), 0)
            for index, page in enumerate(prompt_pages):
                if not members:
                    sequence.add_page(page)
                elif index < full:
                    # A full page of the prompt is never written again, so samples may share it; the last, partly filled one
                    # gets their own tokens.
                    sequence.add_page(self._pages.share(page))
                else:
                    sequence.add_page(self._pages.take())
                    copies[0].append(page)
                    copies[1].append(int(sequence.table[index]))
            members.append(sequence)
        if self._prefixes is not None:
            # Its full pages, for others that begin in this step: all write their keys before any attends.
            whole = group.tokens[: full * self._policy.page_tokens]
            self._prefixes.add(whole, np.array(prompt_pages), computed=False)
        return Beginning(group, members, np.array(prompt_pages), known.tokens)

    def _shared(self, group: Group) -> int:
        """The number of full pages of the group's tokens, which its answers share."""
        return len(group.tokens) // self._policy.page_tokens

    def _most_pages(self, group: Group) -> int:
        """The most pages of one answer with its prompt. Its last token is never put into the cache."""
        return self._policy.pages(len(group.answers[0].prompt.ids) + self._new_tokens - 1)

    def _need(self, group: Group, answers: int) -> int:
        """The most pages that so many answers of the group take together."""
        shared = self._shared(group)
        return shared + answers * (self._most_pages(group) - shared)

    def _together(self, group: Group) -> int:
        """How many answers of a group may begin together. Raises: PlanError if one has no room."""
        together, room = min(len(group.answers), self._policy.max_sequences), self._policy.max_pages
        while room is not None and self._need(group, together) > room:
            together -= 1
            if not together:
                tokens = self._need(group, 1) * self._policy.page_tokens
                raise PlanError(
                    f"generate: a prompt of {len(group.answers[0].prompt.ids)} ids and {self._new_tokens} new tokens need a "
                    f"cache of {tokens} tokens, but CachePolicy(max_tokens={self._policy.max_tokens}). Give more, or ask "
                    "for fewer."
                )
        return together
