"""`make gpu` is rehearsed here on the device `late`: all of its script runs, with few cells and one small benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.__main__ import Config, fitting, main, most
from tests.gpu.rows import PAGE, STEPS, page, read

BENCHMARK = "-c \"print('a ratio of 1.00')\""


def test_the_page_is_that_of_the_rows_that_there_are() -> None:
    assert PAGE.read_text() == page(read(), read(STEPS))


def test_without_rows_the_page_says_so_once() -> None:
    assert page([]).count("Not yet measured") == 1


@pytest.mark.parametrize(("devices", "ranks"), [(0, 0), (1, 1), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_it_takes_the_most_devices_of_1_2_4_and_8(devices: int, ranks: int) -> None:
    assert most(devices) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_there_are_cells_for_any_number_of_devices(ranks: int) -> None:
    cells = fitting(ranks)
    assert len(cells) >= 10
    assert max(cell.spec.world_size for cell in cells) == ranks


@pytest.mark.gate
def test_all_of_the_script_runs_on_a_device_that_is_no_gpu(tmp_path: Path) -> None:
    config = Config(
        device="late", ranks=2, cells=3, benchmarks=(BENCHMARK,), rows=tmp_path / "gpu.jsonl", page=tmp_path / "gpu.md"
    )
    assert main(config) == 0
    rows = read(config.rows)
    assert [row["kind"] for row in rows] == ["cell"] * 3 + ["benchmark"]
    assert config.page.read_text() == page(rows, read(STEPS))
    assert "**3 of 3 cells** kept every law" in page(rows)
    assert "a ratio of 1.00" in page(rows)


@pytest.mark.gate
def test_a_benchmark_that_fails_is_on_the_page_and_in_the_status(tmp_path: Path) -> None:
    config = Config(
        device="late",
        ranks=1,
        cells=0,
        benchmarks=('-c "raise SystemExit(3)"',),
        rows=tmp_path / "r",
        page=tmp_path / "p",
    )
    assert main(config) == 1
    assert "| 3 |" in config.page.read_text()
