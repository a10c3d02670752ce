"""Whoever lies, is lost or late: only copies that a validator passed are learnt, none too old, and nobody is stuck."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.algos.dataflow import Buffer, Groups, Sample
from meshkit.algos.workers import RolloutServer, VerifyPolicy
from meshkit.algos.workers._leases import Leases
from meshkit.algos.workers._unverified import Brought, Unverified
from meshkit.errors import DataError, PlanError

SIZES = (3, 5, 0, 4, 1)
LEASE_S = 10.0
TOTAL = 10
HONEST, WRONG = 1, 0  # the only token of an answer


def size(iteration: int) -> int:
    return SIZES[iteration % len(SIZES)]


def read(group: int, answers: Any) -> list[Sample]:
    (answer,) = answers
    ids, versions = np.array(answer["ids"]), np.array(answer["versions"])
    signed = {"fingerprint": np.zeros(5, np.uint8), "log_probs": np.zeros(1), "prompt_ids": np.zeros(1, np.int64)}
    return [{"group": group, "ids": ids, "versions": versions, **signed}]


@pytest.fixture(scope="module")
def server() -> Iterator[RolloutServer]:
    server = RolloutServer(
        Buffer(Groups(size, TOTAL), 1),
        host="127.0.0.1",
        port=0,
        secret="workers",
        lease_s=LEASE_S,
        tokens=1,
        settings={},
        first=lambda group: {},
        read=read,
        verify=VerifyPolicy(secret="validators", fingerprint_bytes=5),
    )
    yield server
    server.close()


class Jobs:
    """A trainer, workers and validators as drawn: what each holds, and what the server says to it."""

    def __init__(self, server: RolloutServer, seed: int, staleness: int) -> None:
        self.draw, self.now, self.server = random.Random(seed), 0.0, server
        self.buffer = Buffer(Groups(size, TOTAL), staleness)
        server.leases = Leases(self.buffer, LEASE_S, lambda: self.now)
        server.unverified = Unverified(2, LEASE_S, lambda: self.now)
        server.newest, server.weights = 0, {0: "sha256:0"}
        self.staleness, self.lives = staleness, 0
        self.workers: dict[str, tuple[int, bool]] = {"a": (0, True), "b": (0, False)}  # (version, whether it is honest)
        self.writes: dict[str, dict[int, int]] = {"a": {}, "b": {}}  # groups, with the version that began them
        self.verifies: dict[str, dict[int, int]] = {"v": {}}  # tickets, with what a forward says of them
        self.banned: set[str] = set()

    def ask(self, path: str, **message: Any) -> Mapping[str, Any]:
        return self.server.answer(path, {"life": self.server.life, **message})

    def come_anew(self, kind: dict[str, Any], node: str) -> str:
        self.lives += 1
        del kind[node]
        return f"{node[0]}{self.lives}"

    def work(self, node: str, *, wild: bool) -> None:
        step, (version, honest) = self.buffer.step, self.workers[node]
        if wild and self.draw.random() < 0.1:  # lost: another one comes in its place
            del self.workers[node]
            node = self.come_anew(self.writes, node)
            self.workers[node] = (self.draw.randint(0, step), self.draw.random() < 0.5)
            self.writes[node] = {}
            return
        version = step if not wild else self.draw.randint(version, step)
        self.workers[node] = (version, honest)
        holds = self.writes[node]
        try:
            room = self.draw.randint(0, 3) if wild else 100
            answer = self.ask("/work", node=node, version=version, room=room, holds=[*holds])
            holds |= {each["group"]: version for each in answer["groups"] if each["group"] not in holds}
            for group in [*holds]:
                if not wild or self.draw.random() < 0.4:
                    oldest = holds.pop(group)
                    cheats = not honest and self.draw.random() < 0.7
                    answers = [{"ids": [WRONG if cheats else HONEST], "versions": [oldest]}]
                    self.ask("/rollouts", node=node, group=group, answers=answers)
        except DataError as error:
            assert "2 groups of this worker, so it gets no more work of this run" in str(error)
            assert not honest and node not in self.banned
            self.banned.add(node)
            del self.workers[node]
            self.workers[self.come_anew(self.writes, node)] = (step, True)
            self.writes |= {new: {} for new in self.workers if new not in self.writes}

    def validate(self, node: str, *, wild: bool) -> None:
        if wild and self.draw.random() < 0.15:  # lost: what it held, another gets after a lease
            self.verifies[self.come_anew(self.verifies, node)] = {}
            return
        holds = self.verifies[node]
        answer = self.ask("/verify", node=node, holds=[*holds], room=self.draw.randint(0, 3) if wild else 100)
        for each in answer["groups"]:
            (claim,) = each["answers"]
            assert {str(version) for version in claim["versions"]} <= set(answer["weights"])  # it can be verified
            holds[each["ticket"]] = claim["ids"][0]
        for ticket in [*holds]:
            if not wild or self.draw.random() < 0.4:
                why = "" if holds.pop(ticket) == HONEST else "it is wrong"
                self.ask("/verdict", node=node, verdicts=[{"ticket": ticket, "why": why, "log_probs": [[-0.5]]}])

    def take(self, step: int) -> list[int] | None:
        for group, samples in self.server.arrived():
            assert group not in self.buffer.ready
            assert [(each["group"], each["ids"].tolist()) for each in samples] == [(group, [HONEST])]
            assert "fingerprint" not in samples[0]
            self.written[group] = int(samples[0]["versions"][0])
            self.buffer.ready.add(group)
        chosen = self.buffer.take(step)
        if chosen is not None:
            self.server.newest = step + 1
            out = range(max(0, step + 1 - self.staleness), step + 2)  # as many as a flow keeps
            self.server.weights = {version: f"sha256:{version}" for version in out}
        return chosen

    written: dict[int, int]


@given(seed=st.integers(0, 2**32), staleness=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_only_copies_that_pass_are_taken_each_group_once_none_too_old(
    server: RolloutServer, seed: int, staleness: int
) -> None:
    jobs, taken = Jobs(server, seed, staleness), list[int]()
    jobs.written = {}
    for step in range(TOTAL):
        rounds = 0
        while (chosen := jobs.take(step)) is None:
            rounds += 1
            assert rounds < 600, "all ask and nothing becomes ready"
            jobs.now += jobs.draw.random() * 4
            # In the first rounds anything may happen; then all have the newest weights, are prompt, and one is honest.
            wild = rounds < 150
            if not wild and not any(honest for _, honest in jobs.workers.values()):
                jobs.workers["last"], jobs.writes["last"] = (step, True), {}
            if wild and jobs.draw.random() < 0.3:
                continue  # nobody is heard of
            if jobs.draw.random() < 0.5:
                jobs.work(jobs.draw.choice([*jobs.workers]), wild=wild)
            else:
                jobs.validate(jobs.draw.choice([*jobs.verifies]), wild=wild)
        assert len(chosen) == size(step) and not set(chosen) & set(taken)
        assert all(step - jobs.written[group] <= staleness for group in chosen)
        taken += chosen
    assert sorted(taken) == list(range(sum(map(size, range(TOTAL)))))
    assert server.refusals() or not jobs.banned


def brought(group: int, node: str) -> Brought:
    return Brought(group=group, node=node, oldest=0, samples=[])


def test_what_is_said_of_a_copy_is_not_said_of_the_next_one() -> None:
    """A slow validator's word on an honest copy comes when another worker has brought the group again."""
    unverified = Unverified(2, LEASE_S, lambda: 0.0)
    unverified.add(brought(3, "a"))
    assert unverified.assign("v", 9) == [0]
    assert [each.group for each in unverified.fails(0, "it is wrong")] == [3]
    unverified.add(brought(3, "b"))
    assert unverified.passes(0) is None and unverified.fails(0, "late") == [] and len(unverified.waiting) == 1
    assert unverified.failed == {"a": ["group 3: it is wrong"]}
    assert unverified.assign("v", 9) == [1] and unverified.passes(1) is not None and not unverified.waiting


