"""Logger: scalars, tables and pictures of a run to JSONL files, trackers (TensorBoard, W&B, MLflow) and sinks of the user."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch import Tensor

from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.errors import MeshkitError, StepError
from meshkit.metrics._trackers import Tracker, TrackerName, grouped, open_tracker, plain_name

LogSink = Callable[[int, dict[str, float]], None]
logger = logging.getLogger(__name__)


class Logger:
    """Writes scalars of a step to `folder/metrics.jsonl`, tables to `folder/tables.jsonl`, and both to trackers.

    trackers: names, "tensorboard" (files under `folder/tensorboard`), "wandb" and "mlflow", or objects of your own; the last
    two are told `project`, `name` (default: of the folder), and go on with their run when this one does. config: flags of
    the run, for trackers. also: functions that get each line.
    start_step: the step the run continues after. Lines and TensorBoard points of later steps, which an interrupted run
    left behind, are dropped, so that no step appears twice. A JSONL line survives a kill once `log` has returned; a
    value that is not finite is null there. enabled: False on all ranks but one; then nothing is opened or called.
    A tracker of these names that fails later on is left, with a warning: the run goes on, and the files have every line.

    Raises: MeshkitError for a tracker that is not installed or does not begin, and for a JSONL file with other content.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        start_step: int = 0,
        enabled: bool = True,
        jsonl: bool = True,
        trackers: Sequence[TrackerName | Tracker] = ("tensorboard",),
        project: str = "meshkit",
        name: str = "",
        config: Mapping[str, Any] | None = None,
        also: Sequence[LogSink] = (),
    ) -> None:
        self._enabled, self._also = enabled, tuple(also)
        self._lines = self._tables = None
        self._trackers: dict[str, Tracker] = {}
        if not enabled:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if jsonl:
            self._lines = _Lines(folder / "metrics.jsonl", start_step)
            self._tables = _Lines(folder / "tables.jsonl", start_step)
        options = {"project": project, "name": name or folder.resolve().name}
        for index, each in enumerate(trackers):
            if isinstance(each, str):
                self._trackers[each] = open_tracker(each, folder, start_step, **options)
            else:
                self._trackers[f"trackers[{index}]"] = each
        if config is not None:
            plain = {
                plain_name(key): each if isinstance(each, bool | int | float) else str(each)
                for key, each in config.items()
            }
            self._tell(lambda tracker: tracker.config(plain))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one line for this step. Values are numbers or tensors of one element."""
        if not self._enabled:
            return
        values = {name: float(value) for name, value in scalars.items()}
        if "step" in values:
            raise MeshkitError("A scalar cannot be named 'step': that is the number of the line. Choose another name.")
        if self._lines is not None:
            # JSON has no NaN: Python would write one that other readers refuse.
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self._lines.write({"step": step, **finite})
        self._tell(lambda tracker: tracker.scalars(step, {grouped(name): value for name, value in values.items()}))
        for sink in self._also:
            sink(step, values)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table of texts, such as samples with their rewards, to be looked through."""
        if self._tables is not None:
            self._tables.write({"step": step, "name": name, "columns": [*columns], "rows": [[*row] for row in rows]})
        self._tell(lambda tracker: tracker.table(step, plain_name(name), columns, rows))

    def image(self, step: int, name: str, image_CHW: Tensor) -> None:
        """Add a picture to the trackers, uint8 [3, H, W]; the files have none."""
        self._tell(lambda tracker: tracker.image(step, plain_name(name), image_CHW))

    def go_back(self, step: int) -> None:
        """The run goes on from an earlier step: lines and points of later ones are dropped, as when it resumes there."""
        for file in (self._lines, self._tables):
            if file is not None:
                file.go_back(step)
        self._tell(lambda tracker: tracker.go_back(step))

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the files. Leaving the `with` block calls it. failed: whether the run did, for trackers."""
        with ExitStack() as every:  # each, also where another raises
            for name in self._trackers:
                every.callback(self._tell_one, name, lambda tracker: tracker.close(failed=failed))
            for file in (self._lines, self._tables):
                if file is not None:
                    every.callback(file.close)

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for name in tuple(self._trackers):
            self._tell_one(name, what)

    def _tell_one(self, name: str, what: Callable[[Tracker], None]) -> None:
        try:
            what(self._trackers[name])
        except Exception as error:
            if name not in ("wandb", "mlflow"):
                raise
            # A server that is away for a while is no reason to end a training run.
            del self._trackers[name]
            logger.warning(
                "%s: %s: %s. The run goes on without it; metrics.jsonl and tables.jsonl have every line.",
                *(name, type(error).__name__, error),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


class _Lines:
    """A JSONL file whose rows have a step."""

    _file: TextIO | None

    def __init__(self, path: Path, start_step: int) -> None:
        self._path, self._file = path, None
        self.go_back(start_step)

    def go_back(self, step: int) -> None:
        self.close()  # what is open to append is not the file that takes its place
        _drop_lines_after(self._path, step)

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            with telling_of_a_full_disk(StepError, f"writing {self._path}", self._path.parent):
                if self._file is None:
                    self._file = self._path.open(
                        "a", encoding="utf-8", buffering=1
                    )  # by lines: a killed run keeps them
                self._file.write(json.dumps(row, allow_nan=False) + "\n")
        except StepError:
            with suppress(OSError):  # what it holds has no room either
                self.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`. The last line may be torn by a kill in the middle of a write, and then goes too."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept_lines = []
    for number, line in enumerate(lines, start=1):
        try:
            row: Any = json.loads(line)
            if row["step"] <= step and line.endswith("\n"):
                kept_lines.append(line)
        except (ValueError, TypeError, KeyError):
            if number < len(lines) or line.endswith("\n"):
                raise MeshkitError(
                    f"{path}, line {number}: {line.strip()[:80]!r} is not a JSON object with a step. "
                    "Move the file away, or log into another folder."
                ) from None
    # A new file takes the old one's place in one move, so that a kill here loses no line.
    partial = path.with_suffix(".part")
    partial.write_text("".join(kept_lines), encoding="utf-8")
    partial.replace(path)
