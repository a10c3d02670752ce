"""Sandbox, the child process of `run_sandboxed`: a script that needs only the standard library, started by its path.

It reads its order from stdin, drops every right it does not need, runs the program, and writes how it ended to a pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
import traceback
from typing import Any

NO_NEW_PRIVS, PARENT_DEATH_SIGNAL, SECCOMP, SECCOMP_FILTER = 38, 1, 22, 2  # prctl(2)
SIGKILL, EPERM = 9, 1
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every processor
CAPABILITY_VERSION_3 = 0x20080522

# Numbers of system calls that are refused: (x86-64, 64-bit Arm); None where there is none. A process may compute, read
# and print. It may not make processes or threads, run files, talk to others, signal them or change what is theirs.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "io_uring_setup": (425, 425),  # would open sockets past the filter
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # What Landlock does not see: attributes of files, and their lengths before Linux 6.2.
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
}
PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of REFUSED, AUDIT_ARCH


class Refused(Exception):
    """The system lacks a part of the sandbox."""


def main() -> None:
    verdict_pipe, python_folder = int(sys.argv[1]), sys.argv[2]
    order = json.loads(sys.stdin.buffer.read())
    program, password = order["program"], order["password"]

    def say(**verdict: Any) -> None:
        # A line of its own, whatever the program wrote to the pipe before. os._exit: no handler of the program runs after
        # the verdict.
        os.write(verdict_pipe, b"\n" + json.dumps({"password": password, **verdict}).encode() + b"\n")
        os._exit(0)

    try:
        confine(order, python_folder)
    except (Refused, OSError) as error:
        say(refused=str(error))
    # The number of the pipe is none of the program's business.
    sys.argv = [""]
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except MemoryError:
        say(raised=f"MemoryError: more than {order['memory_bytes']} bytes")
    except BaseException as error:
        # SystemExit too: exit(0) before the last line is no pass.
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program.py"]
        where = f" in line {lines[-1]}" if lines else ""
        say(raised=f"{type(error).__name__}: {str(error)[:500]}{where}")
    say(passed=True)


def confine(order: dict[str, Any], python_folder: str) -> None:
    """Drop all rights. The order matters: each step needs what a later one takes away."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = order["folder"]
    os.chdir(folder or "/")
    done(libc.prctl(PARENT_DEATH_SIGNAL, SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    # Landlock and seccomp ask for it of a process without CAP_SYS_ADMIN: no set-uid file may undo them.
    done(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    # In a container the process is often root: without this it could still mount, trace and override permissions.
    drop_capabilities(libc)
    allow_folders(libc, readable=[python_folder, "/usr", "/lib", "/lib64"], writable=[folder] if folder else [])
    resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_s"], order["cpu_s"] + 1))  # SIGXCPU, then SIGKILL
    for kind, limit in (
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    # Last: `setrlimit` above is prlimit64, which the filter refuses.
    refuse_calls(libc)


def done(status: int, what: str) -> int:
    if status < 0:
        raise Refused(f"{what} failed: {os.strerror(ctypes.get_errno())}")
    return status


def drop_capabilities(libc: Any) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    done(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def allow_folders(libc: Any, *, readable: list[str], writable: list[str]) -> None:
    """Landlock: files below these folders, and no others."""
    # With flag 1 it makes no rule set, but returns the version of the interface.
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise Refused("the kernel has no Landlock")
    # A kernel refuses rights that it does not know; version 1 (5.13) has 13, and each later one that is listed added some.
    every_right = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    read_right = 1 << 2 | 1 << 3  # of files and of folders
    rules = done(libc.syscall(LANDLOCK_CREATE, struct.pack("Q", every_right), 8, 0), "landlock_create_ruleset")
    for rights, folders in ((read_right, readable), (every_right, writable)):
        for path in folders:
            if os.path.isdir(path):
                # O_PATH: a handle that only names the folder, and reads nothing.
                where = os.open(path, os.O_PATH)
                rule = struct.pack("=Qi", rights, where)
                done(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule({path})")
                os.close(where)
    done(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def refuse_calls(libc: Any) -> None:
    """seccomp: EPERM for the calls in REFUSED; another processor's calls end the process."""
    if platform.machine() not in PROCESSORS:
        raise Refused(f"no table of system calls for {platform.machine()}")
    column, architecture = PROCESSORS[platform.machine()]
    numbers = [number for row in REFUSED.values() if (number := row[column]) is not None]
    load, equal, at_least, result = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, RET|K
    kill, refuse, allow = 0x80000000, 0x00050000 | EPERM, 0x7FFF0000
    # seccomp_data: the call's number is at offset 0, the architecture at 4. The architecture is tested first: numbers mean
    # other calls on another one.
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (result, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (result, 0, 0, kill)]  # x32: the same calls by other numbers
    for number in numbers:
        steps += [(equal, 0, 1, number), (result, 0, 0, refuse)]
    steps.append((result, 0, 0, allow))
    # Held by this frame until prctl has copied it into the kernel.
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    done(libc.prctl(SECCOMP, SECCOMP_FILTER, program, 0, 0), "prctl(PR_SET_SECCOMP)")


if __name__ == "__main__":
    main()