def test_a_validator_that_is_lost_costs_its_lease_and_a_slow_one_is_believed_all_the_same() -> None:
    now = 0.0
    unverified = Unverified(2, LEASE_S, lambda: now)
    for group in (5, 2, 7):
        unverified.add(brought(group, "a"))
    assert unverified.assign("v", 2) == [1, 0]  # the first groups first
    assert unverified.assign("w", 9) == [2]
    now = 9.0
    unverified.renew("v", {1})  # 0 is forgotten
    assert unverified.assign("w", 9) == [0]
    now = 19.5
    assert unverified.assign("x", 9) == [1, 0, 2]
    assert unverified.passes(1) is not None  # whoever says so


def test_two_groups_that_fail_end_a_worker_and_free_all_that_it_brought() -> None:
    unverified = Unverified(2, LEASE_S, lambda: 0.0)
    for group, node in ((0, "a"), (1, "b"), (2, "a"), (3, "a"), (4, "b")):
        unverified.add(brought(group, node))
    assert [each.group for each in unverified.fails(0, "x")] == [0] and not unverified.refuses("a")
    assert [each.group for each in unverified.fails(1, "x")] == [1] and not unverified.refuses("b")
    assert [each.group for each in unverified.fails(3, "y")] == [3, 2] and unverified.refuses("a")
    assert [each.group for each in unverified.waiting.values()] == [4] and not unverified.refuses("b")


def test_a_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match=r"secret, which is empty. Give VerifyPolicy\(secret=\)"):
        VerifyPolicy(secret="", fingerprint_bytes=5)
    with pytest.raises(PlanError, match=r"VerifyPolicy\(failures=0\): give at least 1"):
        VerifyPolicy(secret="x", fingerprint_bytes=5, failures=0)
