"""A job that runs programs in the sandbox, one line of JSON for each: what the programs of the tests attack.

    python -m tests.sandbox.job < programs.json

It is a process of its own, so that the test outlives it if a program ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshkit.errors import RewardError
from meshkit.sandbox import SandboxLimits, run_sandboxed
from tests.sandbox.escapes import HELP

ATTRIBUTE = "user.mine"
# Where files of all appear, if any do.
SHARED = [Path(folder, "meshkit-escaped") for folder in ("/tmp", "/dev/shm", "/var/tmp", "/usr", "/")]


def main() -> None:
    order = json.load(sys.stdin)
    folder = Path(order["folder"])
    # Two at a time, by threads, as a reward of one's own may have it.
    with ThreadPoolExecutor(2) as threads:
        for result in threads.map(lambda each: _attempt(folder, *each), enumerate(order["programs"])):
            print(json.dumps(result), flush=True)
    print(json.dumps({"lived": True}), flush=True)


def _attempt(parent: Path, index: int, program: dict[str, Any]) -> dict[str, Any]:
    folder = parent / str(index)
    folder.mkdir()
    kept, secret = folder / "kept.txt", folder / "secret.txt"
    kept.write_text("mine")
    secret.write_text("secret")
    has_attributes = True
    try:
        os.setxattr(kept, ATTRIBUTE, b"1")
    except OSError:
        has_attributes = False
    before = _look(folder, kept, has_attributes)
    code = HELP + program["code"].format(pid=os.getpid(), kept=str(kept), secret=str(secret), folder=str(folder))
    began = time.monotonic()
    try:
        verdict = run_sandboxed(code, limits=SandboxLimits(**program["limits"]))
        end, text = verdict.end, verdict.text
    except RewardError as error:
        end, text = "refused", str(error)
    return {
        "index": index,
        "end": end,
        "text": text[:300],
        "wall_s": time.monotonic() - began,
        "changed": _look(folder, kept, has_attributes) != before or any(path.exists() for path in SHARED),
    }


def _look(folder: Path, kept: Path, has_attributes: bool) -> Any:
    """All that a program could have changed; not the time of the last reading."""
    try:
        status = os.stat(kept)
        names = sorted(os.listdir(folder)), os.stat(folder).st_mode, os.listxattr(kept) if has_attributes else []
        return names, kept.read_text(), status.st_mode, status.st_uid, status.st_nlink, status.st_mtime, status.st_ctime
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    main()
