"""`python -m meshkit rollout-validator`: verifies what rollout workers bring; under torchrun on a mesh of its ranks."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from meshkit.algos.shardcast.command import read_secret
from meshkit.algos.workers._validator import validate
from meshkit.algos.workers.command import build_published
from meshkit.errors import PlanError
from meshkit.faults import run_main
from meshkit.mesh import init_mesh


@dataclass(frozen=True, kw_only=True)
class ValidatorOptions:
    """Verify the rollouts that workers bring to a trainer (`--worker-verify` of its recipe), until its run is over.

    Run it where you trust the machine: what it passes is learnt. Weights, the model's shape and bounds come from the trainer.
    Start as many as keep up; on several devices each: torchrun --nproc-per-node 2 -m meshkit rollout-validator
    http://trainer:8000 --mesh "tp=2" ...
    """

    trainer: Annotated[Positional[str], arg(metavar="http://HOST:PORT")]
    """of its --worker-port"""
    secret_file: Path
    """with the secret of its --validator-secret, which workers do not have"""
    mesh: str = "dp_shard=-1"
    """of this job's ranks"""
    folder: Path | None = None
    """for weights, seen by all ranks of this job; default: a temporary one, on one host"""
    relays: tuple[str, ...] = ()
    """addresses of `python -m meshkit relay`, asked for weights before the trainer; they need not be trusted"""
    tokens_per_microbatch: int = 16_384
    """of the forwards that verify"""
    groups: int = 16
    """verified at the same time: more share forwards, fewer are known sooner"""
    patience: float = 600.0
    """seconds that the trainer may not answer, as while it starts anew"""


def command(options: ValidatorOptions) -> None:
    run_main(partial(_validate, options))


def _validate(options: ValidatorOptions) -> None:
    secret = read_secret(options.secret_file, verb="rollout-validator")
    for name in ("tokens_per_microbatch", "groups", "patience"):
        if not getattr(options, name) > 0:
            flag = name.replace("_", "-")
            raise PlanError(f"rollout-validator --{flag} {getattr(options, name)}: give a number above 0.")
    mesh = init_mesh(options.mesh)
    with tempfile.TemporaryDirectory(prefix="meshkit-validator-") as temporary:
        validate(
            mesh,
            options.trainer,
            options.folder or temporary,
            secret=secret,
            build=partial(build_published, mesh),
            upstreams=options.relays,
            tokens_per_microbatch=options.tokens_per_microbatch,
            groups=options.groups,
            timeout_s=options.patience,
            report=partial(print, flush=True),
        )
