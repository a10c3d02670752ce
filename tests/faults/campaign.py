"""Random faults x mesh x launcher x moment: are rank, host, call and cause named, and right, within 30 s with the defaults?

    python -m tests.faults.campaign                          100 faults, from where the file of rows ends
    python -m tests.faults.campaign --first 200 --count 50 --out rows.jsonl
    python -m tests.faults.campaign --show rows.jsonl        the table alone; with --record, also a row for each fault in
                                                             benchmarks/results/faults.jsonl

Row n is the n-th draw, the same in every campaign. A row is written as soon as it is known; those of the file are not run
again. Runs of two hosts need root, and are counted as not run where there is none.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.rows import environment, spread
from tests.faults.hosts import CARD, Hosts, two_hosts
from tests.recipes.launch import ROOT, TORCHRUN, _run_script, command_line, read_losses, start_command
from tests.world import fork

SCRIPT = ROOT / "tests/faults/drill.py"
RESULTS = ROOT / "benchmarks/results/faults.jsonl"
WITHIN_S = 30.0
START_S = 150.0  # until the fault comes, on a busy machine
LAUNCHERS = ("torchrun", "srun", "plain")
FAULTS = ("kill", "stall", "raise", "slow", "cut", "slow link")
MESHES = {
    "dp_shard=2": ("data", "recompute", "checkpoint", "loader"),
    "tp=2": ("tensor",),
    "cp=2": ("context",),
    "pp=2": ("pipeline",),
    "dp_shard=2 ep=2": ("expert",),
    "dp_shard=2 tp=2": ("data", "tensor"),
    "pp=2 dp_shard=2": ("data", "pipeline"),
    "dp_shard=4": ("data",),
}
SLOW_LINK = (
    "400kbit",
    "4mbit",
)  # between the hosts; the latter where they send gradients: a step takes a second or two
ASPECTS = ("rank", "host", "call", "cause", "in_time")


@dataclass(frozen=True, kw_only=True)
class Case:
    """block: in which the fault comes, as the rank enters the `moment`-th function of it in `step`."""

    number: int
    fault: str
    launcher: str
    mesh: str
    block: str
    rank: int
    step: int
    moment: int

    @property
    def size(self) -> int:
        return 4 if self.mesh.endswith("4") or len(re.findall(r"(?:pp|dp_shard|tp)=2", self.mesh)) == 2 else 2

    @property
    def on_two_hosts(self) -> bool:
        return self.fault in ("cut", "slow link")

    def host_of(self, rank: int) -> str:
        return Hosts.names[rank >= self.size // 2] if self.on_two_hosts else socket.gethostname()


def draw(number: int) -> Case:
    rng = random.Random(number)
    fault = rng.choices(FAULTS, [4, 3, 3, 2, 2, 1])[0]
    launcher, mesh = rng.choice(LAUNCHERS), rng.choice(list(MESHES))
    block = rng.choice(MESHES[mesh])
    case = Case(number=number, fault=fault, launcher=launcher, mesh=mesh, block=block, rank=0, step=2, moment=1)
    return Case(
        **{**asdict(case), "rank": rng.randrange(case.size), "step": rng.randint(2, 5), "moment": rng.randint(1, 12)}
    )


def flags(case: Case, out: Path) -> list[str]:
    fault = {"stall": "stay", "cut": "none", "slow link": "none"}.get(case.fault, case.fault)
    measure = {"steps": 1000, "pause_s": 0.05, "measure": 4, "delay_s": 0.4} if case.fault.startswith("slow") else {}
    long = {"steps": 1000, "pause_s": 0.3} if case.fault == "cut" else {"steps": 6} if not measure else {}
    rank = 1000 if case.on_two_hosts else case.rank  # nobody: those come from outside
    at = {"rank": rank, "step": case.step, "moment": case.moment}
    # The defaults of run_main and of init_mesh: a stall is named after 20 s, and the mesh waits ten minutes.
    return command_line(
        {"out": out}, mesh=case.mesh, block=case.block, fault=fault, timeout_s=600, **at, **measure, **long
    )


class Job:
    """The ranks of a case under its launcher, with one log for each host."""

    def __init__(self, case: Case, folder: Path, hosts: Hosts | None) -> None:
        self.case, self.hosts, self.out = case, hosts, folder / "out"
        self.logs = [folder / f"log-{host}" for host in range(2 if hosts else 1)]
        for log in self.logs:
            log.touch()
        self.out.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.processes: list[Any] = []
        self.launched: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        if self.case.launcher == "torchrun":
            self._start_torchrun()
            return
        for rank in range(self.case.size):
            self.processes.append(fork(_rank, self.case, rank, self._environment(rank), self.hosts and self.hosts.spaces,
                                       flags(self.case, self.out), str(self.logs[self._host(rank)])))  # fmt: skip

    def _host(self, rank: int) -> int:
        return int(self.hosts is not None and rank >= self.case.size // 2)

    def _environment(self, rank: int) -> dict[str, str]:
        each = self.case.size // len(self.logs)
        address = self.hosts.addresses[0] if self.hosts else "127.0.0.1"
        if self.case.launcher == "srun":
            return {
                "SLURM_JOB_ID": str(self.case.number),
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % each),
                "SLURM_NODEID": str(rank // each),
                "SLURM_STEP_NUM_TASKS": str(self.case.size),
                "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{len(self.logs)})",
                "SLURM_STEP_NODELIST": address,
                "MASTER_PORT": self.port,  # jobs of other campaigns beside this one have the same number
            }
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.case.size),
            "MASTER_ADDR": address,
            "MASTER_PORT": self.port,
        }

    def _start_torchrun(self) -> None:
        each = self.case.size // len(self.logs)
        for host, log in enumerate(self.logs):
            where = [
                "--nnodes",
                "2",
                "--node-rank",
                str(host),
                "--master-addr",
                Hosts.addresses[0],
                "--master-port",
                "29500",
            ]
            meeting = where if self.hosts else ["--standalone"]
            shell = ["/bin/sh", "-c", f'exec "$@" >> {log} 2>&1', "sh"]
            command = [
                *shell,
                *TORCHRUN,
                *meeting,
                "--nproc-per-node",
                str(each),
                str(SCRIPT),
                *flags(self.case, self.out),
            ]
            card = CARD if self.hosts else "lo"
            command = self.hosts.command(host, command) if self.hosts else command
            self.launched.append(start_command(command, GLOO_SOCKET_IFNAME=card))

    def is_over(self) -> bool:
        return not any(process.is_alive() for process in self.processes) and all(
            process.poll() is not None for process in self.launched
        )

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for started in self.launched:
            if started.poll() is None:
                _kill_tree(started.pid)
            started.wait()

    def said(self) -> list[str]:
        return [log.read_text(errors="replace") for log in self.logs]


def _kill_tree(pid: int) -> None:
    """Of a launcher and the ranks that it started, these first."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    for child in map(int, found.split()):
        _kill_tree(child)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _rank(
    case: Case, rank: int, given: dict[str, str], spaces: tuple[str, ...] | None, words: list[str], log: str
) -> None:
    """In a process of its own."""
    card = "lo"
    if spaces is not None:
        hosts, card = Hosts(), CARD
        hosts.spaces = spaces
        hosts.enter(int(rank >= case.size // 2))
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    environment = {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": card, **given}
    _run_script(str(SCRIPT), tuple(words), environment, str(ROOT), log)


def judged(case: Case, said: Sequence[str], struck: Mapping[str, Any]) -> dict[str, bool]:
    """Each aspect but the time. said: by host. struck: the calls that the struck rank had made."""
    text, rank = "\n".join(said), case.rank
    match case.fault:
        case "kill":
            named = re.findall(r"^rank (\d+) on (\S+) has ended without a word", text, re.MULTILINE)
            return _named(case, named) | {"cause": bool(named), "call": _says_call(text, rank, struck)}
        case "stall":
            named = re.findall(
                r"^rank (\d+) on (\S+) lives, and has been for \d+ s at step.* in _act\.", text, re.MULTILINE
            )
            return _named(case, named) | {"cause": bool(named), "call": _says_call(text, rank, struck)}
        case "raise":
            named = re.findall(r"^HadEnough \(rank (\d+)\): .*\nIt was at .* in _act, on (\S+)\.$", text, re.MULTILINE)
            # In a save ranks hear of it from the one that raised, and each says it.
            of_save = r"^CheckpointError \(rank \d+\): .*HadEnough on rank (\d+): .*\nIt was at .*, on (\S+)\.$"
            named = named or re.findall(of_save, text, re.MULTILINE)
            return _named(case, named) | {"cause": bool(named), "call": bool(named)}
        case "slow":
            named = re.findall(r"rank (\d+) on (\S+) is the slowest", text)
            return _named(case, named) | {"cause": bool(named) and "is slow:" not in text, "call": bool(named)}
        case "cut":
            return _judged_cut(case, said)
        case _:
            links = re.findall(
                r"^(?:the link between ranks (\d+) and (\d+)|a link among ranks (\S+)) on", text, re.MULTILINE
            )
            across = [pair for pair in links if not pair[0] or case.host_of(int(pair[0])) != case.host_of(int(pair[1]))]
            right = bool(links) and len(across) == len(links)
            return {"rank": right, "host": right, "call": right, "cause": right and "is the slowest" not in text}


def _named(case: Case, named: Sequence[tuple[str, str]]) -> dict[str, bool]:
    return {
        "rank": {int(rank) for rank, _ in named} == {case.rank},
        "host": {host for _, host in named} == {case.host_of(case.rank)},
    }


CALL = r"call (\d+) on ([\w/]+|ranks [\d, -]+) \("


def _says_call(text: str, rank: int, struck: Mapping[str, Any]) -> bool:
    """Whether the call in which others miss the rank is said: the one that it was in, or was to make next."""
    missing = re.findall(rf"^(ranks? [\d, -]+?) (?:is|are|has|have) (?:missing in|not made) {CALL}", text, re.MULTILINE)
    waited = re.findall(rf"(?:It waited|, and) in {CALL}[^\n]*?\), with (ranks? [\d-]+(?:, [\d-]+)*)", text)
    told = [(who, int(count), axis) for who, count, axis in missing] + [(who, int(n), axis) for n, axis, who in waited]
    told = [(who, count, axis) for who, count, axis in told if rank in _ranks(who)]
    counts: dict[str, set[int]] = defaultdict(set)
    for axis, _, count in struck["calls"]:
        counts[axis].update((count, count + 1))
    # A group of no mesh, as a checkpoint's, is told by its ranks.
    return any(count in counts.get("" if axis.startswith("ranks ") else axis, {1}) for _, count, axis in told)


def _ranks(words: str) -> set[int]:
    """Of `ranks 0-2, 5`."""
    ends = [part.split("-") for part in words.partition(" ")[2].replace(" ", "").strip(",-").split(",") if part]
    return {rank for end in ends for rank in range(int(end[0]), int(end[-1]) + 1)}


def _judged_cut(case: Case, said: Sequence[str]) -> dict[str, bool]:
    """Each side names the ranks of the other, or at least the host of the store, and the side with the store the call."""
    beyond = set(range(case.size // 2, case.size))
    named = re.findall(r"^rank (\d+) on (\S+) does not answer", said[0], re.MULTILINE)
    there = re.search(
        r"^rank 0 on host-a does not answer|^The store of the job at 10\.77\.0\.1:\d+ has not", said[1], re.M
    )
    missing = re.findall(rf"^(ranks? [\d, -]+?) (?:is|are) missing in {CALL}", said[0], re.MULTILINE)
    return {
        "rank": {int(rank) for rank, _ in named} == beyond,
        "host": {host for _, host in named} == {"host-b"} and bool(there),
        "cause": bool(named) and bool(there),
        "call": any(_ranks(who) <= beyond for who, *_ in missing),
    }


@contextmanager
def _network(case: Case) -> Iterator[Hosts | None]:
    with two_hosts() if case.on_two_hosts else nullcontext() as hosts:
        yield hosts


def run(case: Case) -> dict[str, Any]:
    """The row: the case, what was right of it, and seconds from the fault until it was; `void` where no fault came."""
    row = asdict(case) | {"ranks": case.size}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _network(case) as hosts:
                job = Job(case, Path(folder), hosts)
                try:
                    return row | _run(job)
                finally:
                    job.end()
        except OSError as error:
            return row | {"void": f"not run: {error}"}


def _run(job: Job) -> dict[str, Any]:
    case, began = job.case, time.monotonic()
    struck_file = job.out / "struck"
    job.start()
    strike = _strike_from_outside(job) if case.on_two_hosts else None
    while not struck_file.exists():
        over = job.is_over() or time.monotonic() - began > START_S
        if over and not struck_file.exists():  # asked once more: the fault may have ended it meanwhile
            return {"void": "no fault came", "said": "\n".join(job.said())[-1500:]}
        if strike is not None:
            strike()
        time.sleep(0.05)
    time.sleep(0.05)  # until it is written
    at = float(struck_file.read_text())
    calls = job.out / "struck_calls.json"
    struck = json.loads(calls.read_text()) if calls.exists() else {"calls": []}
    right, took_s = dict[str, bool](), 0.0
    while (took_s := time.time() - at) < WITHIN_S + 5:
        over = job.is_over()
        right = judged(case, job.said(), struck)
        if all(right.values()) or over:
            break
        time.sleep(0.2)
    good = all(right.values()) and took_s <= WITHIN_S
    said = {} if good else {"said": "\n=====\n".join(text[-3000:] for text in job.said()), "struck": struck}
    return {**right, "in_time": took_s <= WITHIN_S, "took_s": round(took_s, 1), "good": good, **said}


def _strike_from_outside(job: Job) -> Callable[[], None]:
    """Cuts the cable, or slows it down, some time after a step that is drawn."""
    case, hosts = job.case, job.hosts
    assert hosts is not None
    after = case.step + (8 if case.fault == "slow link" else 0)  # two reports of the links as they were

    def strike() -> None:
        if after not in read_losses(job.out):
            return
        time.sleep(case.moment / 12)
        if case.fault == "cut":
            hosts.cut()
        else:
            hosts.slow_down(SLOW_LINK[case.mesh.startswith(("dp_shard", "cp"))])
        (job.out / "struck").write_text(str(time.time()))

    return strike


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("launcher", "fault", "faults", *ASPECTS, "all right", "longest")
    cells = [(launcher, fault) for launcher in LAUNCHERS for fault in FAULTS]
    for cell in [*cells, *((each, "all") for each in LAUNCHERS), *(("all", each) for each in FAULTS), ("all", "all")]:
        own = [
            row
            for row in rows
            if "void" not in row and cell[0] in ("all", row["launcher"]) and cell[1] in ("all", row["fault"])
        ]
        if own:
            sums = [str(sum(row[aspect] for row in own)) for aspect in ASPECTS]
            longest = max((row["took_s"] for row in own if row["good"]), default=0.0)
            shown.add_row(*cell, str(len(own)), *sums, str(sum(row["good"] for row in own)), f"{longest:.1f} s")
    return shown


def summaries(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A result for each fault."""
    for fault in FAULTS:
        own = [row for row in rows if row["fault"] == fault and "void" not in row]
        if own:
            numbers = [row["number"] for row in own]
            right = {aspect: sum(row[aspect] for row in own) for aspect in ASPECTS}
            took_s = spread([row["took_s"] for row in own if row["good"]])
            yield {
                "benchmark": "faults",
                "fault": fault,
                "launchers": dict(Counter(row["launcher"] for row in own)),
                "numbers": [min(numbers), max(numbers)],
                "faults": len(own),
                "right": right | {"all": sum(row["good"] for row in own)},
                "took_s": vars(took_s),
            }


@dataclass(frozen=True, kw_only=True)
class Campaign:
    out: Path = Path("build/campaign.jsonl")
    first: int = 0
    count: int = 100
    faults: tuple[str, ...] = FAULTS
    show: tuple[Path, ...] = ()
    """files of rows, of which the table is printed; nothing is run"""
    record: bool = False
    """a result for each fault"""


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main(campaign: Campaign) -> None:
    console = Console(width=140)
    if not campaign.show:
        campaign.out.parent.mkdir(parents=True, exist_ok=True)
        known = {row["number"] for row in read_rows(campaign.out)}
        numbers = [number for number in range(campaign.first, campaign.first + campaign.count) if number not in known]
        for number in track(numbers, console=console, disable=not sys.stderr.isatty()):
            if (case := draw(number)).fault in campaign.faults:
                row = run(case)
                with campaign.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    rows = [row for file in campaign.show or (campaign.out,) for row in read_rows(file)]
    console.print(table(rows))
    if campaign.record:
        with RESULTS.open("a") as results:
            for result in summaries(rows):
                results.write(json.dumps({**result, **environment()}) + "\n")
    console.print(f"{sum('void' in row for row in rows)} draws in which no fault came, or that were not run")


if __name__ == "__main__":
    main(tyro.cli(Campaign))
