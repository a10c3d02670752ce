"""The batch of a step, of the whole job: how many sequences, and how long each is."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.errors import DataError
from meshkit.mesh import MeshSpec


@dataclass(frozen=True, kw_only=True)
class Batch:
    """sequences: of the step, over all ranks and microbatches. seq_len: tokens of each."""

    sequences: int
    seq_len: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise DataError(f"Batch({name}={value!r}): a step has a whole number of them, at least 1.")

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    def rows(self, spec: MeshSpec) -> int:
        """Sequences of the rank that has most."""
        return -(-self.sequences // (spec.dp_replicate * spec.dp_shard))
