"""`python -m meshkit estimate`: memory of a training script from its flags, and flags that would make it fit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from meshkit.errors import MeshError, MeshkitError, PlanError
from meshkit.mesh import MeshSpec
from meshkit.preflight._arguments import coordinate_of
from meshkit.preflight._format import format_bytes, table_lines
from meshkit.preflight.estimate._drawing import svg
from meshkit.preflight.estimate._estimate import Kernels
from meshkit.preflight.estimate._result import NUMBERS, Estimate
from meshkit.preflight.estimate.recipe import Recipe, load_script


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Say what a training script will need on each rank, before it runs: bytes by kind, the peak and where it is.

    The script's own flags follow, as in its launch: --mesh "dp_shard=8 tp=8" --model llama3-8b. It is built and stepped in a
    world that is not there, on tensors without memory: no GPU, no data, one process.
    """

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    world: int | None = None
    """ranks of the run; default: the product of the mesh's axes"""
    rank: int | None = None
    """which of them; default: the first of each pipeline stage, of which the fullest is shown"""
    device_memory: str | None = None
    """what a device has, as 80GiB: says whether the run fits, and if not, which flags would make it"""
    kernels: Kernels = "cuda"
    """whose kernels to count: those of the GPU it will run on, or of a CPU"""
    svg: Annotated[Path | None, arg(metavar="FILE")] = None
    """write a picture of the step in time"""


def command(args: list[str]) -> None:
    """args: what follows `estimate`."""
    options, rest = tyro.cli(Memory, args=args, prog="python -m meshkit estimate", return_unknown_args=True)
    device_bytes = None if options.device_memory is None else parse_bytes(options.device_memory)
    module = load_script(options.script)
    recipe = Recipe.read(module, rest, script=options.script)
    spec = recipe.spec(options.world)
    coordinates = _coordinates(spec, options.rank)
    estimates = [recipe.estimate(spec, coordinate, options.kernels) for coordinate in coordinates]
    worst = max(estimates, key=lambda estimate: estimate.peak_bytes)
    print(worst)
    if len(estimates) > 1:
        print("\n" + "\n".join(_stages(estimates)))
    if options.svg is not None:
        options.svg.write_text(svg({" ".join(args[1:]): worst}), encoding="utf-8")
        print(f"wrote {options.svg}")
    if device_bytes is not None:
        _print_fit(recipe, spec, worst, device_bytes, options.kernels)


def _coordinates(spec: MeshSpec, rank: int | None) -> list[dict[str, int]]:
    if rank is None:
        return [{"pp": stage} for stage in range(spec.pp)]
    if not 0 <= rank < spec.world_size:
        raise MeshError(f"--rank {rank}: the ranks of this world are 0 to {spec.world_size - 1}.")
    return [coordinate_of(spec, rank)]


def _stages(estimates: list[Estimate]) -> list[str]:
    rows = [("rank of pp", "peak", "in the")]
    rows += [
        (str(estimate.coordinate["pp"]), format_bytes(estimate.peak_bytes), estimate.where.removeprefix("the "))
        for estimate in estimates
    ]
    return table_lines(rows, right=NUMBERS)


def _print_fit(recipe: Recipe, spec: MeshSpec, worst: Estimate, device_bytes: int, kernels: Kernels) -> None:
    room = device_bytes - worst.peak_bytes
    if room >= 0:
        print(
            f"\nfits: {format_bytes(room)} of {format_bytes(device_bytes)} are left for workspaces, NCCL and fragmentation"
        )
        return
    print(
        f"\ndoes not fit: {format_bytes(-room)} more than {format_bytes(device_bytes)}. What would change it, estimated:"
    )
    coordinate = worst.coordinate
    tried = advise(
        recipe, recipe.rows(spec), worst, device_bytes, lambda changed: changed.estimate(spec, coordinate, kernels)
    )
    for attempt in tried:
        flags, peak, verdict = attempt.line(device_bytes)
        print(f"  {flags:32} {peak:>10}  {verdict}")
        sys.stdout.flush()


def parse_bytes(text: str, *, flag: str = "--device-memory", least: int = 0) -> int:
    """80GiB, 80GB or 512MiB as bytes. Raises: PlanError for something else, for fewer than `least`, and for fewer
    than 1 MiB without a unit, which nobody means."""
    units = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    units |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    is_number = match is not None and match[1].count(".") <= 1 and match[1] != "." and float(match[1]) < 1e30
    if match is None or not is_number or match[2].upper() not in units:
        raise PlanError(f"{flag} {text[:40]}: not a number of bytes. Write, for example, 80GiB.")
    size = int(float(match[1]) * units[match[2].upper()])
    if size < least:
        raise PlanError(f"{flag} {text[:40]}: needs at least {least} B.")
    if not match[2] and size < 2**20:
        raise PlanError(f"{flag} {text[:40]}: that is {size} bytes. Say the unit, as {match[1]}GiB.")
    return size


# Advice: flags that would make a run fit, each of them estimated.

# What to try, cheapest in time first. A flag that the recipe does not have is left out, and so is a value it has already.
CHANGES: tuple[tuple[str, Any], ...] = (
    ("zero", 3),
    ("sequence", True),
    ("loss_chunk", 1024),
    ("precision", "bf16"),
    ("recompute", "selective"),
    ("recompute", "full"),
    ("microbatches", None),  # one row at a time
    ("offload", "host"),
    ("optimizer_offload", True),
)


@dataclass(frozen=True)
class Tried:
    """Changed flags and the estimate with them; None where the run refuses them, and the refusal."""

    flags: dict[str, Any]
    estimate: Estimate | None
    refusal: str = ""

    def line(self, device_bytes: int) -> tuple[str, str, str]:
        flag_of = {name: f"--{name.replace('_', '-')}" for name in self.flags}
        flags = " ".join(
            flag_of[name] if value is True else f"{flag_of[name]} {value}" for name, value in self.flags.items()
        )
        if self.estimate is None:
            return flags, "", self.refusal
        return (
            flags,
            format_bytes(self.estimate.peak_bytes),
            "fits" if self.estimate.fits(device_bytes) else "does not fit",
        )


def advise(
    recipe: Recipe, rows: int, now: Estimate, device_bytes: int, again: Callable[[Recipe], Estimate]
) -> Iterator[Tried]:
    """Try each change alone, and then those that helped together, until something fits.

    now: what does not fit. again: estimates a changed recipe.
    """
    helped: dict[str, Any] = {}
    for name, value in _changes(recipe, rows):
        tried = _try(recipe, {name: value}, again)
        yield tried
        if tried.estimate is None:
            continue
        if tried.estimate.fits(device_bytes):
            return
        if tried.estimate.peak_bytes < now.peak_bytes:
            helped[name] = value
    if len(helped) > 1:
        yield _try(recipe, helped, again)


def _try(recipe: Recipe, flags: dict[str, Any], again: Callable[[Recipe], Estimate]) -> Tried:
    try:
        return Tried(flags, again(recipe.changed(**flags)))
    except MeshkitError as error:
        return Tried(flags, None, f"refused: {str(error).splitlines()[0]}")


def _changes(recipe: Recipe, rows: int) -> Iterator[tuple[str, Any]]:
    flags = {field.name for field in fields(recipe.config)}
    for name, value in CHANGES:
        value = rows if name == "microbatches" else value
        if name not in flags or getattr(recipe.config, name) == value:
            continue
        if name == "recompute" and getattr(recipe.config, name) == "full":
            continue
        if name == "zero" and (getattr(recipe.config, name) is None or "pp=" in recipe.config.mesh):
            continue
        yield name, value
