"""Rows of benchmarks say which code they measured: a commit that whoever reads them can look at."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_each_row_names_a_commit_of_this_history(path: Path) -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this clone has no history, or not all of it")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for commit in {row["commit"].partition("+")[0] for row in rows if "commit" in row}:
        # A branch that was rebased after it was measured leaves a name that nobody can look up.
        found = git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
        assert found, f"{path.name} names {commit}, which is not in this history. Record the rows again."
