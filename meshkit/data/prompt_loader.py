"""Which prompts make up which step on which rank, for ever, and from any point again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from meshkit.data._cursor import Cursor, check_rank, rank_rows
from meshkit.data.records import Record
from meshkit.errors import DataError


class PromptLoader:
    """An endless iterator of one data rank's part of the `global_batch` rows that each step asks about.

    It gives (key, row). The key is the row's place in the endless sequence: it comes once, is the same on any number of
    ranks, and so names the group of answers and seeds their sampling. Order, shares of the ranks and resume are those of
    `ExampleLoader`; a rank may get no rows.
    Raises: DataError for no rows, and sizes that make no step.
    """

    def __init__(self, rows: Sequence[Record], *, global_batch: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        check_rank(rank, ranks)
        if not rows:
            raise DataError("there are no rows to ask about. Check the path, and what was dropped on the way.")
        self._rows, self._global_batch = rows, global_batch
        self._rank, self._ranks = rank, ranks
        digest = hashlib.sha256(b"prompts 1")
        for row in rows:
            digest.update(json.dumps(row.fields, sort_keys=True, default=str).encode() + b"\n")
        self._cursor = Cursor(
            per_epoch=len(rows),
            global_batch=global_batch,
            seed=seed,
            max_steps=None,
            identity={"data": digest.hexdigest(), "seed": seed},
        )

    @property
    def epoch(self) -> float:
        """How many times the rows have been seen so far, in parts of an epoch too."""
        return self._cursor.epoch

    def __iter__(self) -> Iterator[list[tuple[int, Record]]]:
        return self

    def __next__(self) -> list[tuple[int, Record]]:
        found = self._from(self._cursor.samples)
        self._cursor.advance()
        return found

    def of_step(self, step: int) -> list[tuple[int, Record]]:
        """What the iterator gives at step `step`, counted from 0, if all have this global batch; it does not advance."""
        return self._from(step * self._global_batch)

    def _from(self, first: int) -> list[tuple[int, Record]]:
        share = rank_rows(self._global_batch, self._rank, self._ranks)
        ahead = first - self._cursor.samples
        indices = self._cursor.indices(range(share.start + ahead, share.stop + ahead))
        return [(first + row, self._rows[index]) for row, index in zip(share, indices, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last step."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks, with any global batch.

        Raises: DataError if it is of other rows or of another seed.
        """
        self._cursor.load_state_dict(state)
