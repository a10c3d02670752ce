"""DualPipeV (DualPipe): the V of ZBV, with the forward of one microbatch overlapped with the backward of another."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain

from meshkit.parallel.pipeline._table import Op, Row, Schedule

from ._placement import at_least_one, wave


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """In the steady part every row is an FB: communication of the one hides behind computation of the other.

    Bubble: (p-1) (FB + B - 3W) for m >= 2p, p ranks with two stages each, in the times of a stage.
    Activations: at most 2p+1 of a stage and microbatch on a rank, half a microbatch more than 1F1B. With fewer than 2p
    microbatches, the order for 2p without the rows that are not there.
    Source: Sea AI Lab, "Cut-in-half" schedule of DeepSeek's DualPipe (arXiv 2412.19437), in DeepSeek's DualPipe repository.
    """
    at_least_one("dualpipe_v", ranks=ranks, microbatches=microbatches)
    # The phases assume 2p microbatches; with fewer, rows of missing ones are left out afterwards.
    rounds = max(microbatches, 2 * ranks)
    return Schedule(
        "dualpipe-v",
        microbatches,
        wave(ranks, 2),
        tuple(
            tuple(chain.from_iterable(_present(row, microbatches) for row in _Rank(rank, ranks).rows(rounds)))
            for rank in range(ranks)
        ),
    )


def _present(row: Row, microbatches: int) -> Iterator[Row]:
    """The row, or the half of it whose microbatch exists; nothing if neither does."""
    tasks = [task for task in row.tasks if task.microbatch < microbatches]
    if len(tasks) == len(row.tasks):
        yield row
    elif tasks:
        yield Row(row.rank, tasks[0].stage, "F" if tasks[0].op == "F" else "B", tasks[0].microbatch)


class _Rank:
    """The eight phases of one rank; a chunk is 0 on the way down and 1 on the way up."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.stage = (rank, 2 * ranks - 1 - rank)
        self.count: Counter[tuple[str, int]] = Counter()
        self.weights: deque[tuple[int, int]] = deque()

    def rows(self, microbatches: int) -> Iterator[Row]:
        # Phases are numbered as in the source (dualpipev.py). `after` ranks lie between this one and the turn of the V.
        rank, after = self.rank, self.ranks - 1 - self.rank
        # 1: forwards of the first chunk, while the first microbatch goes down those ranks and comes up again.
        for _ in range(2 * after):
            yield self.forward(0)
        # 2: forwards of both chunks, until the first gradient arrives.
        for _ in range(rank + 1):
            yield self.forward(0)
            yield self.forward(1)
        # 3: backwards are split: the stage before waits for the input gradient, and nobody for the weights'.
        for _ in range(after):
            yield self.input(1)
            yield self.weight()
            yield self.forward(1)
        # 4: the steady part.
        for turn in range(microbatches - 2 * self.ranks + rank + 1):
            if turn == 0 and after == 0:  # as two rows, so that the rank before gets its gradient sooner
                yield self.forward(0)
                yield self.backward(1)
            else:
                yield self.overlapped(0, 1)
            yield self.overlapped(1, 0)
        # 5: the first chunk has no forwards left to overlap with.
        for _ in range(after):
            yield self.backward(1)
            yield self.overlapped(1, 0)
        # 6: backwards alone. The second half of them is split: its W fill the waits at the end.
        left = 2 * (rank + 1)
        for turn in range(left):
            yield self.input(1 - turn % 2) if 2 * turn >= left else self.backward(1 - turn % 2)
        # 7: a W fills the wait for each gradient that is still to come.
        for _ in range(after):
            if self.weights:
                yield self.weight()
            yield self.input(0)
        # 8: nobody waits for the rest.
        while self.weights:
            yield self.weight()

    def next(self, op: str, chunk: int) -> int:
        microbatch = self.count[op, chunk]
        self.count[op, chunk] += 1
        return microbatch

    def row(self, op: Op, chunk: int, microbatch: int) -> Row:
        return Row(self.rank, self.stage[chunk], op, microbatch)

    def forward(self, chunk: int) -> Row:
        return self.row("F", chunk, self.next("F", chunk))

    def backward(self, chunk: int) -> Row:
        return self.row("B", chunk, self.next("B", chunk))

    def input(self, chunk: int) -> Row:
        microbatch = self.next("B", chunk)
        self.weights.append((chunk, microbatch))
        return self.row("I", chunk, microbatch)

    def weight(self) -> Row:
        return self.row("W", *self.weights.popleft())

    def overlapped(self, forward: int, backward: int) -> Row:
        return Row(
            self.rank,
            self.stage[forward],
            "FB",
            self.next("F", forward),
            self.stage[backward],
            self.next("B", backward),
        )
