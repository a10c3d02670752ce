"""Scheduler (continuous batching): which groups begin in a step, which sequences grow, which pages of the KV cache they use.

The samples of a prompt begin together: the prompt is computed once, they share its full pages, and each has its own copy of a
partly filled last page. The pages that they may need at most are reserved when they begin, so no answer is ever preempted.
In a cache that may grow and does not stay, samples of short prompts share nothing, and lie side by side: see `_blocks`.
All this is numbers on the host: ranks with the same prompts decide the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from meshkit.algos.rollout._answers import Answer, Group, groups_of
from meshkit.algos.rollout._blocks import SLACK_PAGES, Blocks, Copies, Growing, spans_of
from meshkit.algos.rollout._cache import CachePolicy, Pages, Span
from meshkit.algos.rollout._engine import Sampling
from meshkit.algos.rollout._prefixes import Known, Prefixes
from meshkit.errors import PlanError


@dataclass(eq=False)
class Beginning:
    """A group whose tokens are computed in this step. table: the pages of its tokens, of which the first `known` are in the
    cache already. spans: where the others go.
    """

    group: Group
    members: list[Growing]
    table: np.ndarray
    known: int
    spans: list[Span]


@dataclass(eq=False)
class Step:
    """begins: tokens of groups that are not known (prefill). grows: one token each (decode), those of a block next to each
    other, then the others, shortest first. copies: (from, to), what to copy after the step; copies_before: pages in which a
    known prefix ends, and those of rows that move, before it. goes_on: as the last step, one token later, and
    all in blocks.
    """

    begins: list[Beginning]
    grows: list[Growing]
    goes_on: bool = False
    copies: Copies = field(default_factory=lambda: ([], []))
    copies_before: Copies = field(default_factory=lambda: ([], []))

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
        self._blocks = Blocks(pages, policy.page_tokens)
        self._apart: list[Growing] = []
        self._same = False  # since the last step no sequence has come or ended
        self._waiting: deque[Group] = deque()

    @property
    def growing(self) -> list[Growing]:
        return [*self._blocks.rows, *self._apart]

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
        for sequence in self._apart:
            sequence.table = np.pad(sequence.table, (0, self._table - len(sequence.table)), mode="edge")

    def drop(self) -> list[Answer]:
        """Give all pages back, as if nothing had been computed; returns the answers that were growing."""
        dropped = self.growing
        self._free(dropped)
        self._reserved, self._same = 0, False
        return [sequence.answer for sequence in dropped]

    def next_step(self) -> Step:
        """What to compute next: all growing sequences, and waiting groups while there is room for them."""
        step, tokens, sequences = Step([], []), 0, len(self.growing)
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
            step.begins.append(self._beside(group) if self._side_by_side(group) else self._begin(group, known, step))
            self._reserved += need
            tokens, sequences = tokens + length, sequences + members
        beside = [begin for begin in step.begins if self._side_by_side(begin.group)]
        moves = self._blocks.arrange([member for begin in beside for member in begin.members])
        if moves is not None:
            step.copies_before[0].extend(moves[0])
            step.copies_before[1].extend(moves[1])
            for begin in beside:
                begin.spans, *others = [
                    member.spans(0, member.cached, self._policy.page_tokens) for member in begin.members
                ]
                step.copies[0].extend(begin.spans * len(others))
                step.copies[1].extend(chain(*others))
        begun = {id(member) for begin in step.begins for member in begin.members}
        step.grows = [row for row in self._blocks.rows if id(row) not in begun]
        for sequence in self._apart:
            # All its pages are full: the token of this step opens another, which was reserved at the beginning.
            if sequence.cached == sequence.pages * self._policy.page_tokens:
                sequence.add_page(self._pages.take())
        # By length: `_past` cuts them into blocks of similar ones.
        self._apart.sort(key=lambda sequence: sequence.cached)
        step.grows += self._apart
        for sequence in step.grows:
            sequence.cached += 1
        self._blocks.grow(changed=moves is not None)
        self._apart += [member for begin in step.begins for member in begin.members if member.block is None]
        step.goes_on = self._same and not step.begins and not self._apart and moves is None
        self._same = not step.begins
        return step

    def end(self, ended: Sequence[Growing]) -> None:
        """Free the pages of these sequences, and what was reserved for them."""
        for sequence in ended:
            if self._prefixes is not None:
                tokens = np.concatenate([sequence.answer.prompt.ids, np.array(sequence.answer.ids, np.int64)])
                self._prefixes.add(tokens[: sequence.cached], sequence.table, computed=True)
            sequence.group.growing -= 1
            # Shared pages stay reserved until the last sample of the group has ended.
            self._reserved -= self._need(sequence.group, 1) - (
                self._shared(sequence.group) if sequence.group.growing else 0
            )
        self._free(ended)
        self._same = self._same and not ended

    def _free(self, sequences: Sequence[Growing]) -> None:
        self._blocks.remove(sequences)
        for sequence in sequences:
            if sequence.block is None:
                for page in sequence.table[: sequence.pages]:
                    self._pages.give_back(int(page))
        freed = set(map(id, sequences))
        self._apart = [sequence for sequence in self._apart if id(sequence) not in freed]

    def _side_by_side(self, group: Group) -> bool:
        """Whether its answers lie side by side: the cache may grow and does not stay, and they would share little."""
        grows = self._prefixes is None and self._policy.max_pages is None
        return grows and (len(group.answers) == 1 or self._shared(group) <= SLACK_PAGES)

    def _beside(self, group: Group) -> Beginning:
        """It gets its places with all that begin in the step."""
        none = np.zeros(0, np.int64)
        members = [Growing(group, answer, len(group.tokens), none, 0) for answer in group.answers]
        return Beginning(group, members, none, 0, [])

    def _begin(self, group: Group, known: Known, step: Step) -> Beginning:
        length, size = len(group.tokens), self._policy.page_tokens
        # Shared before any other is taken, which may evict what nobody uses.
        prompt_pages = [self._pages.share(page) for page in known.full]
        prompt_pages += [self._pages.take() for _ in range(self._policy.pages(length) - len(known.full))]
        if known.begun is not None:
            self._copy_page(step.copies_before, known.begun, prompt_pages[len(known.full)])
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
                    self._copy_page(step.copies, page, int(sequence.table[index]))
            members.append(sequence)
        if self._prefixes is not None:
            # Its full pages, for others that begin in this step: all write their keys before any attends.
            whole = group.tokens[: full * size]
            self._prefixes.add(whole, np.array(prompt_pages), computed=False)
        table = np.array(prompt_pages)
        return Beginning(group, members, table, known.tokens, spans_of(table, known.tokens, length, size))

    def _copy_page(self, copies: Copies, page: int, to: int) -> None:
        size = self._policy.page_tokens
        copies[0].append(Span(page * size, size))
        copies[1].append(Span(to * size, size))

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
