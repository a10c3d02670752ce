"""Do generators and trainers of a stream wait for each other?

    python benchmarks/streaming.py                     # 2 gloo ranks, sleeping stand-ins for compute
    python benchmarks/streaming.py --rollout-s 0.8 0.8

One rank writes the rollouts of an iteration, which take 0.2 and 1.4 seconds in turn, in tokens of 10 ms; another learns for
0.8 seconds. Sleep until the time is over stands in for compute, so that the two ranks of a small machine do not slow each
other down: what is measured is waiting. The same calls run as a `Flow` that is 1, 2 and 4 iterations ahead, and as a
`StreamFlow` of the same ages. The first iterations, in which nothing is ready yet, are left out. Reported is an iteration's
seconds over the larger of the two means, and beside it what a look between two tokens takes, which real tokens wait for.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import tyro
from rich.console import Console
from rich.table import Table
from rows import environment, spread

import meshkit as mk
from meshkit.algos.dataflow import Call, Flow, Sample, StreamCall, StreamFlow, Sync

RESULTS = Path(__file__).parent / "results" / "streaming.jsonl"
TOKEN_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    rollout_s: tuple[float, ...] = (0.2, 1.4)
    """seconds of the rollouts of an iteration, in turn"""
    train_s: float = 0.8
    iterations: int = 30
    warmup: int = 6
    """iterations, an even number, that are left out"""
    staleness: tuple[int, ...] = (1, 2, 4)


class Writer:
    """One iteration's rollouts after the other, a token every `TOKEN_S`."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._open = settings, list[tuple[Sample, float]]()
        self._returned: float | None = None
        self.looks_s: list[float] = []

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def room(self) -> int:
        return int(not self._open)

    def begin(self, samples: Sequence[Sample]) -> None:
        self._open += [(sample, time.perf_counter() + rollout_s(self._settings, sample)) for sample in samples]

    def advance(self) -> list[list[Sample]]:
        if not self._open:
            return []
        now = time.perf_counter()
        if self._returned is not None:
            self.looks_s.append(now - self._returned)
        sample, end = self._open.pop()
        time.sleep(max(0.0, min(TOKEN_S, end - now)))
        self._returned = None
        if time.perf_counter() >= end:
            return [[{**sample, "answer": 0}]]
        self._open.append((sample, end))
        self._returned = time.perf_counter()
        return []

    def take_weights(self, version: int) -> None:
        """They are those of nobody."""

    def state_dict(self) -> dict[str, Any]:
        return {"parts": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("no run of this benchmark is resumed")


def rollout_s(settings: Settings, sample: Sample) -> float:
    return settings.rollout_s[sample["iteration"] % len(settings.rollout_s)]


def iteration_seconds(rank: int, port: int, settings: Settings, stream: bool, staleness: int, queue: Any) -> None:
    """Seconds of each iteration, on the rank that learns."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    dist.init_process_group("gloo")
    meshes = {"sampler": mk.init_mesh("", ranks=range(1, 2)), "actor": mk.init_mesh("", ranks=range(1))}

    def write(samples: list[Sample]) -> list[Sample]:
        time.sleep(sum(rollout_s(settings, sample) for sample in samples))
        return [{**sample, "answer": 0} for sample in samples]

    def learn(samples: list[Sample]) -> None:
        time.sleep(settings.train_s)

    train = Call(name="learn", on="actor", function=learn, needs=["answer"], stage="train")
    options: dict[str, Any] = {
        "source": lambda iteration: [{"iteration": iteration}],
        "fields": ["iteration"],
        "total": settings.iterations,
        "syncs": [Sync(name="weights", source="actor", destination="sampler", function=lambda: None)],
        "staleness": staleness,
    }
    flow: Flow | StreamFlow
    writer = Writer(settings) if rank else None
    if stream:
        call = StreamCall(name="write", on="sampler", writer=writer, needs=["iteration"], gives=["answer"])
        flow = StreamFlow(meshes, call, [train], **options)
    else:
        written = Call(name="write", on="sampler", function=write, needs=["iteration"], gives=["answer"])
        flow = Flow(meshes, [written, train], **options)
    seconds = []
    for _ in range(settings.iterations):
        began = time.perf_counter()
        flow.step()
        seconds.append(time.perf_counter() - began)
    looks: list[float | None] = [None, statistics.median(writer.looks_s) if stream and writer is not None else None]
    dist.broadcast_object_list(looks, src=1)
    if rank == 0:
        queue.put((seconds, looks[1]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    bound = max(sum(settings.rollout_s) / len(settings.rollout_s), settings.train_s)
    context = multiprocessing.get_context("spawn")
    table = Table("flow", "at most updates old", "seconds of an iteration", "over the larger mean", "ms of a look")
    for index, (stream, staleness) in enumerate(
        (stream, age) for stream in (False, True) for age in settings.staleness
    ):
        queue, port = context.Queue(), 29700 + index
        arguments = (port, settings, stream, staleness, queue)
        started = multiprocessing.spawn(iteration_seconds, arguments, nprocs=2, join=False)
        every, look_s = queue.get(timeout=10 * settings.iterations)
        seconds = every[settings.warmup :]
        started.join()
        # Iterations come in turn, so a mean over whole turns, not a median.
        mean, turn = sum(seconds) / len(seconds), len(settings.rollout_s)
        turns = [sum(seconds[first : first + turn]) / turn for first in range(0, len(seconds) - turn + 1, turn)]
        row = {
            "name": "stream" if stream else "flow",
            "staleness": staleness,
            "rollout_s": settings.rollout_s,
            "train_s": settings.train_s,
            "iterations": settings.iterations - settings.warmup,
            "iteration_s": round(mean, 4),
            "ratio": round(mean / bound, 4),
            "look_ms": None if look_s is None else round(1e3 * look_s, 3),
            "loadavg": [round(each, 1) for each in os.getloadavg()],
            "ratio_of_turns": vars(spread([each / bound for each in turns])),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps({**environment(), **row}) + "\n")
        table.add_row(row["name"], str(staleness), f"{mean:.3f}", f"{mean / bound:.3f}", str(row["look_ms"]))
    Console().print(table)


if __name__ == "__main__":
    main()
