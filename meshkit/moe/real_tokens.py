"""Which tokens of a forward are the batch's. What fills a rank up, and the rows that stand in for an empty microbatch, are
computed as all others, but a router neither counts them nor learns from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from meshkit.errors import PlanError

# A context variable, since a router is deep inside of a model's forward; recompute runs in a copy of the forward's context.
_first: ContextVar[tuple[int, int] | None] = ContextVar("(real tokens, all tokens) of a row", default=None)


@contextmanager
def only_first(real: int, tokens: int) -> Iterator[None]:
    """Inside, of the `tokens` of each row the first `real` are the batch's; none where nothing was around it already."""
    nothing = _first.get() == (0, 1)
    token = _first.set((0, 1) if nothing else (real, tokens))
    try:
        yield
    finally:
        _first.reset(token)


@contextmanager
def no_real_tokens() -> Iterator[None]:
    """Inside, no token is the batch's: of a row that stands in for a microbatch without rows."""
    with only_first(0, 1):
        yield


def real_tokens(tokens: int, device: torch.device, *, part: int = 0, parts: int = 1) -> Tensor:
    """[tokens] bool: which of these tokens are the batch's. The host does not wait.

    part: of `parts` equal parts of a row, in order, that ranks hold; these tokens are one, or those of several rows.
    Raises: PlanError where they are not.
    """
    stated = _first.get()
    if stated is None:
        return torch.ones(tokens, dtype=torch.bool, device=device)
    real, all_tokens = stated
    if real == 0:
        return torch.zeros(tokens, dtype=torch.bool, device=device)
    each = all_tokens // parts
    if not each or all_tokens % parts or tokens % each:
        raise PlanError(
            f"a router was given {tokens} tokens where a rank holds {all_tokens // parts} of a row, so it is not known which "
            "of them are padding. Give it all tokens of each row, in their order, or use a mesh without cp."
        )
    places = torch.arange(tokens, device=device) % each + part * each
    return places < real
