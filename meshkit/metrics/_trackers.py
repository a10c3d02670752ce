"""Trackers of experiments (TensorBoard, Weights & Biases, MLflow), each by its own package, behind one small protocol."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from meshkit.errors import MeshkitError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
SHOWN = 300  # characters of a package's error


class Tracker(Protocol):
    """Where a `Logger` sends what it is given, on one rank. Names of scalars are grouped: train/loss, speed/tokens_per_s."""

    def config(self, values: Mapping[str, bool | int | float | str]) -> None:
        """First, each time that a run begins or goes on: its flags."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...

    def image(self, step: int, name: str, image_CHW: Tensor) -> None:
        """uint8 [3, H, W]."""

    def go_back(self, step: int) -> None:
        """What was given of later steps comes again."""

    def close(self, *, failed: bool) -> None: ...


def open_tracker(kind: TrackerName, folder: Path, start_step: int, *, project: str, name: str) -> Tracker:
    """folder: of the run, where a tracker keeps its files, or which of its runs this one is.

    Raises: MeshkitError for a package that is missing, and where the tracker does not let the run begin.
    """
    if kind == "tensorboard":
        return _TensorBoard(folder / "tensorboard", start_step)
    if kind not in _HELP:
        raise MeshkitError(f"trackers={kind!r}: there is none of that name. There are tensorboard, wandb, mlflow.")
    try:
        return (_WandB if kind == "wandb" else _MLflow)(folder, start_step, project=project, name=name)
    except ImportError as error:
        raise MeshkitError(
            f"trackers={kind!r} needs the package {kind}, which cannot be imported ({error}). Install it with: pip install "
            "'meshkit[trackers]', or leave it out."
        ) from error
    except Exception as error:
        said = " ".join(str(error).split())
        raise MeshkitError(
            f"trackers={kind!r}: {type(error).__name__}: {said[:SHOWN]}{'...' * (len(said) > SHOWN)} -- {_HELP[kind]}"
        ) from error


_HELP: dict[str, str] = {
    "wandb": "Log in with `wandb login`, or write to disk alone with WANDB_MODE=offline.",
    "mlflow": "MLFLOW_TRACKING_URI says where its server, folder or database is.",
}


def plain_name(name: str) -> str:
    """With signs alone that every tracker takes."""
    return re.sub(r"[^\w\-. /:]|\.\.+", "_", name)


def grouped(name: str) -> str:
    """The name of a scalar with a group, by which trackers sort their charts."""
    return plain_name(name if "/" in name else f"{_GROUPS.get(name, 'train')}/{name}")


_SPEED = ("step_s", "tokens_per_s", "mfu_full", "mfu_causal", "left_s", "slowest_rank", "slowest_over_median")
_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")
_HELD_OUT = ("held_out", "held_out_loss", "held_out_bits_per_byte", "accuracy")
_GROUPS = dict.fromkeys(_SPEED, "speed") | dict.fromkeys(_MEMORY, "memory") | dict.fromkeys(_HELD_OUT, "evaluation")


class _TensorBoard:
    def __init__(self, folder: Path, start_step: int) -> None:
        self._folder, self._fresh = folder, not start_step
        self._board = _open_board(folder, start_step)

    def config(self, values: Mapping[str, Any]) -> None:
        if self._fresh:
            self._board.add_hparams(dict(values), {}, run_name=".")  # else they are a run of their own
            lines = [f"|{name}|`{value}`|" for name, value in values.items()]
            self._board.add_text("flags", "\n".join(["|flag|value|", "|---|---|", *lines]))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._board.add_text(name, markdown(columns, rows), step)

    def image(self, step: int, name: str, image_CHW: Tensor) -> None:
        self._board.add_image(name, image_CHW, step)

    def go_back(self, step: int) -> None:
        self._board.close()
        self._board = _open_board(self._folder, step)

    def close(self, *, failed: bool) -> None:
        self._board.close()


