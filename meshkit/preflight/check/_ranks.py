"""Forked ranks: a small gloo world on CPU for a check from a plain script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshkit.errors import CheckError


def on_ranks(size: int, function: Callable[[], Any], timeout_s: float) -> Any:
    """Call `function` on every rank of a forked gloo world, and return the result of rank 0.

    Forked ranks start at once, know all that this process knows (functions of a notebook too), and see no accelerator.
    Raises: what a rank raised; CheckError if one died or did not answer within `timeout_s`.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="meshkit-check-") as folder:
        ranks: list[tuple[Connection, Any]] = []
        for rank in range(size):
            connection, child_connection = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, folder, child_connection, function, timeout_s), daemon=True
            )
            process.start()
            child_connection.close()
            ranks.append((connection, process))
        try:
            return _collect([connection for connection, _ in ranks], timeout_s)
        finally:
            for connection, process in ranks:
                process.kill()
                process.join()
                connection.close()


def _collect(connections: list[Connection], timeout_s: float) -> Any:
    until = time.monotonic() + timeout_s
    waiting = dict(enumerate(connections))
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    while waiting:
        ready = wait(list(waiting.values()), 3.0 if errors else max(0.0, until - time.monotonic()))
        if not ready:
            break
        for rank, connection in list(waiting.items()):
            if connection not in ready:
                continue
            del waiting[rank]
            try:
                ok, value = connection.recv()
            except (EOFError, ConnectionResetError):
                ok, value = False, CheckError(f"check: the process of rank {rank} died.")
            if ok:
                results[rank] = value
            else:
                errors[rank] = value
    if errors:
        raise errors[min(errors, key=lambda rank: (isinstance(errors[rank], CheckError), rank))]
    if waiting:
        raise CheckError(
            f"check: ranks {sorted(waiting)} said nothing for {timeout_s} s. Give smaller shapes, or more timeout_s."
        )
    return results[0]


def _serve(
    rank: int, size: int, folder: str, connection: Connection, function: Callable[[], Any], timeout_s: float
) -> None:
    torch.set_num_threads(1)  # fork copies no threads: an operator would wait for the parent's thread pool for ever
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    try:
        store = _store(rank, size, Path(folder) / "port", timedelta(seconds=timeout_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        connection.send((True, function()))
    except Exception as error:
        if "autograd's threading" in str(error):  # torch's words of a process forked from one with threads
            error = CheckError(
                "check: a backward of this process started threads for a device (a GPU), and ranks that are forked from it "
                "cannot run one. Check in a process that has run no backward yet, or under torchrun."
            )
        error.add_note(f"on rank {rank} of {size} of a check:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = CheckError(f"check: rank {rank} raised:\n{traceback.format_exc()}")
        connection.send((False, error))
    connection.poll(timeout_s)  # keep sockets open until all have answered; the parent kills sooner


def _store(rank: int, size: int, port: Path, timeout: timedelta) -> TCPStore:
    """A TCP store that rank 0 serves at a free port, which the others read from a file."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.005)
    return TCPStore("127.0.0.1", int(port.read_text()), size, is_master=False, timeout=timeout, wait_for_workers=False)
