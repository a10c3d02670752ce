"""Bit flips in weights, moments and gradients on twelve meshes: are rank and tensor named within ten steps?

    python -m tests.faults.flips                           500 flips; prints a table
    python -m tests.faults.flips --count 100 --first 500   others
    python -m tests.faults.flips --record                  adds a row for each mesh and kind to benchmarks/results/flips.jsonl
    python -m tests.faults.flips --computed 200            also numbers that are computed wrongly, by the interval of replays

Flip n is the n-th draw, the same in every campaign. A bit flips in memory, past torch: of a weight or a moment between two
steps, or by a hook in the midst of a forward or a backward; of a gradient between its reduction and clipping, or between that
and the optimizer's step. Ranks are those of `tests.world`, which serve all flips of a mesh.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.core.sharding import local_tensor
from meshkit.errors import CorruptionError
from meshkit.faults import CorruptionGuard
from tests.faults.test_corruption import few_bits, flip, flip_gradient, gradients_of, state_of, training
from tests.faults.test_replay import Core
from tests.laws.parity.cases import Cell, Moe, batches, own_rows, start
from tests.planted import of_the_machine
from tests.world import pool

RESULTS = Path(__file__).parents[2] / "benchmarks/results/flips.jsonl"
WITHIN = 10  # steps
EVERY = 5  # steps from check to check

CELLS = [
    Cell(mesh="dp_replicate=2", tied=True, vocab=61, microbatches=2),
    Cell(mesh="dp_replicate=4", heads=(4, 2)),
    Cell(mesh="dp_shard=2", microbatches=2, recompute="full"),
    Cell(mesh="dp_shard=2", dtype="float32", bf16=True),
    Cell(mesh="tp=2", sequence=True),
    Cell(mesh="cp=2", documents=True),
    Cell(mesh="pp=2", tied=True, microbatches=2, zero=1),
    Cell(mesh="dp_shard=2 ep=2", layers=3, moe=Moe(balance=0.1)),
    Cell(mesh="dp_replicate=2 dp_shard=2", zero=2),
    Cell(mesh="pp=2 dp_shard=2", microbatches=2, zero=1),
    Cell(mesh="dp_shard=2 tp=2", zero=2, microbatches=2),
    Cell(mesh="dp_replicate=2 tp=2", sequence=True, dtype="float32", memory=few_bits("8bit")),
]
MOMENTS = {
    "weight": ("between", "forward", "backward"),
    "moment": ("between", "forward", "backward"),
    "gradient": ("reduced", "clipped"),
}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """which, at, where: shares of the tensors of the rank, of a tensor's bytes, and of the modules with a hook."""

    number: int
    kind: str
    moment: str
    rank: int
    which: float
    at: float
    bit: int
    where: float
    step: int


