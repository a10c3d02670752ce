"""Trackers: what a run logs is read back from the real packages' own files, and from a real MLflow server."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshkit.errors import MeshkitError, StepError
from meshkit.metrics import Logger, _logger

ROOT = Path(__file__).parents[2]
# In a process of its own, as a run is: the packages start threads and processes. It goes on from step 2, as after a kill.
RUN = """
import torch
from meshkit.metrics import Logger, show_samples
flags = {"lr": 0.1, "mesh": "dp_shard=2"}
for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    with Logger("run", start_step=start, trackers=[KIND], project="tests", config=flags) as log:
        for step in steps:
            log.log(step, {"loss": start + 1 / step, "tokens_per_s": 10.0, "policy/kl": 0.5})
        show_samples(steps[-1], ["answer", "reward"], [["2", "1.0"], ["5", "0.0"]], log)
        log.image(steps[-1], "load/layers", torch.zeros(3, 8, 8, dtype=torch.uint8))
"""
LOSSES = [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 2 + 1 / 3), (4, 2.25)]


def ran(kind: str, folder: Path, **environment: str) -> None:
    code = RUN.replace("KIND", repr(kind))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_weights_and_biases_has_every_line_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    ran("wandb", tmp_path, WANDB_MODE="offline")
    # Its package writes these files and, from 0.28 on, has no reader of them: a log as of LevelDB, in blocks of 32 KiB.
    code = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record
for path in sys.argv[1:]:
    data, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind not in (1, 4):
            continue
        record, whole = Record.FromString(whole), b""
        if record.WhichOneof("record_type") == "run":
            print(json.dumps({"id": record.run.run_id, "project": record.run.project}))
        if record.WhichOneof("record_type") == "config":
            print(json.dumps({"flags": {each.key: json.loads(each.value_json) for each in record.config.update}}))
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            print(json.dumps({each.key or each.nested_key[0]: json.loads(each.value_json) for each in items}))
"""
    files = sorted(map(str, tmp_path.glob("run/wandb/offline-run-*/*.wandb")), key=os.path.getmtime)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *files], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({row["id"] for row in rows if "id" in row}) == 1
    assert {row["project"] for row in rows if "id" in row} == {"tests"}
    assert any(row["flags"].get("lr") == 0.1 for row in rows if "flags" in row)
    lines = [row for row in rows if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in lines] == LOSSES
    assert all(row["speed/tokens_per_s"] == 10.0 and row["policy/kl"] == 0.5 for row in lines)
    assert [row["step"] for row in rows if "samples" in row] == [3, 4]
    assert [row["step"] for row in rows if "load/layers" in row] == [3, 4]


def in_mlflow(uri: str) -> dict[str, Any]:
    """The one run of the experiment, as its client reads it."""
    code = """
import json, sys, mlflow
client = mlflow.MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
losses = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")]
samples = [each.path for each in client.list_artifacts(run.info.run_id, "samples")]
print(json.dumps({"status": run.info.status, "name": run.info.run_name, "flags": run.data.params, "last": run.data.metrics,
                  "losses": losses, "samples": samples}))
"""
    variables = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, uri], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_whole(found: dict[str, Any]) -> None:
    assert found["status"] == "FINISHED" and found["name"] == "run"
    assert found["flags"] == {"lr": "0.1", "mesh": "dp_shard=2"}
    assert sorted(map(tuple, found["losses"])) == sorted(LOSSES)
    assert found["last"]["speed/tokens_per_s"] == 10.0
    assert found["samples"] == ["samples/step-00000003.md", "samples/step-00000004.md"]


