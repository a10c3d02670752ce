"""Balanced batches (dynamic batching): examples move between data ranks so that all learn about as many tokens, by a budget.

What a step learns, and its sums, do not depend on where its examples are: objectives divide by the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.data.balance import Balance, balance_tokens
from meshkit.data.bins import build_rows, value_names
from meshkit.data.examples import Example
from meshkit.errors import DataError, MeshkitError
from meshkit.mesh import Mesh, gather_over_data
from meshkit.metrics import ModelFlops
from meshkit.step import Batch, Run


@dataclass(frozen=True, kw_only=True, eq=False)
class BalancedBatch:
    """This data rank's part of a balanced step.

    batch: a row [1, T] for each of its microbatches, minibatch after minibatch; T is as long as the fullest needs. Where
    examples are not packed, a row for each of them.
    balance: who has what, the same on every rank.
    """

    batch: Batch
    balance: Balance
    mesh: Mesh

    @property
    def microbatches(self) -> int:
        """For `forward_backward` on all of `batch`: of the whole step."""
        return max(sum(self.balance.microbatches), 1)

    def minibatches(self, batch: Batch) -> list[tuple[Batch, int]]:
        """(rows, microbatches) of each optimizer step. batch: this one, perhaps with more entries.

        A rank with fewer rows than microbatches runs rows of padding for the others, with weight 0.
        """
        rows, steps = 0, []
        for minibatch, microbatches in zip(
            self.balance.parts[self.mesh.data_rank], self.balance.microbatches, strict=True
        ):
            rows, first = rows + len(minibatch), rows
            steps.append(({name: tensor[first:rows] for name, tensor in batch.items()}, microbatches))
        return steps

    def back(self, values_BT: Tensor) -> list[np.ndarray]:
        """Numbers of the tokens of `batch`, [B, T] or [B, T, width], back to where examples came from: [L], or [L, width],
        of each in their order there.

        Every rank must call it. Wire: an all-to-all of 8 bytes for each number of a token of an example that was moved.
        """
        dims = values_BT.shape[2:]
        width = dims.numel()
        rank, home = self.mesh.data_rank, self.balance.home
        numbers = self.balance.taken[rank]
        segments, flat = self.batch["segment_ids"], values_BT.cpu().double()
        # segment_ids count the examples from 1 on, row by row.
        values = [flat[segments == segment].flatten().numpy() for segment in range(1, len(numbers) + 1)]
        outgoing = [
            np.concatenate(
                [np.zeros(0), *(value for number, value in zip(numbers, values, strict=True) if home[number] == to)]
            )
            for to in range(self.mesh.data_ranks)
        ]
        own = [[n for n in numbers if home[n] == rank] for numbers in self.balance.taken]
        lengths = self.balance.lengths
        received = _all_to_all(self.mesh, outgoing, [width * sum(lengths[n] for n in of_rank) for of_rank in own])
        found: dict[int, np.ndarray] = {}
        for of_rank, data in zip(own, received, strict=True):
            cuts = width * np.cumsum([lengths[number] for number in of_rank], dtype=np.int64)
            found |= dict(zip(of_rank, np.split(data, cuts), strict=False))
        return [found[number].reshape(-1, *dims) for number in sorted(found)]


def balance_examples(
    mesh: Mesh,
    examples: Sequence[Example],
    *,
    tokens_per_microbatch: int,
    names: Sequence[str] | None = None,
    microbatches: int = 1,
    minibatches: int = 1,
    minibatch_of: Sequence[int] = (),
    work: Callable[[int], float] = float,
    packed: bool = True,
) -> BalancedBatch:
    """Share this step's examples out anew over the data ranks, and lay what this rank takes into rows.

    examples: of this data rank, which may have none. The rest is as of `balance_tokens`.
    names: of the values in the batch, as `build_rows` has them; default: those of the examples. Sources get lost.
    Every rank must call it. Wire: over the ranks with different tokens a gather of lengths as objects, and an all-to-all of
    8 bytes for each token of a moved example, times its vectors: id, whether it is learnt, and its values.
    Raises: on every rank, DataError for examples with unequal values, and for one that is longer than a microbatch.
    """
    steps = list(minibatch_of) if minibatches > 1 else [0] * len(examples)
    # A rank without examples does not know which values the others' have, and all must refuse alike.
    kinds = dict.fromkeys((_vectors(each), tuple(sorted(each.scalars))) for each in examples)
    told = gather_over_data(mesh, ([len(each) for each in examples], steps, list(kinds)))
    every = list(dict.fromkeys(kind for *_, of_rank in told for kind in of_rank))
    if len(every) > 1:
        some, others = ([*(_said(vector) for vector in vectors), *scalars] for vectors, scalars in every[:2])
        raise DataError(
            f"balance_examples: some examples have the values {some}, others {others}. Give every example the same ones."
        )
    vectors, scalars = every[0] if every else ((), ())
    if every and (missing := {*(names or ())} - {*(vector.name for vector in vectors), *scalars}):
        raise DataError(
            f"balance_examples: {sorted(missing)[0]!r} is asked for, and the examples have no such value. Add it, or do not "
            "ask for it; routing is recorded by generate(routing=True)."
        )
    balance = balance_tokens(
        [length for lengths, *_ in told for length in lengths],
        [rank for rank, (lengths, *_) in enumerate(told) for _ in lengths],
        ranks=mesh.data_ranks,
        tokens_per_microbatch=tokens_per_microbatch,
        microbatches=microbatches,
        minibatches=minibatches,
        minibatch_of=[index for _, of_rank, _ in told for index in of_rank],
        work=work,
        packed=packed,
        row_multiple=mesh.row_multiple,
    )
    rank, first = mesh.data_rank, sum(len(lengths) for lengths, *_ in told[: mesh.data_rank])
    here = {first + index: example for index, example in enumerate(examples)}
    # What stays is neither packed nor copied.
    outgoing = [
        np.concatenate(
            [np.zeros(0), *(_packed(here[n], vectors, scalars) for n in numbers if n in here and to != rank)]
        )
        for to, numbers in enumerate(balance.taken)
    ]
    coming = [
        [n for n in balance.taken[rank] if balance.home[n] == sender and sender != rank]
        for sender in range(mesh.data_ranks)
    ]
    sizes = [[_numbers(balance.lengths[n], vectors) + len(scalars) + 1 for n in numbers] for numbers in coming]
    received = _all_to_all(mesh, outgoing, [sum(of_rank) for of_rank in sizes])
    for numbers, of_rank, data in zip(coming, sizes, received, strict=True):
        for number, one in zip(numbers, np.split(data, np.cumsum(of_rank)), strict=False):
            here[number] = _unpacked(one, balance.lengths[number], vectors, scalars)
    rows = [[here[number] for number in part] for minibatch in balance.parts[rank] for part in minibatch]
    longest = max((sum(map(len, row)) for row in rows), default=1)
    length = -(-longest // mesh.row_multiple) * mesh.row_multiple
    wanted = value_names([example for row in rows for example in row]) if names is None else tuple(names)
    return BalancedBatch(batch=build_rows(rows, length=length, names=wanted), balance=balance, mesh=mesh)


def answer_work(run: Run) -> Callable[[int], float]:
    """The work of an answer of so many tokens, for `balance_tokens`: FLOPs, in which attention grows with their square.

    Of a model whose configuration `ModelFlops` cannot count, its tokens.
    """
    try:
        flops = ModelFlops.from_config(run.resolved.program.model.config)  # type: ignore[arg-type]
    except (AttributeError, MeshkitError):
        return float
    return lru_cache(maxsize=None)(lambda tokens: tokens * flops.per_token(tokens).causal)


class _Vector(NamedTuple):
    """Values of an example's tokens. dims: of one token's. small: int16, of which four travel in a number's place."""

    name: str
    dims: tuple[int, ...]
    small: bool

    def numbers(self, tokens: int) -> int:
        """That are sent."""
        values = tokens * math.prod(self.dims)
        return -(-values // 4) if self.small else values


def _vectors(example: Example) -> tuple[_Vector, ...]:
    named = ((name, np.asarray(values)) for name, values in sorted(example.token_values.items()))
    return tuple(_Vector(name, values.shape[1:], values.dtype == np.int16) for name, values in named)


def _said(vector: _Vector) -> str:
    return vector.name if not vector.dims else f"{vector.name} of {list(vector.dims)}"


def _numbers(tokens: int, vectors: Sequence[_Vector]) -> int:
    return 2 * tokens + sum(vector.numbers(tokens) for vector in vectors)


def _packed(example: Example, vectors: Sequence[_Vector], scalars: Sequence[str]) -> np.ndarray:
    """fp64, which holds ids and keys below 2^53 exactly: one kind of message for all."""
    rows = [example.ids, example.learn]
    for vector in vectors:
        values = np.asarray(example.token_values[vector.name]).reshape(-1)
        rows.append(np.pad(values, (0, -len(values) % 4)).view(np.float64) if vector.small else values)
    numbers = [*(example.scalars[name] for name in scalars), float(example.truncated)]
    return np.concatenate([*(np.asarray(row, dtype=np.float64) for row in rows), np.array(numbers)])


def _unpacked(data: np.ndarray, length: int, vectors: Sequence[_Vector], scalars: Sequence[str]) -> Example:
    sizes = [length, length, *(vector.numbers(length) for vector in vectors)]
    ids, learn, *values, numbers = np.split(data, np.cumsum(sizes))
    token_values = {}
    for vector, sent in zip(vectors, values, strict=True):
        plain = sent.copy().view(np.int16)[: length * math.prod(vector.dims)] if vector.small else sent
        token_values[vector.name] = plain.reshape(length, *vector.dims)
    return Example(
        ids=ids.astype(np.int64),
        learn=learn.astype(bool),
        token_values=token_values,
        scalars=dict(zip(scalars, numbers[:-1].tolist(), strict=True)),
        truncated=bool(numbers[-1]),
    )


def _all_to_all(mesh: Mesh, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
    """Numbers [n] fp64 to each data rank, and from each the given number of them."""
    if mesh.data_ranks == 1:
        return list(outgoing)
    # The ranks with different tokens are those of cp in each data rank: each sends to those of its own place in cp, and all
    # of them, as those of tp and pp, get the same.
    group, cp, place = mesh.tokens.get_group(), mesh["cp"].size(), mesh["cp"].get_local_rank()
    assert dist.get_rank(group) == mesh.data_rank * cp + place
    send_sizes, receive_sizes = ([0] * (mesh.data_ranks * cp) for _ in range(2))
    send_sizes[place::cp] = [len(data) for data in outgoing]
    receive_sizes[place::cp] = incoming
    sent = torch.from_numpy(np.concatenate(outgoing)).to(mesh.device)
    received = sent.new_empty(sum(incoming))
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    return [part.numpy() for part in received.cpu().split(list(incoming))]
