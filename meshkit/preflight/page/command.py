"""`python -m meshkit explain`: parameters, placements and traffic of a training script, as text and as a page."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from meshkit.errors import MeshError
from meshkit.preflight._arguments import coordinate_of
from meshkit.preflight._resolved_run import resolved_run
from meshkit.preflight.estimate import Kernels
from meshkit.preflight.estimate.command import parse_bytes
from meshkit.preflight.estimate.recipe import Recipe, load_script
from meshkit.preflight.explain import explain_resolved
from meshkit.preflight.page._html import refuse_no_file, save_html
from meshkit.preflight.page._page import explain_page


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say what each rank of a training script will hold and send, before it runs: parameters, placements, messages.

    The script's own flags follow, as in its launch: --mesh "pp=2 dp_shard=2 tp=2" --seq-len 4096. Text is of one rank; the
    page is of all, with their memory and the pipeline in time, for which each rank that differs is estimated.
    """

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    world: int | None = None
    """ranks of the run; default: the product of the mesh's axes"""
    rank: int = 0
    """which of them is printed"""
    html: Annotated[Path | None, arg(metavar="FILE")] = None
    """write the page: one file, to be opened in a browser"""
    device_memory: str | None = None
    """what a device has, as 80GiB: a line across the bars of memory"""
    kernels: Kernels = "cuda"
    """whose kernels to count memory for: those of the GPU it will run on, or of a CPU"""


def command(args: list[str]) -> None:
    """args: what follows `explain`."""
    options, rest = tyro.cli(Explain, args=args, prog="python -m meshkit explain", return_unknown_args=True)
    device_bytes = None if options.device_memory is None else parse_bytes(options.device_memory)
    if options.html is not None:
        refuse_no_file(options.html, flag="--html")
    module = load_script(options.script, verb="explain")
    recipe = Recipe.read(module, rest, script=options.script)
    spec = recipe.spec(options.world)
    if not 0 <= options.rank < spec.world_size:
        raise MeshError(f"--rank {options.rank}: the ranks of this world are 0 to {spec.world_size - 1}.")
    step = recipe.step(spec)
    with resolved_run(recipe.build, spec, None, {}, kernels=options.kernels, verb="explain") as resolved:
        sizes = {name: step[name] for name in ("rows", "seq_len", "microbatches")}
        print(explain_resolved(resolved, coordinate=coordinate_of(spec, options.rank), **sizes))
    if options.html is not None:
        page = explain_page(
            recipe.build,
            spec,
            title=shlex.join([options.script.name, *rest]),
            device_bytes=device_bytes,
            kernels=options.kernels,
            **step,
        )
        save_html(page, options.html)
        print(f"wrote {options.html}")
