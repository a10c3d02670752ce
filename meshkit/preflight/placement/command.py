"""`python -m meshkit place`: which rank of a training script's mesh sits where on a cluster of unlike links and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from meshkit.cluster import Cluster
from meshkit.preflight._recipe_run import recipe_run
from meshkit.preflight.placement._place import place


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Find which of the launcher's ranks each rank of the mesh should be, and how many blocks each stage should have.

    The script's own flags follow, as in its launch: --mesh "pp=2 dp_shard=2 tp=2". No GPU, no data, one process.
    """

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    cluster: str
    """a file with [unlike], as measure-cluster writes it where ranks or links are not alike"""
    world: int | None = None
    """ranks of the run; default: the product of the mesh's axes"""
    out: Path | None = None
    """write the strategy as TOML, for --strategy: where stages change, no flag says it"""


def command(args: list[str]) -> None:
    """args: what follows `place`."""
    options, rest = tyro.cli(PlaceOptions, args=args, prog="python -m meshkit place", return_unknown_args=True)
    cluster = Cluster.read(options.cluster)
    run = recipe_run(options.script, rest, world=options.world, kernels=cluster.device.kernels, verb="place")
    strategy = replace(run.resolved.strategy, mesh=run.spec, microbatches=run.microbatches)
    found = place(run.resolved.program.model, strategy, cluster, run.batch, loss=run.loss)
    print(found)
    if options.out is not None:
        found.strategy.write(options.out)
        print(f"wrote {options.out}")
