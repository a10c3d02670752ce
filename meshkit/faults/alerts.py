"""Alerts: what the watchdog reports on a screen is also handed to a function of yours, or posted to a web address (webhook).

mk.run_main(main, alert="ops/page.py:on_call")
mk.run_main(main, alert="http://alerts.example:8080/train")
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from meshkit.core.import_file import import_file
from meshkit.errors import PlanError

Kind = Literal["stall", "error", "lost", "terminated", "slow", "corrupt", "own"]
ALERT_S = 5.0  # for a hook to return, and for an address to answer


@dataclass(frozen=True, kw_only=True)
class Alert:
    """kind: `stall`, a rank waits for another, or ranks differ; `error`, a rank has raised; `lost`, it has lost the others;
    `terminated`, it was told to end while others were silent; `slow`, the others wait for it in each step;
    `corrupt`, its numbers are wrong or odd; `own`, what your loop says. text: as on the screen.
    rank: that reports. job: TORCHELASTIC_RUN_ID or SLURM_JOB_ID, if there is one. time: seconds since 1970."""

    kind: Kind
    text: str
    rank: int
    host: str
    job: str
    time: float


Hook = str | Callable[[Alert], object]


class Alerts:
    """The hook of a process: a function, "file.py:function", or "http://..." to which the alert is posted as JSON.

    Raises: PlanError for a hook that cannot be called, before anything is trained.
    """

    def __init__(self, hook: Hook | None) -> None:
        self._name = hook if isinstance(hook, str) else getattr(hook, "__name__", type(hook).__name__)
        self._call = _callable(hook)
        self._failed = False  # and has said so
        self._saying = threading.Lock()
        self._running: list[threading.Thread] = []

    def send(self, kind: Kind, text: str, *, rank: int) -> None:
        """In a thread of its own, for the watchdog goes on meanwhile."""
        if self._call is None:
            return
        job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
        alert = Alert(kind=kind, text=text, rank=rank, host=socket.gethostname(), job=job, time=time.time())
        thread = threading.Thread(target=self._run, args=(self._call, alert), name="alert", daemon=True)
        thread.start()
        self._running.append(thread)

    def finish(self) -> None:
        """Before the process ends: wait for hooks that run, `ALERT_S` in all."""
        end = time.monotonic() + ALERT_S
        for thread in self._running:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, call: Callable[[Alert], object], alert: Alert) -> None:
        try:
            call(alert)
        except Exception as error:  # whatever it is: a hook ends no job
            with self._saying:  # hooks fail in threads of their own, two of them at once
                first, self._failed = not self._failed, True
            if first:
                said = f"The alert hook {self._name} failed: {type(error).__name__}: {error}."
                print(said, file=sys.stderr, flush=True)


def _callable(hook: Hook | None) -> Callable[[Alert], object] | None:
    if hook is None:
        return None
    if not isinstance(hook, str):
        return hook
    if hook.startswith(("http://", "https://")):
        return _post(hook)
    file, _, name = hook.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise PlanError(
            f'alert={hook!r}: give "file.py:function" with a file that exists, or an address that begins with http://.'
        )
    try:
        module = import_file(Path(file))
    except ImportError as error:
        raise PlanError(f"alert={file!r} cannot be imported: {error}.") from error
    function: Callable[[Alert], object] | None = getattr(module, name, None)
    if not callable(function):
        raise PlanError(f"alert={hook!r}: {file} has no function {name!r}.")
    return function


def _post(address: str) -> Callable[[Alert], object]:
    def post(alert: Alert) -> None:
        body = json.dumps(asdict(alert)).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=ALERT_S):
            pass

    return post
