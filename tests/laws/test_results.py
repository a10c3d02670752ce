"""Rows of benchmarks say which code they measured: a commit that whoever reads them can look at, and those of rows
beside peers that are older than their code are marked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import page
from benchmarks.peers.fresh import digest
from benchmarks.peers.turns import Block, refuse_other_losses

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


PEERS = page.read()


@pytest.mark.parametrize("row", PEERS, ids=lambda row: f"{row['cell']}: {row['peer']}")
def test_a_row_beside_a_peer_names_the_code_that_it_measured(row: dict[str, Any]) -> None:
    assert row["code"]["files"] and not row["commit"].endswith("+changes")


def test_the_page_of_peers_shows_the_rows_and_marks_those_that_are_older_than_their_code() -> None:
    said = "make peers ARGS='--stale' measures what is old again; python -m benchmarks.peers.page marks it."
    assert page.table(PEERS) in page.PAGE.read_text(), said
    older = [{**row, "code": {**row["code"], "digest": "0"}} for row in PEERS]
    assert page.table(older).count(" † |") == len(PEERS)


def test_comments_are_free_to_change_and_code_is_not(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "a.py").write_text(text)
        return digest(["a.py"], tmp_path)

    first = of('"""What it does."""\n\nx = "#1"  # one\n\n\ndef f():\n    """Gives x."""\n    return x\n')
    assert of('x = "#1"\ndef f():\n    # see x\n    return x\n') == first
    assert of('x = "#2"\ndef f():\n    return x\n') != first
    (tmp_path / "a.py").unlink()
    assert digest(["a.py"], tmp_path) != first


@pytest.mark.parametrize("other", [[2.0, 1.0 + 3e-6], [2.0, float("nan")]])
def test_a_loop_with_another_trace_has_no_row(other: list[float]) -> None:
    def did(values: list[float]) -> list[Block]:
        return [Block(values=values, wall_s=1.0, cpu_s=1.0, peak_bytes=1)]

    same = {"meshkit": did([2.0, 1.0]), "peer": did([2.0, 1.0 + 1e-6])}
    assert refuse_other_losses(same, steps=2, tolerance=2e-6)[1] == pytest.approx(1e-6)
    with pytest.raises(SystemExit, match="step 2: peer has the loss .*: not the same work"):
        refuse_other_losses({**same, "peer": did(other)}, steps=2, tolerance=2e-6)
