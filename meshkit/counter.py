"""Random bits that depend on a stream and an element's index in the whole tensor, and so not on the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from meshkit.sharding import local_slices, local_tensor

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
