"""MeetingPlace: replicas of local updates that are jobs of their own, and come and go (elastic, as torchft's)."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.sharding import local_tensor
from meshkit.core.waiting import waiting
from meshkit.errors import MeetingError, PlanError
from meshkit.mesh import Mesh
from meshkit.optim.outer._hand_on import Snapshot, receive, send
from meshkit.optim.outer._meets import CameLate, Joined, Met, Sent
from meshkit.optim.outer._policy import CO2, Policy, delay_of, fragments_of
from meshkit.optim.outer.place._link import PlaceLink
from meshkit.optim.outer.place._meeting import PlaceMeeting
from meshkit.optim.outer.place._messages import Message
from meshkit.step import Run

CONNECT = timedelta(seconds=60)
LOOK_S = 0.05
TRIES = 10  # to be given the others' state


class MeetingPlace:
    """Replicas that are jobs of their own, and meet at `python -m meshkit meeting-place`: give it to `OuterOptimizer`.

    address: host:port. mesh: of this job, without dp_replicate. steps: after which the run ends, the same on all replicas.
    slot: of this replica, below `most`, by which it reads its part of the data: `data_rank` of `data_ranks`, as of a mesh
    with `most` replicas. last: the last meeting. Collectives of the mesh: to make it, and `leave`.
    Wire: a connection of each rank to the place; at a meeting, in gloo groups made for it, to the ranks with its place in the
    other replicas. What is on a device travels by way of the host. Nothing is signed: a network that one trusts, as for
    torchrun's own.
    Raises: MeetingError where no place answers, or none has a slot; PlanError for a mesh with replicas.
    """

    hands_on = True

    def __init__(self, address: str, mesh: Mesh, *, steps: int) -> None:
        if mesh.spec.dp_replicate > 1:
            raise PlanError(
                f"MeetingPlace: the mesh has dp_replicate={mesh.spec.dp_replicate}, and each replica at a meeting place is "
                "a job of its own. Leave that axis out, and start so many jobs."
            )
        self.mesh = mesh
        self.last: Met | None = None
        self.group: tuple[str, Any] = ("", None)  # of the last meeting that counted, by its name
        self._joins: list[Message] = []
        self._handing_on: dict[str, threading.Thread] = {}
        self._facts: dict[str, str] = {}
        self._steps = steps
        self.link, welcome = self._enter(address)
        self.slot, self.most = int(welcome["slot"]), int(welcome["replicas"])
        self._timeout = timedelta(seconds=welcome["exchange_s"])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self.link.host, welcome["store_port"], is_master=False, wait_for_workers=False, timeout=CONNECT
        )

    @property
    def data_rank(self) -> int:
        return self.slot * self.mesh.data_ranks + self.mesh.data_rank

    @property
    def data_ranks(self) -> int:
        return self.most * self.mesh.data_ranks

    def leave(self) -> None:
        """At the end of the run, so that nobody waits for this replica; whoever gets its state still does."""
        end = time.monotonic() + self._timeout.total_seconds()
        is_lost = False
        while any(thread.is_alive() for thread in self._handing_on.values()) and not is_lost and time.monotonic() < end:
            time.sleep(LOOK_S)
            while not self.link.messages.empty():
                is_lost |= self._heard(self.link.messages.get())["is"] == "lost"
        self.mesh.host.barrier()
        self.link.send("leave")
        self.link.close()

    # ------------------------------------------------------------------------------------------- of an OuterOptimizer

    def check(self, run: Run, policy: Policy) -> None:
        if run.mesh is not self.mesh:
            raise PlanError("OuterOptimizer: the run is on another mesh than its MeetingPlace. Give both the same.")
        delay, every, fragments = delay_of(policy), policy.every, fragments_of(policy)
        if isinstance(every, int) and delay and (isinstance(policy, CO2) or delay * fragments == every):
            raise PlanError(
                f"{policy} at a meeting place: something is always in flight, and there is no step after which a replica "
                f"that comes could be given all. Give DiLoCo with a delay below {every // fragments}, or none."
            )
        run.mesh.agreement.meet("OuterOptimizer", facts={"policy": policy})
        self._facts = {"policy": str(policy), "mesh": str(run.mesh.spec), "number of steps": str(self._steps)}

    def compare(self, run: Run, tensors: Mapping[str, Tensor], trained: set[str], facts: Mapping[str, str]) -> None:
        """Notes what replicas must have alike; values they get from one."""
        layout, frozen = hashlib.sha256(), hashlib.sha256()
        parameters = {id(param) for param in run.model.parameters()}
        for name, tensor in tensors.items():
            local = local_tensor(tensor).detach()
            layout.update(f"{name} {tuple(tensor.shape)} {tuple(local.shape)} {local.dtype}\n".encode())
            if id(tensor) in parameters and name not in trained:
                frozen.update(local.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        count = sum(tensor.numel() for tensor in tensors.values())
        self._facts["model"] = f"{len(tensors)} tensors of {count:,} elements ({layout.hexdigest()[:12]})"
        self._facts["values that are not trained"] = frozen.hexdigest()[:12]
        self._facts |= facts

    def begin(self, sent: Sent) -> PlaceMeeting:
        return PlaceMeeting(self, sent)

    def join(self, newest: tuple[int, int], *, can_go_back: bool) -> Joined:
        for _ in range(TRIES):
            self.link.send("ready", facts=self._facts, newest=newest, can_go_back=can_go_back)
            with waiting("the next meeting of the other replicas"):
                message, snapshot = self._fetch()
            try:
                given: Snapshot | None = self.agree(message, snapshot)
            except CameLate:
                continue
            self.link.send("fetched")
            return Joined(snapshot=given, goes_back=bool(message.get("goes_back")))
        raise MeetingError(f"{TRIES} times the replica whose state this one was to get was lost. Start it again.")

    def hand_on(self, make: Callable[[], Snapshot]) -> None:
        mine, self._joins = [join for join in self._joins if join["from"] == self.slot], []
        if not mine:
            return
        snapshot = make()
        for join in mine:
            work = partial(self._give, join["group"], snapshot)
            thread = threading.Thread(target=work, name="hand on", daemon=True)
            self._handing_on[join["group"]] = thread
            thread.start()

    # ------------------------------------------------------------------------------------------------- for a meeting

    def next_message(self) -> Message:
        """Of the place, or of a thread of this process."""
        message = self._heard(self.link.messages.get())
        if message["is"] == "lost":
            self.link.messages.put(message)  # for whoever asks next
        return message

    def _heard(self, message: Message) -> Message:
        if message["is"] == "gone":  # for whom a state was
            self._handing_on.pop(message["group"], None)
        return message

    def agree(self, message: Message, brought: Any) -> Any:
        """`brought`, where all ranks of this replica have been told the same. A collective of them.

        Raises on all: CameLate; MeetingError where the place is gone or refuses one of them.
        """
        told = self.mesh.host.all_gather((message["is"], message.get("why", "")))
        words = dict(reversed(told))
        if "refused" in words:
            raise MeetingError(f"the meeting place {self.link.address} refuses this replica: {words['refused']}.")
        if "lost" in words:
            raise MeetingError(
                f"the meeting place {self.link.address} is gone: {words['lost']}. Start it again, then the replicas: they go "
                "on from what they have saved."
            )
        if "late" in words:
            raise CameLate
        self._joins += message.get("joins", [])
        return brought

    def gloo(self, name: str, index: int, size: int) -> Any:
        """A group, of the ranks with this one's place in some replicas. Raises: RuntimeError where one does not come."""
        store = dist.PrefixStore(f"{name}/{self.mesh.rank}", self._store.clone())  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(store, index, size, self._timeout)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------------------------------------------- within

    def _give(self, group: str, snapshot: Snapshot) -> None:
        with contextlib.suppress(RuntimeError):  # whom it was for is gone, which the place tells
            send(self.gloo(group, 0, 2), snapshot)

    def _fetch(self) -> tuple[Message, Snapshot | None]:
        """(the place's last word, the state of another replica)."""
        joining: Message = {}
        while True:
            message = self.next_message()
            word = message["is"]
            if word == "join":
                joining = message
                threading.Thread(target=self._receive, args=(message["group"],), name="join", daemon=True).start()
            elif word == "received" and message["group"] == joining.get("group"):
                return (
                    ({"is": "join"}, message["snapshot"]) if message["snapshot"] is not None else ({"is": "late"}, None)
                )
            elif word == "giver lost" and message["group"] == joining.get("group"):
                return {"is": "late"}, None
            elif word in ("begin", "refused", "lost"):
                return message, None

    def _receive(self, group: str) -> None:
        """On a thread: see [Note: an attempt is left, not ended]."""
        snapshot = None
        try:
            snapshot = receive(self.gloo(group, 1, 2))
        except RuntimeError as error:
            _print(f"the replica whose state this one was to get was lost: {str(error).splitlines()[0][:200]}")
        self.link.messages.put({"is": "received", "group": group, "snapshot": snapshot})

    def _enter(self, address: str) -> tuple[PlaceLink, Message]:
        """The first rank is given a slot, then the others say to whom they belong."""
        host = self.mesh.host
        link, welcome, error = self._try_hello(address, None) if self.mesh.rank == 0 else (None, {}, "")
        token, error = host.broadcast((welcome.get("token"), error))
        if not error and self.mesh.rank > 0:
            link, welcome, error = self._try_hello(address, token)
        errors = [each for each in host.all_gather(error) if each]
        if errors:
            raise MeetingError(errors[0])
        assert link is not None
        return link, welcome

    def _try_hello(self, address: str, token: str | None) -> tuple[PlaceLink | None, Message, str]:
        try:
            link = PlaceLink(address, told=_print)
        except MeetingError as error:
            return None, {}, str(error)
        rank, ranks = self.mesh.rank, self.mesh.spec.world_size
        link.send("hello", token=token, rank=rank, ranks=ranks, host=socket.gethostname())
        message: Message = link.messages.get()
        if message["is"] == "lost":
            link.close()
            return (
                None,
                {},
                (
                    f"what answers at {address} is no meeting place: {message['why']}. Give the port that python -m meshkit "
                    "meeting-place prints, not the store's after it."
                ),
            )
        if message["is"] != "welcome":
            link.close()
            return None, {}, f"the meeting place {address} refuses this replica: {message['why']}."
        link.beat_s, link.silence_s = float(message["beat_s"]), float(message["grace_s"])
        return link, message, ""


def _print(text: str) -> None:
    print(f"meeting place: {text}", flush=True)
