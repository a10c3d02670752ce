"""Prefix cache (automatic prefix caching, RadixAttention): a tree of the pages of sequences that have been computed.

A node is a page and the tokens in it; its path from the root is the sequence up to there. A sequence that begins takes the
full pages of its longest known prefix, shared, and a copy of the page in which the prefix ends. All this is numbers on the
host: ranks with the same calls have the same tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshkit.algos.rollout._cache import Pages


@dataclass(eq=False)
class Node:
    """ids: the tokens in the page, at most a page of them. below: children by each beginning of theirs. used: when last."""

    ids: np.ndarray
    page: int
    parent: Node | None
    below: dict[bytes, dict[Node, None]] = field(default_factory=dict)
    used: int = 0
    computed: bool = False


class Known(NamedTuple):
    """tokens: of the known prefix. full: its full pages. begun: the page in which it ends, if not at the end of a page."""

    tokens: int
    full: list[int]
    begun: int | None


class Prefixes:
    """Pages of `pages` that stay after their sequences have ended, each counted as used once.

    Source: Zheng et al. 2024 (2312.07104), section 3; vLLM's automatic prefix caching.
    """

    def __init__(self, pages: Pages, page_tokens: int) -> None:
        self._pages, self._page_tokens = pages, page_tokens
        self._root = Node(np.zeros(0, np.int64), -1, None, computed=True)
        self._fresh: list[Node] = []
        self._clock = 0

    def settle(self) -> None:
        """What was added is computed now."""
        for node in self._fresh:
            node.computed = True
        self._fresh = []

    def find(self, ids: np.ndarray) -> Known:
        """The longest prefix that is known, without the last token, whose logits are wanted."""
        self._clock += 1
        node, full, most = self._root, list[int](), len(ids) - 1
        while True:
            left = ids[len(full) * self._page_tokens : most]
            near, same = self._nearest(node, left)
            if near is None:
                return Known(len(full) * self._page_tokens, full, None)
            near.used = self._clock
            if same < self._page_tokens:
                # A page that this very step computes can be read by all of it, but not be copied before it.
                tokens, page = (same, near.page) if near.computed else (0, None)
                return Known(len(full) * self._page_tokens + tokens, full, page)
            full.append(near.page)
            node = near

    def add(self, ids: np.ndarray, table: np.ndarray, *, computed: bool) -> None:
        """Keep the pages of a sequence. ids: those in the cache. table: its pages."""
        self._clock += 1
        node, size = self._root, self._page_tokens
        for index, start in enumerate(range(0, len(ids), size)):
            part = ids[start : start + size]
            near, same = self._nearest(node, part)
            if near is None or same < len(part):
                made = Node(
                    part.copy(), self._pages.share(int(table[index])), node, used=self._clock, computed=computed
                )
                if not computed:
                    self._fresh.append(made)
                if near is not None and same == len(near.ids) and not near.below:
                    self._remove(near)  # all that it has is in the new one
                for length in range(1, len(part) + 1):
                    node.below.setdefault(part[:length].tobytes(), {})[made] = None
                near = made
            near.used, node = self._clock, near

    def evict(self) -> bool:
        """Give the page back that was used longest ago and that no sequence uses; False where there is none."""
        idle = [node for node in self._nodes() if not node.below and self._pages.users(node.page) == 1]
        if not idle:
            return False
        self._remove(min(idle, key=lambda node: node.used))
        return True

    def forget(self) -> None:
        """Give all pages back."""
        for node in list(self._nodes()):
            self._pages.give_back(node.page)
        self._root.below, self._fresh = {}, []

    def _nearest(self, node: Node, ids: np.ndarray) -> tuple[Node | None, int]:
        """The child with the most tokens in common with ids, and how many; a page of them at most."""
        for length in range(min(len(ids), self._page_tokens), 0, -1):
            if found := node.below.get(ids[:length].tobytes()):
                return next(reversed(found)), length
        return None, 0

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        for length in range(1, len(node.ids) + 1):
            start = node.ids[:length].tobytes()
            del node.parent.below[start][node]
            if not node.parent.below[start]:
                del node.parent.below[start]
        self._pages.give_back(node.page)

    def _nodes(self) -> Iterator[Node]:
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            children = list(dict.fromkeys(child for each in node.below.values() for child in each))
            waiting += children
            yield from children
