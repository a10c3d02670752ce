"""Paths of microbatches through the stages of a pipeline: all stages in the order of the model, or some of them in any order
(stage skipping, SkipPipe).

The first stage, with the embedding, and the last, with the head and the loss, are the ends of every path. A stage that a
microbatch does not pass does nothing for it: its blocks are left out of the forward, and the hidden state goes from the stage
before on the path to the one after, as the residual stream of a block that adds nothing.
Source: Blagoev et al. 2025, SkipPipe (arXiv 2502.19913).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

Path = tuple[int, ...]
"""The stages that a microbatch passes, in the order in which it does."""


def whole(stages: int) -> Path:
    """All of them, in the order of the model."""
    return tuple(range(stages))


@lru_cache(maxsize=4096)
def before(path: Path) -> Mapping[int, int]:
    """By stage, the stage before it on the path; the first has none."""
    return {after: stage for stage, after in pairwise(path)}


@lru_cache(maxsize=4096)
def after(path: Path) -> Mapping[int, int]:
    """By stage, the stage after it on the path; the last has none."""
    return dict(pairwise(path))
