"""A link with a rate and a delay between two network namespaces, in user space: packets wait for their turn and their time.

For kernels without netem. Packets go in order, none is lost; what is in flight is bounded by the senders' windows.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from collections import deque

CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
CARD, MTU = "far0", 16_384
_TOOLS = "/usr/sbin:/usr/bin:/sbin:/bin"


def enter(space: str) -> None:
    """Put this process into the namespace. Before it has threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def card(space: str, address: str) -> int:
    """A network card of the namespace whose packets this process reads and writes: its file descriptor."""
    enter(space)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", CARD.encode(), IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {address}/24 dev {CARD}", f"link set {CARD} mtu {MTU} txqueuelen 1000 up"):
        subprocess.run(["ip", *words.split()], env={"PATH": _TOOLS}, check=True)
    return tun


def carry(source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
    """One way, for good: a packet leaves once those before it have, and comes `delay_s` after its last byte left."""
    waiting: deque[tuple[float, bytes]] = deque()
    ready = threading.Condition()

    def deliver() -> None:
        while True:
            with ready:
                while not waiting:
                    ready.wait()
                due, packet = waiting.popleft()
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    free = 0.0
    while True:
        packet = os.read(source, MTU)
        now = time.monotonic()
        free = max(free, now) + len(packet) / bytes_per_s
        if (ahead := free - now) > 0.05:  # the card's own queue holds the rest
            time.sleep(ahead - 0.05)
        with ready:
            waiting.append((free + delay_s, packet))
            ready.notify()


def main(one: str, other: str, addresses: str, bytes_per_s: str, delay_s: str) -> None:
    here, there = addresses.split(",")
    cards = card(one, here), card(other, there)
    for source, target in (cards, cards[::-1]):
        threading.Thread(target=carry, args=(source, target, float(bytes_per_s), float(delay_s)), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()  # until the parent closes it


if __name__ == "__main__":
    main(*sys.argv[1:])
