"""Leader of the supervisors (membership, roll call): sees who has died, and says who is which rank in the next life."""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from typing import Any

from meshkit.faults.crew import Crew, Restarts, next_members

BEAT_S = 1.0
ROLL_CALL_S = 5.0  # after a rank has died, for the other supervisors to answer: who does not is lost
LOST_S = 30.0  # without a beat, while no rank has died, or without an answer of the store
COME = timedelta(minutes=10)  # for all supervisors, at first
CAUSE_S = 2.0  # for the supervisor of a dead rank to say so, before what another rank met is taken for the cause
WRONG_INPUT = 2  # exit code of what another start would not change


class Leader:
    """Beside the supervisor of process 0: sees who has died, and says who is which rank in the next life."""

    def __init__(self, restarts: Restarts, processes: int, store: Any, poll_s: float) -> None:
        self._restarts, self._processes, self._store, self._poll_s = restarts, processes, store, poll_s
        self._ranks = processes - restarts.spares
        self._crew = Crew(life=-1, members=(), tokens=())
        self._beats: dict[int, tuple[str, float]] = {}  # of each member, the last beat and when it came
        self._next_look, self._began = 0.0, time.monotonic()
        self._events, self._calls, self._is_final = 0, 0, False
        self._code = 1  # of the last rank that ended with an error

    def turn(self) -> None:
        if self._is_final:
            return
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + BEAT_S / 2
            self._look(now)
        if self._crew.life < 0:
            self._wait_for_all(now)
        elif (reason := self._reason(now)) is not None:
            self._begin_again(reason)

    def _look(self, now: float) -> None:
        """At all beats."""
        keys = {member: f"beat/{member}" for member in range(self._processes)}
        there = {member: key for member, key in keys.items() if member in self._beats or self._store.check([key])}
        for member, beat in zip(there, self._store.multi_get([*there.values()]) if there else [], strict=True):
            if self._beats.get(member, ("", 0.0))[0] != beat.decode():
                self._beats[member] = beat.decode(), now

    def _token(self, member: int) -> str:
        return self._beats[member][0].split()[0]

    def _wait_for_all(self, now: float) -> None:
        ranks = range(self._ranks)
        if missing := [rank for rank in ranks if rank not in self._beats]:
            if now - self._began > COME.total_seconds():
                self._end(WRONG_INPUT, f"ranks {missing[:8]} have not come within {COME.total_seconds():.0f} s")
            return
        self._store.set("call", "0")
        self._store.set("final", "")
        self._publish(tuple(ranks))

    def _publish(self, members: tuple[int, ...]) -> None:
        tokens = tuple(map(self._token, members))
        self._crew = Crew(life=self._crew.life + 1, members=members, tokens=tokens)
        self._store.set("crew", self._crew.encode())

    # ----------------------------------------------------------------------------------------------------- deaths, births

    def _reason(self, now: float) -> str | None:
        """Why all should start anew; None while all is well. Ends the job where it is done, or cannot be mended."""
        if (events := self._store.add("events", 0)) != self._events:
            self._events = events
            if (reason := self._read_ends()) is not None:
                return reason
        for rank, (member, token) in enumerate(zip(self._crew.members, self._crew.tokens, strict=True)):
            if self._token(member) != token:
                return f"rank {rank} was lost, and its process started anew"
            if now - self._beats[member][1] > LOST_S:
                return f"rank {rank} has not been heard of for {LOST_S:.0f} s"
        alive = [member for member, (_, at) in self._beats.items() if now - at < ROLL_CALL_S]
        more = next_members(self._crew.members, alive, ranks=self._ranks, multiple=self._restarts.multiple)
        if more is not None and len(more) > len(self._crew.members):
            return f"{len(more)} ranks in the place of {len(self._crew.members)}"
        return None

    def _read_ends(self) -> str | None:
        ends = self._ends()
        if all(status == 0 for status in ends.values()):
            if len(ends) == len(self._crew.members):
                self._end(0)
            return None
        until = time.monotonic() + CAUSE_S
        while {*ends.values()} <= {0, WRONG_INPUT} and time.monotonic() < until:
            time.sleep(self._poll_s)  # it may be what that rank met because another one died
            ends = self._ends()
        first = next((rank for rank, status in ends.items() if status not in (0, WRONG_INPUT)), None)
        if first is None:
            self._end(WRONG_INPUT)
            return None
        status = ends[first]
        self._code = exit_code(status)
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
        return f"rank {first} ended {how}"

    def _ends(self) -> dict[int, int]:
        """The exit status of each rank that has ended, the first one first."""
        keys = {rank: f"ended/{self._crew.life}/{member}" for rank, member in enumerate(self._crew.members)}
        told = {rank: self._store.get(key).decode().split() for rank, key in keys.items() if self._store.check([key])}
        return {rank: int(status) for rank, (_, status) in sorted(told.items(), key=lambda end: int(end[1][0]))}

    def _begin_again(self, reason: str) -> None:
        life = self._crew.life + 1
        alive = self._call_roll()
        members = next_members(self._crew.members, alive, ranks=self._ranks, multiple=self._restarts.multiple)
        if life > self._restarts.times:
            self._end(self._code, f"{reason}: the job ends, it has started anew {self._restarts.times} times")
        elif members is None:
            few = f"{len(alive)} of {self._ranks} processes are left"
            self._end(self._code, f"{reason}: the job ends, {few}")
        else:
            change = "" if len(members) == len(self._crew.members) else f" as {len(members)}"
            say(f"{reason}: all ranks start anew{change}, {life} of {self._restarts.times}.")
            self._publish(members)

    def _call_roll(self) -> list[int]:
        """Who lives: members that answer."""
        self._calls += 1
        self._store.set("call", str(self._calls))
        members = [*self._beats]
        keys = {member: f"answer/{self._calls}/{member}" for member in members if member != 0}
        until = time.monotonic() + ROLL_CALL_S
        answered: set[int] = {0}
        while len(answered) < len(members) and time.monotonic() < until:
            answered |= {member for member, key in keys.items() if member not in answered and self._store.check([key])}
            time.sleep(self._poll_s / 2)
        self._look(time.monotonic())
        return sorted(answered)

    def _end(self, code: int, reason: str = "") -> None:
        if reason:
            say(f"{reason}.")
        self._is_final = True
        if not self._store.check(["crew"]):  # nobody has begun
            for key, value in (("call", "0"), ("crew", self._crew.encode())):
                self._store.set(key, value)
        self._store.set("final", str(code))


def exit_code(status: int) -> int:
    """As a shell says it: 128 and the number of the signal."""
    return status if status >= 0 else 128 - status


def say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)
