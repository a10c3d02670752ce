"""Data loader of examples (SFT, preferences): packing, padding, shares of the data ranks, shuffling, resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any, Literal

import torch

from meshkit.data._cursor import Cursor, check_rank, rank_rows
from meshkit.data.balance import balance_tokens
from meshkit.data.batch_growth import GlobalBatch
from meshkit.data.bins import build_rows, check_vocabulary, first_fit_decreasing, value_names
from meshkit.data.examples import Unit, members, unit_length, units_fingerprint
from meshkit.errors import DataError
from meshkit.mesh import Mesh

Packing = Literal["rows", "step", "balanced", "none"]


class ExampleLoader:
    """An endless iterator of one data rank's part of each global batch of examples, pairs or other units.

    packing: the kind of sample; each step takes `global_batch` samples, or as many as it says of the tokens taken so far,
    where a sample counts seq_len of them (`BatchRamp`, `MeasuredBatch`).
    "rows": a row of seq_len tokens, filled once for all with as many units as fit. Steps have equal sizes in tokens.
    "step": a unit. The units of a step are packed into as few rows of seq_len as first-fit-decreasing finds, which are then
    made as short as still hold them. Steps have equal numbers of units, and between steps the rows differ.
    "balanced": a unit. Those of a step are shared out over the ranks so that all have about as many tokens, and each rank's
    packed into rows of at most seq_len that are about equally full, of the ranks equally many where there are enough units.
    "none": a unit, alone in its row; rows are as long as the longest of the step. A pair is one row too, its answers one
    after the other, so that no split of the rows parts them.
    pad_multiple: lengths of rows other than seq_len are rounded up to it; with sequence parallelism a multiple of tp.
    The order of samples, shares of the ranks and resume are those of `Loader`: any number of data ranks gives the same
    steps, of any rank's batch may be [0, T], and a state may be loaded with another number of ranks or global batch.
    Batches: see `build_rows`. Everything is in memory.
    vocab_size: of the model; a larger id is refused. max_steps: stop after so many, counted from the start of the run.
    Raises: DataError for no units, one longer than seq_len, unequal values, sizes that make no batch, or an id outside.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        seq_len: int,
        global_batch: GlobalBatch,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        packing: Packing = "rows",
        pad_multiple: int = 8,
        vocab_size: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        check_rank(rank, ranks)
        samples = _samples(units, seq_len, packing, vocab_size)
        self.samples_per_epoch = len(samples)
        self._samples = samples
        self._names = value_names(units)
        self._seq_len = seq_len
        self._packing = packing
        self._pad_multiple = pad_multiple
        self._rank, self._ranks = rank, ranks
        self._cursor = Cursor(
            per_epoch=len(samples),
            global_batch=global_batch,
            seq_len=seq_len,
            seed=seed,
            max_steps=max_steps,
            # Neither the global batch nor the number of ranks: the sequence of samples does not depend on them, and a
            # resumed run may have others.
            identity={"data": units_fingerprint(units), "seq_len": seq_len, "seed": seed, "packing": packing},
        )

    @property
    def epoch(self) -> float:
        """How many times the data has been seen so far, in parts of an epoch too."""
        return self._cursor.epoch

    @property
    def global_batch(self) -> int:
        """Samples of the next step, over all ranks."""
        return self._cursor.global_batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        # Every rank takes the samples of all ranks and packs the whole step, and only then its share: which units lie
        # in a row must not depend on the number of ranks.
        step = [self._samples[index] for index in self._cursor.indices(range(self.global_batch))]
        length = self._seq_len
        if self._packing == "balanced":
            units = [unit for sample in step for unit in sample]
            rows = _balanced(units, length, self._rank, self._ranks)
            batch = build_rows(rows, length=_rounded(rows, self._pad_multiple, length), names=self._names)
            self._cursor.advance()
            return batch
        if self._packing == "step":
            step, length = _pack_short([unit for sample in step for unit in sample], self._pad_multiple, length)
        elif self._packing == "none":
            length = _rounded(step, self._pad_multiple, length)
        batch = _share(step, length, self._names, self._rank, self._ranks)
        self._cursor.advance()
        return batch

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
        self._pad_multiple = lcm(self._pad_multiple, mesh.row_multiple)


