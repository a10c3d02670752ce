"""Pictures say what was simulated: golden text, one rect per task, and a trace whose lanes lie side by side."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from meshkit.parallel.pipeline import Row, Schedule, Task, Times, simulate
from meshkit.parallel.pipeline.drawing import coloured, html, summary, svg, table_text, text, trace
from meshkit.parallel.pipeline.schedules import interleaved, one_f_one_b, zb_h1

draws = settings(deadline=None)  # a busy machine
SVG = "{http://www.w3.org/2000/svg}"

OVERLAPPED = Schedule(
    "overlapped", 2, (0,), ((Row(0, 0, "F", 0), Row(0, 0, "FB", 1, 0, 0), Row(0, 0, "I", 1), Row(0, 0, "W", 1)),)
)


def test_text_of_1f1b() -> None:
    assert text(simulate(one_f_one_b(2, 3))) == (
        "rank 0 │F0 F1       B0━━━ F2 B1━━━    B2━━━\n"
        "rank 1 │   F0 B0━━━ F1 B1━━━ F2 B2━━━\n"
        "time    0              5              10"
    )


def test_text_of_chunks_names_stages_and_long_lanes_go_on_below() -> None:
    assert text(simulate(interleaved(2, 2, chunks=2)), width=40) == (
        "rank 0 │0F0 0F1 2F0 2F1\n"
        "rank 1 │    1F0 1F1 3F0 3B0━━━━\n"
        "time    0                   5\n"
        "\n"
        "rank 0 │2B0━━━━     2B1━━━━ 0B0━━━━\n"
        "rank 1 │3F1 3B1━━━━ 1B0━━━━ 1B1━━━━\n"
        "time                    10\n"
        "\n"
        "rank 0 │0B1━━━━\n"
        "rank 1 │\n"
        "time"
    )


def test_text_of_an_overlapped_row() -> None:
    assert text(simulate(OVERLAPPED)) == ("rank 0 │F0 F1+B0━━━ I1 W1\ntime    0              5")


@settings(draws, max_examples=60)
@given(
    m=st.integers(1, 12),
    hop=st.sampled_from([0.0, 0.1, 3.0]),
    f=st.sampled_from([0.001, 0.7, 1.0, 4.0]),
    width=st.integers(24, 160),
)
def test_no_line_is_wider_than_asked_and_every_cell_is_there(m: int, hop: float, f: float, width: int) -> None:
    simulation = simulate(one_f_one_b(3, m), Times(f_s=f, hop_s=hop))
    lines = text(simulation, width=width).splitlines()
    assert max(map(len, lines)) <= width
    if f == 1.0 and hop != 0.1:  # else rounding may leave a cell a column too short
        cells = Counter(re.findall(r"[FB]\d+", "".join(lines)))
        assert cells == {f"{op}{microbatch}": 3 for op in "FB" for microbatch in range(m)}


def test_colours_change_no_character_but_the_fill() -> None:
    simulation = simulate(OVERLAPPED)
    console = Console(width=80, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(coloured(simulation, width=80))
    drawn = capture.get()
    assert "\x1b[38;2;0;0;0;48;2" in drawn
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert [line.rstrip() for line in plain.splitlines()] == text(simulation, width=80).replace("━", " ").splitlines()


def test_an_arrow_points_at_a_cell_of_the_table() -> None:
    assert table_text(one_f_one_b(2, 3), at=(1, 2)) == (
        "cell    0  1  2  3  4  5\nrank 0 │F0 F1 B0 F2 B1 B2\nrank 1 │F0 B0 F1 B1 F2 B2\n              ^"
    )


def test_a_table_too_wide_is_drawn_around_the_arrow() -> None:
    drawn = table_text(one_f_one_b(16, 64), at=(8, 70), width=40).splitlines()
    assert max(map(len, drawn)) <= 40
    assert [line[:7] for line in drawn if line.startswith("rank")] == [f"rank {rank:>2}" for rank in range(4, 13)]
    arrow = drawn.index(next(line for line in drawn if "^" in line))
    assert str(one_f_one_b(16, 64).ranks[8][70])[1:] == drawn[arrow - 1][drawn[arrow].index("^") :].split()[0]
    assert drawn[0][drawn[arrow].index("^") :].split()[0] == "70"


# ----------------------------------------------------------------------------------------------------------------- SVG


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), zb_h1(4, 12), interleaved(4, 8, chunks=3), OVERLAPPED])
def test_svg_has_one_rect_per_task_where_it_was_in_time(schedule: Schedule) -> None:
    simulation = simulate(schedule, Times(f_s=1.5, hop_s=0.25))
    root = ET.fromstring(svg(simulation, px_per_s=20.0))
    rects = [element for element in root.iter(f"{SVG}rect") if element.get("class") == "task"]
    events = [event for rank in simulation.events for event in rank]
    tasks = [(event, task) for event in events for task in event.row.tasks]
    assert len(rects) == len(tasks)
    for rect, (event, _) in zip(rects, tasks, strict=True):
        assert number(rect, "x") == pytest.approx(58 + 20 * event.start_s, abs=0.51)
        assert number(rect, "width") == pytest.approx(20 * (event.end_s - event.start_s), abs=1.01)
    titles = {title.text for title in root.iter(f"{SVG}title")}
    assert any("forward of microbatch 0 through stage 0, 0 to 1.5" in (title or "") for title in titles)


def test_halves_of_an_overlapped_row_lie_one_above_the_other() -> None:
    cells = ET.fromstring(svg(simulate(OVERLAPPED))).iter(f"{SVG}rect")
    forward, backward = [cell for cell in cells if cell.get("class") == "task"][1:3]
    assert number(forward, "x") == number(backward, "x")
    assert number(forward, "height") == number(backward, "height") == 12
    assert number(backward, "y") == number(forward, "y") + 12


@pytest.mark.parametrize("m", [1, 8, 200])
def test_nothing_in_the_svg_leaves_it_and_numbers_fit_their_cells(m: int) -> None:
    root = ET.fromstring(svg(simulate(zb_h1(4, m), Times(w_s=0.1))))
    width, height = number(root, "width"), number(root, "height")
    for rect in root.iter(f"{SVG}rect"):
        assert number(rect, "x") + number(rect, "width") <= width
        assert number(rect, "y") + number(rect, "height") <= height
    for cell in root.iter(f"{SVG}g"):
        rect, words = cell.find(f"{SVG}rect"), cell.find(f"{SVG}text")
        if rect is not None and words is not None:
            assert 0.62 * number(words, "font-size") * len(words.text or "") <= number(rect, "width") + 1
    assert {len(cell) for cell in root.iter(f"{SVG}g")} >= {2, 3}  # some have room for a number, W has not


def test_shades_are_chunks_and_colours_are_ops() -> None:
    schedule = interleaved(2, 2, chunks=2)
    root = ET.fromstring(svg(simulate(schedule)))
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect") if rect.get("class") == "task"]
    wears: dict[tuple[str, int], set[str | None]] = {}
    for fill, row in zip(fills, schedule.rows(), strict=True):
        wears.setdefault((row.op, row.stage // 2), set()).add(fill)
    assert all(len(fills) == 1 for fills in wears.values())
    assert len(set.union(*wears.values())) == len(wears) == 4


def test_curves_show_the_peak_of_every_rank() -> None:
    simulation = simulate(one_f_one_b(4, 8))
    drawn = svg(simulation)
    for rank, peak in enumerate((4, 3, 2, 1)):
        assert f"rank {rank} holds at most {peak}" in drawn
    assert re.findall(r">(peak \d)<", drawn) == ["peak 4", "peak 3", "peak 2", "peak 1"]


def test_html_stands_alone() -> None:
    page = html(simulate(one_f_one_b(4, 8)), simulate(OVERLAPPED), title="a < b")
    assert page.count("<svg") == 2
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script""", page)
    assert page.count("http") == page.count("http://www.w3.org/2000/svg") == 2  # names of a language, not addresses
    assert "a &lt; b" in page
    assert "1f1b" in page


