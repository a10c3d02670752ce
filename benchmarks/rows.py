"""What every result row says of the code, the machine and the spread."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return Spread(median=round(median, 4), low=round(low, 4), high=round(high, 4))


def environment() -> dict[str, Any]:
    """What a result row says of code and machine; neither paths nor names of hosts."""
    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "../meshkit", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.strip() + ("+changes" if changed else ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }
