"""Start recipes as a user does, with torchrun, and never wait without end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def start(ranks: int, script: str, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), str(ROOT / script), *flags]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float = 120) -> tuple[int, str]:
    """(exit status, output); kills the whole launch when time is up."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s:\n{output}") from None
    return process.returncode, output


def run(ranks: int, script: str, *flags: str, timeout_s: float = 120) -> tuple[int, str]:
    return finish(start(ranks, script, *flags), timeout_s=timeout_s)


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
