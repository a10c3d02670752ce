"""Jail (bubblewrap, else util-linux's unshare): the command that starts a process in namespaces of its own.

Both are other people's, well kept, and need no rights where the kernel lets users have namespaces.
"""

from __future__ import annotations

import compileall
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from meshkit.errors import RewardError

INSIDE = Path(__file__).parent
"""folder from which the bare interpreter imports `_inside`"""
_START = "import sys; sys.path.insert(0, sys.argv[1]); from _inside.main import main; main()"
_SYSTEM = ("/usr", "/lib", "/lib64")

Tool = Literal["bubblewrap", "unshare", "none"]


@dataclass(frozen=True, kw_only=True)
class Jail:
    """How a process is started."""

    tool: Tool
    command: tuple[str, ...]
    readable: tuple[str, ...]
    """folders that it may read"""


@cache
def compile_inside() -> None:
    """So that no run compiles it again: nothing inside can write bytecode. An installed package has it already."""
    compileall.compile_dir(INSIDE / "_inside", quiet=2)


def find_tool() -> Tool:
    """The best one that is installed. Raises: RewardError where there is none."""
    if shutil.which("bwrap"):
        return "bubblewrap"
    if shutil.which("unshare") and shutil.which("setpriv"):
        return "unshare"
    raise RewardError(
        "run_sandboxed needs namespaces, but neither bwrap nor unshare and setpriv are installed. "
        "Install bubblewrap, or pass SandboxLimits(namespaces=False) on Linux 6.12 or later."
    )


def jail(tool: Tool, folder: str | None) -> Jail:
    """The command for an interpreter inside, without site-packages; `folder`: where it mounts a file system of its own."""
    # Not the virtual environment's: it is a link to this one, with a folder that nobody need read.
    python = str(getattr(sys, "_base_executable", sys.executable))
    readable = tuple(dict.fromkeys((sys.base_prefix, *_SYSTEM)))
    # -I and -S: no user site, no PYTHON* variables and no .pth files, any of which could run code before the sandbox is
    # closed. -B: there is nowhere to write bytecode.
    interpreter = (python, "-I", "-S", "-B", "-c", _START, str(INSIDE))
    command: tuple[str, ...] = ()
    if tool == "bubblewrap":
        command = (_where("bwrap"), *_bubblewrap(readable, folder))
    elif tool == "unshare":
        # setpriv: unshare dies with the job; --kill-child: the process inside, and with it all there is, dies with unshare.
        command = (
            _where("setpriv"),
            "--pdeathsig",
            "KILL",
            "--",
            _where("unshare"),
            "--user",
            "--map-root-user",
            "--pid",
        )
        command += ("--fork", "--kill-child", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--")
    return Jail(tool=tool, command=(*command, *interpreter), readable=readable)


def _where(program: str) -> str:
    # By its path: nothing inside has the job's PATH.
    return shutil.which(program) or program


def _bubblewrap(readable: tuple[str, ...], folder: str | None) -> list[str]:
    # Each by its name, not --unshare-all: that goes on without user namespaces where there are none.
    options = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    options += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in (*readable, "/etc/ld.so.cache", str(INSIDE)):
        options += ["--ro-bind-try", path, path]
    if folder:
        # To mount there; `confine` drops it. It is a right within the new namespaces only.
        options += ["--dir", folder, "--cap-add", "CAP_SYS_ADMIN"]
    return [*options, "--remount-ro", "/", "--chdir", "/", "--"]
