"""`python -m meshkit search`: the best strategy of a training script's model on a cluster, as flags and as TOML."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.status import Status
from tyro.conf import Positional, arg

from meshkit.cluster import Cluster
from meshkit.mesh import MeshSpec
from meshkit.preflight._recipe_run import recipe_run
from meshkit.preflight.estimate.command import parse_bytes
from meshkit.preflight.search._drawing import svg
from meshkit.preflight.search._goal import parse_goal
from meshkit.preflight.search._result import Tried
from meshkit.preflight.search._search import search
from meshkit.preflight.search._space import Space
from meshkit.strategy import ActivationOffload, PipelinePolicy, Scheme, Strategy


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find the strategy whose step is fastest of those that fit: flags for the script, and why its neighbours lose.

    The script's own flags follow, as in its launch: --model llama3-8b --global-batch 512. Those of --mesh, --zero,
    --schedule, --sequence, --recompute and --microbatches that are given stay; the others are searched. No GPU, no data.
    """

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    world: int
    """ranks of the run"""
    cluster: str = "h100"
    """a datasheet that comes with meshkit (a100, b200, cpu, h100, h200, mi300x), or a file, as measure-cluster writes it"""
    device_memory: str | None = None
    """what a device may use, as 80GiB; default: memory is not looked at"""
    goal: Annotated[str, arg(metavar="time|cost|energy|'fewest ranks'|FILE.py:FUNCTION")] = "time"
    """what is least: seconds of a step, seconds times ranks, joules of a step, the ranks on which it fits, or what a function
    of a Forecast returns"""
    cp: tuple[int, ...] = (1,)
    """sizes of cp to try"""
    schemes: tuple[Scheme, ...] = Space().scheme
    """schemes of cp to try, where it has several ranks"""
    schedules: tuple[str, ...] = Space().schedule
    """pipeline schedules to try"""
    shardings: bool = True
    """also rows of shardings beside the ZeRO stages, on meshes that tell nodes apart: hpZ, PaRO"""
    mix: bool = Space().mix
    """also two modes of recompute in one model, where the lighter one does not fit"""
    offload: bool = False
    """also strategies that keep masters and moments on the host; their peaks are traced, which takes seconds each"""
    activations: tuple[Literal["device", "host", "disk"], ...] = ("device",)
    """where blocks' activations may wait for their backward; of a disk the cluster says host.disk_bytes_per_s"""
    limit_s: float | None = None
    """processor seconds after which the best so far is the answer, and how much better another may be; default: no limit"""
    processes: int | None = None
    """how many trace; default: as many as there are processors, at most 8"""
    out: Path | None = None
    """write the winner as TOML, for --strategy"""
    svg: Path | None = None
    """write a picture: seconds against memory of all that was priced, and the Pareto front"""


def command(args: list[str]) -> None:
    """args: what follows `search`."""
    options, rest = tyro.cli(Search, args=args, prog="python -m meshkit search", return_unknown_args=True)
    device_bytes = None if options.device_memory is None else parse_bytes(options.device_memory)
    cluster, goal = Cluster.read(options.cluster), parse_goal(options.goal)
    run = recipe_run(options.script, rest, world=options.world, kernels=cluster.device.kernels, verb="search")
    console = Console(stderr=True)
    with console.status("reading") as status:
        found = search(
            run.resolved.program.model,
            cluster,
            run.batch,
            world=options.world,
            device_memory=device_bytes,
            space=_space(options, run.resolved.strategy, _given(rest), str(run.config.mesh)),
            goal=goal,
            fixed=_fixed(run.resolved.strategy, _given(rest)),
            loss=run.loss,
            limit_s=options.limit_s,
            processes=min(8, os.cpu_count() or 1) if options.processes is None else options.processes,
            progress=lambda tried, left, best: _show(status, tried, left, best),
        )
    print(found)
    if options.out is not None and found.best is not None:
        found.write(options.out)
        print(f"wrote {options.out}")
    if options.svg is not None:
        options.svg.write_text(svg(found), encoding="utf-8")
        print(f"wrote {options.svg}")
    if found.best is None:
        sys.exit(1)


def _show(status: Status, tried: int, left: int, best: Tried | None) -> None:
    status.update(f"{tried:,} priced, {left:,} left" + ("" if best is None else f"; {best}"))


def _given(rest: list[str]) -> set[str]:
    return {each.partition("=")[0].lstrip("-").removeprefix("no-") for each in rest if each.startswith("--")}


def _space(options: Search, strategy: Strategy, given: set[str], mesh: str) -> Space:
    """A flag that says what is the default anyway stays as well, and an axis of --mesh that says 1."""
    said = {
        "zero": (strategy.zero,),
        "sequence": (strategy.sequence,),
        "schedule": (strategy.pipeline.schedule,),
        "recompute": (strategy.memory.recompute,),
    }
    changes: dict[str, Any] = {name: value for name, value in said.items() if name in given}
    if "zero" in given or not options.shardings:
        changes["data"] = (strategy.data,)
    words = [word.partition("=") for word in mesh.replace(",", " ").split()] if "mesh" in given else []
    for axis, _, size in words if "placement=" not in mesh else ():  # which `Space.fixed_by` refuses
        ranks, _, inside = size.partition("x")  # as dp_shard=4x8
        nodes = int(inside) if inside else 1
        changes |= {axis: (int(ranks) * nodes,)} if int(ranks) != -1 else {}
        changes |= {"dp_intra": (nodes,)} if inside else {}
    offload = (False, True) if options.offload else Space().offload
    chosen = Space(
        cp=options.cp,
        scheme=options.schemes,
        schedule=options.schedules,
        mix=options.mix,
        offload=offload,
        activations=tuple(None if where == "device" else ActivationOffload(to=where) for where in options.activations),
    )
    return replace(chosen, **changes)


def _fixed(strategy: Strategy, given: set[str]) -> Strategy:
    """The script's strategy, less what is searched and was not given as a flag."""
    plain = Strategy()
    assert isinstance(strategy.mesh, MeshSpec | None)
    return replace(
        strategy,
        mesh=strategy.mesh if "mesh" in given else None,
        zero=strategy.zero if "zero" in given else plain.zero,
        sequence=strategy.sequence if "sequence" in given else plain.sequence,
        microbatches=strategy.microbatches if "microbatches" in given else None,
        pipeline=strategy.pipeline if "schedule" in given else PipelinePolicy(),
        memory=strategy.memory if "recompute" in given else replace(strategy.memory, recompute="none"),
    )
