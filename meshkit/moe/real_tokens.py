"""Which tokens of a forward are the batch's. What fills a rank up, and the rows that stand in for an empty microbatch, are
computed as all others, but a router neither counts them nor learns from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from meshkit.core.noting import noted


@noted(reading=lambda x: x.clone())
def counted(scores: Tensor) -> Tensor:
    """The scores of the tokens that a router counts, as they are: by this a program tells which tokens those are."""
    return scores


# A context variable, since a router is deep inside of a model's forward; recompute runs in a copy of the forward's context.
_first: ContextVar[tuple[int, int] | None] = ContextVar("(real tokens, all tokens) of a row", default=None)
_NONE = 0, 1


@contextmanager
def only_first(real: int, tokens: int) -> Iterator[None]:
    """Inside, of the `tokens` of each row the first `real` are the batch's; inside of `no_real_tokens` still none."""
    token = _first.set(_NONE if _first.get() == _NONE else (real, tokens))
    try:
        yield
    finally:
        _first.reset(token)


@contextmanager
def no_real_tokens() -> Iterator[None]:
    """Inside, no token is the batch's: of a row that stands in for a microbatch without rows."""
    with only_first(*_NONE):
        yield


def real_tokens(tokens: int, device: torch.device, *, part: int = 0, parts: int = 1) -> Tensor | None:
    """[tokens] bool: which of these tokens are the batch's; None where all are. The host does not wait.

    part: of `parts` equal parts of a row, in order, that ranks hold: these tokens are it, in each row.
    """
    real, all_tokens = _first.get() or (1, 1)
    if real == all_tokens:
        return None
    if real == 0:  # whatever stands where
        return torch.zeros(tokens, dtype=torch.bool, device=device)
    return torch.arange(tokens, device=device) + part * (all_tokens // parts) < real
