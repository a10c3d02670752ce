"""Start recipes as a user does, and never wait without end.

`start` is torchrun, which takes its signals and ends all ranks when one fails. `run` gives the ranks the environment that
torchrun would, and forks them from a server that has imported torch: most of a short run is imports.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from tests.world import fork

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def start(ranks: int, script: str, *flags: str) -> subprocess.Popen[str]:
    return start_command([*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), str(ROOT / script), *flags])


# The kernel tells torchrun to end once its parent, pytest, is gone: torchrun ends its ranks then, with SIGTERM, and after
# 30 s with SIGKILL. It is asked by a first program that turns into torchrun, since in this process, which has threads,
# nothing may run between fork and exec. `getppid` is asked last: pytest may have ended before the kernel was told.
PR_SET_PDEATHSIG = 1
END_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def start_command(command: list[str], **more: str) -> subprocess.Popen[str]:
    """The command, which gets a SIGTERM when this process ends, however it ends. more: variables of the environment."""
    command = [sys.executable, "-c", END_WITH_PARENT, str(os.getpid()), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float = 120) -> tuple[int, str]:
    """(exit status, output); kills the whole launch when time is up."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which no signal to its own group would reach
        try:
            output, _ = process.communicate(timeout=45)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            output = str(error.output)
        raise AssertionError(f"no end within {timeout_s} s:\n{output}") from None
    return process.returncode, output


def run(
    ranks: int, script: str, *flags: str, timeout_s: float = 120, stop: tuple[Path, int] | None = None
) -> tuple[int, str]:
    """(exit status, output) of ranks without torchrun. When one fails, the others are ended, as torchrun does.

    stop: (out, step); every rank gets a SIGTERM once `out` has the loss of that step, as when torchrun gets one.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with tempfile.NamedTemporaryFile("r") as output:
        processes = {}
        for rank in range(ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = fork(_run_script, str(ROOT / script), flags, own, os.getcwd(), output.name)
            processes[process.sentinel] = process
        failed, deadline = False, time.monotonic() + timeout_s
        try:
            while processes:
                left = max(0.0, deadline - time.monotonic())
                ended = wait(list(processes), timeout=min(left, 0.05) if stop else left)
                if stop and stop[1] in read_losses(stop[0]):
                    stop = None
                    for process in processes.values():
                        process.terminate()
                if not ended and time.monotonic() < deadline:
                    continue
                if not ended and failed:
                    break
                if not ended:
                    raise AssertionError(f"no end within {timeout_s} s:\n{output.read()}")
                for sentinel in ended:
                    process = processes.pop(sentinel)  # type: ignore[call-overload]
                    process.join()
                    if process.exitcode and not failed:
                        failed, deadline = True, time.monotonic() + 30  # until torchrun kills what ignores a SIGTERM
                        for other in processes.values():
                            other.terminate()
        finally:
            for process in processes.values():
                process.kill()
        return int(failed), output.read()


def run_alone(script: Path, folder: Path, *flags: str, timeout_s: float = 120) -> tuple[int, str]:
    """(exit status, output) of `python script flags` in a folder: a process that is no rank, forked as those of `run` are."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = fork(_run_script, str(script), flags, dict(os.environ), str(folder), output.name)
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"no end within {timeout_s} s:\n{output.read()}")
        return process.exitcode or 0, output.read()


def _run_script(script: str, flags: tuple[str, ...], environment: dict[str, str], folder: str, output: str) -> None:
    """In a process of its own: what `python script flags` would do."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    warnings.resetwarnings()
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    torch.seed()  # which forked ranks share, and those that torchrun starts do not
    runpy.run_path(script, run_name="__main__")


def command_line(flags: Mapping[str, object], **changed: object) -> list[str]:
    """`--name value` of each flag, with these changed or added: `seq_len=8` is `--seq-len 8`."""
    chosen = {**flags, **{name.replace("_", "-"): value for name, value in changed.items()}}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def read_losses(out: Path) -> dict[int, float]:
    path = out / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows}


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int, *, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while step not in read_losses(out):
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"step {step} was not reached:\n{finish(process, timeout_s=5)[1]}")
        time.sleep(0.05)


def write_corpus(path: Path) -> Path:
    """A small text with structure to learn, the same everywhere."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 7))) for _ in range(60)]
    with path.open("w") as file:
        for _ in range(120):
            at = generator.randrange(60)
            text = []
            for _ in range(generator.randint(20, 200)):
                text.append(words[at])
                at = (at * 7 + generator.randrange(3)) % 60
            file.write(json.dumps({"text": " ".join(text)}) + "\n")
    return path
