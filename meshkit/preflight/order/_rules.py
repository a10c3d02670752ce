"""NCCL's rules, as a simulation: hosts that issue calls, communicators that run them in order, compute that waits.

Each communicator has one stream, which runs what is issued on it one after the other, and begins a call when the compute
stream has come to where it was issued. A collective ends when all members run it, a message when both ends do. The host goes
on at once, but where it waits for its device, where a call is on the host, and, under `LAZY`, where a communicator is used
for the first time, for which all of its hosts wait. Communicators are a group's; under `LAZY` a send or receive outside of a
batch has one of the two ranks (ProcessGroupNCCL of torch 2.11 to 2.14; under `EAGER`, torch 2.15's, all are made before).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshkit.preflight.order._calls import Call, Event, Group, HostWait, Part, Wait


@dataclass(frozen=True)
class Rules:
    """made_at_first_use: communicators, for which the hosts of their ranks wait."""

    name: str
    made_at_first_use: bool

    def communicator(self, call: Call, rank: int) -> Group:
        if self.made_at_first_use and call.parts and not call.batched:
            pair = tuple(sorted((rank, call.parts[0].peer)))
            return Group(f"{call.group.name} {pair}", pair, f"{call.group.axis or call.group.name} {pair}")
        return call.group


LAZY, EAGER = Rules("lazy", True), Rules("eager", False)


def mismatches(ranks: Sequence[Sequence[Event]]) -> list[str]:
    """Where members of a group do not make the same calls in the same order, or the two ends of a way other messages.

    ranks: the events of each rank of the world. Returns a line for each group and way that differs.
    """
    collectives: dict[Group, dict[int, list[Call]]] = defaultdict(dict)
    ways: dict[tuple[str, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank, events in enumerate(ranks):
        for event in events:
            if not isinstance(event, Call):
                continue
            for part in event.parts:
                source, target = (rank, part.peer) if part.op == "send" else (part.peer, rank)
                ways[event.group.name, source, target][part.op == "recv"].append(part.size)
            if not event.parts:
                collectives[event.group].setdefault(rank, []).append(event)
    found = []
    for group, by_rank in collectives.items():
        first = by_rank.get(group.ranks[0], [])
        for rank in group.ranks[1:]:
            own = by_rank.get(rank, [])
            for number in range(max(len(first), len(own))):
                a, b = (calls[number] if number < len(calls) else None for calls in (first, own))
                if a is None or b is None or (a.op, a.size, a.dtype) != (b.op, b.size, b.dtype):
                    found.append(f"{group}: call {number} of rank {group.ranks[0]} is {a}, of rank {rank} it is {b}")
                    break
    for (name, source, target), (sent, received) in ways.items():
        if sent != received:
            found.append(f"{name}: rank {source} sends {sent} bytes to rank {target}, which receives {received}")
    return found


def deadlock(ranks: Sequence[Sequence[Event]], rules: Rules) -> list[str]:
    """The circle of waits at which the ranks stop, a line for each rank in it; empty if all of them end.

    ranks: the events of each rank of the world.
    """
    world = _World(ranks, rules)
    world.run()
    return world.stuck()


@dataclass(eq=False)
class _Op:
    """A call on its communicator's stream. after: how many of the rank's waits stand before it. turn: its number on the
    communicator, of each part its number on the way. left: parts that have not met."""

    call: Call
    index: int
    communicator: Group
    after: int
    turn: int = 0
    keys: list[tuple[Group, int, int, int]] = field(default_factory=list)
    left: int = 1
    runs: bool = False


@dataclass(eq=False)
class _Rank:
    events: Sequence[Event]
    at: int = 0
    blocked: str = ""
    absent: tuple[int, ...] = ()  # for whom its host waits
    ops: dict[int, _Op] = field(default_factory=dict)
    streams: dict[Group, deque[_Op]] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    waited: int = 0  # of the waits, how many are over
    done: set[int] = field(default_factory=set)
    made: set[Group] = field(default_factory=set)
    turns: dict[object, int] = field(default_factory=lambda: defaultdict(int))

    def turn(self, key: object) -> int:
        self.turns[key] += 1
        return self.turns[key] - 1


class _World:
    def __init__(self, ranks: Sequence[Sequence[Event]], rules: Rules) -> None:
        self.ranks = [_Rank(events) for events in ranks]
        self.rules = rules
        self.met: dict[object, set[int]] = defaultdict(set)  # hosts that have come
        self.running: dict[object, list[tuple[int, _Op]]] = defaultdict(list)
        self.changed = deque(range(len(self.ranks)))

    def run(self) -> None:
        while self.changed:
            number = self.changed.popleft()
            self._issue(number)
            self._begin(number)

    # ---------------------------------------------------------------------------------------------------------- the host

    def _issue(self, number: int) -> None:
        rank = self.ranks[number]
        while rank.at < len(rank.events):
            event = rank.events[rank.at]
            if isinstance(event, Wait):
                rank.waits.append(event.of)
            elif isinstance(event, HostWait):
                self._count_waits(rank)
                if rank.waited < len(rank.waits):
                    rank.blocked = str(event)
                    return
            elif event.on_host:
                turn = rank.turns[event.group, "host"]
                if not self._meet((event.group, turn), number, event.group.ranks, str(event)):
                    return
                rank.turn((event.group, "host"))
            elif not self._enqueue(number, event):
                return
            rank.at += 1
            rank.blocked, rank.absent = "", ()

    def _meet(self, key: object, number: int, ranks: tuple[int, ...], what: str) -> bool:
        """Whether all hosts have come; else this one waits."""
        here = self.met[key]
        if number not in here:
            here.add(number)
            if here.issuperset(ranks):
                self.changed.extend(rank for rank in ranks if rank != number)
        if here.issuperset(ranks):
            return True
        self.ranks[number].blocked = what
        self.ranks[number].absent = tuple(rank for rank in ranks if rank not in here)
        return False

    def _enqueue(self, number: int, call: Call) -> bool:
        rank, communicator = self.ranks[number], self.rules.communicator(call, number)
        if self.rules.made_at_first_use and communicator not in rank.made:
            what = f"makes the communicator of {communicator} for {call}"
            if not self._meet(("made", communicator), number, communicator.ranks, what):
                return False
            rank.made.add(communicator)
        op = _Op(call, rank.at, communicator, after=len(rank.waits))
        if call.parts:
            op.keys = [self._key(rank, number, communicator, part) for part in call.parts]
            op.left = len(op.keys)
        else:
            op.turn = rank.turn(communicator)
        rank.ops[rank.at] = op
        rank.streams.setdefault(communicator, deque()).append(op)
        if call.waited:
            rank.waits.append(rank.at)
        return True

    def _key(self, rank: _Rank, number: int, communicator: Group, part: Part) -> tuple[Group, int, int, int]:
        source, target = (number, part.peer) if part.op == "send" else (part.peer, number)
        return communicator, source, target, rank.turn((communicator, part.op, part.peer))

    # -------------------------------------------------------------------------------------------------------- the device

    def _count_waits(self, rank: _Rank) -> None:
        while rank.waited < len(rank.waits) and rank.waits[rank.waited] in rank.done:
            rank.waited += 1

    def _begin(self, number: int) -> None:
        """Let what is first on its stream run, where compute has come to it."""
        rank = self.ranks[number]
        self._count_waits(rank)
        for stream in rank.streams.values():
            if stream and not stream[0].runs and stream[0].after <= rank.waited:
                op = stream[0]
                op.runs = True
                if op.keys:
                    for key in op.keys:
                        self._match(key, number, op, 2)
                else:
                    self._match((op.communicator, op.turn), number, op, len(op.communicator.ranks))

    def _match(self, key: object, number: int, op: _Op, members: int) -> None:
        here = self.running[key]
        here.append((number, op))
        if len(here) < members:
            return
        for other, theirs in self.running.pop(key):
            theirs.left -= 1
            if theirs.left:
                continue
            rank = self.ranks[other]
            rank.done.add(theirs.index)
            rank.streams[theirs.communicator].popleft()
            self.changed.append(other)

    # ----------------------------------------------------------------------------------------------------------- at the end

    def stuck(self) -> list[str]:
        every = ((number, self._waits_for(number)) for number in range(len(self.ranks)))
        waiting = {number: pair for number, pair in every if pair is not None}
        if not waiting:
            return []
        circle: list[int] = []
        number = next(iter(waiting))
        while number not in circle:
            circle.append(number)
            number = next((each for each in waiting[number][1] if each in waiting), number)
        return [f"rank {each} {waiting[each][0]}" for each in circle[circle.index(number) :]]

    def _waits_for(self, number: int) -> tuple[str, tuple[int, ...]] | None:
        """(at what a rank stands, the ranks for which it waits); None of one that has ended."""
        rank = self.ranks[number]
        if rank.absent:
            return rank.blocked, rank.absent
        heads = [stream[0] for stream in rank.streams.values() if stream]
        if rank.at == len(rank.events) and not heads:
            return None
        found = [(op, absent) for op in heads if (absent := tuple(self._absent(number, op)))]
        op, absent = found[0] if found else (heads[0] if heads else None, ())
        before = f"{rank.blocked}, behind " if rank.blocked else "stands at "
        return f"{before}{op.call if op is not None else 'nothing'}", absent

    def _absent(self, number: int, op: _Op) -> Iterator[int]:
        """Ranks that do not run what this one runs."""
        if not op.runs:
            return
        for key in op.keys:
            if any(own == number for own, _ in self.running.get(key, ())):
                yield key[2] if key[1] == number else key[1]
        if not op.keys:
            here = {own for own, _ in self.running[op.communicator, op.turn]}
            yield from (rank for rank in op.communicator.ranks if rank not in here)