def _open_board(folder: Path, start_step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MeshkitError(
            f"trackers='tensorboard' needs the package tensorboard, which cannot be imported ({error}). "
            "Install it with: pip install 'meshkit[recipes]', or leave it out: trackers=()."
        ) from error
    # purge_step hides, for the reader, what earlier event files hold from that step on.
    return SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=10)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. Backticks keep signs of the cells from being read as marks."""
    lines = [columns, ["---"] * len(columns), *([f"`{cell}`" for cell in row] for row in rows)]
    return "\n".join("|".join(("", *line, "")) for line in lines)


class _WandB:
    """A process of its package sends, so that a step waits for nobody. Charts are over the metric `step`."""

    def __init__(self, folder: Path, start_step: int, *, project: str, name: str) -> None:
        import wandb

        path = folder / "wandb.json"
        goes_on = bool(start_step) and path.exists()
        run_id = json.loads(path.read_text())["id"] if goes_on else uuid.uuid4().hex[:8]
        self._wandb: Any = wandb
        self._run: Any = wandb.init(project=project, name=name, id=run_id, dir=str(folder), resume="allow")
        # Its own steps only grow, and a run that goes on from a checkpoint, or goes back to one, makes some again.
        path.write_text(json.dumps({"id": run_id}))
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def config(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._run.log({"step": step, name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def image(self, step: int, name: str, image_CHW: Tensor) -> None:
        self._run.log({"step": step, name: self._wandb.Image(image_CHW.permute(1, 2, 0).numpy())})

    def go_back(self, step: int) -> None:
        """Points are of the steps that they say, and later ones of the same step stand beside them."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    """Lines are sent by a thread. Tables are artifacts in Markdown, one for each step."""

    def __init__(self, folder: Path, start_step: int, *, project: str, name: str) -> None:
        # Its own are 7, in four minutes for each request: so long would a run wait at its end for a server that is gone.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        import mlflow

        self._mlflow: Any = mlflow
        self._client: Any = mlflow.MlflowClient()
        # Of our own: what its asynchronous calls could not send nobody is told of.
        self._thread, self._sent = ThreadPoolExecutor(1, thread_name_prefix="mlflow"), deque[Future[Any]]()
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(project)
        path = folder / "mlflow.json"
        if start_step and path.exists():
            self._id, self._fresh = json.loads(path.read_text())["id"], False
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id, self._fresh = self._client.create_run(experiment_id, run_name=name).info.run_id, True
            path.write_text(json.dumps({"id": self._id}))

    def config(self, values: Mapping[str, Any]) -> None:
        if self._fresh:  # a run's parameters never change
            params = [self._mlflow.entities.Param(name, str(value)[:6000]) for name, value in values.items()]
            for first in range(0, len(params), 100):  # of one request
                self._send("log_batch", self._id, params=params[first : first + 100])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), 1000):  # of one request
            self._send("log_batch", self._id, metrics=metrics[first : first + 1000])

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._send("log_text", self._id, markdown(columns, rows), f"{name}/step-{step:08d}.md")

    def image(self, step: int, name: str, image_CHW: Tensor) -> None:
        picture = image_CHW.permute(1, 2, 0).numpy()
        self._send("log_image", self._id, picture, key=name.replace("/", "."), step=step)

    def go_back(self, step: int) -> None:
        """Later points of the same step stand beside those that are there."""

    def close(self, *, failed: bool) -> None:
        self._sent.append(
            self._thread.submit(self._client.set_terminated, self._id, "FAILED" if failed else "FINISHED")
        )
        while self._sent:
            self._settle()
        self._thread.shutdown()

    def _send(self, call: str, *args: Any, **options: Any) -> None:
        """Raises: what went wrong with an earlier one."""
        while self._sent and self._sent[0].done():
            self._settle()
        self._sent.append(self._thread.submit(getattr(self._client, call), *args, **options))

    def _settle(self) -> None:
        """Wait for the oldest. Raises: what went wrong with it; then the others are not sent, each after as long a wait."""
        try:
            self._sent.popleft().result()
        except Exception:
            self._thread.shutdown(wait=False, cancel_futures=True)
            raise