def test_names_from_a_file_cannot_break_a_page() -> None:
    schedule = Schedule('<b>&"', 1, (0,), ((Row(0, 0, "F", 0),),))
    ET.fromstring(svg(simulate(schedule)))
    assert "<b>" not in html(simulate(schedule))


# --------------------------------------------------------------------------------------------------------------- trace


def test_trace_has_a_process_per_rank_and_a_lane_each_for_simulated_and_measured() -> None:
    simulation = simulate(one_f_one_b(2, 3))
    measured = [
        (rank, event.row.tasks[0], 50 + 2 * event.start_s, 50 + 2 * event.end_s)
        for rank, events in enumerate(simulation.events)
        for event in events
    ]
    loaded = json.loads(trace(simulation, measured))["traceEvents"]
    slices = [event for event in loaded if event["ph"] == "X"]
    simulated, real = ([event for event in slices if event["tid"] == lane] for lane in (0, 1))
    assert [key(event) for event in simulated] == [key(event) for event in real]
    assert len(simulated) == 12
    for one, other in zip(simulated, real, strict=True):
        assert (2 * one["ts"], 2 * one["dur"]) == (other["ts"], other["dur"])
    assert simulated[0] == {
        "ph": "X",
        "name": "0F0",
        "cat": "F",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 1e6,
        "cname": "thread_state_running",
        "args": {"forward of": "microbatch 0 through stage 0"},
    }
    names = {(event["pid"], event.get("tid")): event["args"]["name"] for event in loaded if "name" in event["args"]}
    assert names == {
        (0, None): "rank 0",
        (0, 0): "simulated",
        (0, 1): "measured",
        (1, None): "rank 1",
        (1, 0): "simulated",
        (1, 1): "measured",
    }
    held = [event["args"]["held"] for event in loaded if event["ph"] == "C" and event["pid"] == 0]
    assert max(held) == simulation.peak_units[0] == 2


def test_trace_of_a_real_run_alone() -> None:
    loaded = json.loads(trace(measured=[(1, Task("F", 1, 0), 7.0, 7.5), (1, Row(1, 1, "FB", 1, 0, 0), 7.5, 9.0)]))
    slices = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [
        ("1F0", 0.0, 5e5),
        ("1F1+0B0", 5e5, 1.5e6),
    ]
    assert {
        event["args"]["name"] for event in loaded["traceEvents"] if event["ph"] == "M" and "name" in event["args"]
    } == {
        "rank 1",
        "measured",
    }


def test_summary_is_one_line() -> None:
    assert summary(simulate(one_f_one_b(2, 3))) == (
        "1f1b, 2 ranks, 3 microbatches: makespan 12, bubble rate 0.2500, peak activations by rank 2 1"
    )


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "0"))


def key(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["pid"], event["name"], event["cat"], event["cname"], str(event["args"])