def draw(number: int, ranks: int) -> Draw:
    rng = random.Random(number)
    kind = rng.choice([*MOMENTS])
    return Draw(
        number=number,
        kind=kind,
        moment=rng.choice(MOMENTS[kind]),
        rank=rng.randrange(ranks),
        which=rng.random(),
        at=rng.random(),
        bit=rng.randrange(8),
        where=rng.random(),
        step=rng.randint(1, EVERY),  # before the first step nothing is at rest
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """tensor: as an error has it, known on the rank that was struck alone. early: an error before there was a flip. steps:
    from the flip to the error."""

    tensor: str
    ranks: tuple[int, ...]
    text: str
    early: bool
    steps: int


def struck(cell: Cell, numbers: Sequence[int]) -> list[Outcome]:
    """On every rank: each flip, what was said, and then the state of before."""
    run, optimizer, gradients = training(cell)
    gradients()
    optimizer.step()
    held = state_of(cell, run, optimizer)
    trained = gradients_of(cell, run)
    outcomes = []
    with CorruptionGuard(run, optimizer, every_steps=EVERY) as guard:
        for each in (draw(number, run.mesh.spec.world_size) for number in numbers):
            good = [local_tensor(tensor).clone() for _, tensor in held]
            name, strike = _aimed(each, held, trained) if each.rank == run.mesh.rank else ("", lambda: None)
            text, ranks, step = "", (), 0
            for step in range(each.step + WITHIN):
                act = strike if step == each.step else lambda: None
                with _inside(run, each, act):
                    gradients(act if each.moment == "reduced" else lambda: None)
                if each.moment in ("clipped", "between"):
                    act()
                optimizer.step()
                try:
                    guard.check(step)
                except CorruptionError as error:
                    text, ranks = str(error), error.ranks
                    break
            outcomes.append(
                Outcome(
                    tensor=name, ranks=ranks, text=text, early=bool(text) and step < each.step, steps=step - each.step
                )
            )
            for (_, tensor), values in zip(held, good, strict=True):
                local_tensor(tensor).copy_(values)
            guard.forget()
    return outcomes


def _aimed(
    each: Draw, held: Sequence[tuple[str, Tensor]], trained: Sequence[tuple[str, Tensor]]
) -> tuple[str, Callable[[], None]]:
    if each.kind == "gradient":
        name, param = trained[int(each.which * len(trained))]
        return name, lambda: flip_gradient(param, each.at, each.bit)
    own = [one for one in held if (" of " in one[0]) == (each.kind == "moment")]
    name, tensor = own[int(each.which * len(own))]
    return name, lambda: flip(tensor, each.at, each.bit)


@contextmanager
def _inside(run: mk.Run, each: Draw, act: Callable[[], None]) -> Iterator[None]:
    """Acts once, in a hook of one of the modules: when it has run forward, or when the gradient of what it gave comes."""
    left = [act]

    def once(*_: Any) -> None:
        if left:
            left.pop()()

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if each.moment == "forward":
            once()
        elif isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(once)

    if each.moment not in ("forward", "backward"):
        yield
        return
    modules = [module for module in run.model.modules() if isinstance(module, nn.Linear) and module.weight.numel()]
    hook = modules[int(each.where * len(modules))].register_forward_hook(of_the_machine(after))
    yield
    hook.remove()
    assert not left, (each, "was not reached")


def computed(cell: Cell, every: int, count: int, first: int) -> list[tuple[str, tuple[int, ...], str]]:
    """On every rank: once in ten steps the gradient of a weight is computed wrongly on one of them, before ranks add it up.

    every: steps from replay to replay. Returns (module, ranks that are named, text)."""
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-3)
    rows = own_rows(batches(cell)[0], run.mesh)
    core, made = Core(run), []
    run.forward_backward(rows, microbatches=cell.microbatches)
    optimizer.step()
    held = state_of(cell, run, optimizer)
    for number in range(first, first + count):
        rng = random.Random(f"computed {number}")
        rank, which, at, when = (
            rng.randrange(run.mesh.spec.world_size),
            rng.random(),
            rng.random(),
            rng.randint(1, WITHIN),
        )
        microbatch, name, text, ranks = rng.randrange(cell.microbatches), "", "", ()
        good = [local_tensor(tensor).clone() for _, tensor in held]
        with CorruptionGuard(run, optimizer, every_steps=WITHIN, replay_every=every, seed=number) as guard:
            for step in range(1, WITHIN + 1):
                optimizer.zero_grad()
                if step == when and rank == run.mesh.rank:
                    name = [*core.modules][int(which * len(core.modules))]
                    core.aim(name, "weight", at, microbatch)
                run.forward_backward(rows, microbatches=cell.microbatches)
                if step == when:
                    core.disarm()
                mk.clip_grad_norm(run, 1.0)
                optimizer.step()
                try:
                    guard.check(step)
                except CorruptionError as error:
                    text, ranks = str(error), error.ranks
                    break
        made.append((name, ranks, text))
        for (_, tensor), values in zip(held, good, strict=True):
            local_tensor(tensor).copy_(values)
    return made


# ---------------------------------------------------------------------------------------------------- the campaign


