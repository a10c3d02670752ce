"""`python -m meshkit rollout-worker`: writes rollouts for a trainer of another job; under torchrun on a mesh of its ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from meshkit._parallelize import parallelize
from meshkit.algos.shardcast.command import read_secret
from meshkit.algos.workers._worker import work
from meshkit.errors import PlanError
from meshkit.faults import run_main
from meshkit.mesh import Mesh, init_mesh
from meshkit.models import build_model, config_from_pretrained, meta_parameters, model_plan
from meshkit.step import Run
from meshkit.strategy import MemoryPolicy, Precision, Strategy


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Write rollouts for a trainer of another job (`--worker-port` of its recipe), until its run is over.

    Weights, the model's shape, sampling and prompts come from the trainer. Start and stop as many as there are machines for;
    on several devices each: torchrun --nproc-per-node 2 -m meshkit rollout-worker http://trainer:8000 --mesh "tp=2" ...
    """

    trainer: Annotated[Positional[str], arg(metavar="http://HOST:PORT")]
    """of its --worker-port"""
    secret_file: Path
    """with the secret that the trainer has too"""
    mesh: str = "dp_shard=-1"
    """of this job's ranks"""
    folder: Path | None = None
    """for weights, seen by all ranks of this job; default: a temporary one, on one host"""
    relays: tuple[str, ...] = ()
    """addresses of `python -m meshkit relay`, asked for weights before the trainer"""
    tokens: int = 8
    """of each answer between two looks at what the trainer has"""
    sequences: int = 256
    """answers that a data rank writes at the same time"""
    patience: float = 600.0
    """seconds that the trainer may not answer, as while it starts anew"""


def command(options: WorkerOptions) -> None:
    run_main(partial(_work, options))


def _work(options: WorkerOptions) -> None:
    secret = read_secret(options.secret_file, verb="rollout-worker")
    for name in ("tokens", "sequences", "patience"):
        if not getattr(options, name) > 0:
            raise PlanError(f"rollout-worker --{name} {getattr(options, name)}: give a number above 0.")
    mesh = init_mesh(options.mesh)
    with tempfile.TemporaryDirectory(prefix="meshkit-worker-") as temporary:
        work(
            mesh,
            options.trainer,
            options.folder or temporary,
            secret=secret,
            build=partial(build_published, mesh),
            upstreams=options.relays,
            tokens=options.tokens,
            sequences=options.sequences,
            timeout_s=options.patience,
            report=partial(print, flush=True),
        )


def build_published(mesh: Mesh, folder: Path, settings: Mapping[str, Any]) -> Run:
    """The sharded model of a folder that a trainer published, without values, in the trainer's precision."""
    shape = config_from_pretrained(folder)
    with meta_parameters():
        model = build_model(shape)
    precision = Precision() if settings["precision"] == "bf16" else None
    strategy = Strategy(plan=model_plan(shape), memory=MemoryPolicy(precision=precision))
    return parallelize(model, mesh, strategy)
