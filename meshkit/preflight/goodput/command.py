"""`python -m meshkit goodput`: what failures, restarts and checkpoints leave of the wall clock, and the best interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from meshkit.errors import PlanError
from meshkit.preflight.estimate.command import parse_bytes
from meshkit.preflight.goodput._faults import Faults, in_memory, on_storage
from meshkit.preflight.goodput._goodput import goodput

BYTES = arg(metavar="BYTES")


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Say what share of the wall clock a long run trains, what the rest goes into, and how often it should save.

    For 405B parameters (12 bytes each in fp32 with AdamW) on 16,384 GPUs: --ranks 16384 --step-s 20 --device-mtbf-h 45566
    --state 4.86TB --storage 2TB --save-s 5. Nothing is run: closed forms of these numbers.
    """

    ranks: int
    step_s: float
    """mean seconds of an optimizer step, without jitter"""
    device_mtbf_h: float
    """mean hours between failures of one device with its part of host, network and software"""
    state: Annotated[str, BYTES]
    """parameters and optimizer state, once: 12 bytes a parameter in fp32 with AdamW; 840GB"""
    storage: Annotated[str, BYTES]
    """bytes a second of the storage, for the whole job: 20GB"""
    host: Annotated[str, BYTES] = "20GB"
    """bytes a second from a device to its host, of one rank"""
    save_s: float = 0.0
    """what a save blocks besides its copy"""
    interval_s: float | None = None
    """seconds of steps between two saves on storage; default: the best"""
    in_memory: bool = False
    """checkpoints in the memory of the hosts inside those on storage, as --memory-every of the recipes"""
    copies: int = 1
    """of those on other hosts"""
    beyond_copies: float = 0.0
    """share of failures in which more hosts are lost than copies, so that storage is loaded; with 0 it is never"""
    network: Annotated[str, BYTES] = "10GB"
    """bytes a second between hosts, of one rank, for those copies"""
    memory_interval_s: float | None = None
    """seconds of steps between two saves in memory; default: the best"""
    memory_restart_s: float | None = None
    """of a restart from memory; default: --restart-s"""
    detect_s: float = Faults.detect_s
    """from a failure to the end of all ranks"""
    restart_s: float = Faults.restart_s
    """from there to the load: reschedule, processes, rendezvous, compile"""
    host_lost: float = Faults.host_lost
    """share of failures after which a host must be repaired"""
    repair_h: float = Faults.repair_h
    """hours until it is"""
    devices_per_host: int = Faults.devices_per_host
    replicas: int = 1
    """copies of the state in the job, dp_replicate: each is read at a restart"""
    jitter: float = Faults.jitter
    """standard deviation of the time that a rank works in a step, over its mean"""
    multiple: int | None = None
    """ranks of one copy of the model: also say what shrinking by them gives"""


def command(options: GoodputOptions) -> None:
    if options.ranks < 1 or options.copies < 0 or options.replicas < 1:
        raise PlanError(
            f"--ranks {options.ranks} --replicas {options.replicas} --copies {options.copies}: at least one rank and one "
            "replica, and copies from 0 up."
        )
    sizes = {
        name: parse_bytes(text, flag=f"--{name}", least=1)
        for name, text in (
            ("state", options.state),
            ("storage", options.storage),
            ("host", options.host),
            ("network", options.network),
        )
    }
    faults = Faults(
        device_mtbf_h=options.device_mtbf_h,
        devices_per_host=options.devices_per_host,
        detect_s=options.detect_s,
        restart_s=options.restart_s,
        host_lost=options.host_lost,
        repair_h=options.repair_h,
        jitter=options.jitter,
    )
    kinds = [
        on_storage(
            sizes["state"],
            options.ranks,
            storage_bytes_per_s=sizes["storage"],
            host_bytes_per_s=sizes["host"],
            fixed_s=options.save_s,
            replicas=options.replicas,
            interval_s=options.interval_s,
        )
    ]
    if options.in_memory:
        memory = in_memory(
            sizes["state"],
            options.ranks,
            host_bytes_per_s=sizes["host"],
            network_bytes_per_s=sizes["network"],
            copies=options.copies,
            host_lost=options.host_lost,
            beyond_copies=options.beyond_copies,
            replicas=options.replicas,
            interval_s=options.memory_interval_s,
            restart_s=options.memory_restart_s,
        )
        # What survives every failure leaves nothing for the storage to be loaded after.
        kinds = [memory] if memory.survives == 1 else [memory, *kinds]
    print(
        goodput(step_s=options.step_s, ranks=options.ranks, faults=faults, checkpoints=kinds, multiple=options.multiple)
    )
