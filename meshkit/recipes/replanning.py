"""Re-planning: where a run's steps are not as forecast, the best strategy of the cluster as measured, and whether it pays.

Other processes on the host of rank 0 search meanwhile, since a search reads the model in worlds of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from meshkit.mesh import Mesh
from meshkit.preflight.forecast import Told
from meshkit.strategy import Strategy

EVERY = 5  # steps between two looks, at the same ones on all ranks
GAIN = 0.05  # of a step: less does not pay for the errors of a forecast
SEARCHED = ("mesh", "zero", "sequence", "schedule", "recompute")
"""flags whose values are searched anew: the script's own say where the run began"""


class Replanning:
    """`begin` after a forecast was compared; `next_strategy` before each step. Every rank calls both.

    limit: of a forecast's error, as a share of the step, beyond which a search begins. folder: with the measured cluster;
    the strategy that is found is written there. microbatches: the loop's, which stay. script, args: default those of this
    process' launch.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        limit: float,
        folder: Path,
        microbatches: int,
        script: str = "",
        args: Sequence[str] | None = None,
    ) -> None:
        self._group, self._first, self._world = mesh.group, mesh.ranks[0], mesh.spec.world_size
        self._limit, self._microbatches = limit, microbatches
        self._cluster, self._found = folder / "cluster.toml", folder / "strategy.toml"
        self._script = script or sys.argv[0]
        self._args = without_flags(sys.argv[1:] if args is None else args, (*SEARCHED, "out"))
        self._memory = str(torch.cuda.mem_get_info(mesh.device)[1]) if mesh.device_type == "cuda" else None
        self._folder = tempfile.TemporaryDirectory()
        self._told = Path(self._folder.name) / "told.json"
        self._process: subprocess.Popen[str] | None = None
        self._measured_s, self._forecasts = 0.0, False
        self.done = False

    def begin(self, off: float, measured_s: float) -> None:
        """Starts the search on the rank that knows of such an error. measured_s: of a step now."""
        if off <= self._limit or self._measured_s:
            return
        self._measured_s = measured_s
        memory = [] if self._memory is None else ["--device-memory", self._memory]
        microbatches = ("--microbatches", str(self._microbatches))
        self._start("search", *memory, "--out", str(self._found), script_flags=microbatches)

    def next_strategy(self, step: int) -> tuple[Strategy | None, str]:
        """What to go on with, if the search has ended with something better, and a sentence about it: on every rank, once.

        Wire: every few steps a broadcast of an object from rank 0 over the mesh.
        """
        if self.done or step % EVERY:
            return None, ""
        found = [self._look() if dist.get_rank() == self._first else None]
        dist.broadcast_object_list(found, src=self._first, group=self._group)
        if found[0] is None:
            return None, ""
        self.close()
        return found[0]

    def close(self) -> None:
        """Ends the search, if it still runs."""
        self.done = True
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.communicate()
            self._process = None
        self._folder.cleanup()

    def _look(self) -> tuple[Strategy | None, str] | None:
        """None while there is nothing to say."""
        if self._process is None or self._process.poll() is None:
            return None
        process, self._process = self._process, None
        _, error = process.communicate()
        if process.returncode:
            lines = error.strip().splitlines() or [f"exit code {process.returncode}"]
            return None, f"--replan: {lines[-1]}"
        if not self._forecasts:  # the search has ended; its winner's seconds are read of a forecast of it
            self._forecasts = True
            self._start("forecast", "--save", str(self._told), script_flags=("--strategy", str(self._found)))
            return None
        seconds = Told.from_json(self._told.read_text(encoding="utf-8")).seconds
        beside = f"--replan: {self._found} is forecast {seconds:.3g} s a step, which now takes {self._measured_s:.3g} s"
        if seconds > (1 - GAIN) * self._measured_s:
            return None, f"{beside}: the run stays as it is"
        return Strategy.read(self._found), beside

    def _start(self, verb: str, *options: str, script_flags: Sequence[str]) -> None:
        same = ["--cluster", str(self._cluster), "--world", str(self._world)]
        # A strategy's file says the microbatches itself, and those of the launch are the same.
        args = without_flags(self._args, ("microbatches", *(("strategy",) if verb == "forecast" else ())))
        words = [sys.executable, "-m", "meshkit", verb, self._script, *same, *options, *args, *script_flags]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def without_flags(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words of a command line without these flags and their values: `--mesh X`, `--mesh=X`, `--no-sequence`."""
    kept: list[str] = []
    drops = False
    for word in args:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
            drops = name in names
            if not drops:
                kept.append(word)
            drops = drops and "=" not in word
        elif not drops:
            kept.append(word)
        else:
            drops = False  # one value each
    return kept
