import gzip
import json
from pathlib import Path

import pytest
import torch

from meshkit.core import _torch
from meshkit.errors import MeshkitError
from meshkit.metrics import profile


def train(step_done, steps: int) -> None:
    for step in range(steps):
        with torch.profiler.record_function(f"train_step_{step}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        step_done()


def traced_steps(path: Path) -> set[str]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("train_step_")}


def test_the_trace_holds_the_steps_of_the_window_and_no_others(tmp_path):
    with profile(tmp_path, rank=3, first_step=2, steps=2) as step_done:
        train(step_done, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["trace-rank3.json.gz"]
    assert traced_steps(tmp_path / "trace-rank3.json.gz") == {"train_step_2", "train_step_3"}


def test_a_run_that_ends_within_the_window_writes_what_it_has(tmp_path):
    with profile(tmp_path, first_step=1, steps=50) as step_done:
        train(step_done, 4)
    assert traced_steps(tmp_path / "trace-rank0.json.gz") == {"train_step_1", "train_step_2", "train_step_3"}


def test_a_run_that_ends_before_the_window_says_that_there_is_no_trace(tmp_path):
    with (
        pytest.warns(UserWarning, match=r"profile\(\) wrote no trace: the block ended before step 5"),
        profile(tmp_path, first_step=5) as step_done,
    ):
        train(step_done, 3)
    assert list(tmp_path.iterdir()) == []


def test_profiling_that_is_off_does_nothing(tmp_path):
    with profile(tmp_path / "run", enabled=False) as step_done:
        train(step_done, 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [{"first_step": 0}, {"steps": 0}])
def test_a_window_without_a_step_before_it_or_in_it_is_refused(tmp_path, window):
    with (
        pytest.raises(MeshkitError, match=r"the window holds at least 1 step and starts at step 1"),
        profile(tmp_path, **window),
    ):
        pass


@pytest.fixture
def memory_calls(monkeypatch):
    """The calls that would reach the CUDA allocator, which needs a GPU."""
    calls = []
    monkeypatch.setattr(_torch, "record_memory_history", lambda enabled: calls.append(enabled))
    monkeypatch.setattr(_torch, "dump_memory_snapshot", lambda path: calls.append(path.name))
    return calls


def test_memory_is_recorded_in_the_window_and_dumped_before_recording_stops(tmp_path, memory_calls):
    with profile(tmp_path, rank=1, first_step=2, steps=2, device=torch.device("cuda")) as step_done:
        for step in range(6):
            assert memory_calls == ([] if step < 2 else [True] if step < 4 else [True, "memory-rank1.pickle", False])
            train(step_done, 1)


def test_memory_is_dumped_when_a_step_of_the_window_fails(tmp_path, memory_calls):
    with (
        pytest.raises(torch.OutOfMemoryError),
        profile(tmp_path, first_step=2, steps=2, device=torch.device("cuda")) as step_done,
    ):
        train(step_done, 3)
        raise torch.OutOfMemoryError("no memory left")
    assert memory_calls == [True, "memory-rank0.pickle", False]


@pytest.mark.parametrize(
    "options", [{}, {"device": torch.device("cpu")}, {"device": torch.device("cuda"), "memory": False}]
)
def test_memory_is_recorded_on_cuda_only_and_only_if_asked(tmp_path, memory_calls, options):
    with profile(tmp_path, first_step=1, steps=1, **options) as step_done:
        train(step_done, 3)
    assert memory_calls == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_snapshot_of_a_gpu_names_its_allocations(tmp_path):
    device = torch.device("cuda")
    with profile(tmp_path, first_step=1, steps=1, device=device) as step_done:
        for _ in range(3):
            torch.ones(1 << 20, device=device).sum().item()
            step_done()
    assert (tmp_path / "memory-rank0.pickle").stat().st_size > 0
    assert (tmp_path / "trace-rank0.json.gz").stat().st_size > 0
