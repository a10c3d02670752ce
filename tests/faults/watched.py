"""A job whose rank 1 stays away, or raises, under alerts and a status page."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import meshkit as mk


def main(fault: str) -> None:
    mesh = mk.init_mesh("dp_shard=2", timeout=timedelta(seconds=60))
    if mesh.rank == 1:
        if fault == "raise":
            raise ValueError("this rank has had enough")
        time.sleep(7 if fault == "stay" else 0)
    if fault == "own" and mesh.rank == 0:
        mk.faults.send_alert("the loss is 12.3")
    dist.all_reduce(torch.ones(1), group=mesh.group)


if __name__ == "__main__":
    fault, alert, page = sys.argv[1:]
    mk.run_main(
        lambda: main(fault),
        stall_s=1.5 if fault == "stay" else 60,
        alert=alert or None,
        page=Path(page) if page else None,
    )
