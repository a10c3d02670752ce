"""The scheduler ("continuous batching"): which prompts begin, which sequences grow in a step, which pages each holds.

The samples of a prompt begin together: it is computed once, they share its full pages, and each has its own copy of the last
one where that is partly filled. What they may come to need is set aside when they begin, so no answer is ever given up for
another. Only numbers on the host: ranks with the same prompts do the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshkit.algos.rollout._cache import CachePolicy, Pages
from meshkit.algos.rollout._engine import Sampling
from meshkit.algos.rollout._rollout import Prompt
from meshkit.errors import PlanError


@dataclass(eq=False)
class Group:
    """Samples of a prompt that begin together, of which so many are not yet done."""

    prompt: int
    samples: range
    growing: int


@dataclass(eq=False)
class Growing:
    """One answer on its way. table: its pages, and then its last page again, up to what any sequence may need."""

    group: Group
    sample: int
    stream: int
    held: int  # tokens of the prompt and of the answer that are in the cache
    table: np.ndarray
    pages: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add_page(self, page: int) -> None:
        self.table[self.pages :] = page
        self.pages += 1


@dataclass(eq=False)
class Beginning:
    """A group in the step that computes its prompt. table: the prompt's own pages."""

    group: Group
    members: list[Growing]
    table: np.ndarray


@dataclass(eq=False)
class Step:
    """begins: computed whole; grows: one token each, the shortest first. copies: pages to copy once it is computed."""

    begins: list[Beginning]
    grows: list[Growing]
    copies: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    @property
    def draws(self) -> list[Growing]:
        """Whose next tokens the step's logits give."""
        return [member for begin in self.begins for member in begin.members] + self.grows

    @property
    def draws_per_row(self) -> list[int]:
        """How many read each row of logits."""
        return [len(begin.members) for begin in self.begins] + [1] * len(self.grows)


class Scheduler:
    """streams: int64 [prompts, samples], of their random numbers."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        streams: np.ndarray,
        sampling: Sampling,
        policy: CachePolicy,
        pages: Pages,
    ) -> None:
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
        grows = sorted(self.growing, key=lambda one: one.held)
        step = Step([], grows)
        tokens, sequences = 0, len(grows)
        while self._waiting:
            group = self._waiting[0]
            length, members = self._lengths[group.prompt], len(group.samples)
            need = self._need(group.prompt, members)
            if sequences + members > self._policy.max_sequences:
                break
            if step.begins and tokens + length > self._policy.prefill_tokens:
                break
            if self._policy.max_pages is not None and self._reserved + need > self._policy.max_pages:
                break
            self._waiting.popleft()
            step.begins.append(self._begin(group, step.copies))
            self._reserved += need
            tokens, sequences = tokens + length, sequences + members
        for one in grows:
            if one.held == one.pages * self._policy.page_tokens:
                one.add_page(self._pages.take())
            one.held += 1
        self.growing = step.draws
        return step

    def end(self, ended: Sequence[Growing]) -> None:
        """Their pages are for others."""
        for one in ended:
            for page in one.table[: one.pages]:
                self._pages.give_back(int(page))
            prompt, one.group.growing = one.group.prompt, one.group.growing - 1
            self._reserved -= self._need(prompt, 1) - (self._shared(prompt) if one.group.growing else 0)
        gone = set(map(id, ended))
        self.growing = [one for one in self.growing if id(one) not in gone]

    def _begin(self, group: Group, copies: tuple[list[int], list[int]]) -> Beginning:
        length = self._lengths[group.prompt]
        own = [self._pages.take() for _ in range(self._policy.pages(length))]
        full = self._shared(group.prompt)
        members: list[Growing] = []
        for sample in group.samples:
            stream = int(self._streams[group.prompt, sample])
            one = Growing(group, sample, stream, length, np.zeros(self._table, np.int64), 0)
            for place, page in enumerate(own):
                if not members:
                    one.add_page(page)
                elif place < full:
                    one.add_page(self._pages.share(page))
                else:
                    one.add_page(self._pages.take())
                    copies[0].append(page)
                    copies[1].append(int(one.table[place]))
            members.append(one)
        return Beginning(group, members, np.array(own))

    def _shared(self, prompt: int) -> int:
        """Full pages of the prompt."""
        return self._lengths[prompt] // self._policy.page_tokens

    def _most_pages(self, prompt: int) -> int:
        """Of one answer. Its last token is never put into the cache."""
        return self._policy.pages(self._lengths[prompt] + self._new_tokens - 1)

    def _need(self, prompt: int, samples: int) -> int:
        shared = self._shared(prompt)
        return shared + samples * (self._most_pages(prompt) - shared)

    def _parts(self, prompt: int, samples: int) -> list[range]:
        """The samples that begin together: as many as have room. Raises: PlanError if not even one has."""
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
