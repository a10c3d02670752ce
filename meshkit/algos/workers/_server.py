"""The trainer's server of rollout workers: gives out groups to write, takes in what was written, in threads of its own."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from meshkit.algos.dataflow import Buffer, Sample
from meshkit.algos.shardcast import QuietServer
from meshkit.algos.workers._leases import Leases
from meshkit.algos.workers._rollouts import FINGERPRINT, claim_of
from meshkit.algos.workers._unverified import Brought, Unverified, VerifyPolicy
from meshkit.algos.workers._wire import SIGNATURE, UNREADABLE, signature
from meshkit.errors import DataError, PlanError

# [Note: what a worker is believed]
# A worker is a process of another job, perhaps at another site. It says token ids, their log-probabilities and the version of
# the weights that wrote each, and nothing else: prompts, texts and where an answer ends are the trainer's own, made of the
# ids. What does not fit (ids that do not exist, an answer that goes on after its end, weights that are not out yet or too
# old) is refused, and the group is free again. Whether those weights wrote it is for validators to say, where there are any:
# jobs that are trusted, and known by a secret of their own. Until one has passed a group, it is not there for the trainer.

# [Note: whose log-probabilities are learnt]
# What a worker says is within the bounds of what an honest one may be off, and still decides: moved by 0.02 a token one way,
# an answer of a thousand tokens is 20 nats off, and a correction of sequences drops it or not as the worker likes. So the
# validator's are learnt, which the weights of each token's version give: what the worker should have said, to rounding. What
# is lost is how the worker's kernels rounded, for which a correction would make up if the word of a worker were good.

# [Note: lives of a trainer]
# A trainer that starts anew from a checkpoint counts versions again from there, with other weights than those that came
# after the checkpoint before. So each server has a life of its own, drawn at random, and a worker that names another one is
# told to join again: it forgets what it has.

BYTES_OF_A_MESSAGE = 2**18  # beside answers
BYTES_OF_A_TOKEN = 64  # its id, log-probability and version, as texts
KEPT_REFUSALS = 10
BYTES_OF_A_REASON = 300
CHARACTERS_OF_A_NAME = 200
GROUPS_OF_A_VALIDATOR = 256  # at most, so that verdicts on them fit into a message
VALIDATORS = ("/validator/join", "/verify", "/verdict", "/validator/leave")

Read = Callable[[int, Sequence[Mapping[str, Any]]], list[Sample]]
"""(group, answers of a worker) -> its samples. Raises: DataError for what cannot be."""


@dataclass
class _Node:
    seen: float
    told: bool = False
    """that the run is over"""


class RolloutServer:
    """Serves `POST /join`, `/work`, `/rollouts` and `/leave` to workers that know the secret, until it is closed.

    tokens: of all answers to a prompt, the most; longer messages are not read. settings: what a worker learns when it joins.
    first(group): what it gets of a group's first sample. read: see `Read`; it is called without the lock, for it takes long.
    verify: `VALIDATORS` are served to validators too, and what workers bring has arrived when one of these has passed it.
    most_groups, longest_hold: see `Leases`.
    """

    def __init__(
        self,
        buffer: Buffer,
        *,
        host: str,
        port: int,
        secret: str,
        lease_s: float,
        tokens: int,
        settings: Mapping[str, Any],
        first: Callable[[int], Mapping[str, Any]],
        read: Read,
        verify: VerifyPolicy | None = None,
        most_groups: int = Leases.most,
        longest_hold: int = Leases.longest,
    ) -> None:
        self.lock = threading.RLock()
        """around each look at the leases and the buffer"""
        self.leases = Leases(buffer, lease_s, time.monotonic, most=most_groups, longest=longest_hold)
        self.newest, self.done = -1, False
        self.life = secrets.token_hex(8)
        self._settings, self._first = {**settings, "life": self.life}, first
        self._read_answers, self._secret, self._verify = read, secret, verify
        self.most_bytes = BYTES_OF_A_MESSAGE + BYTES_OF_A_TOKEN * tokens
        self.unverified: Unverified | None = None
        self.weights: dict[int, str] = {}
        """versions that are still out, with the digests of their manifests"""
        self._answers = {"/join": self._join, "/work": self._work, "/rollouts": self._rollouts, "/leave": self._leave}
        if verify is not None:
            self.most_bytes += verify.fingerprint_bytes * 4 // 3  # in base64
            self.unverified = Unverified(verify.failures, lease_s, time.monotonic)
            of_validators = (self._join_validator, self._give_unverified, self._verdict, self._leave_validator)
            self._answers |= dict(zip(VALIDATORS, of_validators, strict=True))
        self._refused: list[str] = []
        self._arrived: list[tuple[int, list[Sample]]] = []
        self._nodes: dict[str, _Node] = {}
        self._validators: dict[str, _Node] = {}
        handler = type("Handler", (_Handler,), {"owner": self})
        try:
            self._server = QuietServer((host, port), handler)
        except OSError as error:
            raise PlanError(f"RolloutServer(port={port}): {error}. Choose another port.") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="rollout server", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- the trainer

    def arrived(self) -> list[tuple[int, list[Sample]]]:
        """(group, its samples) of those that came since the last call."""
        with self.lock:
            found, self._arrived = self._arrived, []
        return found

    @property
    def waiting(self) -> int:
        """How many groups wait for a verdict."""
        return 0 if self.unverified is None else len(self.unverified.waiting)

    def refusals(self) -> list[str]:
        """What workers said that could not be, or did not pass, since the last call; the last ten."""
        with self.lock:
            found, self._refused = self._refused, []
        return found

    def workers(self) -> list[str]:
        """Those that were heard of lately."""
        return self._lately(self._nodes)

    def validators(self) -> list[str]:
        """Those that were heard of lately."""
        return self._lately(self._validators)

    def _lately(self, nodes: Mapping[str, _Node]) -> list[str]:
        with self.lock:
            since = time.monotonic() - self.leases.lease_s
            return sorted(name for name, node in nodes.items() if node.seen >= since)

    def finish(self, *, timeout_s: float = 10.0) -> None:
        """The run is over: return when all workers and validators that live know it, or after the timeout."""
        end = time.monotonic() + timeout_s
        self.done = True
        while time.monotonic() < end:
            with self.lock:
                told = [nodes[name].told for nodes in (self._nodes, self._validators) for name in self._lately(nodes)]
            if all(told):
                return
            time.sleep(0.05)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ------------------------------------------------------------------------------------------------- all messages

    def refuse_unsigned(self, path: str, body: bytes, given: str) -> str:
        """Why the message is not believed, "" if it is. Workers' secret opens no path of validators, nor theirs another."""
        secret, whose = self._secret, "the secret that the trainer has"
        if self._verify is not None and path in VALIDATORS:
            secret, whose = self._verify.secret, "the secret that the trainer has for validators (--validator-secret)"
        signed = hmac.compare_digest(signature(secret, path, body).encode(), given.encode())
        return "" if signed else f"the message is not signed by {whose}"

    def answer(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Raises: KeyError for a path that there is not; DataError and what `UNREADABLE` has for odd messages."""
        function = self._answers[path]
        if not path.endswith("/join") and message["life"] != self.life:
            return {"rejoin": True}
        return function(message)

    # ------------------------------------------------------------------------------------------------- the workers

    def _join(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return self._settings

    def _work(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """message: node, version of its weights, room for so many more groups, holds: those that it writes."""
        node, version, room = _name(message), _whole(message["version"]), _whole(message["room"])
        holds = {_whole(each) for each in message["holds"]}
        with self.lock:
            self._refuse_failed(node)
            known = self._nodes.setdefault(node, _Node(time.monotonic()))
            known.seen = time.monotonic()
            self.leases.renew(node, holds)
            groups: list[int] = []
            if not self.done and 0 <= version <= self.newest:
                groups = self.leases.assign(node, version, room)
            known.told = self.done
            given = [{"group": group, **self._first(group)} for group in groups]
            return {"groups": given, "newest": self.newest, "done": self.done}

    def _rollouts(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """message: node, group, answers."""
        node, group, answers = _name(message), _whole(message["group"]), message["answers"]
        with self.lock:
            self._refuse_failed(node)
            if self.done or not self.leases.is_wanted(group):
                return {"taken": False}
        try:
            samples = self._read_answers(group, answers)
            with self.lock:  # meanwhile it may have been brought by another
                self._refuse_failed(node)
                if self.done or not self.leases.is_wanted(group):
                    return {"taken": False}
                for sample in samples:
                    self._refuse_versions(group, sample["versions"])
                oldest = self.leases.oldest[group]
                self.leases.finish(group)
                if self.unverified is None:
                    self._arrived.append((group, samples))
                else:
                    self.unverified.add(Brought(group=group, node=node, oldest=oldest, samples=samples))
        except (DataError, *UNREADABLE) as error:
            with self.lock:
                self._note_refusal(f"{node:.80}: group {group}: {error}")
                self.leases.renew(node, set())  # its groups are free
            raise
        return {"taken": True}

    def _leave(self, message: Mapping[str, Any]) -> dict[str, Any]:
        node = _name(message)
        with self.lock:
            self.leases.renew(node, set())
            self._nodes.pop(node, None)
        return {}

    def _refuse_versions(self, group: int, versions: np.ndarray) -> None:
        oldest = self.leases.oldest[group]
        if (np.diff(versions) < 0).any() or versions[0] < oldest or versions[-1] > self.newest:
            raise DataError(
                f"versions of its tokens are {versions[0]} to {versions[-1]}, where {oldest} to {self.newest} can be, and "
                "none is followed by an older one."
            )

    def _refuse_failed(self, node: str) -> None:
        if self.unverified is not None and self.unverified.refuses(node):
            failed = self.unverified.failed[node]
            raise DataError(
                f"validators did not pass {len(failed)} groups of this worker, so it gets no more work of this run. The last "
                f"one, {failed[-1]}. Look at its weights, precision and kernels."
            )

    def _note_refusal(self, line: str) -> None:
        self._refused = [*self._refused[1 - KEPT_REFUSALS :], line]

    # ------------------------------------------------------------------------------------------------- the validators

    def _join_validator(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._verify is not None
        bounds = None if self._verify.bounds is None else asdict(self._verify.bounds)
        return {**self._settings, "bounds": bounds}

    def _give_unverified(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """message: node, holds: tickets of the groups that it verifies, room for so many more."""
        assert self.unverified is not None
        node, room = _name(message), _whole(message["room"])
        holds = {_whole(each) for each in message["holds"]}
        with self.lock:
            known = self._validators.setdefault(node, _Node(time.monotonic()))
            known.seen, known.told = time.monotonic(), self.done
            self.unverified.renew(node, holds)
            tickets = [] if self.done else self.unverified.assign(node, min(room, GROUPS_OF_A_VALIDATOR))
            given = {ticket: self.unverified.waiting[ticket].samples for ticket in tickets}
            weights, done = {str(each): digest for each, digest in self.weights.items()}, self.done
        groups = [{"ticket": ticket, "answers": list(map(claim_of, samples))} for ticket, samples in given.items()]
        return {"groups": groups, "weights": weights, "done": done}

    def _verdict(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """message: verdicts, each of a ticket, why it does not pass, or "", and else the log_probs of each answer."""
        for each in message["verdicts"]:
            ticket, why = _whole(each["ticket"]), str(each["why"])[:BYTES_OF_A_REASON]
            verified = [] if why else [np.array(of_answer, np.float64) for of_answer in each["log_probs"]]
            with self.lock:
                if why:
                    self._write_anew(ticket, why)
                else:
                    self._pass(ticket, verified)
        return {}

    def _pass(self, ticket: int, verified: list[np.ndarray]) -> None:
        """See [Note: whose log-probabilities are learnt]."""
        assert self.unverified is not None
        if ticket not in self.unverified.waiting:
            return
        samples = self.unverified.waiting[ticket].samples
        if [each.shape for each in verified] != [each["ids"].shape for each in samples]:
            raise DataError(f"log_probs of ticket {ticket} are not one number for each token of its answers")
        if not all(np.isfinite(each).all() for each in verified):
            raise DataError(f"log_probs of ticket {ticket} are not finite")
        brought = self.unverified.passes(ticket)
        assert brought is not None
        learnt = [
            {**{name: value for name, value in each.items() if name != FINGERPRINT}, "log_probs": np.minimum(own, 0.0)}
            for each, own in zip(samples, verified, strict=True)
        ]
        self._arrived.append((brought.group, learnt))

    def _write_anew(self, ticket: int, why: str) -> None:
        """The group of a failed copy is free, and so are all of its worker's if this was one too many."""
        assert self.unverified is not None
        anew = self.unverified.fails(ticket, why)
        for brought in anew:
            self.leases.reopen(brought.group, brought.oldest)
        for failed in anew[:1]:
            end = ""
            if self.unverified.refuses(failed.node):
                self.leases.renew(failed.node, set())
                self._nodes.pop(failed.node, None)
                end = " It gets no more work."
            self._note_refusal(f"{failed.node:.80}: group {failed.group}: {why}.{end}")

    def _leave_validator(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self.unverified is not None
        node = _name(message)
        with self.lock:
            self.unverified.renew(node, set())
            self._validators.pop(node, None)
        return {}


def _name(message: Mapping[str, Any]) -> str:
    """Of who sends it. It is printed in lines of the trainer's."""
    name = message["node"]
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= CHARACTERS_OF_A_NAME:
        raise DataError(f"the name of a node is printable text of 1 to {CHARACTERS_OF_A_NAME} characters.")
    return name


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise DataError(f"{value!r:.40} is no whole number.")
    return value


class _Handler(BaseHTTPRequestHandler):
    owner: RolloutServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return self._end(411, b"how many bytes the message has is not said")
        if not 0 <= size <= self.owner.most_bytes:  # before it is known who sends it
            return self._end(413, b"the message is too large")
        body = self.rfile.read(size)
        if why := self.owner.refuse_unsigned(self.path, body, self.headers.get(SIGNATURE, "")):
            return self._end(403, why.encode())
        try:
            answer = self.owner.answer(self.path, json.loads(body))
        except KeyError as error:
            return self._send(400, f"{self.path}: there is no {error}".encode())
        except (DataError, *UNREADABLE) as error:
            return self._send(400, f"{self.path}: {error}".encode())
        self._send(200, json.dumps(answer).encode())

    def _end(self, status: int, data: bytes) -> None:
        """What follows on this connection is not to be read."""
        self.close_connection = True
        self._send(status, data)

    def _send(self, status: int, data: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # who asked is gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each message would bury all else."""
