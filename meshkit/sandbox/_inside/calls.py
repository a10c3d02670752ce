"""Allow-list of system calls (seccomp-bpf): what a Python process needs to compute, and to read and write what it may open.

A call that is not listed fails with EPERM, also one that a later kernel adds.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable
from typing import Any

Step = tuple[int, int, int, int]
"""of a BPF program: operation, jump if true, jump if false, constant"""

# Numbers of calls: (x86-64, 64-bit Arm); None where there is none.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # what is open already
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "close": (3, 57),
    "close_range": (436, 436),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "ftruncate": (77, 46),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "fadvise64": (221, 223),
    # files by name: Landlock says which
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    # memory
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    # its own signals and timers
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    # waiting
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    # pipes and pairs of its own, for asyncio
    "pipe": (22, None),
    "pipe2": (293, 59),
    "eventfd2": (290, 19),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    # looking
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "sched_getaffinity": (204, 123),
    # the end
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# Names of files in a folder of its own, allowed where there is one.
ALLOWED_IN_A_FOLDER: dict[str, tuple[int | None, int | None]] = {
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
}
# Allowed for some arguments; numbers as above.
FCNTL, IOCTL, PRLIMIT, SOCKETPAIR = (72, 25), (16, 29), (302, 261), (53, 199)
FCNTL_COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
FCNTL_SET_FLAGS, O_ASYNC = 4, 0o20000  # F_SETFL, but never with signals: they would go to whom F_SETOWN names
IOCTL_COMMANDS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
AF_UNIX, SOCK_STREAM, SOCKET_TYPES = 1, 1, 0xF

PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN, MASK = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000


def allow_only_listed(libc: Any, done: Callable[[int, str], int], *, folder: bool) -> None:
    """Install the filter. It cannot be taken off, and `prctl`, which could add to it, is not on the list."""
    steps = program(platform.machine(), folder=folder)
    # Held by this frame until prctl has copied it into the kernel.
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    fprog = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    done(libc.prctl(22, 2, fprog, 0, 0), "prctl(PR_SET_SECCOMP)")


def program(machine: str, *, folder: bool) -> list[Step]:
    """The BPF program. seccomp_data: the call's number at byte 0, architecture at 4, argument i at 16 + 8 i (low half)."""
    column, architecture = PROCESSORS[machine]
    # Architecture first: numbers mean other calls on another one.
    steps: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]  # the same calls by other numbers
    table = {**ALLOWED, **(ALLOWED_IN_A_FOLDER if folder else {})}
    for row in table.values():
        if (number := row[column]) is not None:
            steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    end = [(RETURN, 0, 0, REFUSE)]
    # The kernel reads these arguments as 32 bits, so their high halves say nothing.
    fcntl = [_argument(1), *_allow(FCNTL_COMMANDS), (EQUAL, 1, 0, FCNTL_SET_FLAGS), *end]
    steps += _only(FCNTL[column], [*fcntl, _argument(2), (ANY_BIT, 0, 1, O_ASYNC), *end, (RETURN, 0, 0, ALLOW)])
    steps += _only(IOCTL[column], [_argument(1), *_allow(IOCTL_COMMANDS), *end])
    # prlimit64(0, ..., NULL, old) reads its own limits: both halves of the pointer to new ones are zero.
    reads: list[Step] = []
    for offset in (16, 16 + 16, 16 + 20):
        reads += [(LOAD, 0, 0, offset), (EQUAL, 1, 0, 0), *end]
    steps += _only(PRLIMIT[column], [*reads, (RETURN, 0, 0, ALLOW)])
    pair = [_argument(0), (EQUAL, 1, 0, AF_UNIX), *end, _argument(1), (MASK, 0, 0, SOCKET_TYPES)]
    steps += _only(SOCKETPAIR[column], [*pair, (EQUAL, 1, 0, SOCK_STREAM), *end, (RETURN, 0, 0, ALLOW)])
    return steps + end


def _only(number: int, steps: list[Step]) -> list[Step]:
    """Steps for one call, which all end in a RETURN; for another, the accumulator still has its number."""
    return [(EQUAL, 0, len(steps), number), *steps]


def _argument(index: int) -> Step:
    return (LOAD, 0, 0, 16 + 8 * index)


def _allow(values: tuple[int, ...]) -> list[Step]:
    return [step for value in values for step in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
