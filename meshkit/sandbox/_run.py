"""Sandbox, the side of the job: starts a program and its tests in two jails, waits, kills, and reads the tests' verdict."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from typing import Any, Literal

from meshkit.errors import RewardError
from meshkit.sandbox._jail import Jail, Tool, compile_inside, find_tool, jail

_MOST_BYTES = 1 << 14
"""of a verdict; what is written beyond that is not read"""
_SLACK_S = 5.0
"""for the kernel to end what was killed"""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits on time, memory and files of a program, and as much again for its tests."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    """of address space; Python itself takes about 20 MiB"""
    file_bytes: int = 0
    """of all files together, at most 1024, in a folder in memory that is gone afterwards. 0: no file can be written"""
    namespaces: bool = True
    """False: no namespaces, for containers that allow none. It then needs Linux 6.12, and file_bytes=0"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a program ended."""

    end: Literal["passed", "ended", "raised", "timed out", "killed"]
    """passed: every test holds. ended: without tests, by its own word"""
    text: str
    """what was raised and where; the limit it met; the signal"""
    printed: str = ""
    """without tests, by a program that ended: the first 1,000 characters"""


def run_sandboxed(program: str, *, tests: str | None = None, limits: SandboxLimits | None = None) -> Verdict:
    """Run a Python program, and then its tests, each in an interpreter and a sandbox of its own, without site-packages.

    tests: plain Python with asserts. Functions and classes of the program that they name are called over a pipe: the program
    gets arguments, never what is expected, and results come back as plain data (numbers, text, lists, ...) that the
    tests' own interpreter compares. Objects of other types stay in the program: they can be called and read, not compared.
    Without tests the verdict is the program's own word: "ended" is no pass.

    Each process has namespaces of its own (bubblewrap, else unshare), reads Python and system libraries only (Landlock),
    makes system calls of an allow-list only (seccomp), and meets limits on time, memory and files. It dies with this process.
    What it protects from, and what not, is in `docs/sandbox.md`.
    Raises: RewardError where the system lacks one of these; nothing has run then.
    Source: bwrap(1), unshare(1), landlock(7), seccomp(2), setrlimit(2).
    """
    limits = SandboxLimits() if limits is None else limits
    if limits.file_bytes and not limits.namespaces:
        raise RewardError(
            f"run_sandboxed(file_bytes={limits.file_bytes}, namespaces=False): without a mount namespace nothing bounds "
            "the number of files. Pass file_bytes=0."
        )
    compile_inside()
    tool: Tool = find_tool() if limits.namespaces else "none"
    with ExitStack() as stack:
        folder = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix="meshkit-sandbox-")) if limits.file_bytes else None
        )
        start = _Start(jail=jail(tool, folder), limits=limits, folder=folder)
        if tests is None:
            alone = stack.enter_context(start.process("alone", program, line=()))
            return _verdict([alone], alone, _wait([alone], alone, limits), limits)
        to_program, from_tests = _pipe(stack)
        to_tests, from_program = _pipe(stack)
        run = stack.enter_context(start.process("program", program, line=(to_program, from_program)))
        judge = stack.enter_context(start.process("tests", tests, line=(to_tests, from_tests)))
        # Our copies: while they are open, the death of one side would not end the other's pipe.
        for end in (to_program, from_tests, to_tests, from_program):
            end.close()
        return _verdict([run, judge], judge, _wait([run, judge], judge, limits), limits)


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    # Files, not numbers: closing one twice would close what another thread has opened in between.
    read, write = os.pipe()
    return stack.enter_context(FileIO(read, "r")), stack.enter_context(FileIO(write, "w"))


@dataclass(eq=False, kw_only=True)
class _Process:
    popen: subprocess.Popen[bytes]
    word: FileIO
    """end of the pipe to which it says how it goes"""
    notes: FileIO
    """its stderr, until it is confined"""
    said: bytes = b""
    closed: bool = False
    """nothing more will be read from it"""
    began: float = field(default_factory=time.monotonic)

    @property
    def first(self) -> dict[str, Any]:
        """Of the sandbox itself; later messages may be the program's."""
        return next(iter(self.messages()), {})

    def messages(self) -> list[dict[str, Any]]:
        messages = []
        for text in self.said.splitlines():
            with suppress(ValueError, RecursionError):
                messages.append(json.loads(text))
        return [each for each in messages if isinstance(each, dict)]


