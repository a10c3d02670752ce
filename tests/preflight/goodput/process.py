"""A job with failures, played event by event: the oracle of goodput's closed forms, with which it shares no code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np


@dataclass(frozen=True)
class Kind:
    """Of checkpoints. survives: share of failures after which this kind or an earlier one is loaded."""

    interval_s: float
    blocking_s: float
    write_s: float
    restart_s: float
    survives: float


@dataclass
class Played:
    useful_s: float
    wall_s: float
    saving_s: float
    restarts_s: float
    failures: int


def play(kinds: Sequence[Kind], *, mtbf_s: float, useful_s: float, seed: int) -> Played:
    """Until `useful_s` of work is done. Each kind is saved whenever its interval of work has passed since its last save."""
    random = np.random.default_rng(seed)
    clock, done, saving, restarts, failures = 0.0, 0.0, 0.0, 0.0, 0
    fails_at = random.exponential(mtbf_s)
    # Of each kind: (work that is in it, when it can be loaded). One that is not written yet is in `pending`.
    loadable = [0.0] * len(kinds)
    pending: list[list[tuple[float, float]]] = [[] for _ in kinds]
    last = [0.0] * len(kinds)  # work at the last save of each kind
    while done < useful_s:
        due = min(at + kind.interval_s for at, kind in zip(last, kinds, strict=True))
        work = min(due, useful_s) - done
        if clock + work < fails_at:
            clock += work
            done += work
            failed = False
            for index, kind in enumerate(kinds):
                if done < last[index] + kind.interval_s - 1e-9:
                    continue
                if clock + kind.blocking_s >= fails_at:
                    failed = True
                    break
                clock += kind.blocking_s
                saving += kind.blocking_s
                pending[index].append((done, clock + kind.write_s))
                last[index] = done
            if not failed:
                continue
        # A failure. Which kind is loaded, and until when restarts last.
        clock = fails_at
        level = 0
        while True:
            failures += 1
            for index, saves in enumerate(pending):
                loadable[index] = max([loadable[index], *(at for at, when in saves if when <= clock)])
                pending[index] = []  # what was being written is gone
            level = max(level, next(i for i, kind in enumerate(kinds) if random.random() < _odds(kinds, i)))
            fails_at = clock + random.exponential(mtbf_s)
            ends = clock + kinds[level].restart_s
            restarts += min(ends, fails_at) - clock
            clock = min(ends, fails_at)
            if clock == ends:
                break
        done = loadable[level]
        for index in range(len(kinds)):
            # An inner kind's checkpoints are of no use after an outer one was loaded.
            loadable[index] = loadable[index] if index >= level else done
            last[index] = done if index <= level else last[index]
    return Played(done, clock, saving, restarts, failures)


def _odds(kinds: Sequence[Kind], index: int) -> float:
    """That a failure which no earlier kind survives is survived by this one."""
    before = kinds[index - 1].survives if index else 0.0
    return inf if index == len(kinds) - 1 else (kinds[index].survives - before) / (1 - before)
