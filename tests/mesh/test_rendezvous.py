"""A world is made of those that are here: a job that torchrun has restarted never meets the processes of its former life."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from tests.world import fork

END_S = 60.0


def meet(rank: int, size: int, port: int, life: int, late_s: float, timeout_s: float, log: str) -> None:
    """Join a world as under torchrun, add up (life + rank) over it, and leave without a farewell."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",  # as on a host that was restarted because of another
    }
    time.sleep(late_s)
    try:
        mk.init_mesh("dp_shard=-1", device_type="cpu", timeout=timedelta(seconds=timeout_s))
        total = torch.tensor(100.0 * life + rank)
        dist.all_reduce(total)
        said = f"{total:.0f}"
    except mk.MeshkitError as error:
        said = str(error)
    with Path(log).open("a") as file:
        file.write(said + "\n")
    os._exit(0)


def live(log: Path, store: dist.TCPStore, life: int, late_s: dict[int, float], *, size: int, timeout_s: float) -> None:
    """One life of a job: ranks, each late by so much; a rank that is not in late_s never comes."""
    ranks = [fork(meet, rank, size, store.port, life, late, timeout_s, str(log)) for rank, late in late_s.items()]
    try:
        for each in ranks:
            each.join(END_S)
        assert [each.exitcode for each in ranks] == [0] * len(ranks), log.read_text() if log.exists() else ""
    finally:
        for each in ranks:
            each.kill()


@pytest.fixture
def store() -> dist.TCPStore:
    """As torchrun's: it outlives the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_each_life_of_a_job_meets_on_the_same_store(late: int, store: dist.TCPStore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for life, size in ((1, 3), (2, 3), (3, 2), (4, 4)):  # the third as after the loss of a host
        delays = {rank: 0.5 * (rank == late) for rank in range(size)}
        live(log, store, life, delays, size=size, timeout_s=30)
    assert log.read_text().split() == ["303"] * 3 + ["603"] * 3 + ["601"] * 2 + ["1606"] * 4


@pytest.mark.parametrize(("missing", "who"), [(0, "rank 0"), (2, "rank 2 of 3")])
def test_who_does_not_come_is_named(missing: int, who: str, store: dist.TCPStore, tmp_path: Path) -> None:
    live(tmp_path / "first", store, 1, dict.fromkeys(range(3), 0.0), size=3, timeout_s=30)
    here = {rank: 0.0 for rank in range(3) if rank != missing}
    live(tmp_path / "second", store, 2, here, size=3, timeout_s=6)  # traces of the missing one are in the store
    said = re.findall(rf"init_mesh: {who} did not come to \S+ within 6 s", (tmp_path / "second").read_text())
    assert len(said) == 2
