"""A shuffle that is a function: where an index goes is computed, never stored.

A stored permutation of the 2.4e8 samples in 1e12 tokens is 2 GB on every rank, and has to be made again on resume.
This one takes no memory and no time to set up, and any position of any epoch can be asked for at any time.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 8
"""four do for many samples; over the 24 orders of 4 samples they leave chi-squared at 27 per degree, eight below 1"""


def permute(index: int, count: int, *, seed: int, epoch: int) -> int:
    """Where `index` in [0, count) goes: a permutation of [0, count) for each (seed, epoch), like a random one.

    Source: Luby and Rackoff 1988 (Feistel rounds of a keyed hash make a pseudo-random permutation of 2^2k values);
    Black and Rogaway 2002 (walk along its cycle until a value falls below `count`: at most 4 steps are expected).
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_hash(right, seed, epoch, round_number) & mask)
        index = left << half_bits | right
        if index < count:
            return index


def _hash(value: int, seed: int, epoch: int, round_number: int) -> int:
    message = f"{seed} {epoch} {round_number} {value}".encode()
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
