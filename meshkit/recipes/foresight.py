"""The forecast of this script's step, beside the steps that it makes: a process of its own makes the forecast meanwhile."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from meshkit.cluster import Cluster
from meshkit.mesh import Mesh
from meshkit.preflight.forecast import MeasuredStep, Told, calibrated, measure_step

FIRST = 4  # of the process: before it connections are opened, blocks compiled
STEPS = 8  # of which the one in the middle counts
WAIT_S = 60.0  # at a run's end, for a forecast that is not there yet


class Foresight:
    """What --forecast does: `measure()` around each step, and `said()` is a sentence once, on rank 0 of the world.

    cluster: a datasheet or a file. out: a file for it as this run measured it. script, args: default those of this process'
    launch; the script is read again by `python -m meshkit forecast`, on rank 0's host, since a forecast needs a world of its
    own.
    Raises: ClusterError for a cluster that is not there.
    """

    def __init__(self, mesh: Mesh, cluster: str, *, out: Path, script: str = "", args: Sequence[str] = ()) -> None:
        self._cluster, self._out = Cluster.read(cluster), out  # refused on every rank, now
        self._on_host = mesh.device_type != "cuda"
        self._steps: list[MeasuredStep] = []
        self._slowed: list[MeasuredStep] = []
        self._seen = 0
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "forecast.json"
        self.off = 0.0
        """how far the forecast was off, as a share of the measured step, once `out` is written"""
        self.measured_s = 0.0
        self._process: subprocess.Popen[str] | None = None
        if dist.get_rank() == 0:
            options = ["--cluster", cluster, "--world", str(mesh.spec.world_size), "--save", str(self._file)]
            launched = [script, *options, *args] if script else [sys.argv[0], *options, *sys.argv[1:]]
            words = ["-m", "meshkit", "forecast", *launched]
            self._process = subprocess.Popen(
                [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Around the work of a step."""
        with measure_step(on_host=self._on_host) as found:
            yield
        self._seen += 1
        if self._process is not None and self._seen > FIRST:
            # While the other process runs it is in the way: those steps count only where there are no others.
            (self._steps if self._process.poll() is not None else self._slowed).extend(found)

    def said(self, *, ends: bool = False) -> str:
        """The sentence, once there are enough measured steps, or some and no more come; "" before, and after it was said."""
        if self._process is None or (len(self._steps) < STEPS and not ends):
            return ""
        try:
            self._process.wait(timeout=WAIT_S)
            sentence = self._sentence(self._steps or self._slowed)
        except subprocess.TimeoutExpired:
            sentence = "--forecast: the run ended before the forecast was made"
        self.close()
        return sentence

    def _sentence(self, steps: Sequence[MeasuredStep]) -> str:
        assert self._process is not None
        if self._process.returncode:
            _, error = self._process.communicate()
            return f"--forecast: {error.strip().splitlines()[-1] if error.strip() else self._process.returncode}"
        if not steps:
            return f"--forecast: the run has no step after its first {FIRST} to compare with"
        middle = statistics.median_low([step.seconds for step in steps])
        measured = next(step for step in steps if step.seconds == middle)
        told = Told.from_json(self._file.read_text(encoding="utf-8"))
        if not measured.by_axis:
            return told.beside(measured)
        calibrated(self._cluster, told, measured).write(self._out)
        self.off, self.measured_s = abs(told.seconds / measured.seconds - 1), measured.seconds
        return f"{told.beside(measured)}; {self._out} is the cluster as this run measured it"

    def close(self) -> None:
        """Ends the other process, if it still runs."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.communicate()
            self._process = None
        self._folder.cleanup()
