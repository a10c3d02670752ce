"""What a rank asks of its communicators, in the order of its host: calls, and waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Group:
    """A process group. ranks: of the world. axis: of the mesh, for people."""

    name: str
    ranks: tuple[int, ...]
    axis: str = field(default="", compare=False)

    def __hash__(self) -> int:
        return hash(self.name)  # of all ranks besides it would be made anew in each look at a dict

    def __str__(self) -> str:
        return f"{self.axis or self.name} {list(self.ranks)}"


@dataclass(frozen=True)
class Part:
    """A send or a receive. peer: rank of the world. size: bytes."""

    op: Literal["send", "recv"]
    peer: int
    size: int

    def __str__(self) -> str:
        return f"{self.op} {'to' if self.op == 'send' else 'from'} rank {self.peer}"


@dataclass(frozen=True)
class Call:
    """A collective, or one or more sends and receives. size: elements, None where ranks may differ. parts: of
    point-to-point. batched: by `batch_isend_irecv`. waited: the compute stream waits for it at once. on_host: between
    hosts, beside the communicators. where: file and line."""

    op: str
    group: Group
    size: int | None = None
    dtype: str = ""
    parts: tuple[Part, ...] = ()
    batched: bool = True
    waited: bool = False
    on_host: bool = False
    where: str = ""

    def __str__(self) -> str:
        what = ", ".join(map(str, self.parts)) or f"{self.op} over {self.group}"
        return f"{what} ({self.where})" if self.where else what


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the call of that index, among the rank's events."""

    of: int


@dataclass(frozen=True)
class HostWait:
    """The host waits for the compute stream, as `.item()` does."""

    where: str = ""

    def __str__(self) -> str:
        return f"waits for its device ({self.where})" if self.where else "waits for its device"


Event = Call | Wait | HostWait
