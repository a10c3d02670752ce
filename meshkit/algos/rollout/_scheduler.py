"""Scheduler (continuous batching): which prompts begin in a step, which sequences grow, which pages of the KV cache they use.

The samples of a prompt begin together: the prompt is computed once, they share its full pages, and each has its own copy of a
partly filled last page. The pages that they may need at most are reserved when they begin, so no answer is ever preempted.
All this is numbers on the host: ranks with the same prompts decide the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshkit.algos.rollout._cache import CachePolicy, Pages
from meshkit.algos.rollout._engine import Sampling
from meshkit.algos.rollout._prefixes import Known, Prefixes
from meshkit.algos.rollout._rollout import Prompt
from meshkit.errors import PlanError


@dataclass(eq=False)
class Group:
    """Samples of a prompt that begin together. growing: how many have not ended yet."""

    prompt: int
    samples: range
    growing: int


@dataclass(eq=False)
class Growing:
    """One answer in progress. table: its pages, then its last page again up to the most pages any sequence may need."""

    group: Group
    sample: int
    stream: int
    cached: int  # tokens of the prompt and of the answer that are in the KV cache
    table: np.ndarray
    pages: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        return self.group.prompt

    def add_page(self, page: int) -> None:
        self.table[self.pages :] = page
        self.pages += 1


@dataclass(eq=False)
class Beginning:
    """A group whose prompt is computed in this step. table: the pages of the prompt. known: its tokens that the cache has
    already, before the `tokens` that are computed.
    """

    group: Group
    members: list[Growing]
    table: np.ndarray
    known: int
    tokens: int


@dataclass(eq=False)
class Step:
    """begins: whole prompts (prefill). grows: one token each (decode), shortest sequence first. copies: (from, to), pages to
    copy after the step; copies_before: pages in which a known prefix ends, to copy before it.
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
    """streams: int64 [prompts, samples], the streams of their random numbers. prefixes: of a cache that stays."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        streams: np.ndarray,
        sampling: Sampling,
        policy: CachePolicy,
        pages: Pages,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._prompts, self._prefixes = prompts, prefixes
        self._lengths = [len(prompt.ids) for prompt in prompts]
        self._streams, self._policy, self._pages = streams, policy, pages
        self._new_tokens = sampling.max_new_tokens
        self._reserved = 0
        self.growing: list[Growing] = []
        self._waiting = deque(
            Group(prompt, part, len(part)) for prompt in range(len(prompts)) for part in self._parts(prompt, samples)
        )
        self._table = max((self._most_pages(prompt) for prompt in range(len(prompts))), default=0)

    @property
    def done(self) -> bool:
        return not self._waiting and not self.growing

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
            known = self._known(group.prompt)
            length, members = self._lengths[group.prompt] - known.tokens, len(group.samples)
            need = self._need(group.prompt, members)
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
                ids = np.concatenate([self._prompts[sequence.prompt].ids, np.array(sequence.ids, np.int64)])
                self._prefixes.add(ids[: sequence.cached], sequence.table, computed=True)
            for page in sequence.table[: sequence.pages]:
                self._pages.give_back(int(page))
            prompt, sequence.group.growing = sequence.group.prompt, sequence.group.growing - 1
            # Shared pages stay reserved until the last sample of the group has ended.
            self._reserved -= self._need(prompt, 1) - (self._shared(prompt) if sequence.group.growing else 0)
        ended_ids = set(map(id, ended))
        self.growing = [sequence for sequence in self.growing if id(sequence) not in ended_ids]

    def _known(self, prompt: int) -> Known:
        return Known(0, [], None) if self._prefixes is None else self._prefixes.find(self._prompts[prompt].ids)

    def _begin(self, group: Group, known: Known, step: Step) -> Beginning:
        length, copies = self._lengths[group.prompt], step.copies
        # Shared before any other is taken, which may evict what nobody uses.
        prompt_pages = [self._pages.share(page) for page in known.full]
        prompt_pages += [self._pages.take() for _ in range(self._policy.pages(length) - len(known.full))]
        if known.begun is not None:
            step.copies_before[0].append(known.begun)
            step.copies_before[1].append(prompt_pages[len(known.full)])
        full = self._shared(group.prompt)
        members: list[Growing] = []
        for sample in group.samples:
            stream = int(self._streams[group.prompt, sample])
            sequence = Growing(group, sample, stream, length, np.zeros(self._table, np.int64), 0)
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
            ids = self._prompts[group.prompt].ids[: full * self._policy.page_tokens]
            self._prefixes.add(ids, np.array(prompt_pages), computed=False)
        return Beginning(group, members, np.array(prompt_pages), known.tokens, length - known.tokens)

    def _shared(self, prompt: int) -> int:
        """The number of full pages of the prompt, which its samples share."""
        return self._lengths[prompt] // self._policy.page_tokens

    def _most_pages(self, prompt: int) -> int:
        """The most pages of one answer with its prompt. Its last token is never put into the cache."""
        return self._policy.pages(self._lengths[prompt] + self._new_tokens - 1)

    def _need(self, prompt: int, samples: int) -> int:
        """The most pages that so many samples of the prompt take together."""
        shared = self._shared(prompt)
        return shared + samples * (self._most_pages(prompt) - shared)

    def _parts(self, prompt: int, samples: int) -> list[range]:
        """The samples in groups that begin together, each as large as has room. Raises: PlanError if one sample has none."""
        together, room = min(samples, self._policy.max_sequences), self._policy.max_pages
        while room is not None and self._need(prompt, together) > room:
            together -= 1
            if not together:
                tokens = self._need(prompt, 1) * self._policy.page_tokens
                raise PlanError(
                    f"generate: a prompt of {self._lengths[prompt]} ids and {self._new_tokens} new tokens need a cache of "
                    f"{tokens} tokens, but CachePolicy(max_tokens={self._policy.max_tokens}). Give more, or ask for fewer."
                )
        return [range(first, min(first + together, samples)) for first in range(0, samples, together)]
