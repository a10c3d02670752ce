"""A replica's side of one meeting at a meeting place: attempts on threads, until one counts, and nothing is changed before.

It waits for the others, and exchanges, beside the steps that follow, if any do before `finish`.

[Note: an attempt is left, not ended]
Nobody can end a gloo call that waits for a rank which is gone. So each attempt is on a thread, with a group and copies of its
own, and when the place calls for another one, the thread is left to itself: it ends when its group's timeout does.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshkit.core.waiting import waiting
from meshkit.optim.outer._exchange import Exchange
from meshkit.optim.outer._meets import Met, Sent
from meshkit.optim.outer.place._messages import Message

if TYPE_CHECKING:
    from meshkit.optim.outer.place._meeting_place import MeetingPlace

HOST = torch.device("cpu")


class PlaceMeeting:
    """Says at once that this rank is here; `finish` waits until the meeting counts on all replicas.

    Only one at a time may be under way, as it hears what the place says.
    """

    def __init__(self, place: MeetingPlace, sent: Sent) -> None:
        self._place, self._sent = place, sent
        self._device = sent.weight.device
        self._payloads, self._weight = [payload.to(HOST) for payload in sent.payloads], sent.weight.to(HOST)
        self._errors = None if sent.errors is None else [error.to(HOST) for error in sent.errors]
        self.steps: list[int] = []
        self.finite = torch.ones(place.most, dtype=torch.bool, device=self._device)  # others do not meet
        finite = all(bool(payload.isfinite().all()) for payload in self._payloads)
        self._end: tuple[Message, Any] = ({}, None)
        place.link.send("here", key=sent.key, last=sent.last, finite=finite)
        self._thread = threading.Thread(target=self._attend, name="meeting", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Nothing is to be done halfway: a thread does."""

    def finish(self) -> list[Tensor]:
        """The means. Raises: CameLate, MeetingError, on all ranks of the replica."""
        began = time.monotonic()
        with waiting("the other replicas at a meeting"):
            self._thread.join()
        means, errors, group = self._place.agree(*self._end)
        message = self._end[0]
        if group is not None:
            self._place.group = group
        self._place.last = Met(
            step=self._sent.step,
            replicas=tuple(message["slots"]),
            waited_s=float(message["waited_s"]),
            stood_s=time.monotonic() - began,
        )
        if errors is not None:
            assert self._sent.errors is not None
            for error, new in zip(self._sent.errors, errors, strict=True):
                error.copy_(new)
        return [mean.to(self._device) for mean in means]

    def _attend(self) -> None:
        """On a thread, until the place's last word."""
        attempt, brought = 0, None
        while True:
            message = self._place.next_message()
            word = message["is"]
            if word == "go":
                attempt, brought = message["attempt"], None
                threading.Thread(target=self._exchange, args=(message,), name="exchange", daemon=True).start()
            elif word == "exchanged" and message["attempt"] == attempt:
                brought = message["brought"]
                self._place.link.send("done", attempt=attempt, why=message["why"])
            elif word in ("met", "late", "refused", "lost"):
                self._end = message, brought
                return

    def _exchange(self, go: Message) -> None:
        """On a thread: see [Note: an attempt is left, not ended]."""
        brought, why = None, ""
        try:
            brought = self._values_of(go)
        except Exception as error:  # of gloo, of the store: whatever it is, the place must know
            why = "".join(filter(str.isprintable, f"{type(error).__name__}: {error}".splitlines()[0][:300]))
        self._place.link.messages.put({"is": "exchanged", "attempt": go["attempt"], "brought": brought, "why": why})

    def _values_of(self, go: Message) -> tuple[list[Tensor], list[Tensor] | None, tuple[str, Any] | None]:
        """(means, errors, the group)."""
        sent, errors, name = self._sent, self._errors, go["group"]
        if not sum(sent.sizes):  # a stage without the fragment's blocks
            return [payload.to(sent.dtype) for payload in self._payloads], errors, None
        errors = None if errors is None else [error.clone() for error in errors]
        known, group = self._place.group
        if known != name:
            group = self._place.gloo(name, go["index"], len(go["slots"]))
        layout = sent.layout(len(go["slots"]))
        exchange = Exchange(group, layout, self._payloads, weight=self._weight, step=sent.step, errors=errors)
        return exchange.finish(), errors, (name, group)
