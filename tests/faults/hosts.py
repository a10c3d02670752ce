"""Two hosts on one machine: network namespaces joined by a cable, each with a host name of its own."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
CARD = "cable0"
_TOOLS = "/usr/sbin:/usr/bin:/sbin:/bin"


class Hosts:
    """Two namespaces: addresses 10.77.0.1 and 10.77.0.2, names host-a and host-b."""

    addresses = ("10.77.0.1", "10.77.0.2")
    names = ("host-a", "host-b")

    def __init__(self) -> None:
        self.spaces = tuple(f"meshkit-{os.getpid()}-{letter}" for letter in "ab")

    def lay_cable(self) -> None:
        a, b = self.spaces
        for space in self.spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("link", "add", CARD, "netns", a, "type", "veth", "peer", "name", CARD, "netns", b)
        for space, address in zip(self.spaces, self.addresses, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", CARD)
            _ip("-n", space, "link", "set", CARD, "up")

    def cut(self) -> None:
        _ip("-n", self.spaces[0], "link", "set", CARD, "down")

    def mend(self) -> None:
        _ip("-n", self.spaces[0], "link", "set", CARD, "up")

    def slow_down(self, rate: str) -> None:
        """Both ways of the cable, from now on."""
        for space in self.spaces:
            _run(
                "tc",
                "-n",
                space,
                "qdisc",
                "add",
                "dev",
                CARD,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "4k",
                "latency",
                "1s",
            )

    def enter(self, host: int) -> None:
        """Put this process on the host, for good. Before it has threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.spaces[host]}") as space:
            if libc.setns(space.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), "setns or unshare")
        socket.sethostname(self.names[host])

    def command(self, host: int, command: list[str]) -> list[str]:
        """The same for a command."""
        lines = (
            f"import os, sys; sys.path.insert(0, {os.getcwd()!r})",
            "from tests.faults.hosts import Hosts",
            f"hosts = Hosts(); hosts.spaces = {self.spaces!r}; hosts.enter({host})",
            "os.execv(sys.argv[1], sys.argv[1:])",
        )
        return [sys.executable, "-c", "\n".join(lines), *command]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Raises: OSError where this is not allowed, with the reason."""
    hosts = Hosts()
    try:
        hosts.lay_cable()
        yield hosts
    finally:
        for space in hosts.spaces:
            subprocess.run(["ip", "netns", "delete", space], env={"PATH": _TOOLS}, capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, env={"PATH": _TOOLS}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
