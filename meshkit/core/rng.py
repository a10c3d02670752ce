"""Counter-based random numbers (RNG): bits that depend on a stream and an element's index in the full tensor, on no mesh.

Two kinds of counters: the index of an element in the full tensor, for first values of parameters and stochastic rounding, and
keys of tokens, for dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.core.hashing import signed64
from meshkit.core.sharding import local_slices, local_tensor

CHUNK = 1 << 22  # elements at a time: bounds the scratch memory to about 300 MiB


def stream_of(*key: object) -> int:
    """Another stream for every key: a 64-bit hash of it."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(counter: Tensor, stream: int | Tensor, bits: int) -> Tensor:
    """`bits` uniform bits for each int64 counter, by the finaliser of SplitMix64 (Steele et al. 2014).

    stream: one for all counters, or one for each.
    """
    z = counter * signed64(0x9E3779B97F4A7C15) + stream  # new memory: what follows is done in place
    z.bitwise_xor_(_shift(z, 30)).mul_(signed64(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift(z, 27)).mul_(signed64(0x94D049BB133111EB))
    return _shift(z.bitwise_xor_(_shift(z, 31)), 64 - bits)


def indexed_parts(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """This rank's shard in chunks along dim 0: (rows of the local tensor, index of each element in the full one, int64).

    A scalar is one chunk of slice(None).
    """
    return ((rows, index_of_rows(tensor, rows)) for rows in row_chunks(tensor))


def row_chunks(tensor: Tensor) -> Iterator[slice]:
    """Rows of the local tensor, of at most CHUNK elements where one row has no more."""
    local = local_tensor(tensor)
    if not local.ndim:
        yield slice(None)
        return
    count = local.shape[0]
    step = max(1, CHUNK // max(1, local.shape[1:].numel()))
    yield from (slice(start, min(start + step, count)) for start in range(0, count, step))


def index_of_rows(tensor: Tensor, rows: slice) -> Tensor:
    """The index in the full tensor of each element of these rows of this rank's shard, int64."""
    local, slices = local_tensor(tensor), local_slices(tensor)
    strides = torch.empty(tensor.shape, device="meta").stride()
    index = local.new_zeros((), dtype=torch.int64)  # of a tensor without values the indices have none either
    for region, stride in list(zip(slices, strides, strict=True))[1:]:  # all dims but the first
        index = index.unsqueeze(-1) + torch.arange(region.start, region.stop, device=local.device) * stride
    if not slices:
        return index
    first = slices[0].start
    row_index = torch.arange(first + rows.start, first + rows.stop, device=local.device) * strides[0]
    return row_index.reshape(-1, *[1] * index.ndim) + index


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


# [Note: keys of tokens]
# Dropout masks are drawn from a key for each token, which is a hash of its document up to and including the token. Two tokens
# have equal keys if their documents are the same that far, and otherwise do not (but for 1 in 2^63). So a mask does not
# depend on where the token lies: it is the same in packed and unpacked rows, on every mesh, in any microbatch, and in a
# forward that recompute runs again. Dims: B rows, T tokens.

KEYS = "token_keys"  # in a batch, beside input_ids
# The innermost counts. A list and no context variable: autograd's threads, where blocks run again, read it too.
_in_use: list[Tensor | None] = []


def token_keys(input_ids_BT: Tensor, position_ids_BT: Tensor | None, *key: object) -> Tensor:
    """[B, T] int64, different for every `key`. position_ids: a document starts where one is not its predecessor plus 1.

    See [Note: keys of tokens].
    """
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
    """Inside, forwards, and blocks that backward runs again, are of the microbatch with these keys."""
    _in_use.append(keys_BT)
    try:
        yield
    finally:
        _in_use.pop()


def keys_in_use() -> Tensor | None:
    return _in_use[-1] if _in_use else None
