"""Processes that trace ahead: the search's answer is the same, and none that fails holds it up or outlives it."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.preflight.search import _ahead
from meshkit.preflight.search._ahead import Ahead, Task
from tests.preflight.search.test_search import EXPERTS, FEWER, dense, moe


def test_a_search_by_several_processes_finds_the_same(monkeypatch):
    taken = set()
    take = Ahead.take

    def noted(self, key):
        found = take(self, key)
        taken.update([key] * found)
        return found

    monkeypatch.setattr(Ahead, "take", noted)
    space = replace(FEWER, ep=(1, 2))

    def found(processes):
        batch = mk.Batch(sequences=16, seq_len=64)
        return mk.search(
            moe(), "h100", batch, world=8, space=space, device_memory=10**9, fixed=EXPERTS, processes=processes
        )

    alone = found(1)
    assert not taken
    helped = found(3)
    assert {name for name, _ in taken} == {"kept", "microbatch", "traced"}
    assert [str(each) for each in helped.tried] == [str(each) for each in alone.tried]
    assert (helped.winner.strategy, helped.winner.seconds) == (alone.winner.strategy, alone.winner.seconds)
    assert (helped.refused, helped.unfit, helped.cut) == (alone.refused, alone.unfit, alone.cut)


@pytest.mark.parametrize("processes", [0, -1, True, 2.0, "2"])
def test_processes_that_cannot_be(processes):
    with pytest.raises(PlanError, match=r"search\(processes=.*\): give a whole number of processes, at least 1"):
        mk.search(dense(), "h100", mk.Batch(sequences=16, seq_len=64), world=8, processes=processes)


def ends(task):
    os._exit(3)


def raises(task):
    raise ValueError("no such thing")


def unpicklable(task):
    return {task.key: lambda: None}


def sleeps(task):
    time.sleep(60)


@pytest.mark.parametrize(
    "serve, says",
    [
        (ends, "ended with exit code 3"),
        (raises, "could not: ValueError: no such thing"),
        (unpicklable, "could not: .*pickle"),
        (sleeps, "said nothing for 1 s"),
    ],
)
def test_one_that_fails_is_named_and_left_out(serve, says, monkeypatch):
    monkeypatch.setattr(_ahead, "LONGEST_S", 1.0)
    ahead = Ahead(serve, 1)
    ahead.ask([Task(1, "method", ())])
    began = time.monotonic()
    with pytest.warns(UserWarning, match=f"search: a process that helps {says}.*Going on with 1"):
        assert not ahead.take(1)
    assert time.monotonic() - began < 30
    ahead.ask([Task(2, "method", ())])  # nobody is left, and this process does it
    assert not ahead.take(2)
    ahead.close()


def test_they_end_with_the_search_and_with_the_process_that_forked_them():
    script = textwrap.dedent(
        """
        import os, sys, time
        from meshkit.preflight.search._ahead import Ahead, Task
        ahead = Ahead(lambda task: {task.key: os.getpid()}, 2)
        ahead.ask([Task(1, "m", ()), Task(2, "m", ())])
        assert ahead.take(1) and ahead.take(2)
        print(ahead.found[1], ahead.found[2], flush=True)
        if sys.argv[1] == "close":
            ahead.close()
            print("closed", flush=True)
            time.sleep(60)
        os.kill(os.getpid(), 9)
        """
    )
    for how in ("close", "killed"):
        with subprocess.Popen([sys.executable, "-c", script, how], stdout=subprocess.PIPE, text=True) as process:
            pids = [int(each) for each in process.stdout.readline().split()]
            assert len(set(pids)) == 2
            if how == "close":
                assert process.stdout.readline() == "closed\n"
            until = time.monotonic() + 30
            while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
                time.sleep(0.05)
            assert not any(os.path.exists(f"/proc/{pid}") for pid in pids), how
            process.kill()
