"""Data loaders of token files and of prompts: batches of each data rank, shuffling, resume from any step on any mesh."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshkit.data._cursor import Cursor, check_rank, rank_rows
from meshkit.data.batch_growth import GlobalBatch
from meshkit.data.mixture import MixedCursor, Mixture
from meshkit.data.records import Record
from meshkit.data.text.packing import pack_batch, sample_count
from meshkit.data.text.tokens import Tokens
from meshkit.errors import DataError
from meshkit.mesh import Mesh


class Loader:
    """An endless iterator of one data rank's part of each global batch.

    The order of samples is one endless sequence, every epoch shuffled anew by (seed, epoch); step s takes the next
    `global_batch` of it, on any number of data ranks, also across the end of an epoch. Of each global batch, data
    rank r of n takes the rows from B*r//n to B*(r+1)//n; with fewer rows than ranks some batches are [0, T].
    Batches: input_ids, labels and, if `documents`, position_ids, all int64 [rows, T] (see `pack_sample`).
    tokens: a file, or a `Mixture` of several, of which each step has its share of each, in an order of their own.
    global_batch: or what says it of the tokens taken so far, as `BatchRamp` and `MeasuredBatch` do; `loader.global_batch` is
    that of the next step.
    Resume: `state_dict` is a few numbers, the same on every rank. They may be loaded with another number of data
    ranks or another global batch: the sequence goes on where it stopped. Weights of a mixture may be others then, too.
    vocab_size: of the model; a file that may hold larger ids is refused.
    max_steps: stop after this many steps, counted from the start of the run, also across a resume.
    Raises: DataError for sizes that make no batch, and for an id outside the vocabulary.
    """

    def __init__(
        self,
        tokens: Tokens | Mixture,
        *,
        seq_len: int,
        global_batch: GlobalBatch,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        documents: bool = True,
        vocab_size: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        check_rank(rank, ranks)
        self._sources = tokens.sources if isinstance(tokens, Mixture) else {"": tokens}
        for file in self._sources.values():
            if vocab_size is not None and file.vocab_size > vocab_size:
                raise DataError(
                    f"{file.path}: holds ids up to {file.vocab_size - 1}, but the model has vocab_size={vocab_size}. "
                    f"Give the model at least {file.vocab_size}, or build the file with a smaller tokenizer."
                )
        per_epoch = {name: sample_count(file, seq_len) for name, file in self._sources.items()}
        self.samples_per_epoch = sum(per_epoch.values())
        self._seq_len = seq_len
        self._documents = documents
        self._rank, self._ranks = rank, ranks
        fingerprints = {name: file.fingerprint for name, file in self._sources.items()}
        # See ExampleLoader: neither the global batch nor the number of ranks.
        identity: dict[str, Any] = {"seq_len": seq_len, "seed": seed, "documents": documents}
        sizes: dict[str, Any] = {"global_batch": global_batch, "seq_len": seq_len, "seed": seed, "max_steps": max_steps}
        self._cursor: Cursor = (
            MixedCursor(tokens, per_epoch=per_epoch, **sizes, identity={"data": fingerprints, **identity})
            if isinstance(tokens, Mixture)
            else Cursor(per_epoch=self.samples_per_epoch, **sizes, identity={"data": tokens.fingerprint, **identity})
        )

    @property
    def epoch(self) -> float:
        """How many times the data has been seen so far, in parts of an epoch too."""
        return self._cursor.epoch

    @property
    def epochs(self) -> dict[str, float]:
        """The same of each source of a mixture; of one file, by the name ""."""
        return self._cursor.epochs

    @property
    def global_batch(self) -> int:
        """Sequences of the next step, over all ranks."""
        return self._cursor.global_batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self._packed(self._cursor.picks(rank_rows(self.global_batch, self._rank, self._ranks)))
        self._cursor.advance()  # after the batch is built: an error leaves the position as it was
        return batch

    def _packed(self, picks: Sequence[tuple[str, int]]) -> dict[str, torch.Tensor]:
        """Rows of each source together, and then in the order of the picks."""
        places: dict[str, list[int]] = {name: [] for name in self._sources}
        for place, (name, _) in enumerate(picks):
            places[name].append(place)
        parts = [
            pack_batch(
                self._sources[name],
                [picks[place][1] for place in of_source],
                seq_len=self._seq_len,
                documents=self._documents,
            )
            for name, of_source in places.items()
        ]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([place for of_source in places.values() for place in of_source], dtype=torch.int64)
        return {key: torch.cat([part[key] for part in parts])[order.argsort()] for key in parts[0]}

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last batch: samples and steps taken, and what they were taken from."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises: DataError if it is of other data, or of another seq_len, seed or packing: the sequence is not the same.
        """
        self._cursor.load_state_dict(state)

    def move(self, mesh: Mesh) -> None:
        """From the next batch on, the part of this rank on another mesh; the sequence goes on. See `Run.move`."""
        self._rank, self._ranks = mesh.data_rank, mesh.data_ranks


def evaluation_batches(
    tokens: Tokens, *, seq_len: int, batch: int, rank: int = 0, ranks: int = 1, documents: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """Every sample of a token file once, in order, shared out over the data ranks.

    Each batch is [batch, T] and every rank gets the same number of them: the last sample is padded, and so are the
    rows that no sample is left for (all their labels are -100).
    Raises: DataError, at once, for sizes that make no batch.
    """
    if batch < 1:
        raise DataError(f"batch={batch}: an evaluation batch needs at least 1 row. Give batch >= 1.")
    check_rank(rank, ranks)
    count = sample_count(tokens, seq_len, last="pad")
    # Rounded up to as many batches on every rank, since each forward has collectives. An index past the last sample
    # makes a row of padding.
    starts = range(rank * batch, -(-count // (batch * ranks)) * batch * ranks, batch * ranks)
    return (
        pack_batch(tokens, list(range(start, start + batch)), seq_len=seq_len, documents=documents) for start in starts
    )


# Prompts of each step, for reinforcement learning.


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
            # The content and not the path. sort_keys: another order of columns is no other data. default=str: rows of
            # Arrow hold dates and other types that JSON has not.
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
        rows = self._from(self._cursor.samples)
        self._cursor.advance()
        return rows

    def of_step(self, step: int) -> list[tuple[int, Record]]:
        """What the iterator gives at step `step`, counted from 0, if all have this global batch; it does not advance."""
        return self._from(step * self._global_batch)

    def _from(self, first: int) -> list[tuple[int, Record]]:
        share = rank_rows(self._global_batch, self._rank, self._ranks)
        # `indices` counts from the cursor; `of_step` asks for steps before or after it, so the difference may be
        # negative.
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

    def move(self, mesh: Mesh) -> None:
        """From the next step on, the part of this rank on another mesh; the sequence goes on. See `Run.move`."""
        self._rank, self._ranks = mesh.data_rank, mesh.data_ranks
