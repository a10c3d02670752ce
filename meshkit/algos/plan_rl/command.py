"""`python -m meshkit plan-rl`: the meshes of an RL script whose iteration takes least, as flags and TOML."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from meshkit.algos.dataflow import Call
from meshkit.algos.plan_rl._drawing import svg
from meshkit.algos.plan_rl._places import PlanSpace
from meshkit.algos.plan_rl._plan import PlannedRun, plan_rl
from meshkit.errors import PlanError
from meshkit.preflight.estimate.command import parse_bytes
from meshkit.preflight.estimate.recipe import Recipe, load_script

FILE = arg(metavar="FILE")
NEEDED = (
    "The command needs a frozen dataclass `Config` of the script's flags, and `planned_calls(config)`, which returns a "
    "`PlannedRun`. See docs/plan_rl.md."
)


@dataclass(frozen=True, kw_only=True)
class PlanRL:
    """Find the ranks and layouts of a script's calls (generate, infer, train) whose iteration is forecast to take least.

    The script's own flags follow, as in its launch: --prompts 512 --max-new-tokens 896. What is found is printed as flags of
    the script, with how far above the least it may be. No GPU, one process. Needs ortools: pip install "meshkit[plans]".
    """

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    world: int
    """ranks of the run"""
    cluster: str = "h100"
    """a datasheet that comes with meshkit (a100, b200, cpu, h100, h200, mi300x), or a file, as measure-cluster writes it"""
    device_memory: str | None = None
    """what a device may use, as 80GiB; default: memory is not looked at"""
    each_call: bool = False
    """place each call by itself, for a flow of yours that reads --out; the script's flags cannot say that"""
    unit_ranks: int | None = None
    """meshes are of whole multiples of so many ranks; default: a node, on a single node one"""
    pp: tuple[int, ...] = (1, 2, 4, 8)
    """sizes of pp to try"""
    limit_s: float = 30.0
    """seconds of the search, after all is priced"""
    gap: float = 0.02
    """stop when the iteration is at most this share above the least"""
    out: Annotated[Path | None, FILE] = None
    """write the plan as TOML"""
    svg: Annotated[Path | None, FILE] = None
    """write a picture: who does what when, by node"""


def command(args: list[str]) -> None:
    """args: what follows `plan-rl`."""
    options, rest = tyro.cli(PlanRL, args=args, prog="python -m meshkit plan-rl", return_unknown_args=True)
    device_bytes = None if options.device_memory is None else parse_bytes(options.device_memory)
    module = load_script(options.script, verb="plan-rl", needs=("Config", "planned_calls"), flags=(), protocol=NEEDED)
    recipe = Recipe.read(module, rest, script=options.script)
    run: PlannedRun = module.planned_calls(recipe.config)
    plan = plan_rl(
        apart(run) if options.each_call else run,
        options.cluster,
        world=options.world,
        device_memory=device_bytes,
        space=PlanSpace(unit_ranks=options.unit_ranks, pp=options.pp),
        limit_s=options.limit_s,
        gap=options.gap,
    )
    print(plan)
    if plan.run_beside is not None:
        print(plan.flags)
    if options.out is not None:
        plan.write(options.out)
        print(f"wrote {options.out}")
    if options.svg is not None:
        options.svg.write_text(svg(plan), encoding="utf-8")
        print(f"wrote {options.svg}")


def apart(run: PlannedRun) -> PlannedRun:
    """The same run with each work on a mesh of its own, in calls of their own: those of one call keep its order."""
    calls: list[Call] = []
    for call in run.calls:
        for index, work in enumerate(call.works):
            name = call.name if len(call.works) == 1 else f"{call.name} {work.model}"
            is_last = index == len(call.works) - 1
            calls.append(replace(call, name=name, on=name, works=(work,), gives=call.gives if is_last else ()))
        if not call.works:  # of no model: it stays with the call that makes what it reads
            maker = next((each for each in calls if set(each.gives) & set(call.needs)), None)
            if maker is None:
                raise PlanError(f"call {call.name!r} has no work, and reads nothing of another call. Leave it out.")
            calls.append(replace(call, on=maker.on))
    return replace(run, calls=calls, beside=None)
