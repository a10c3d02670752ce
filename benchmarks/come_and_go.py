"""How long do replicas that come and go stop each other, and what does it cost? Jobs of one recipe, killed at random moments.

    python -m benchmarks.come_and_go --kills 20
    python -m benchmarks.come_and_go --kills 20 --record

Each replica is a torchrun job of examples/diloco_pretrain.py. Kills (SIGKILL) are by turns in a step, in a meeting (up to
50 ms after the victim said that it is there) and in a join (while it waits for the others' state, or is given it); the victim
is started again at once. After each meeting and each join every job writes down a digest of its outer state: of a step all
must be the same. A stop is the time in which a replica's `OuterOptimizer.step` did not return. The same run without kills
goes on beside it; each step has a pause, so that the cores have room for both and for those that start. Kills are spread
over the run. Prints one JSON row; --record adds it to results/come_and_go.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import environment, spread
from meshkit.optim.outer.place import MeetingRules, PlaceServer
from tests.recipes.launch import ROOT, TORCHRUN, finish, start_command

RESULTS = Path(__file__).parent / "results/come_and_go.jsonl"
MOMENTS = ("step", "meeting", "join")
WAIT_S = 120.0
ROWS, SEQ_LEN = 2, 128  # of a replica's step
PAUSE = "COME_AND_GO_PAUSE_S"  # how long a rank waits before each step
KILLED_UNTIL = 0.95  # of the steps


def job() -> None:
    """In a rank: the recipe, which writes down what its outer optimizer does."""
    import diloco_pretrain

    import meshkit as mk
    from tests.optim.outer.jobs import digest

    out = Path(sys.argv[sys.argv.index("--out") + 1])
    out.mkdir(parents=True, exist_ok=True)

    class Told(mk.optim.outer.OuterOptimizer):
        def tell(self, word: str, began: float) -> None:
            met = self.replicas.last
            row = {"word": word, "step": self.steps, "digest": digest(self), "took_s": time.monotonic() - began}
            row |= {"slot": self.replicas.slot, "slots": met.replicas if met is not None else []}
            with (out / "outer.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

        def join(self) -> int:
            (out / "pid").write_text(f"{os.getpid()} {self.replicas.slot}")
            began = time.monotonic()
            steps = super().join()
            self.tell("joined", began)
            return steps

        def step(self) -> None:
            time.sleep(float(os.environ[PAUSE]))
            before, began, number = self.replicas.last, time.monotonic(), self.steps + 1
            super().step()
            if self.replicas.last is not before and self.steps == number:
                self.tell("met", began)

    diloco_pretrain.OuterOptimizer = Told
    mk.run_main(diloco_pretrain.main)


class Campaign:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.lines = folder, options, list[str]()
        rules = MeetingRules(replicas=options.replicas, quorum=2, grace_s=options.grace, patience_s=WAIT_S)
        self.server = PlaceServer(rules, port=0, say=self.lines.append)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=lambda: self.server.run(until=self.stopped.is_set), daemon=True)
        self.thread.start()
        self.jobs: dict[int, subprocess.Popen[str]] = {}
        self.outputs: list[str] = []

    def start(self, index: int) -> None:
        options = self.options
        flags = {
            "meeting-place": f"127.0.0.1:{self.server.port}",
            "mesh": "dp_shard=1",
            "out": self.out(index),
            "steps": options.steps,
            "every": options.every,
            "seq-len": SEQ_LEN,
            "global-batch": ROWS * options.replicas,
            "outer-lr": 1.0,
            "outer-momentum": 0.3,
            "eval-every": 0,
            "eval-batches": 16,
            "save-every": 100,
            "sample-tokens": 1,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", "1", __file__, "job", *words]
        (self.out(index) / "pid").unlink(missing_ok=True)
        self.out(index).mkdir(parents=True, exist_ok=True)
        log = str(self.out(index) / "log")
        shell = ["/bin/sh", "-c", 'log=$1; shift; exec "$@" >>"$log" 2>&1', "sh", log, *command]
        paths = f"{ROOT}:{ROOT / 'examples'}"
        self.jobs[index] = start_command(shell, PYTHONPATH=paths, **{PAUSE: str(options.pause)})

    def out(self, index: int) -> Path:
        return self.folder / f"replica-{index}"

    def process(self, index: int) -> tuple[int, int] | None:
        """(pid, slot) of the rank, once it has come."""
        path = self.out(index) / "pid"
        words = path.read_text().split() if path.exists() else []
        return (int(words[0]), int(words[1])) if len(words) == 2 else None

    def member(self, index: int) -> Any:
        found = self.process(index)
        return None if found is None else self.server.place._members.get(found[1])

    def counts(self, index: int) -> bool:
        member = self.member(index)
        return member is not None and member.standing == "in"

    def has_met(self, step: float) -> bool:
        """Whether some replica has met, or was given the others' state, at the step or after it."""
        written = [path.read_text().rpartition("\n")[0] for path in self.folder.glob("replica-*/outer.jsonl")]
        return any(json.loads(lines.splitlines()[-1])["step"] >= step for lines in written if lines)

    def wait(self, what: Callable[[], bool], *, longest_s: float = WAIT_S, look_s: float = 0.002) -> None:
        end = time.monotonic() + longest_s
        while not what():
            if time.monotonic() > end or any(process.poll() is not None for process in self.jobs.values()):
                logs = [(self.out(index) / "log").read_text()[-1500:] for index in self.jobs]
                raise AssertionError("\n".join([*self.lines[-10:], *logs]))
            time.sleep(look_s)

    def kill(self, index: int, moment: str, draw: random.Random) -> None:
        """At such a moment of it, as soon as there is one, and all others count; then it starts anew."""
        others = [each for each in self.jobs if each != index]
        self.wait(lambda: all(self.counts(each) for each in others))
        if moment == "join":
            self.wait(lambda: self.process(index) is not None)
            if draw.random() < 0.5:  # while it is given the state; else while it waits for that
                self.wait(lambda: self.counts(index))
            time.sleep(draw.uniform(0, 0.2))
        else:
            self.wait(lambda: self.counts(index))
            time.sleep(draw.uniform(0, 1.5))
            if moment == "meeting":
                self.wait(lambda: (member := self.member(index)) is not None and bool(member.here))
                time.sleep(draw.uniform(0, 0.05))
        found = self.process(index)
        assert found is not None
        os.kill(found[0], signal.SIGKILL)
        self.jobs[index].wait(60)
        self.start(index)

    def end(self) -> None:
        for index, process in self.jobs.items():
            status, _ = finish(process, timeout_s=3600)
            assert status == 0, (self.out(index) / "log").read_text()[-3000:]
        self.stopped.set()
        self.thread.join(10)
        self.server.close()

    def told(self) -> dict[int, list[dict[str, Any]]]:
        return {
            index: [json.loads(line) for line in (self.out(index) / "outer.jsonl").read_text().splitlines()]
            for index in range(self.options.replicas)
        }

    def loss(self) -> float:
        lines = [json.loads(line) for line in (self.out(0) / "metrics.jsonl").read_text().splitlines()]
        return float(lines[-1]["held_out_bits_per_byte"])


