import builtins
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshkit.errors import MeshkitError
from meshkit.metrics import Logger, show_samples

ROOT = Path(__file__).parents[2]


def rows(folder: Path) -> list[dict[str, float | None]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [
        json.loads(line, parse_constant=no_constant) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def test_every_sink_gets_what_was_logged(tmp_path):
    seen = []
    with Logger(tmp_path, also=[lambda step, scalars: seen.append((step, scalars))]) as log:
        log.log(1, {"loss": torch.tensor(2.5), "lr": 0.25})
        log.log(2, {"loss": 1.5})
    assert rows(tmp_path) == [{"step": 1, "loss": 2.5, "lr": 0.25}, {"step": 2, "loss": 1.5}]
    assert points(tmp_path, "train/loss") == [(1, 2.5), (2, 1.5)]
    assert points(tmp_path, "train/lr") == [(1, 0.25)]
    assert seen == [(1, {"loss": 2.5, "lr": 0.25}), (2, {"loss": 1.5})]


def test_a_value_that_is_not_finite_is_null_in_jsonl_and_itself_elsewhere(tmp_path):
    seen = []
    with Logger(tmp_path, also=[lambda step, scalars: seen.append(scalars)]) as log:
        log.log(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 1.0}]
    assert math.isnan(points(tmp_path, "train/loss")[0][1]) and math.isinf(points(tmp_path, "train/grad_norm")[0][1])
    assert math.isnan(seen[0]["loss"])


def test_a_line_can_be_read_when_log_returns(tmp_path):
    log = Logger(tmp_path, trackers=())
    log.log(1, {"loss": 1.0})
    assert rows(tmp_path) == [{"step": 1, "loss": 1.0}]
    log.close()


def test_a_continued_run_has_every_step_once(tmp_path):
    with Logger(tmp_path) as log:
        for step in range(1, 8):
            log.log(step, {"loss": 10.0 + step})
    with Logger(tmp_path, start_step=5) as log:  # the checkpoint was of step 5
        for step in range(6, 10):
            log.log(step, {"loss": 20.0 + step})
    expected = [(step, 10.0 + step) for step in range(1, 6)] + [(step, 20.0 + step) for step in range(6, 10)]
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == expected
    assert points(tmp_path, "train/loss") == expected


def test_a_line_torn_by_a_kill_is_dropped_and_the_next_one_is_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    with Logger(tmp_path, start_step=2, trackers=()) as log:
        log.log(3, {"loss": 1.0})
    assert rows(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 3, "loss": 1.0}]
    # Torn just before its newline, a line is as good as whole to a parser, but the next one would run into it.
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    with Logger(tmp_path, start_step=2, trackers=()) as log:
        log.log(3, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"loss": 1.0}', '{"step": "one"}', "7"])
def test_a_file_that_is_no_log_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(MeshkitError, match=r"metrics.jsonl, line 2: .* is not a JSON object with a step"):
        Logger(tmp_path, start_step=2, trackers=())
    assert path.read_text().splitlines()[1] == line


def test_ranks_that_are_not_enabled_touch_nothing(tmp_path):
    def forbidden(step: int, scalars: dict[str, float]) -> None:
        raise AssertionError("called")

    with Logger(tmp_path / "run", enabled=False, also=[forbidden]) as log:
        log.log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensorboard_is_named_when_it_is_asked_for_and_only_then(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_tensorboard(name, *args, **kwargs):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(MeshkitError, match=r"trackers='tensorboard' needs .* pip install 'meshkit\[recipes\]'"):
        Logger(tmp_path)
    with Logger(tmp_path, trackers=()) as log:
        log.log(1, {"loss": 1.0})
    assert rows(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_scalar_cannot_take_the_name_of_the_step(tmp_path):
    with Logger(tmp_path, trackers=()) as log, pytest.raises(MeshkitError, match="cannot be named 'step'"):
        log.log(1, {"step": 1.0})


def test_importing_metrics_imports_neither_tensorboard_nor_rich():
    code = "import sys, meshkit.metrics; print([name for name in ('tensorboard', 'rich') if name in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert child.stdout.strip() == "[]"


def test_samples_are_shown_and_kept_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evenly chosen, and markup in a sample is text."""
    rows = [(f"p{n}", "[bold]a[/bold]", f"{n}.00") for n in range(6)]
    with Logger(tmp_path) as logger:
        show_samples(3, ("prompt", "answer", "score"), rows, logger, most=3)
    printed = capsys.readouterr().out
    assert [name for name, *_ in rows if name in printed] == ["p0", "p2", "p4"]
    assert "step 3" in printed and "[bold]a[/bold]" in printed
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (event,) = board.Tensors("samples/text_summary")
    assert event.step == 3
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == "|prompt|answer|score|" and lines[2] == "|`p0`|`[bold]a[/bold]`|`0.00`|" and len(lines) == 2 + 6
