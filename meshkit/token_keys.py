"""A number for each token that depends on its text so far, and not on where in which batch it lies: for drawing masks.

Two tokens have one key if all of their documents up to them is the same, and only then (but for 1 in 2^63). So what is drawn
from keys is the same for packed and unpacked rows, on every mesh, in any microbatch, and in a forward that runs again.
Dims: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor

from meshkit.counter import random_bits, stream_of

KEYS = "token_keys"  # in a batch, beside input_ids
_in_use: list[Tensor | None] = []  # the innermost counts; autograd's threads read it too


def token_keys(input_ids_BT: Tensor, position_ids_BT: Tensor | None, *key: object) -> Tensor:
    """[B, T] int64, other ones for every `key`. position_ids: a document starts where one is not the last plus 1."""
    ids = input_ids_BT.long()
    positions_BT = (
        (ids.new_ones(ids.shape).cumsum(1) - 1) if position_ids_BT is None else position_ids_BT.expand_as(ids)
    )
    words_BT = random_bits(ids, random_bits(positions_BT, stream_of("position"), 63), 63)
    sums_BT = words_BT.cumsum(1)  # modulo 2^64
    starts_BT = F.pad(positions_BT.diff(dim=1) != 1, (1, 0), value=True)
    index_BT = ids.new_ones(ids.shape).cumsum(1) - 1
    first_BT = index_BT.where(starts_BT, 0).cummax(1).values if ids.numel() else index_BT
    before_BT = (sums_BT - words_BT).gather(1, first_BT)
    return random_bits(sums_BT - before_BT, stream_of(*key), 63)


@contextmanager
def using_keys(keys_BT: Tensor | None) -> Iterator[None]:
    """Inside, forwards and what backwards run again are those of the microbatch with these keys."""
    _in_use.append(keys_BT)
    try:
        yield
    finally:
        _in_use.pop()


def keys_in_use() -> Tensor | None:
    return _in_use[-1] if _in_use else None
