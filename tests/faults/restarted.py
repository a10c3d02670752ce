"""A small training run that keeps its state in memory, for drills that kill its ranks.

What it writes:

pid-RANK      of the process that trains, not of its supervisor
steps         a line for each start and each step of the first rank: word, life, step, time, loss
state-RANK    at the end: a digest of all that later steps would depend on
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

import meshkit as mk
from tests.checkpoint.training import build


@dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    mesh: str = "dp_shard=2 tp=2"
    steps: int = 20
    save_every: int = 0
    """on disk; 0: never"""
    restarts: str = "3"
    copies: int = 1
    noise: float = 0.1
    """losses are scaled by draws of each rank"""
    ram: Path | None = None
    """default: in `out`, so that nothing stays of a job that is not started again"""
    pause_s: float = 0.0
    """of every step"""
    raises: int = 0
    """in this step of the first life one rank raises"""


def main(config: Config) -> None:
    rank, life = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    config.out.mkdir(parents=True, exist_ok=True)
    mesh = mk.init_mesh(config.mesh, device_type="cpu")
    training = build(config.mesh, num_hidden_layers=2, tie_word_embeddings=False)
    state = (training.run, training.optimizer)
    memory = mk.checkpoint.InMemory(copies=config.copies, folder=config.ram or config.out / "ram")
    with (
        mk.Checkpointer(config.out / "checkpoints", memory=memory) as checkpointer,
        (config.out / "steps").open("a", buffering=1) as said,
    ):
        start = checkpointer.resume(*state, **training.holders)
        (config.out / f"pid-{rank}").write_text(str(os.getpid()))
        if mesh.rank == 0:
            print("start", life, start, time.time(), "nan", file=said)
        for step in range(start + 1, config.steps + 1):
            if step == config.raises and life == "0" and rank == 1:
                raise RuntimeError("this rank has had enough")
            (loss,) = training.train(1, noise=config.noise)
            time.sleep(config.pause_s)
            if config.save_every and step % config.save_every == 0:
                checkpointer.save(step, *state, **training.holders)
            checkpointer.save_in_memory(step, *state, **training.holders)
            if mesh.rank == 0:
                print("step", life, step, time.time(), repr(loss), file=said)
    (config.out / f"state-{rank}").write_text(training.local_state())


if __name__ == "__main__":
    config = tyro.cli(Config)
    mk.run_main(lambda: main(config), restarts=mk.faults.Restarts.parse(config.restarts))
