"""`python -m meshkit goodput`: what it prints, and one line for what is none."""

from __future__ import annotations

import io
import sys

import pytest

from meshkit.__main__ import main
from meshkit.preflight.goodput import Faults, goodput, in_memory, on_storage

LLAMA = "--ranks 16384 --step-s 20 --device-mtbf-h 45566 --state 4.86TB --storage 2TB --host 50GB --save-s 5"


def meshkit(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["meshkit", *words.split()])
    monkeypatch.setenv("COLUMNS", "100")
    main()


def refused(monkeypatch: pytest.MonkeyPatch, words: str) -> str:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with pytest.raises(SystemExit) as stop:
        meshkit(monkeypatch, words)
    assert stop.value.code == 2
    return said.getvalue().strip()


def test_it_prints_the_ledger_of_the_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meshkit(monkeypatch, f"goodput {LLAMA}")
    storage = on_storage(4_860 * 10**9, 16384, storage_bytes_per_s=2e12, host_bytes_per_s=5e10, fixed_s=5)
    told = goodput(step_s=20, ranks=16384, faults=Faults(device_mtbf_h=45_566), checkpoints=[storage])
    assert capsys.readouterr().out == f"{told}\n"


def test_checkpoints_in_memory_are_inside_those_on_storage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--in-memory --copies 2 --beyond-copies 0.1 --network 5GB --memory-restart-s 30 --multiple 128"
    meshkit(monkeypatch, f"goodput {LLAMA} {words}")
    sizes = {"host_bytes_per_s": 5e10, "network_bytes_per_s": 5e9}
    kinds = [
        in_memory(4_860 * 10**9, 16384, copies=2, beyond_copies=0.1, restart_s=30, **sizes),
        on_storage(4_860 * 10**9, 16384, storage_bytes_per_s=2e12, host_bytes_per_s=5e10, fixed_s=5),
    ]
    faults = Faults(device_mtbf_h=45_566)
    told = goodput(step_s=20, ranks=16384, faults=faults, checkpoints=kinds, multiple=128)
    assert capsys.readouterr().out == f"{told}\n"
    meshkit(monkeypatch, f"goodput {LLAMA} --in-memory")  # survives all: storage is never loaded
    assert "on storage" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--ranks 0", "PlanError: --ranks 0 --replicas 1 --copies 1: at least one rank"),
        ("--state lots", "PlanError: --state lots: not a number of bytes."),
        ("--storage 0", "PlanError: --storage 0: needs at least 1 B."),
        ("--device-mtbf-h nan", "PlanError: device_mtbf_h=nan: Faults needs a number above 0."),
        ("--interval-s 1e-9 --storage 1GB", "PlanError: a save on storage every 20 s, but each takes 4.86e+03 s"),
        ("--step-s 1e-300", "PlanError: step_s=1e-300, ranks=16384: give the seconds of a step"),
        ("--restart-s 1e9", "PlanError: no run gets on here: a failure comes every 2.78 h"),
        ("--multiple 3", "PlanError: multiple=3: 16384 ranks are no multiple of it."),
    ],
)
def test_bad_numbers_are_one_line(monkeypatch: pytest.MonkeyPatch, words: str, line: str) -> None:
    said = refused(monkeypatch, f"goodput {LLAMA} {words}")
    assert said.startswith(line) and "\n" not in said
