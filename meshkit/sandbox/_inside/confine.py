"""Confinement of a process by itself (Landlock, seccomp, rlimits, capabilities): it drops every right that it does not need.

Namespaces are there already, made by bubblewrap or unshare, which started this process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from typing import Any

from .calls import PROCESSORS, allow_only_listed

PARENT_DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVS = 1, 4, 38  # prctl(2)
SIGKILL = 9
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every processor
CAPABILITY_VERSION_3 = 0x20080522
NO_SUID_NO_DEV_NO_EXEC = 2 | 4 | 8  # mount(2)
MOST_FILES = 1024
"""in a folder of a program's own, folders too"""


class Refused(Exception):
    """The system lacks a part of the sandbox: what, and what to change."""


def confine(order: dict[str, Any]) -> None:
    """Drop all rights. The order matters: each step needs what a later one takes away."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder, limits = order["folder"], order["limits"]
    if platform.machine() not in PROCESSORS:
        raise Refused(f"there is no list of system calls for {platform.machine()}. Run it on x86-64 or 64-bit Arm.")
    # With namespaces the tool that made them has seen to it.
    if not order["namespaces"]:
        done(libc.prctl(PARENT_DEATH_SIGNAL, SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if folder:
        _mount_folder(libc, folder, limits["file_bytes"])
    os.chdir(folder or "/")
    # No core dump, and no process of the same user may attach.
    done(libc.prctl(DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    # Landlock and seccomp ask for it of a process without CAP_SYS_ADMIN: no set-uid file may undo them.
    done(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    # In a container the process is often root: without this it could still mount, trace and override permissions.
    done(libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()), "capset")
    _landlock(libc, order["readable"], folder, needs_scope=not order["namespaces"])
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))  # SIGXCPU, then SIGKILL
    for kind, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    # Last: every call above but the reading ones is one that the filter refuses.
    allow_only_listed(libc, done, folder=bool(folder))


def done(status: int, what: str) -> int:
    if status < 0:
        raise Refused(f"{what} failed: {os.strerror(ctypes.get_errno())}. Run it where the kernel allows that.")
    return status


def _mount_folder(libc: Any, folder: str, file_bytes: int) -> None:
    """A file system in memory: the only way to bound all files together, which neither rlimits nor Landlock can."""
    options = f"size={file_bytes},nr_inodes={MOST_FILES},mode=700".encode()
    status = libc.mount(b"tmpfs", folder.encode(), b"tmpfs", NO_SUID_NO_DEV_NO_EXEC, options)
    done(status, "mounting a file system of its own for file_bytes")


def _landlock(libc: Any, readable: list[str], folder: str | None, *, needs_scope: bool) -> None:
    """Files below these folders and no others; no TCP; signals and abstract sockets of this process alone."""
    # With flag 1 it makes no rule set, but returns the version of the interface.
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise Refused("the kernel has no Landlock. Run it on Linux 5.13 or later with landlock among its LSMs.")
    if needs_scope and version < 6:
        raise Refused(
            f"namespaces=False needs Landlock's signal scope (version 6), but the kernel has version {version}. "
            "Allow user namespaces, or run it on Linux 6.12 or later."
        )
    # A kernel refuses rights that it does not know; version 1 has 13 of files, and each later one that is listed added some.
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    ports, scopes = 1 | 2, 1 | 2  # bind and connect; abstract sockets and signals
    rules = struct.pack("QQQ", files, ports, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = done(libc.syscall(LANDLOCK_CREATE, rules, len(rules), 0), "landlock_create_ruleset")
    read = 1 << 2 | 1 << 3  # of files and of folders
    change = files & ~(1 << 0 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12)  # no running, devices, sockets, links
    for rights, paths in ((read, readable), (change, [folder] if folder else [])):
        for path in paths:
            if os.path.isdir(path):
                # O_PATH: a handle that only names the folder, and reads nothing.
                where = os.open(path, os.O_PATH)
                rule = struct.pack("=Qi", rights, where)
                done(libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule({path})")
                os.close(where)
    done(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