def run(folder: Path, options: argparse.Namespace, kills: int) -> tuple[Campaign, list[str]]:
    campaign, draw, moments = Campaign(folder, options), random.Random(options.seed), []
    try:
        for index in range(options.replicas):
            campaign.start(index)
        victim = -1
        for number in range(kills):
            moment = MOMENTS[number % len(MOMENTS)]
            if moment != "join" or victim < 0:  # a join is that of the last victim
                victim = draw.randrange(options.replicas)
            if moment != "join":  # which follows the kill before at once
                due = (number + draw.random()) / kills * KILLED_UNTIL * options.steps
                campaign.wait(partial(campaign.has_met, due), longest_s=3600, look_s=0.1)
            campaign.kill(victim, moment, draw)
            moments.append(moment)
            print(f"{number + 1}: replica {victim} in a {moment}: {campaign.lines[-1]}", flush=True)
        campaign.end()
    finally:
        for process in campaign.jobs.values():
            if process.poll() is None:
                process.terminate()
    return campaign, moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each step of a replica")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        with ThreadPoolExecutor() as threads:
            beside = threads.submit(run, Path(temporary, "whole"), options, 0)
            struck, moments = run(Path(temporary, "struck"), options, options.kills)
            whole, _ = beside.result()
        digests: dict[int, set[str]] = defaultdict(set)
        rows = [row for each in struck.told().values() for row in each]
        for row in rows:
            digests[row["step"]].add(row["digest"])
        met = {row["step"]: len(row["slots"]) for row in rows if row["word"] == "met"}
        stops = [row["took_s"] for row in rows if row["word"] == "met"]
        joins = [row["step"] for row in rows if row["word"] == "joined" and row["step"]]
        row = {
            "benchmark": "come_and_go",
            "mesh": f"{options.replicas} jobs of one rank",
            "steps": options.steps,
            "rows_a_step": ROWS * options.replicas,
            "seq_len": SEQ_LEN,
            "every": options.every,
            "pause_s": options.pause,
            "grace_s": options.grace,
            "kills": options.kills,
            "moments": {moment: moments.count(moment) for moment in MOMENTS},
            "joins": len(joins),
            "steps_compared": len(digests),
            "mean_replicas": round(sum(met.values()) / len(met), 2),
            "stop_s": vars(spread(stops)),
            "longest_stop_s": round(max(stops), 3),
            "stop_s_without_kills": vars(
                spread([row["took_s"] for each in whole.told().values() for row in each if row["word"] == "met"])
            ),
            "bit_for_bit": all(len(found) == 1 for found in digests.values()),
            "held_out_bits_per_byte": round(struck.loss(), 4),
            "without_kills": round(whole.loss(), 4),
            "seed": options.seed,
            **environment(),
        }
    print(json.dumps(row))
    if options.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        del sys.argv[1]
        job()
    else:
        main()
