"""What fails and how often (MTBF), and what checkpoints cost: blocking seconds, writing, loading."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import Any

from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Failures of a job, and its restart. A cluster hands it over.

    A failure stops all ranks. They come at random and independently (exponential times between them).
    """

    device_mtbf_h: float
    """mean hours between failures of one device, with its part of the host, the network and the software"""
    devices_per_host: int = 8
    detect_s: float = 20.0
    """from a failure to the end of all ranks; what `run_main(stall_s=)` takes for a rank that hangs"""
    restart_s: float = 600.0
    """from there to the load: reschedule, processes, rendezvous, compile, first allocations"""
    host_lost: float = 1.0
    """share of failures after which the host must be repaired or replaced"""
    repair_h: float = 24.0
    """until that host, or another for it, can be used"""
    jitter: float = 0.0
    """standard deviation of the time that a rank works in a step, over its mean"""

    def __post_init__(self) -> None:
        refuse_odd(self, positive=("device_mtbf_h", "devices_per_host"), shares=("host_lost",))

    def rate_per_s(self, ranks: int) -> float:
        """Failures of the job per second."""
        return ranks / (3600.0 * self.device_mtbf_h)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """One kind of checkpoint: how long a save blocks, when it counts, and after which failures it can be loaded.

    interval_s: from one save to the next, in seconds of steps; None: the best. survives: the share of failures after which
    there is one to load. restart_s: in place of `Faults.restart_s` where this kind starts ranks anew in another way.
    """

    name: str
    blocking_s: float
    """all ranks wait so long in a save"""
    write_s: float = 0.0
    """from there until it can be loaded, beside training"""
    load_s: float = 0.0
    survives: float = 1.0
    interval_s: float | None = None
    restart_s: float | None = None

    def __post_init__(self) -> None:
        refuse_odd(self, positive=(), shares=("survives",))


def on_storage(
    state_bytes: int,
    ranks: int,
    *,
    storage_bytes_per_s: float,
    host_bytes_per_s: float,
    fixed_s: float = 0.0,
    replicas: int = 1,
    interval_s: float | None = None,
) -> Checkpoints:
    """`Checkpointer.save`, asynchronous: a save blocks for the copy of a rank's share to the host, then storage is written.

    state_bytes: parameters and optimizer state once; 12 bytes a parameter with fp32 and AdamW. replicas: copies of the state
    in the job (dp_replicate): written once, read by all. fixed_s: what a save blocks besides, as a step that is late.
    """
    share_bytes = state_bytes * replicas / ranks
    return Checkpoints(
        name="on storage",
        blocking_s=fixed_s + share_bytes / host_bytes_per_s,
        write_s=state_bytes / storage_bytes_per_s,
        load_s=state_bytes * replicas / storage_bytes_per_s,
        interval_s=interval_s,
    )


def in_memory(
    state_bytes: int,
    ranks: int,
    *,
    host_bytes_per_s: float,
    network_bytes_per_s: float,
    copies: int = 1,
    host_lost: float = 1.0,
    beyond_copies: float = 0.0,
    fixed_s: float = 0.0,
    replicas: int = 1,
    interval_s: float | None = None,
    restart_s: float | None = None,
) -> Checkpoints:
    """`Checkpointer.save_in_memory`: a rank's share into the RAM disk of its host and, beside training, of `copies` others.

    What is on the RAM disk outlives processes; a lost host takes its own along, so without copies this kind survives only
    the failures that leave the host (1 - host_lost), and with them all but the share `beyond_copies`, in which more hosts
    are lost than there are copies. network_bytes_per_s: of a rank. restart_s: of `run_main(restarts=)`.
    """
    share_bytes = state_bytes * replicas / ranks
    return Checkpoints(
        name="in memory",
        blocking_s=fixed_s + share_bytes / host_bytes_per_s,
        write_s=copies * share_bytes / network_bytes_per_s,
        load_s=share_bytes / min(host_bytes_per_s, network_bytes_per_s if copies else inf),
        survives=1.0 - (beyond_copies if copies else host_lost),
        interval_s=interval_s,
        restart_s=restart_s,
    )


def refuse_odd(record: Any, *, positive: tuple[str, ...], shares: tuple[str, ...]) -> None:
    """Raises: PlanError for a number that is below 0, not finite, or no share."""
    for field in fields(record):
        value = getattr(record, field.name)
        if not isinstance(value, (int, float)):
            continue
        low = "above 0" if field.name in positive else "from 0 to 1" if field.name in shares else "from 0 up"
        fits = (
            0 < value < inf if field.name in positive else 0 <= value < inf and (field.name not in shares or value <= 1)
        )
        if not fits:
            raise PlanError(f"{field.name}={value:g}: {type(record).__name__} needs a number {low}.")