def rows_of(cell: Cell, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each flip."""
    ranks = pool(mk.MeshSpec.parse(cell.mesh).world_size)
    of_ranks = ranks.run(struck, cell, numbers, timeout_s=30.0 + 10.0 * len(numbers))
    rows = []
    for number, outcomes in zip(numbers, zip(*of_ranks, strict=True), strict=True):
        each, said = draw(number, ranks.size), outcomes[0]
        tensor = outcomes[each.rank].tensor
        alike = len({(one.text, one.ranks) for one in outcomes}) == 1  # one text on every rank
        named = alike and not said.early and said.ranks == (each.rank,) and f"{tensor} " in said.text.replace(",", " ")
        rows.append(
            {
                **asdict(each),
                "mesh": _name(cell),
                "tensor": tensor,
                "named": named,
                "early": said.early,
                "steps": said.steps,
            }
            | ({} if named else {"said": said.text, "said_ranks": said.ranks})
        )
    return rows


def _name(cell: Cell) -> str:
    more = " bf16" if cell.bf16 else " 8bit" if cell.memory is not None else ""
    return cell.mesh + more


def deal(first: int, count: int) -> Iterable[tuple[Cell, list[int]]]:
    """Which flips each mesh gets."""
    for index, cell in enumerate(CELLS):
        yield cell, [number for number in range(first, first + count) if number % len(CELLS) == index]


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A result for each mesh and kind."""
    made = []
    for mesh, kind in dict.fromkeys((row["mesh"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["mesh"], row["kind"]) == (mesh, kind)]
        steps = [float(row["steps"]) for row in own if row["named"]]
        named = sum(row["named"] for row in own)
        made.append(
            {
                "benchmark": "flips",
                "mesh": mesh,
                "kind": kind,
                "first": min(row["number"] for row in own),
                "flips": len(own),
                "named": named,
                "early": sum(row["early"] for row in own),
                "share": round(named / len(own), 4),
                "steps": vars(spread(steps)) if steps else None,
            }
        )
    return made


@dataclass(frozen=True, kw_only=True)
class Campaign:
    count: int = 500
    first: int = 0
    computed: int = 0
    """numbers that are computed wrongly, for each interval"""
    intervals: tuple[int, ...] = (1, 2, 5, 10)
    """steps from replay to replay"""
    out: Path | None = None
    """a row for each flip"""
    record: bool = False


def main(campaign: Campaign) -> None:
    console, measured_with = Console(width=140), environment()
    rows: list[dict[str, Any]] = []
    for cell, numbers in deal(campaign.first, campaign.count):
        if numbers:
            rows += rows_of(cell, numbers)
            own = rows[-len(numbers) :]
            console.print(f"{_name(cell)}: {sum(row['named'] for row in own)} of {len(own)}")
    for row in rows:
        if not row["named"]:
            console.print_json(json.dumps(row))
    results = summaries(rows)
    for every in campaign.intervals if campaign.computed else ():
        results += [_computed(every, campaign.computed, campaign.first)]
    table = Table("mesh", *MOMENTS, "all")
    for mesh in [*dict.fromkeys(row["mesh"] for row in rows), "all"]:
        of_mesh = [row for row in rows if mesh in ("all", row["mesh"])]
        cells = [[row for row in of_mesh if row["kind"] == kind] for kind in MOMENTS] + [of_mesh]
        table.add_row(mesh, *(f"{sum(row['named'] for row in each)} of {len(each)}" for each in cells))
    console.print(table)
    for result in results:
        if result["kind"] == "computed":
            console.print(
                f"computed wrongly, replay every {result['replay_every']}: {result['named']} of {result['flips']}"
            )
    console.print(f"{sum(row['early'] for row in rows)} errors before a flip")
    if campaign.out is not None:
        campaign.out.parent.mkdir(parents=True, exist_ok=True)
        campaign.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if campaign.record:
        with RESULTS.open("a") as file:
            for result in results:
                file.write(json.dumps({**result, "every_steps": EVERY, **measured_with}) + "\n")


def _computed(every: int, count: int, first: int) -> dict[str, Any]:
    cell = Cell(mesh="dp_shard=2")
    of_ranks = pool(2).run(computed, cell, every, count, first, timeout_s=60.0 + 10.0 * count)
    named = 0
    for each in zip(*of_ranks, strict=True):
        rank = next(rank for rank, (module, *_) in enumerate(each) if module)
        module, ranks, text = each[rank]
        named += ranks == (rank,) and f"the gradient of {module}.weight" in text
    share = round(named / count, 4)
    what = {"benchmark": "flips", "mesh": cell.mesh, "kind": "computed", "replay_every": every}
    return {**what, "first": first, "flips": count, "named": named, "share": share}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Campaign))
