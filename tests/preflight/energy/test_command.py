"""`python -m meshkit energy`: what it prints and writes, and one line for what is none."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from meshkit.__main__ import PLANNED, main
from meshkit.parallel.pipeline import Times
from meshkit.parallel.pipeline.schedules import one_f_one_b
from meshkit.preflight.energy import PowerPoint, plan_energy

POWER = "--power 1980:700:1,1410:450:1.27 --idle-watts 100"


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


def test_it_prints_the_plan_and_writes_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("clocks.csv", "plan.svg", "front.svg")}
    meshkit(
        monkeypatch,
        f"energy 1f1b --ranks 2 --microbatches 3 --times F=1:1.3,B=2:2.6 --devices 8 {POWER} "
        f"--csv {files['clocks.csv']} --svg {files['plan.svg']} --front {files['front.svg']}",
    )
    power = [PowerPoint(mhz=1980, watts=700, slowdown=1), PowerPoint(mhz=1410, watts=450, slowdown=1.27)]
    times = Times(f_s=(1, 1.3), b_s=(2, 2.6))
    plan = plan_energy(one_f_one_b(2, 3), times, power=power, idle_watts=100, devices=8)
    said = capsys.readouterr().out
    assert said.startswith(f"{plan}\n")
    assert f"wrote {files['clocks.csv']}" in said
    assert files["clocks.csv"].read_text().count("\n") == 13
    for name in ("plan.svg", "front.svg"):
        ET.fromstring(files[name].read_text())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("energy 1f1b --power 1980:700 --idle-watts 100", "PlanError: --power 1980:700: cannot read '1980:700'."),
        (
            "energy 1f1b --power 1980:700:2 --idle-watts 100",
            "PlanError: the fastest of 1 power points has a slowdown of 2",
        ),
        ("energy 1f1b --power , --idle-watts 100", "PlanError: power=[]: give at least one PowerPoint"),
        (f"energy 1f1b {POWER} --slowdown nan", "PlanError: slowdown=nan: give a share from 0 up"),
        (f"energy 1f1b {POWER} --devices 0", "PlanError: devices=0: a rank of pp has at least one."),
        (f"energy nope {POWER}", "PlanError: there is no schedule 'nope'."),
        (f"energy 1f1b {POWER} --csv /nowhere/plan.csv", "FileNotFoundError: "),
        (f"energy 1f1b {POWER} --ranks 2 --microbatches {PLANNED}", "PlanError: energy 1f1b with 4,096 microbatches"),
    ],
)
def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch, words: str, line: str) -> None:
    said = refused(monkeypatch, words)
    assert said.startswith(line) and "\n" not in said
