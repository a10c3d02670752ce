"""Ranks with a network card each, on a switch (network namespaces on a bridge), in which one link can be slow."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.hosts import CLONE_NEWNET

CARD = "card0"
_TOOLS = "/usr/sbin:/usr/bin:/sbin:/bin"


class Switch:
    """Ranks at 10.78.0.1, 10.78.0.2, ...: each in a namespace, the switch in one more."""

    def __init__(self, size: int) -> None:
        self.size, self.name = size, f"meshkit-{os.getpid()}"
        self.addresses = [f"10.78.0.{rank + 1}" for rank in range(size)]
        self._slowed: dict[int, list[int]] = {}  # ranks that a rank's messages to are slow

    def space(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    def lay_cables(self) -> None:
        hub = f"{self.name}-hub"
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "hub", "up")
        for rank, address in enumerate(self.addresses):
            space = self.space(rank)
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "link", "add", CARD, "netns", space, "type", "veth", "peer", "name", f"p{rank}", "netns", hub)
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", CARD)
            _run("ip", "-n", space, "link", "set", CARD, "up")
            _run("ip", "-n", hub, "link", "set", f"p{rank}", "master", "hub", "up")

    def slow_down(self, one: int, other: int, rate: str) -> None:
        """What these two send each other goes at this rate ("20mbit"); what they send others is as before."""
        for source, target in ((one, other), (other, one)):
            tc, slowed = ["tc", "-n", self.space(source)], self._slowed.setdefault(source, [])
            if not slowed:
                _run(*tc, "qdisc", "replace", "dev", CARD, "root", "handle", "1:", "htb", "default", "10")
                _run(*tc, "class", "add", "dev", CARD, "parent", "1:", "classid", "1:10", "htb", "rate", "10gbit")
            slowed.append(target)
            of_link = f"1:{10 + len(slowed)}"
            _run(
                *tc,
                "class",
                "add",
                "dev",
                CARD,
                "parent",
                "1:",
                "classid",
                of_link,
                *f"htb rate {rate} burst 2k".split(),
            )
            match = ["match", "ip", "dst", f"{self.addresses[target]}/32", "flowid", of_link]
            _run(*tc, "filter", "add", "dev", CARD, "protocol", "ip", "parent", "1:0", "prio", "1", "u32", *match)

    def enter(self, rank: int) -> None:
        """Put this process on the rank's network, for good. Before it has threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.space(rank)}") as space:
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def switch(size: int) -> Iterator[Switch]:
    """Raises: OSError where this is not allowed, with the reason."""
    made = Switch(size)
    try:
        made.lay_cables()
        yield made
    finally:
        for name in [made.space(rank) for rank in range(size)] + [f"{made.name}-hub"]:
            subprocess.run(["ip", "netns", "delete", name], env={"PATH": _TOOLS}, capture_output=True, check=False)


def _run(*words: str) -> None:
    done = subprocess.run(words, env={"PATH": _TOOLS}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
