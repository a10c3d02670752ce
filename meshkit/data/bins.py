"""Packing of examples into rows of one length (first-fit-decreasing bins, no example is split), and unpacking of batches.

Legend: B rows of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from meshkit.data.examples import Example, Unit, members
from meshkit.data.text.packing import IGNORED
from meshkit.errors import DataError


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices into `lengths` by bin, no bin above `capacity`; the same for the same lengths.

    The longest goes first, equal ones in order, each into the first bin with room: O(n log n). At most 11/9 of the fewest
    bins possible and 2/3 of a bin (Dósa 2007).
    Raises: DataError for a length that is above capacity.
    """
    bins: list[list[int]] = []
    # One leaf for each bin there could be. Bins not begun yet have all their room, so the leftmost leaf with room is
    # the next new bin where none of those begun has any.
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    # First fit in O(log n): go down to the leftmost leaf that has room.
    room = [capacity] * (2 * leaves)  # a heap-shaped tree: the most room in the bins below each node
    # A stable sort: equal lengths stay in order, so all ranks find the same bins without a message.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise DataError(f"example {index} takes {length} tokens, but a row holds {capacity}. Call `fit` first.")
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def value_names(units: Sequence[Unit]) -> tuple[str, ...]:
    """The names of the numbers that go with every example, of tokens first.

    Raises: DataError for an example that lacks one, and for a name that a batch already has.
    """
    if not units:
        return ()
    head = members(units[0])[0]
    names = (*sorted(head.token_values), *sorted(head.scalars))
    for unit in units:
        for example in members(unit):
            if (*sorted(example.token_values), *sorted(example.scalars)) != names:
                has = [*sorted(example.token_values), *sorted(example.scalars)]
                raise DataError(
                    f"{example.source}: has the values {has}, but {head.source} has {list(names)}. "
                    "Give every example the same ones."
                )
    # `mask` too: no loader writes one, but a loss hands batch["mask"] to the model.
    taken = {"input_ids", "labels", "position_ids", "segment_ids", "ends", "mask"} & set(names)
    if taken or len(set(names)) < len(names):
        raise DataError(f"values named {sorted(taken) or list(names)}: a name of a batch, or given twice. Rename them.")
    return names


