"""The command line: what it prints, what it writes, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import meshkit.__main__ as meshkit_main
from meshkit.__main__ import main, parse_times
from meshkit.errors import PlanError
from meshkit.parallel.pipeline import simulate, write_csv
from meshkit.parallel.pipeline.schedules import NAMES, auto, interleaved, one_f_one_b


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


def test_it_draws_text_and_prints_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meshkit(monkeypatch, "draw 1f1b --ranks 2 --microbatches 3")
    assert capsys.readouterr().out == (
        "rank 0 │F0 F1       B0━━━ F2 B1━━━    B2━━━\n"
        "rank 1 │   F0 B0━━━ F1 B1━━━ F2 B2━━━\n"
        "time    0              5              10\n"
        "\n"
        "1f1b, 2 ranks, 3 microbatches: makespan 12, bubble rate 0.2500, peak activations by rank 2 1\n"
        "one unit of activations: one microbatch in all stages of a rank\n"
    )


def test_stages_are_ranks_and_a_unit_of_activations_is_the_same_for_all_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meshkit(monkeypatch, "draw zbv --stages 4 --microbatches 8")
    out = capsys.readouterr().out
    assert "zbv, 4 ranks, 8 stages, 8 microbatches: makespan 51, bubble rate 0.0588, peak" in out
    assert "peak activations by rank 4 4 4 4\n" in out


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"auto"}))
def test_every_schedule_draws(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    meshkit(monkeypatch, f"draw {name.replace('-', '_')} --ranks 2 --microbatches 3")
    assert f"\n{name}, 2 ranks" in capsys.readouterr().out


def test_auto_gets_the_times_and_the_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "F=1,I=1,W=4,hop=0.5"
    times = parse_times(words)
    asked, unasked, limited = (
        f"makespan {simulate(table, times).makespan_s:g}, "
        for table in (auto(2, 3, times=times), auto(2, 3), auto(2, 3, times=times, max_live=2))
    )
    assert asked not in (unasked, limited)
    meshkit(monkeypatch, f"draw auto --ranks 2 --microbatches 3 --times {words}")
    assert asked in capsys.readouterr().out
    meshkit(monkeypatch, f"draw auto --ranks 2 --microbatches 3 --times {words} --max-live 2")
    assert limited in capsys.readouterr().out
    assert "max_live=0" in refused(monkeypatch, "draw auto --ranks 2 --microbatches 3 --max-live 0")


def test_chunks_and_times_reach_the_schedule_and_the_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meshkit(monkeypatch, "draw interleaved --ranks 2 --microbatches 4 --chunks 3 --times F=2,B=3,hop=0.5")
    expected = simulate(interleaved(2, 4, chunks=3), parse_times("F=2,B=3,hop=0.5"))
    assert f"6 stages, 4 microbatches: makespan {expected.makespan_s:g}, " in capsys.readouterr().out


def test_it_writes_every_kind_of_file_and_reads_its_own_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = " ".join(f"--{kind} {tmp_path / f'it.{kind}'}" for kind in ("svg", "html", "trace", "csv"))
    meshkit(monkeypatch, f"draw zb-h1 --ranks 3 --microbatches 4 {files}")
    first = capsys.readouterr().out
    assert first.count("wrote ") == 4
    rects = ET.parse(tmp_path / "it.svg").getroot().iter("{http://www.w3.org/2000/svg}rect")
    assert sum(rect.get("class") == "task" for rect in rects) == 3 * 3 * 4
    assert (tmp_path / "it.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    slices = [e for e in json.loads((tmp_path / "it.trace").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 3 * 3 * 4
    meshkit(monkeypatch, f"draw {tmp_path / 'it.csv'}")
    assert capsys.readouterr().out.splitlines()[:4] == first.splitlines()[:4]


def test_times_are_read() -> None:
    times = parse_times("F=1:2,I=0.5, hop=0.1,overlap=1")
    assert (times.f_s, times.i_s, times.w_s, times.b_s, times.hop_s) == ((1.0, 2.0), 0.5, 1.0, None, 0.1)
    assert times.fb_s(2.0, 3.0) == 3.0
    assert parse_times("").f_s == 1.0
    for bad in ("G=1", "F=x", "F", "hop=1:2", "F=1;I=2"):
        with pytest.raises(PlanError, match="cannot read"):
            parse_times(bad)


def test_what_it_cannot_do_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "PlanError: there is no schedule 'zbw'. Did you mean 'zbv'?" in refused(monkeypatch, "draw zbw")
    assert (
        refused(monkeypatch, "draw zbv --chunks 3") == "PlanError: --chunks 3: zbv has no choice there. Leave it out."
    )
    table = tmp_path / "bad.csv"
    write_csv(replace(one_f_one_b(2, 2), ranks=(one_f_one_b(2, 2).ranks[0][::-1], one_f_one_b(2, 2).ranks[1])), table)
    assert "^" in refused(monkeypatch, f"draw {table}")
    assert "--times F=one: cannot read 'F=one'" in refused(monkeypatch, "draw zbv --times F=one")
    assert "f_s has 2 values, but schedule '1f1b' has 4 stages" in refused(monkeypatch, "draw 1f1b --times F=1:2")
    assert "ranks=0 is not a whole number of at least 1" in refused(monkeypatch, "draw 1f1b --ranks 0")
    for large in ("--ranks 100000", "--microbatches 1000000", "--ranks 128 --microbatches 128 --chunks 2"):
        assert "of at most 16,384" in refused(monkeypatch, f"draw interleaved {large}")


def test_help_names_the_command_and_the_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        meshkit(monkeypatch, "--help")
    assert "python -m meshkit draw zbv --ranks 4 --microbatches 8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        meshkit(monkeypatch, "draw --help")
    out = capsys.readouterr().out
    assert all(word in out for word in ("--stages", "--times", "--svg FILE", *NAMES))


def test_without_tyro_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(meshkit_main.__file__)), run_name="__main__")
    assert stop.value.code == (
        'meshkit needs tyro, which is in the optional extra `recipes`.\nInstall it with: pip install "meshkit[recipes]"'
    )


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "meshkit", "draw", "gpipe", "--ranks", "1", "--microbatches", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 │F0 F1 B0━━━ B1━━━\n")
