"""Sandbox for untrusted code (Landlock, seccomp, rlimits): a Python program that may compute and do nothing else."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from meshkit.errors import RewardError

_CHILD = Path(__file__).with_name("_sandbox_child.py")
_MOST_BYTES = 1 << 14
"""of a verdict; what a program writes beyond that is not read"""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits on time, memory and files of a program."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    """of address space; Python itself takes about 20 MiB"""
    file_bytes: int = 0
    """of each file, in a folder that is deleted afterwards; the number of files has no limit. 0: no file can be written"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a program ended."""

    end: Literal["passed", "raised", "timed out", "killed"]
    text: str
    """what was raised and where; the limit it met; the signal"""


def run_sandboxed(program: str, *, limits: SandboxLimits | None = None) -> Verdict:
    """Run a program to its end in a process of its own, without site-packages; what it prints is thrown away.

    The process has limits on time, memory and files, no capabilities and no new privileges. A seccomp filter refuses new
    processes and threads, sockets, signals, and calls about other processes. Landlock allows it to read only Python's folders
    and the system's libraries. It is killed when its time is up, or when this process ends. A program has "passed" only if
    it ran to its last line; exit(0) before that is "killed".
    This protects the run from mistakes, fork bombs and attempts at cheating. It does not protect from an exploit of the
    kernel, nor from a program that searches the interpreter's frames for the password of a pass.
    Raises: RewardError where the system lacks one of these. It needs Linux 5.13 or later on x86-64 or 64-bit Arm.
    Source: landlock(7), seccomp(2), setrlimit(2).
    """
    limits = SandboxLimits() if limits is None else limits
    # Only the child's own code writes it into a verdict: what a program writes to the pipe is none.
    password = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="meshkit-sandbox-") if limits.file_bytes else nullcontext() as folder:
        order = {**asdict(limits), "program": program, "password": password, "folder": folder}
        read, write = os.pipe()
        try:
            process = _start(write)
            # Our copy of the write end: while it is open, the death of the child would not end the pipe.
            os.close(write)
            try:
                reply = _listen(process, json.dumps(order).encode(), read, limits.wall_s)
            finally:
                _kill(process)
        finally:
            os.close(read)
    return _verdict(reply, process, password, limits)


def _start(pipe: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -I and -S: no user site, no PYTHON* variables and no .pth files, any of which could run code before the sandbox is
        # closed. -B: there is nowhere to write bytecode.
        [sys.executable, "-I", "-S", "-B", str(_CHILD), str(pipe), sys.base_prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[pipe],
        # Tokens and passwords of the job live in its environment.
        env={},
        # A process group of its own, for os.killpg; and no terminal to write to.
        start_new_session=True,
        bufsize=0,
    )


def _listen(process: subprocess.Popen[bytes], order: bytes, read: int, wall_s: float) -> bytes | None:
    """The bytes that the child wrote to its pipe until it ended; None when time is up. It never blocks on the child."""
    assert process.stdin is not None
    deadline = time.monotonic() + wall_s
    stdin = process.stdin.fileno()
    # A child that never reads would block a write of more than a pipe holds, beyond any deadline.
    os.set_blocking(stdin, False)
    reply = b""
    while True:
        left = deadline - time.monotonic()
        readable, writable, _ = select.select([read], [stdin] if order else [], [], max(0.0, left))
        if left <= 0 or not (readable or writable):
            return None
        if writable:
            try:
                # A pipe takes 64 KiB at a time; the rest waits for the next round.
                order = order[os.write(stdin, order) :]
            except BrokenPipeError:
                # The child has died before it read all; the end of its pipe says so next.
                order = b""
            if not order:
                process.stdin.close()
        if readable:
            more = os.read(read, _MOST_BYTES)
            reply += more
            if not more or len(reply) > _MOST_BYTES:
                return reply


def _kill(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(0.2)  # a child that has replied exits by itself, and its status says how
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _verdict(reply: bytes | None, process: subprocess.Popen[bytes], password: str, limits: SandboxLimits) -> Verdict:
    if reply is None:
        return Verdict(end="timed out", text=f"not done within {limits.wall_s} s")
    try:
        # The last line: the program itself may have found the pipe and written before.
        last = json.loads(reply.splitlines()[-1])
    except (IndexError, ValueError):
        last = {}
    if isinstance(last, dict) and last.get("password") == password:
        if "refused" in last:
            raise RewardError(f"run_sandboxed: {last['refused']}. Run it on Linux 5.13 or later, x86-64 or 64-bit Arm.")
        if "passed" in last:
            return Verdict(end="passed", text="")
        return Verdict(end="raised", text=str(last.get("raised")))
    status = process.returncode
    # Of processor time; a program that sleeps meets the wall clock in `_listen`.
    if status == -signal.SIGXCPU:
        return Verdict(end="timed out", text=f"more than {limits.cpu_s} s of processor time")
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return Verdict(end="killed", text=f"it left before its end: {name}")