def build_rows(rows: Sequence[Sequence[Unit]], *, length: int, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Rows of units as tensors [B, length]; no row makes tensors [0, length].

    input_ids, int64: examples end to end, then zeros. labels: the next token where that is learnt, else -100; no label
    crosses from one example into another. position_ids: from 0 in each example, and in the padding.
    segment_ids: which example, counted from 1 over the whole batch; 0 is padding. A unit's members follow each other, so in
    a batch of pairs chosen ones are odd, each rejected one its chosen's number plus 1.
    ends: 1 at the last token of each example, where a reward model reads its score; 0 elsewhere.
    names: values of examples to add, float64 (int16 where they are), 0 where there is none, [B, length] or with the dims of a
    token's values behind. A token's value stands where the token is the label,
    so it goes with log-probabilities; that of an example's first token, which is no label, is left out. An example's scalar
    stands at its end. So a sum over a segment is the sum of its tokens' values, or the scalar.
    """
    shape = (len(rows), length)
    integers = {name: np.zeros(shape, dtype=np.int64) for name in ("input_ids", "segment_ids", "ends")}
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.tile(np.arange(length), (len(rows), 1))
    # fp64, as objectives compute: their sums over segments then agree to 1e-12 for any split of the batch.
    values = {name: np.zeros((*shape, *_dims(name, rows)), dtype=_kind(name, rows)) for name in names}
    segment = 0
    for row, units in enumerate(rows):
        start = 0
        for example in (example for unit in units for example in members(unit)):
            stop = start + len(example)
            if stop > length:
                raise DataError(f"{example.source}: does not fit into a row of {length} tokens. Call `fit` first.")
            # Counted over the batch and not in the row: context parallelism lays rows end to end, and each example
            # needs a number of its own there.
            segment += 1
            integers["input_ids"][row, start:stop] = example.ids
            integers["segment_ids"][row, start:stop] = segment
            integers["ends"][row, stop - 1] = 1
            # Shifted by one inside of the example: its last token has no label, so none crosses into the next example.
            labels[row, start : stop - 1] = np.where(example.learn[1:], example.ids[1:], IGNORED)
            positions[row, start:stop] = np.arange(len(example))
            for name in names:
                if name in example.scalars:
                    values[name][row, stop - 1] = example.scalars[name]
                else:
                    # Shifted as labels are: place t holds the value of token t + 1, whose log-probability the model
                    # gives there.
                    values[name][row, start : stop - 1] = example.token_values[name][1:]
            start = stop
        # Padding is a document of its own: positions restart, so attention never looks at it from an example.
        positions[row, start:] = np.arange(length - start)
    arrays = {**integers, "labels": labels, "position_ids": positions, **values}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _dims(name: str, rows: Sequence[Sequence[Unit]]) -> tuple[int, ...]:
    """Those of one token's value; () for numbers, and where there is no example to tell."""
    first = _first(rows)
    if first is None or name not in first.token_values:
        return ()
    return tuple(np.shape(first.token_values[name])[1:])


def _kind(name: str, rows: Sequence[Sequence[Unit]]) -> type[np.generic]:
    """float64, or int16 of small whole numbers of which a token has many."""
    first = _first(rows)
    is_small = first is not None and getattr(first.token_values.get(name), "dtype", None) == np.int16
    return np.int16 if is_small else np.float64


def _first(rows: Sequence[Sequence[Unit]]) -> Example | None:
    return next((example for units in rows for unit in units for example in members(unit)), None)


def check_vocabulary(examples: Sequence[Example], vocab_size: int) -> None:
    """Raises: DataError naming the first id outside the vocabulary."""
    for example in examples:
        if example.ids.min() < 0 or example.ids.max() >= vocab_size:
            index = int(np.flatnonzero((example.ids < 0) | (example.ids >= vocab_size))[0])
            raise DataError(
                f"{example.source}: id {example.ids[index]} at position {index} is outside the vocabulary of {vocab_size}. "
                "Encode it with the model's tokenizer, or give the model a larger vocabulary."
            )


# Segments of a packed batch, which are its examples: taken out by number, and packed into rows of their own.

Batch = dict[str, torch.Tensor]


def take_segments(batch: Batch, numbers: Iterable[int]) -> Batch:
    """The examples with these `segment_ids`, packed into as few rows of the same length T as first-fit-decreasing finds.

    All tensors of the batch are [B, T] and go along; the examples are numbered anew, from 1 on.
    """
    segment_ids_BT = batch["segment_ids"]
    length = segment_ids_BT.shape[1]
    # [L, 2] each: `build_rows` never splits an example, so its tokens lie side by side in one row.
    tokens_of_segment = [(segment_ids_BT == number).nonzero() for number in numbers]
    bins = first_fit_decreasing([len(token_indices) for token_indices in tokens_of_segment], length)
    taken = {
        name: tensor.new_full((len(bins), length), IGNORED if name == "labels" else 0) for name, tensor in batch.items()
    }
    count = 0
    for row, indices in enumerate(bins):
        start = 0
        for index in indices:
            (old, first), stop = tokens_of_segment[index][0].tolist(), start + len(tokens_of_segment[index])
            for name, tensor in batch.items():
                taken[name][row, start:stop] = tensor[old, first : first + stop - start]
            count += 1
            taken["segment_ids"][row, start:stop] = count
            start = stop
        taken["position_ids"][row, start:] = torch.arange(length - start)  # padding is a document of its own
    return taken


def split_mismatches(batch: Batch) -> tuple[Batch, Batch]:
    """A batch of units of `with_mismatches`: (the answers, the mismatched ones), each packed into a batch of its own.

    Raises: DataError for an odd number of examples.
    """
    examples = int(batch["segment_ids"].max()) if batch["segment_ids"].numel() else 0
    if examples % 2:
        raise DataError(
            f"split_mismatches: segment_ids go up to {examples}, an odd number, so some answer has no mismatch. Build the "
            "batch from the units of `with_mismatches`."
        )
    return take_segments(batch, range(1, examples + 1, 2)), take_segments(batch, range(2, examples + 1, 2))