def pack_step(
    units: Sequence[Unit],
    *,
    seq_len: int,
    rank: int = 0,
    ranks: int = 1,
    names: Sequence[str] | None = None,
    pad_multiple: int = 8,
    vocab_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """The batch of one data rank from the units of one step, packed as `ExampleLoader(packing="step")` packs them.

    Every rank gives all units of the step and gets its share of the rows; or each gives its own, with ranks=1.
    names: of their values, by default those of the units: a rank that may have no units must say them.
    Raises: DataError for a unit longer than seq_len, unequal values, or an id outside of the vocabulary.
    """
    check_rank(rank, ranks)
    # A rank without units gets [0, seq_len] tensors, with which it takes part in every collective of the step.
    rows, length = list[list[Unit]](), seq_len
    if units:
        # Called for its refusals; the rows are packed on the next line.
        _samples(units, seq_len, "step", vocab_size)
        rows, length = _pack_short(units, pad_multiple, seq_len)
    return _share(rows, length, value_names(units) if names is None else names, rank, ranks)


def example_batches(
    units: Sequence[Unit],
    *,
    seq_len: int,
    rows: int,
    rank: int = 0,
    ranks: int = 1,
    packing: Literal["rows", "none"] = "rows",
    pad_multiple: int = 8,
    vocab_size: int | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Every unit once, in order of its row, shared out over the data ranks: for evaluation.

    Every rank gets the same number of batches of `rows` rows; rows that no unit is left for are padding, all labels -100.
    Raises: DataError, at once, as `ExampleLoader` does.
    """
    if rows < 1:
        raise DataError(f"rows={rows}: an evaluation batch needs at least 1 row. Give rows >= 1.")
    check_rank(rank, ranks)
    samples, names = _samples(units, seq_len, packing, vocab_size), value_names(units)
    length = seq_len if packing == "rows" else _rounded(samples, pad_multiple, seq_len)
    # Rows of padding up to a whole batch on every rank: one that had fewer batches would leave the others waiting in
    # a forward's collectives.
    samples = samples + [[] for _ in range(-len(samples) % (rows * ranks))]
    starts = range(rank * rows, len(samples), rows * ranks)
    return (build_rows(samples[start : start + rows], length=length, names=names) for start in starts)


def _share(
    rows: Sequence[Sequence[Unit]], length: int, names: Sequence[str], rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    share = rank_rows(len(rows), rank, ranks)
    return build_rows(rows[share.start : share.stop], length=length, names=names)


def _samples(units: Sequence[Unit], seq_len: int, packing: str, vocab_size: int | None) -> list[list[Unit]]:
    if packing not in ("rows", "step", "balanced", "none"):
        raise DataError(f"packing={packing!r}: no such way. Give rows, step, balanced or none.")
    if not units:
        raise DataError("there are no examples. Check the path, and what was dropped on the way.")
    for unit in units:
        if unit_length(unit) > seq_len:
            source = members(unit)[0].source
            raise DataError(
                f"{source}: takes {unit_length(unit)} tokens, but a row holds seq_len={seq_len}. "
                "Give a larger seq_len, or call `fit` to drop or cut long ones."
            )
        if vocab_size is not None:
            check_vocabulary(members(unit), vocab_size)
    return _pack(units, seq_len) if packing == "rows" else [[unit] for unit in units]


def _pack(units: Sequence[Unit], seq_len: int) -> list[list[Unit]]:
    bins = first_fit_decreasing([unit_length(unit) for unit in units], seq_len)
    return [[units[index] for index in indices] for indices in bins]


def _pack_short(units: Sequence[Unit], multiple: int, seq_len: int) -> tuple[list[list[Unit]], int]:
    """(rows, their length): as few as there are of seq_len, and as short as bisection finds: less padding for few rows."""
    rows, length = _pack(units, seq_len), seq_len
    # No row can be shorter than the mean over the rows, or than the longest unit.
    least = max(-(-sum(map(unit_length, units)) // len(rows)), *map(unit_length, units))
    shorter = range(-(-least // multiple) * multiple, seq_len, multiple)
    low, high = 0, len(shorter)
    # Bisection may miss the shortest length, since first-fit-decreasing is not monotonous in the capacity, but what
    # it returns always fits: `rows` is replaced only by a packing of as few rows.
    while low < high:
        middle = (low + high) // 2
        shorter_rows = _pack(units, shorter[middle])
        if len(shorter_rows) > len(rows):
            low = middle + 1
        else:
            rows, length, high = shorter_rows, shorter[middle], middle
    return rows, length


def _balanced(units: Sequence[Unit], seq_len: int, rank: int, ranks: int) -> list[list[Unit]]:
    """The rows of one rank."""
    # Every rank has all units: where each is beforehand does not matter.
    home = [0] * len(units)
    balance = balance_tokens(list(map(unit_length, units)), home, ranks=ranks, tokens_per_microbatch=seq_len)
    return [[units[index] for index in row] for row in balance.parts[rank][0]]


def _rounded(rows: Sequence[Sequence[Unit]], multiple: int, seq_len: int) -> int:
    """The longest row's length, up to a multiple, and to seq_len at most."""
    longest = max((sum(unit_length(unit) for unit in row) for row in rows), default=1)
    return min(seq_len, -(-longest // multiple) * multiple)