def test_mlflow_has_every_line_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", exc_type=ImportError)
    uri = f"file:{tmp_path / 'mlruns'}"
    ran("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    is_whole(in_mlflow(uri))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    if importlib.util.find_spec("flask") is None or importlib.util.find_spec("mlflow") is None:
        pytest.skip("a server takes the whole package: pip install mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    command = [sys.executable, "-m", "mlflow", "server", *options, *places]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        uri, end = f"http://127.0.0.1:{port}", time.monotonic() + 100
        while True:
            try:
                with urllib.request.urlopen(f"{uri}/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.2)
        yield uri
        os.killpg(process.pid, signal.SIGKILL)


def test_a_server_of_mlflow_has_every_line(server: str, tmp_path: Path) -> None:
    ran("mlflow", tmp_path, MLFLOW_TRACKING_URI=server)
    is_whole(in_mlflow(server))


class Silent:
    """A tracker that keeps the steps of what it was given."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def config(self, values: Mapping[str, bool | int | float | str]) -> None: ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...

    def image(self, step: int, name: str, image_CHW: torch.Tensor) -> None: ...

    def go_back(self, step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Broken(Silent):
    """One whose server goes away after the first line."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.steps:
            raise ConnectionError("the server is gone")
        super().scalars(step, values)

    def close(self, *, failed: bool) -> None:
        raise AssertionError("it was left")


def test_a_run_goes_on_without_a_server_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    monkeypatch.setattr(_logger, "open_tracker", lambda *args, **options: broken)
    with Logger(tmp_path, trackers=["wandb"]) as log:
        for step in range(1, 5):
            log.log(step, {"loss": 1.0})
    assert broken.steps == [1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    (record,) = caplog.records
    assert record.getMessage().startswith("wandb: ConnectionError: the server is gone. The run goes on without it;")


def test_on_a_full_disk_the_error_is_of_one_line_and_trackers_are_closed(tmp_path: Path) -> None:
    class Told(Silent):
        failed = False

        def close(self, *, failed: bool) -> None:
            self.failed = failed

    told = Told()
    with (
        pytest.raises(StepError, match=r"metrics.jsonl: No space left"),
        Logger(tmp_path, trackers=[told]) as log,
    ):
        log.log(1, {"loss": 1.0})
        assert log._lines is not None and log._lines._file is not None
        log._lines._file.close()
        log._lines._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
        log.log(2, {"loss": 1.0})
    assert told.failed


def test_an_error_in_a_tracker_of_ones_own_is_raised(tmp_path: Path) -> None:
    log = Logger(tmp_path, trackers=[Broken()])
    log.log(1, {"loss": 1.0})
    with pytest.raises(ConnectionError):
        log.log(2, {"loss": 1.0})
    with pytest.raises(AssertionError, match="it was left"):
        log.close()


def test_a_name_that_nobody_has_and_a_package_that_is_missing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MeshkitError, match="trackers='comet': there is none of that name"):
        Logger(tmp_path, trackers=["comet"])  # type: ignore[list-item]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MeshkitError, match=r"trackers='wandb' needs the package wandb, .* 'meshkit\[trackers\]'"):
        Logger(tmp_path, trackers=["wandb"])


def test_tables_are_read_back_and_those_of_later_steps_go(tmp_path: Path) -> None:
    with Logger(tmp_path, trackers=()) as log:
        for step in (1, 2, 3):
            log.table(step, "samples", ["answer"], [[str(step)]])
    with Logger(tmp_path, trackers=(), start_step=2) as log:
        log.table(3, "samples", ["answer"], [["again"]])
    rows = [json.loads(line) for line in (tmp_path / "tables.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rows"]) for row in rows] == [(1, [["1"]]), (2, [["2"]]), (3, [["again"]])]


def test_tensorboard_has_flags_samples_and_pictures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Logger(tmp_path, config={"lr": 0.1, "out": tmp_path, "data": ("a", "b"), "sequence": True}) as log:
        log.table(1, "samples", ["answer", "reward"], [["*2*", "1.0"]])
        log.image(1, "load", torch.zeros(3, 4, 4, dtype=torch.uint8))
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()
    tags = board.Tags()
    assert {"flags/text_summary", "samples/text_summary"} <= {*tags["tensors"]}
    assert tags["images"] == ["load"]
    assert b"`*2*`" in board.Tensors("samples/text_summary")[0].tensor_proto.string_val[0]
    assert b"|lr|`0.1`|" in board.Tensors("flags/text_summary")[0].tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in board.summary_metadata
