"""Random bits that depend on a stream and an element's index in the whole tensor, and so not on the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.core.sharding import local_slices, local_tensor

CHUNK = 1 << 22  # elements at a time: bounds the scratch memory to about 300 MiB


def stream_of(*key: object) -> int:
    """A stream of its own for every key."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(counter: Tensor, stream: int | Tensor, bits: int) -> Tensor:
    """So many uniform bits for each int64 counter, by the finaliser of SplitMix64 (Steele et al. 2014).

    stream: of all of them, or one for each.
    """
    z = counter * _signed(0x9E3779B97F4A7C15) + stream  # memory of its own, in which the rest happens
    z.bitwise_xor_(_shift(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return _shift(z.bitwise_xor_(_shift(z, 31)), 64 - bits)


def indexed_parts(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """This rank's part in chunks along dim 0: (rows of the local tensor, index of each element in the whole, int64).

    A scalar is one chunk of slice(None).
    """
    local, parts = local_tensor(tensor), local_slices(tensor)
    strides = torch.empty(tensor.shape, device="meta").stride()
    index = local.new_zeros((), dtype=torch.int64)  # of a tensor without values the indices have none either
    for part, stride in list(zip(parts, strides, strict=True))[1:]:  # dims but the first, whole
        index = index.unsqueeze(-1) + torch.arange(part.start, part.stop, device=local.device) * stride
    if not parts:
        yield slice(None), index
        return
    step = max(1, CHUNK // max(1, index.numel()))
    for start in range(parts[0].start, parts[0].stop, step):
        count = min(step, parts[0].stop - start)
        first = torch.arange(start, start + count, device=local.device) * strides[0]
        here = start - parts[0].start
        yield slice(here, here + count), first.reshape(-1, *[1] * index.ndim) + index


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# A number for each token that depends on its text so far, and not on where in which batch it lies: for drawing masks.
#
# Two tokens have one key if all of their documents up to them is the same, and only then (but for 1 in 2^63). So what
# is drawn from keys is the same for packed and unpacked rows, on every mesh, in any microbatch, and in a forward that
# runs again. Dims: B rows, T tokens.

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