@dataclass(frozen=True, kw_only=True)
class _Start:
    jail: Jail
    limits: SandboxLimits
    folder: str | None

    @contextmanager
    def process(self, role: str, source: str, *, line: tuple[FileIO, ...]) -> Iterator[_Process]:
        """A process that is dead when the context ends, and with it all that it started."""
        with ExitStack() as stack:
            word, their_word = _pipe(stack)
            their_alive, _ = _pipe(stack)  # the other end is open for as long as this process lives
            order = {
                "role": role,
                "source": source,
                "limits": asdict(self.limits),
                "namespaces": self.limits.namespaces,
                "readable": self.jail.readable,
                "folder": self.folder,
                "word": their_word.fileno(),
                "alive": their_alive.fileno(),
                "line": [end.fileno() for end in line],
            }
            # Files in memory: a pipe would have to be fed and drained while we wait.
            stdin = stack.enter_context(FileIO(os.memfd_create("order"), "r+"))
            notes = stack.enter_context(FileIO(os.memfd_create("notes"), "r+"))
            stdin.write(json.dumps(order).encode())
            stdin.seek(0)
            popen = subprocess.Popen(
                self.jail.command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=notes,
                pass_fds=[end.fileno() for end in (their_word, their_alive, *line)],
                # Tokens and passwords of the job live in its environment.
                env={},
                # A process group of its own, for os.killpg; and no terminal to write to.
                start_new_session=True,
            )
            stack.callback(_kill, popen)
            their_word.close()
            yield _Process(popen=popen, word=word, notes=notes)


def _kill(popen: subprocess.Popen[bytes]) -> None:
    # Not yet waited for, so its number is still its own.
    if popen.poll() is None:
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait(_SLACK_S)


def _wait(processes: list[_Process], judge: _Process, limits: SandboxLimits) -> bool:
    """Whether the one whose word counts has said it, or died, in time."""
    deadline = time.monotonic() + limits.wall_s
    waiting = {process.word.fileno(): process for process in processes}
    poll = select.poll()
    for word in waiting:
        poll.register(word, select.POLLIN)
    while judge.word.fileno() in waiting:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        for word, _ in poll.poll(left_s * 1000):
            process = waiting[word]
            more = os.read(word, _MOST_BYTES)
            process.said += more
            if not more or len(process.said) > _MOST_BYTES:
                poll.unregister(word)
                del waiting[word]
                process.closed = True
                if "confined" not in process.first:
                    return True
    return True


def _verdict(processes: list[_Process], judge: _Process, in_time: bool, limits: SandboxLimits) -> Verdict:
    for process in processes:
        if refused := process.first.get("refused"):
            raise RewardError(f"run_sandboxed: {refused}")
    for process in processes:
        if process.closed and "confined" not in process.first:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(_SLACK_S)
            process.notes.seek(0)
            notes = process.notes.read(2000).decode(errors="replace").strip().splitlines()
            why = notes[-1] if notes else f"exit status {process.popen.returncode}"
            raise RewardError(
                f"run_sandboxed: the jail did not start: {why}. "
                "Allow user namespaces, or pass SandboxLimits(namespaces=False) on Linux 6.12 or later."
            )
    if not in_time:
        return Verdict(end="timed out", text=f"not done within {limits.wall_s} s")
    last = judge.messages()[-1]
    if last.get("passed") is True and judge is not processes[0]:
        return Verdict(end="passed", text="")
    if last.get("ended") is True and judge is processes[0]:
        return Verdict(end="ended", text="", printed=str(last.get("printed", "")))
    if "raised" in last:
        text = str(last["raised"])
        return Verdict(
            end="raised",
            text=f"MemoryError: more than {limits.memory_bytes} bytes" if text.startswith("MemoryError") else text,
        )
    return _how_it_died(processes[0], limits, str(last.get("left", "")))


def _how_it_died(process: _Process, limits: SandboxLimits, text: str) -> Verdict:
    # It has closed its pipe, and exits by itself, or is killed with the rest.
    with suppress(subprocess.TimeoutExpired):
        process.popen.wait(0.5)
    status = process.popen.returncode
    if status is None:
        return Verdict(end="killed", text=f"it left before its end: {text or 'it said no verdict'}")
    # bwrap gives the number of a signal as 128 + n. unshare dies of the same one; of SIGKILL that of util-linux before 2.39
    # cannot, and says so.
    number = -status if status < 0 else status - 128
    process.notes.seek(0)
    if status == 1 and b"sigprocmask unblock failed" in process.notes.read(2000):
        number = signal.SIGKILL
    # Of processor time: SIGXCPU; the first process of a namespace ignores that, and is killed a second later.
    spent = time.monotonic() - process.began >= limits.cpu_s
    if number == signal.SIGXCPU or (number == signal.SIGKILL and spent):
        return Verdict(end="timed out", text=f"more than {limits.cpu_s} s of processor time")
    name = signal.Signals(number).name if number in set(signal.Signals) else f"exit status {status}"
    return Verdict(end="killed", text=f"it left before its end: {name}")
