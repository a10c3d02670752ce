"""`python -m meshkit forecast`: seconds of a training script's step from its flags, on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from meshkit.cluster import Cluster
from meshkit.preflight._recipe_run import recipe_run
from meshkit.preflight.forecast._forecast import forecast_resolved


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Say how long a step of a training script will take, before it runs: seconds, tokens/s, MFU, and where they go.

    The script's own flags follow, as in its launch: --mesh "dp_shard=8 tp=8" --model llama3-8b. No GPU, no data, one process.
    """

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    cluster: str = "h100"
    """a datasheet that comes with meshkit (a100, b200, cpu, h100, h200, mi300x), or a file, as measure-cluster writes it"""
    world: int | None = None
    """ranks of the run; default: the product of the mesh's axes"""
    also: tuple[str, ...] = ()
    """further clusters to print seconds for; nothing is traced again"""
    save: Path | None = None
    """a file for the seconds, of computing and of each axis, as JSON"""


def command(args: list[str]) -> None:
    """args: what follows `forecast`."""
    options, rest = tyro.cli(Seconds, args=args, prog="python -m meshkit forecast", return_unknown_args=True)
    cluster = Cluster.read(options.cluster)
    run = recipe_run(options.script, rest, world=options.world, kernels=cluster.device.kernels, verb="forecast")
    told = forecast_resolved(run.resolved, cluster, run.batch, microbatches=run.microbatches, loss=run.loss)
    if options.save is not None:
        options.save.write_text(told.told.to_json(), encoding="utf-8")
    print(told)
    for name in options.also:
        print(f"on {name}: {told.on(Cluster.read(name)).seconds:.4g} s")
