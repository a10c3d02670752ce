"""How long until a job goes on after a rank was killed, and how many steps are lost? Ranks of one torchrun, killed at random.

    python benchmarks/restarts.py --kills 50
    python benchmarks/restarts.py --ranks 8 --mesh "pp=2 dp_shard=2 tp=2" --kills 50 --record

The job keeps its state in memory in every step, and starts anew in place (`run_main(restarts=)`). Each kill comes at a random
moment of a random rank, at the earliest two steps after the last one. At the end the state is compared, bit for bit, with
that of a job that nobody struck. Seconds are from the kill to the end of the first step afterwards. Prints one JSON row;
--record adds it to results/restarts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from rich.progress import track

from benchmarks.rows import environment, spread
from tests.faults.test_restarts import lines, start, states
from tests.recipes.launch import finish

RESULTS = Path(__file__).parent / "results/restarts.jsonl"
WAIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mesh", default="pp=2 dp_shard=2 tp=2")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    steps = 4 * options.kills + 10
    with tempfile.TemporaryDirectory() as folder:
        struck, whole = Path(folder, "struck"), Path(folder, "whole")
        job = start(struck, options.ranks, mesh=options.mesh, steps=steps, restarts=options.kills, ram="/dev/shm")
        seconds, lost = [], []
        for life in track(range(options.kills), description="kills"):
            reached = wait(struck, life, 2)
            time.sleep(draw.uniform(0, 0.5))
            victim = int((struck / f"pid-{draw.randrange(options.ranks)}").read_text())
            killed, before = time.time(), max(each.step for each in lines(struck))
            os.kill(victim, signal.SIGKILL)
            wait(struck, life + 1, 1)
            after = [each for each in lines(struck) if each.life == life + 1]
            seconds.append(next(each.time for each in after if each.word == "step") - killed)
            lost.append(max(0, max(before, reached) - after[0].step))
        status, output = finish(job, timeout_s=600)
        assert status == 0, output
        status, output = finish(start(whole, options.ranks, mesh=options.mesh, steps=steps, restarts=0), timeout_s=600)
        assert status == 0, output
        row = {
            "benchmark": "restarts",
            "mesh": options.mesh,
            "kills": options.kills,
            "seconds_to_go_on": vars(spread(seconds)),
            "most_steps_lost": max(lost),
            "bit_for_bit": states(struck, options.ranks) == states(whole, options.ranks),
            **environment(),
        }
    print(json.dumps(row))
    if options.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def wait(out: Path, life: int, count: int) -> int:
    """Until so many steps of a life have ended; returns the last."""
    deadline = time.monotonic() + WAIT_S
    while len(made := [each.step for each in lines(out) if each.word == "step" and each.life == life]) < count:
        assert time.monotonic() < deadline, f"life {life} made {len(made)} steps in {WAIT_S:.0f} s"
        time.sleep(0.005)
    return made[-1]


if __name__ == "__main__":
    main()
