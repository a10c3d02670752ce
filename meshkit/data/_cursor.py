"""Data position (resume) and shuffling: where a data loader stands in its endless sequence, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from meshkit.data.batch_growth import GlobalBatch, MeasuredBatch, check_batch, sequences_after
from meshkit.errors import DataError


class Cursor:
    """Samples and steps taken so far of a sequence in which every epoch is shuffled anew by (seed, epoch).

    seq_len: tokens of a sample, for a global batch that grows with them. identity: what fixes the sequence; a state with
    another is refused.
    Raises: DataError for a global batch of less than 1.
    """

    def __init__(
        self,
        *,
        per_epoch: int,
        global_batch: GlobalBatch,
        seq_len: int = 1,
        seed: int,
        max_steps: int | None,
        identity: Mapping[str, Any],
    ) -> None:
        check_batch(global_batch)
        self.samples = 0
        self.steps = 0
        self._per_epoch = per_epoch
        self._batch = global_batch
        self._seq_len = seq_len
        self._seed = seed
        self._max_steps = max_steps
        self._identity = dict(identity)

    @property
    def epoch(self) -> float:
        """Epochs so far, with fractions."""
        return self.samples / self._per_epoch

    @property
    def global_batch(self) -> int:
        """Samples of the next step."""
        return sequences_after(self.samples * self._seq_len, self._batch)

    def indices(self, rows: range) -> list[int]:
        """Indices of the samples in these rows of the next global batch. Raises: as `refuse_more`."""
        self.refuse_more()
        # Places in the endless sequence, not in an epoch: a global batch may begin in one epoch and end in the next,
        # so nothing is dropped at the end of an epoch and every step has the same size.
        return [self._sample_at(self.samples + row) for row in rows]

    @property
    def epochs(self) -> dict[str, float]:
        """The same of each source; here there is one, without a name."""
        return {"": self.epoch}

    def picks(self, rows: range) -> list[tuple[str, int]]:
        """(source, index of the sample in it) of these rows of the next global batch. Raises: as `indices`."""
        return [("", index) for index in self.indices(rows)]

    def refuse_more(self) -> None:
        """Raises: StopIteration after max_steps."""
        if self.steps == self._max_steps:
            raise StopIteration

    def advance(self) -> None:
        """Move on by one global batch."""
        self.samples += self.global_batch
        self.steps += 1

    def _sample_at(self, position: int) -> int:
        epoch, index = divmod(position, self._per_epoch)
        return permute(index, self._per_epoch, seed=self._seed, epoch=epoch)

    def state_dict(self) -> dict[str, Any]:
        # Nothing in it is a rank's own: all ranks write the same state, of which a checkpoint keeps one, and any
        # number of ranks goes on from it. `steps` does not follow from `samples` once the global batch has changed.
        found = {"samples": self.samples, "steps": self.steps, **self._identity}
        return {**found, "batch": self._batch.state_dict()} if isinstance(self._batch, MeasuredBatch) else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = sorted(({"samples", "steps"} | self._identity.keys()) - state.keys())
        if missing:
            raise DataError(f"the saved data position lacks {missing}. Load the state_dict of a Loader.")
        for name, value in self._identity.items():
            if state[name] != value:
                raise DataError(
                    f"the saved data position has {name}={state[name]!r}, but this run has {name}={value!r}, which is "
                    f"another sequence of samples. Give the {name} of the saved run, or start the data afresh."
                )
        # Of a run whose batch was not measured there is none: it begins with its first size.
        if isinstance(self._batch, MeasuredBatch) and "batch" in state:
            self._batch.load_state_dict(state["batch"])
        self.samples, self.steps = int(state["samples"]), int(state["steps"])


def rank_rows(count: int, rank: int, ranks: int) -> range:
    """The rows of `count` that data rank `rank` of `ranks` takes."""
    # Floors of multiples: the shares tile range(count) for any two numbers and differ by at most one row.
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def check_rank(rank: int, ranks: int) -> None:
    """Raises: DataError if there is no such data rank."""
    if not 0 <= rank < ranks:
        raise DataError(f"rank={rank} of ranks={ranks}: there is no such data rank. Give 0 <= rank < ranks.")


# [Note: shuffle without a stored permutation] The position of an index is computed, never stored.
# A stored permutation of the 2.4e8 samples in 1e12 tokens is 2 GB on every rank, and has to be made again on resume.
# This one takes no memory and no time to set up, and any position of any epoch can be asked for at any time.

_ROUNDS = 8
"""four do for many samples; over the 24 orders of 4 samples they leave chi-squared at 27 per degree, eight below 1"""


def permute(index: int, count: int, *, seed: int, epoch: int) -> int:
    """Where `index` in [0, count) goes: a permutation of [0, count) for each (seed, epoch), like a random one.

    Source: Luby and Rackoff 1988 (Feistel rounds of a keyed hash make a pseudo-random permutation of 2^2k values);
    Black and Rogaway 2002 (walk along its cycle until a value falls below `count`: at most 4 steps are expected).
    """
    # Feistel halves are equally long, so the rounds permute 2^(2 half_bits) values, at most 4 * count. At least one
    # bit, or a sequence of one sample would have halves of nothing.
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_hash(right, seed, epoch, round_number) & mask)
        # Cycle walking: the rounds permute a power of 4 at least `count`; what lies beyond `count` is permuted again.
        index = left << half_bits | right
        if index < count:
            return index


@lru_cache(maxsize=1 << 16)
def _hash(value: int, seed: int, epoch: int, round_number: int) -> int:
    # blake2b and not Python's hash, which is salted in each process; ranks and resumed runs must agree. The spaces
    # keep (1, 23) and (12, 3) apart. There are as many values as the square root of an epoch's samples, so they come again.
    message = f"{seed} {epoch} {round_number} {value}".encode()
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
