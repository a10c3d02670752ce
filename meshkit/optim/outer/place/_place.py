"""A meeting place (elastic membership, quorum, two-phase commit): who meets, when, and what counts. It knows no sockets.

[Note: a meeting counts on all replicas or on none]
Every rank of every replica says that it is here. When all have come, or after the grace period, the list is closed, and the
ranks exchange. Each says how that went, and has changed nothing yet. If all have got the mean, the meeting counts, and all
are told. If one is lost first, those who are left begin another attempt, with what they brought to the first. Replicas that
were told have the same outer state bit for bit; one that was not told is gone, or comes back as any other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from meshkit.optim.outer.place._members import Here, Member, difference, out_of_turn
from meshkit.optim.outer.place._messages import Message
from meshkit.optim.outer.place._rules import MeetingRules

CAUSE_S = 1.0  # after an exchange has failed, for the connection of a lost rank to close, before the next one
LATE_S = 5.0  # beyond the time of an exchange, for those who take part to say how it went


class Place:
    """`hear`, `lose` and `tick` change what it knows; what is to be sent is then in `outbox`, by connection.

    say: is told a line at each change. outbox: None in place of a message ends the connection.
    """

    def __init__(self, rules: MeetingRules, say: Callable[[str], None], *, store_port: int = 0) -> None:
        self.rules, self.over = rules, False
        self.outbox: list[tuple[int, Message | None]] = []
        self._said, self._store_port = say, store_port
        self._members: dict[int, Member] = {}  # by slot
        self._by_connection: dict[int, tuple[Member, int]] = {}
        self._asking: dict[int, tuple[Message, float]] = {}  # no slot is free for them
        self._meeting, self._attempt = 1, 0
        self._meets: list[Member] = []  # in the attempt that goes on
        self._group = ""  # of processes, kept as long as the same replicas meet
        self._groups_tokens: tuple[str, ...] = ()
        self._attempt_at = 0.0
        self._failed_at: float | None = None  # this attempt
        self._failing_since: float | None = None  # this meeting
        self._first_here: float | None = None
        self._short_since: float | None = None  # too few for a quorum
        self._ready_since: float | None = None  # nobody counts
        self._went_back = False  # since the last meeting: nobody had finite values
        self._ticked: float | None = None

    # ------------------------------------------------------------------------------------------------- what happens

    def hear(self, connection: int, message: Message, now: float) -> None:
        """message: `checked`. Raises: ValueError for one that does not come now, as a second hello."""
        word = message["is"]
        if word == "hello":
            if connection in self._by_connection or connection in self._asking:
                raise ValueError("it has said hello before")
            self._hello(connection, message, now)
            return
        if word == "beat" and connection not in self._by_connection:
            return  # of one that has no slot yet
        if connection not in self._by_connection:
            raise ValueError(f"{word} before it has a slot")
        member, rank = self._by_connection[connection]
        member.heard[rank] = now
        if word == "ready":
            newest, can_go_back = (message["newest"][0], message["newest"][1]), message["can_go_back"]
            if member.greet(rank, message["facts"], newest, can_go_back=can_go_back):
                self._ready(member)
        elif word == "here":
            self._here(member, rank, message, now)
        elif word == "done" and message["attempt"] == self._attempt and member in self._meets:
            member.done[rank] = message["why"]
            if member.done[rank] and self._failed_at is None:
                self._failed_at = now
        elif word == "fetched":
            member.giver, member.is_poisoned = None, False
        elif word == "leave":
            self._leave(member)
        self.tick(now)

    def lose(self, connection: int, now: float) -> None:
        """A connection has closed: its replica is gone."""
        self._asking.pop(connection, None)
        member, rank = self._by_connection.get(connection, (None, 0))
        if member is not None:
            self._forget(member, f"rank {rank} of this replica is gone", end=True)
            self._say(f"{member} is gone; {self._counted()}")
            self.tick(now)

    def tick(self, now: float) -> None:
        """Look at the clock: called often."""
        if self._ticked is not None and now - self._ticked > self.rules.grace_s / 2:
            for member in self._members.values():  # this process stood still, and heard nobody
                member.heard = dict.fromkeys(member.heard, now)
        self._ticked = now
        for connection, (message, since) in list(self._asking.items()):
            self._asking.pop(connection)
            self._hello(connection, message, now, since=since)
        for member in list(self._members.values()):
            if member.is_silent(now, self.rules.grace_s):
                self._part(member)
                if member.standing == "in":
                    self._leave_behind(member, f"it said nothing for {self.rules.grace_s:g} s")
        if self._meets:
            self._look_at_attempt(now)
        if not self._meets:
            self._look_at_meeting(now)
        if not any(member.standing == "in" for member in self._members.values()):
            self._look_at_start(now)

    # ------------------------------------------------------------------------------------------------- coming, going

    def _hello(self, connection: int, message: Message, now: float, since: float | None = None) -> None:
        if (token := message["token"]) is not None:  # a further rank
            member = next((each for each in self._members.values() if each.token == token), None)
            if member is None:
                self._refuse(connection, "the first rank of this replica is gone")
            elif message["rank"] in member.connections or message["rank"] >= member.ranks:
                self._refuse(connection, f"{member} has no rank {message['rank']} that is missing")
            else:
                self._attach(connection, member, message["rank"], now)
            return
        slot = self._free_slot(now)
        if self.over:
            self._refuse(connection, "the run of this meeting place has ended. Start another one for another run")
        elif slot is None and since is not None and now - since > self.rules.grace_s:
            self._refuse(
                connection,
                f"all {self.rules.replicas} slots are taken. Wait until a replica is gone, or start the meeting place with "
                "more --replicas",
            )
        elif slot is None:
            self._asking[connection] = message, now if since is None else since
        else:
            member = Member(slot=slot, token=secrets.token_hex(8), host=message["host"], ranks=message["ranks"])
            self._members[slot] = member
            self._attach(connection, member, 0, now)

    def _free_slot(self, now: float) -> int | None:
        for slot in range(self.rules.replicas):
            if slot not in self._members:
                return slot
        for slot, member in self._members.items():  # of a host that was cut off, whose connections never close
            if member.is_silent(now, self.rules.grace_s):
                self._forget(member, "another one has its slot", end=True)
                self._say(f"{member} is gone: it said nothing, and another one has its slot; {self._counted()}")
                return slot
        return None

    def _attach(self, connection: int, member: Member, rank: int, now: float) -> None:
        member.connections[rank], member.heard[rank] = connection, now
        self._by_connection[connection] = member, rank
        rules = self.rules
        self._send(
            connection,
            "welcome",
            slot=member.slot,
            token=member.token,
            store_port=self._store_port,
            replicas=rules.replicas,
            grace_s=rules.grace_s,
            exchange_s=rules.exchange_s,
            beat_s=rules.beat_s,
        )

    def _ready(self, member: Member) -> None:
        others = [each for each in self._members.values() if each is not member and each.standing != "coming"]
        others.sort(key=lambda each: each.standing != "in")
        if others and (differs := difference(member, others[0])):
            self._say(f"{member} is refused: {differs}")
            why = f"replicas that meet are laid out alike: {differs}. Start it as the others"
            for connection in member.connections.values():
                self._refuse(connection, why)
            self._forget(member, "", end=False)
            return
        member.standing = "ready"
        self._say(f"{member} has come; {self._counted()}")

    def _leave(self, member: Member) -> None:
        self._forget(member, "", end=False)
        self._say(f"{member} has ended its run; {self._counted()}")
        if not any(each.standing == "in" for each in self._members.values()):
            self.over = True
            for other in list(self._members.values()):
                for connection in other.connections.values():
                    self._refuse(connection, "the run of this meeting place has ended")
                self._forget(other, "", end=False)

    def _forget(self, member: Member, why: str, *, end: bool) -> None:
        """end: its other ranks too."""
        self._members.pop(member.slot, None)
        for connection in member.connections.values():
            self._by_connection.pop(connection, None)
            if end:
                self._refuse(connection, why)
        self._part(member)
        self._stop(member)

    def _part(self, member: Member) -> None:
        """It gives its state to nobody any more, and is given none: neither it nor the others wait for that."""
        for other in list(self._members.values()):
            if other.giver is not None and member in (other, other.giver):
                self._tell(other, "giver lost", group=other.group)
                self._tell(other.giver, "gone", group=other.group)
                other.giver = None
        if member.giver is not None:  # of one that is no member any more
            self._tell(member.giver, "gone", group=member.group)
            member.giver = None

    def _leave_behind(self, member: Member, reason: str) -> None:
        """The others go on without it; when it says that it is here, it is told."""
        member.standing, member.reason = "late", reason
        for rank in member.here:
            self._send(member.connections[rank], "late", reason=reason)
        member.here = {}
        self._stop(member)
        self._say(f"{member} is left behind: {reason}; {self._counted()}")

    def _stop(self, member: Member) -> None:
        """An attempt of which it is a part."""
        if member in self._meets:
            self._meets = []

    # ------------------------------------------------------------------------------------------------------ meetings

    def _here(self, member: Member, rank: int, message: Message, now: float) -> None:
        if member.standing != "in":
            self._send(member.connections[rank], "late", reason=member.reason or "the others went on without it")
            return
        here = Here(key=message["key"], last=message["last"], finite=message["finite"])
        if any(each.key != here.key for each in member.here.values()):
            raise ValueError("its ranks are at different meetings")
        member.here[rank] = here
        if self._first_here is None:
            self._first_here = now
        if member.has_come and not all(each.finite for each in member.here.values()):
            member.is_poisoned = True
            self._leave_behind(member, "its values are not finite")

    def _look_at_meeting(self, now: float) -> None:
        """Close the list where all are there, or have been waited for."""
        counted = [member for member in self._members.values() if member.standing == "in"]
        come = [member for member in counted if member.has_come]
        if not come:
            if not any(member.here for member in counted):
                self._first_here = self._short_since = self._failing_since = None
            return
        assert self._first_here is not None
        missing = [member for member in counted if not member.has_come]
        if missing and now - self._first_here < self.rules.grace_s:
            return
        apart, most = out_of_turn(come)
        for member in apart:
            why = f"it meets at {member.key}, and the others at {most}"
            self._end([member], f"this replica is out of turn: {why}. Give all the same steps and flags")
            self._say(f"{member} is refused: {why}")
        if apart:
            return
        ready = [member for member in self._members.values() if member.standing == "ready"]
        if len(come) + len(ready) < self.rules.quorum:
            self._wait_for_quorum(come, now)
            return
        self._short_since = None
        for member in missing:
            self._leave_behind(member, f"it did not come within {self.rules.grace_s:g} s")
        self._begin(come, now)

    def _wait_for_quorum(self, come: list[Member], now: float) -> None:
        if self._short_since is None:
            self._short_since = now
            self._say(f"{len(come)} of a quorum of {self.rules.quorum} replicas: waiting for more")
        elif now - self._short_since > self.rules.patience_s:
            self._short_since = None
            self._end_short(come)

    def _end_short(self, members: list[Member]) -> None:
        count, rules = len(members), self.rules
        text = f"{count} of a quorum of {rules.quorum} replicas came within {rules.patience_s:g} s"
        self._say(f"{text}: they end")
        self._end(members, f"{text}. Start more, and these anew")

    def _end(self, members: list[Member], why: str) -> None:
        for member in list(members):
            self._forget(member, why, end=True)

    def _begin(self, come: list[Member], now: float) -> None:
        """An attempt, of those who are there."""
        self._meets = sorted(come, key=lambda member: member.slot)
        tokens = tuple(member.token for member in self._meets)
        self._attempt += 1
        if tokens != self._groups_tokens or self._failing_since is not None:
            self._group, self._groups_tokens = f"{self._meeting}.{self._attempt}", tokens
        self._attempt_at, self._failed_at = now, None
        for index, member in enumerate(self._meets):
            member.done = {}
            slots = [each.slot for each in self._meets]
            self._tell(member, "go", attempt=self._attempt, group=self._group, index=index, slots=slots)

    def _look_at_attempt(self, now: float) -> None:
        done = [why for member in self._meets for why in member.done.values()]
        whole = len(done) == sum(member.ranks for member in self._meets)
        if whole and not any(done):
            self._commit(now)
        elif self._failed_at is not None and now - self._failed_at > CAUSE_S:
            self._failing_since = self._failing_since or self._failed_at
            why = next(filter(None, done))
            if now - self._failing_since > self.rules.grace_s + CAUSE_S:  # who is lost would be known by now
                text = f"replicas {[each.slot for each in self._meets]} do not reach each other: {why}"
                self._say(f"{text}: they end")
                self._failing_since = None
                self._end(self._meets, text)
            self._meets = []  # and another attempt, of those who are there
        elif now - self._attempt_at > self.rules.exchange_s + LATE_S:
            for member in [each for each in self._meets if len(each.done) < each.ranks]:
                self._leave_behind(member, f"its exchange did not end within {self.rules.exchange_s:g} s")

    def _commit(self, now: float) -> None:
        met, self._meets, self._went_back = self._meets, [], False
        assert self._first_here is not None
        last = all(here.last for member in met for here in member.here.values())
        joins = self._hand_on(met) if last else []
        for member in met:
            member.here = {}
            slots = [each.slot for each in met]
            self._tell(member, "met", slots=slots, waited_s=self._attempt_at - self._first_here, joins=joins)
        self._meeting += 1
        self._first_here = self._failing_since = None
        if joins:
            self._say(f"{self._counted()}, from the next meeting on")

    def _hand_on(self, givers: list[Member]) -> list[Message]:
        """Those who have come get the state of those who have it, and count from now on."""
        joins = []
        for index, member in enumerate(each for each in self._members.values() if each.standing == "ready"):
            member.standing, member.giver = "in", givers[index % len(givers)]
            member.group = f"join.{secrets.token_hex(4)}"
            self._tell(member, "join", group=member.group)
            joins.append({"from": member.giver.slot, "group": member.group})
        return joins

    def _look_at_start(self, now: float) -> None:
        """Nobody counts: the one with the newest state begins, and the others get it."""
        ready = [member for member in self._members.values() if member.standing == "ready"]
        if not ready:
            self._ready_since = None
            return
        if self._ready_since is None:
            self._ready_since = now
        waited_s = now - self._ready_since
        if len(ready) < self.rules.quorum:
            if waited_s > self.rules.patience_s:
                self._end_short(ready)
            return
        if len(ready) < self.rules.replicas and waited_s < self.rules.grace_s:
            return
        self._ready_since = self._first_here = None
        healthy = [member for member in ready if not member.is_poisoned]
        first = max(healthy or ready, key=lambda member: (member.newest, -member.slot))
        if not healthy:
            why = (
                "again right after they went back" if self._went_back else "and their policy keeps no outer parameters"
            )
            if self._went_back or not first.can_go_back:
                text = f"no replica's values are finite after step {first.newest[1]}, {why}"
                self._say(f"{text}: they end")
                self._end(ready, f"{text}. Go on from a checkpoint before it, and let a NonFiniteGuard skip such steps")
                return
            self._went_back = True
            self._say(
                f"no replica's values are finite after step {first.newest[1]}: they go back to their last meetings"
            )
        first.standing, first.is_poisoned = "in", False
        joins = self._hand_on([first])
        self._tell(first, "begin", joins=joins, goes_back=not healthy)
        self._say(f"{first} has the newest state, after step {first.newest[1]}; {self._counted()}")

    # ------------------------------------------------------------------------------------------------------- sending

    def _say(self, text: str) -> None:
        self._said(text)
        for member in self._members.values():
            if 0 in member.connections:
                self._send(member.connections[0], "said", text=text)

    def _counted(self) -> str:
        count = sum(member.standing == "in" for member in self._members.values())
        return f"{count} replica{'s meet' if count != 1 else ' meets'}"

    def _tell(self, member: Member, word: str, **values: Any) -> None:
        for connection in member.connections.values():
            self._send(connection, word, **values)

    def _send(self, connection: int, word: str, **values: Any) -> None:
        self.outbox.append((connection, {"is": word, **values}))

    def _refuse(self, connection: int, why: str) -> None:
        self._send(connection, "refused", why=why)
        self.outbox.append((connection, None))
