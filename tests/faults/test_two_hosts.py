"""Two hosts: a short loss of the network changes nothing, a long one or a lost host ends the job naming the host."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from meshkit.checkpoint import InMemory
from meshkit.checkpoint.in_memory import Keeper
from tests.depth import deep
from tests.faults.hosts import CARD, Hosts, two_hosts
from tests.faults.test_drill import flags
from tests.faults.test_restarts import lines
from tests.recipes.launch import ROOT, TORCHRUN, _run_script, command_line, finish, read_losses, run, start_command
from tests.world import fork

SCRIPT = "tests/faults/drill.py"
STEPS = 16
END_S = 120.0
TIMEOUT_S = 10  # of collectives
TOL_FP64 = 1e-10  # another number of ranks sums in another order


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts() as made:
            yield made
    except OSError as error:
        pytest.skip(f"no two hosts here: {error} (network namespaces need root and `ip` of iproute2)")


def launched(host: int, hosts: Hosts) -> dict[str, str]:
    """The variables that a launcher gives the one rank of a host."""
    return {
        "GLOO_SOCKET_IFNAME": CARD,
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": "29500",
        "RANK": str(host),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }


def run_on(host: int, hosts: Hosts, folder: str, log: str) -> None:
    hosts.enter(host)
    environment = {**os.environ, **launched(host, hosts)}
    values = flags(Path(folder), block="data", steps=STEPS, pause_s=0.3, timeout_s=TIMEOUT_S)
    _run_script(str(ROOT / SCRIPT), tuple(values), environment, str(ROOT), log)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_cable_out_for_a_while_changes_nothing_and_out_for_good_is_named_on_both_sides(
    hosts: Hosts, tmp_path: Path
) -> None:
    out, logs = tmp_path / "out", [tmp_path / "a", tmp_path / "b"]
    ranks = []
    for host, log in enumerate(logs):
        log.touch()
        ranks.append(fork(run_on, host, hosts, str(out), str(log)))

    def said() -> str:
        return "\n".join(log.read_text() for log in logs)

    try:
        wait_until(lambda: 3 in read_losses(out), said())
        hosts.cut()
        time.sleep(2)
        hosts.mend()
        before = max(read_losses(out))
        wait_until(lambda: before + 3 in read_losses(out), said())
        hosts.cut()
        cut = time.monotonic()
        for rank in ranks:
            rank.join(END_S)
        ended_s = time.monotonic() - cut
        assert [rank.exitcode for rank in ranks] == [1, 1], said()
    finally:
        for rank in ranks:
            rank.kill()
    at_a, at_b = (log.read_text() for log in logs)
    assert re.search(r"RuntimeError \(rank 0\): .*\nIt was at step \d+, ", at_a), at_a
    assert re.search(
        r"^rank 1 on host-b does not answer: process \d+ or its host has ended, or the network", at_a, re.M
    ), at_a
    assert re.search(
        r"^rank 0 on host-a does not answer: .* It had the store of the job at 10.77.0.1:29500\.$"
        r"|^The store of the job at 10.77.0.1:29500 has not answered for \d+ s.* and host-b",
        at_b,
        re.MULTILINE,
    ), at_b
    assert ended_s < TIMEOUT_S + 40, ended_s
    assert run(2, SCRIPT, *flags(tmp_path / "whole", block="data", steps=STEPS))[0] == 0
    whole = read_losses(tmp_path / "whole")
    assert all(whole[step] == loss for step, loss in read_losses(out).items())


def start_on(hosts: Hosts, host: int, out: Path) -> subprocess.Popen[str]:
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    meeting = [
        "--rdzv-endpoint",
        f"{hosts.addresses[0]}:29400",
        "--rdzv-id",
        "drill",
        "--local-addr",
        hosts.addresses[host],
    ]
    patience = ["--rdzv-conf", "last_call_timeout=15,is_host=" + str(host == 0).lower()]
    values = flags(out, block="data", mesh="dp_shard=-1", steps=STEPS, pause_s=0.5, timeout_s=TIMEOUT_S)
    command = [*TORCHRUN, *elastic, *meeting, *patience, str(ROOT / SCRIPT), *values]
    return start_command(hosts.command(host, command), GLOO_SOCKET_IFNAME=CARD)


@deep
@pytest.mark.parametrize("loss", ["killed", "cut off"])
def test_a_host_lost_for_good_is_named_and_the_other_goes_on_from_the_checkpoint(
    hosts: Hosts, tmp_path: Path, loss: str
) -> None:
    out = tmp_path / "out"
    a, b = (start_on(hosts, host, out) for host in (0, 1))
    try:
        wait_until(lambda: 4 in read_losses(out), "step 4")
        if loss == "cut off":
            hosts.cut()
        else:
            kill_all_of(hosts, 1)
        status, output = finish(a, timeout_s=200)
    finally:
        for host in (0, 1):
            kill_all_of(hosts, host)
        finish(b, timeout_s=20)
    assert status == 0, output
    assert re.search(r"^rank 1 on host-b does not answer", output, re.MULTILINE), output
    assert run(2, SCRIPT, *flags(tmp_path / "whole", block="data", steps=STEPS))[0] == 0
    assert read_losses(out) == pytest.approx(read_losses(tmp_path / "whole"), rel=TOL_FP64), output


def kill_all_of(hosts: Hosts, host: int) -> None:
    inside = subprocess.run(
        ["ip", "netns", "pids", hosts.spaces[host]],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/sbin"},
    )
    for pid in inside.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def start_supervised(hosts: Hosts, host: int, out: Path) -> subprocess.Popen[str]:
    """Without torchrun: by the environment that a launcher gives."""
    values = command_line(
        {"out": out}, mesh="dp_shard=-1", steps=GROWN + 40, pause_s=0.2, noise=0.0, restarts="9 multiple=1"
    )
    command = [sys.executable, str(ROOT / "tests/faults/restarted.py"), *values]
    return start_command(hosts.command(host, command), **launched(host, hosts))


GROWN = 20


def test_a_lost_host_costs_a_step_and_a_new_one_in_its_place_takes_part_again(hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def worlds() -> list[tuple[int, int]]:
        """(life, step) of each start."""
        return [(each.life, each.step) for each in lines(out) if each.word == "start"]

    def last() -> int:
        return max((each.step for each in lines(out)), default=0)

    a, b = (start_supervised(hosts, host, out) for host in (0, 1))
    try:
        wait_until(lambda: last() >= 4, "step 4")
        kill_all_of(hosts, 1)
        finish(b, timeout_s=20)
        before = last()
        with mock.patch("socket.gethostname", lambda: hosts.names[1]):  # its memory is lost with it
            shutil.rmtree(Keeper(InMemory(folder=out / "ram"), out / "checkpoints").folder)
        wait_until(lambda: len(worlds()) == 2, "a second life")
        assert worlds()[1][1] in (
            before - 1,
            before,
            before + 1,
        )  # what was done last need not be with the other host yet
        wait_until(lambda: last() >= GROWN, f"step {GROWN}")
        b = start_supervised(hosts, 1, out)
        wait_until(lambda: len(worlds()) == 3, "a third life")
        status, output = finish(a, timeout_s=120)
        assert status == 0, output
        assert finish(b, timeout_s=20)[0] == 0
    finally:
        for host in (0, 1):
            kill_all_of(hosts, host)
    assert "rank 1 was lost" in output or "rank 0 ended with exit code 1: all ranks start anew as 1, 1 of 9." in output
    assert "2 ranks in the place of 1: all ranks start anew as 2, 2 of 9." in output
    whole = tmp_path / "whole"
    assert (
        run(1, "tests/faults/restarted.py", *command_line({"out": whole}, mesh="", steps=GROWN + 40, noise=0.0))[0] == 0
    )
    losses = {each.step: each.loss for each in lines(out) if each.word == "step"}
    assert losses == pytest.approx({each.step: each.loss for each in lines(whole) if each.word == "step"}, rel=TOL_FP64)
