"""Supervised fine-tuning as the first phase of a recipe: `teach` with checkpoints, logs, progress and signals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from meshkit.algos.teach import teach
from meshkit.checkpoint import Checkpointer, SaveOnSignal
from meshkit.data import Example
from meshkit.metrics import Logger, Progress
from meshkit.step import Run


def sft_phase(
    run: Run, optimizer: Optimizer, examples: Sequence[Example], out: Path, *, steps: int, **taught: Any
) -> bool:
    """Learn the examples for `steps` steps, from where a checkpoint in `out` stands, on whatever mesh.

    out: gets `checkpoints`, also when SIGTERM or SIGUSR1 ends the phase, and the files of `Logger`.
    taught: more arguments of `teach`: global_batch, seq_len and seed, and what is to differ from its defaults.
    Returns: whether all steps are made; False where a signal ended it. Every rank must call it.
    """
    mesh, speaks = run.mesh, run.mesh.rank == 0
    checkpoints = Checkpointer(out / "checkpoints", keep=1)
    start = checkpoints.latest() or 0  # for what only rank 0 shows; `teach` asks rank 0 for all
    with (
        checkpoints,
        SaveOnSignal() as signals,
        Progress(total_steps=steps, start_step=start, enabled=speaks) as progress,
        Logger(out, start_step=start, enabled=speaks, also=[progress.update]) as logger,
    ):
        done = teach(
            run,
            optimizer,
            examples,
            steps=steps,
            each=logger.log,
            checkpoints=checkpoints,
            leave=lambda: signals.should_stop(mesh),
            **taught,
        )
    if not done and speaks:
        print(f"{signals.received or 'a signal on another rank'}: saved in {out}; start again to go on")
    return done
