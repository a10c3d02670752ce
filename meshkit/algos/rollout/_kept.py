"""KV cache that stays between calls (prefix caching): conversations go on, and prompts share how they begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.rollout._cache import CachePolicy, KeyValueCache
from meshkit.algos.rollout._prefixes import Prefixes
from meshkit.algos.rollout._scheduler import Step
from meshkit.core.sharding import local_tensor
from meshkit.faults.rest import digests
from meshkit.step import Run


class KeptCache:
    """`generate(..., cache=KeptCache())`: what calls have computed, the next ones find. One for each model.

    A prompt that begins as a prompt or an answer of a former call, such as the next turn of a conversation, is computed from
    there on: each token once. Once parameters have changed nothing is found: their checksums are taken in each call.
    With `CachePolicy(max_tokens=)` what was used longest ago goes first; without, the cache grows.
    prefilled: tokens of prompts that were computed. reused: those that were found. decoded: tokens of answers that were
    computed; the last one of an answer is not, until its conversation goes on. All of this data rank.
    """

    def __init__(self, policy: CachePolicy | None = None) -> None:
        self.policy = policy or CachePolicy()
        self.prefilled = self.reused = self.decoded = 0
        self._weights: tuple[int, Tensor] | None = None
        self._empty()

    def forget(self) -> None:
        """Nothing of it is found any more. The counts go on."""
        self.prefixes.forget()

    def _empty(self) -> None:
        self.store = KeyValueCache(self.policy.page_tokens)
        self.prefixes = Prefixes(self.store.pages, self.policy.page_tokens)
        self.store.pages.limit, self.store.pages.evict = self.policy.max_pages, self.prefixes.evict

    @contextmanager
    def used_by(self, run: Run) -> Iterator[None]:
        """Of a call of `generate`, or a part of one. Wire: a number over the mesh."""
        # By value: fused optimizers write without a trace in autograd's counters. `id` tells models apart.
        device = run.mesh.device
        sums = digests((local_tensor(parameter) for parameter in run.parameters()), device)
        changed = torch.tensor(True, device=device)
        if self._weights is not None and self._weights[0] == id(run):
            changed = (self._weights[1] != sums).any()
        # Ranks have other shards, of which some may stay as they are, and must find the same in the cache.
        if run.mesh.spec.world_size > 1:
            changed = changed.int()
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=run.mesh.group)
        if changed:
            self.forget()
        self._weights = id(run), sums
        try:
            yield
        except BaseException:
            self._empty()  # sequences that were cut off still hold pages
            raise

    def count(self, step: Step) -> None:
        for begin in step.begins:
            self.prefilled += len(begin.group.tokens) - begin.known
            self.reused += begin.known
        self.decoded += len(step.grows)
