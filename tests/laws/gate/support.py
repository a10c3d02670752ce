"""support.md and support_triples.md: what works with what, counted over the cells that the gate has run. See `make docs`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from tests.laws.gate.cell import CHOICES, MODELS, REFUSALS, SCHEDULES, UNDRAWN, Cell, draw
from tests.laws.gate.choose import Seed, seeds, tuples

RESULTS = Path(__file__).with_name("results.json")
COMMAND = "python -m tests.laws.gate"

GROUPS: dict[str, tuple[str, ...]] = {
    "Axes": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "sequence", "ep", "etp"),
    "Models": tuple(f"model: {model}" for model in MODELS),
    "Memory": (
        *(f"recompute: {mode}" for mode in CHOICES["recompute"][1:]),
        "offload: host",
        "offload: disk",
        "regather",
        "mlp chunks",
        "chunked loss",
        "optimizer on the host",
    ),
    "Precision and ZeRO": ("fp64", "fp32", "bf16", "zero 1", "zero 2", "zero 3"),
    "Data": ("accumulation", "packing", "rows without labels", "uneven sizes", "resume", "resume on another mesh"),
    "Context parallelism": tuple(f"cp: {scheme}" for scheme in CHOICES["context"]),
    "Pipeline schedules": tuple(f"pp: {schedule}" for schedule in SCHEDULES),
}
FEATURES = [feature for group in GROUPS.values() for feature in group]
PREFIXES = ("model", "recompute", "offload", "cp", "pp", "zero")  # of features of which a run has one
ALTERNATIVES = [
    {"fp64", "fp32", "bf16"},
    {"resume", "resume on another mesh"},
    *({feature for feature in FEATURES if feature.partition(":")[0] == each} for each in PREFIXES[:-1]),
    {"zero 1", "zero 2", "zero 3"},
]
NEEDS = {"sequence": "tp", "regather": "sequence"} | {
    feature: feature.partition(":")[0] for feature in FEATURES if feature.startswith(("cp: ", "pp: "))
}
MIXTURES = {"model: moe", "model: mla"}


@dataclass(frozen=True, kw_only=True)
class Results:
    """Runs of the gate. seeds: (first, last) of those whose cells passed. fingerprint: of what they were drawn as."""

    fingerprint: str
    torch: str
    commit: str
    seeds: list[tuple[int, int]]

    def passed(self) -> Iterator[Seed]:
        for first, last in self.seeds:
            yield from islice(seeds(first), last - first + 1)


def read() -> Results:
    told = json.loads(RESULTS.read_text())
    return Results(**{**told, "seeds": [(first, last) for first, last in told["seeds"]]})


def write(results: Results) -> None:
    RESULTS.write_text(json.dumps(asdict(results)) + "\n")


def fingerprint() -> str:
    """Changes when another cell is drawn for a seed."""
    drawn = "\n".join(str(draw(*seed)) for seed in islice(seeds(), 200))
    return hashlib.sha256(drawn.encode()).hexdigest()[:16]


@cache
def _cells(passed: tuple[Seed, ...]) -> list[Cell]:
    return [draw(*seed) for seed in passed]


def counts(cells: Sequence[Cell], size: int) -> Counter[tuple[str, ...]]:
    """In how many cells so many features met, and all laws held."""
    return Counter(each for cell in cells if not cell.refusals() for each in tuples(cell, size))


def pages(results: Results) -> dict[str, str]:
    """Two pages by name."""
    cells = _cells(tuple(results.passed()))
    return {"support.md": _pairs_page(results, cells), "support_triples.md": _triples_page(results, cells)}


def ask(features: Sequence[str], results: Results) -> str:
    """What is known of some features together."""
    unknown = [feature for feature in features if feature not in FEATURES]
    if unknown:
        return f"{unknown[0]!r} is no feature of the gate. They are: {', '.join(FEATURES)}."
    reasons = [f"{r.one} with {r.other}: {r.reason}" for r in REFUSALS if {r.one, r.other} <= set(features)]
    if reasons:
        return "refused. " + "; ".join(reasons)
    found = [c for c in _cells(tuple(results.passed())) if not c.refusals() and set(features) <= c.features()]
    shown = "\n".join(f"  {cell}" for cell in found[:5])
    return f"works: {len(found)} cells, of which\n{shown}" if found else "no cell of the gate has them together"


def _pairs_page(results: Results, cells: Sequence[Cell]) -> str:
    met, alone = counts(cells, 2), counts(cells, 1)
    legal = sum(not cell.refusals() for cell in cells)
    by_ranks = Counter(cell.spec.world_size for cell in cells)
    ranks = ", ".join(f"{times} on {size}" for size, times in sorted(by_ranks.items()))
    lines = [
        "# What works with what",
        "",
        "<!-- Written by `make docs`; do not edit. -->",
        "",
        "The gate draws a model, a mesh and every other choice of a run, trains three steps, and holds them against one "
        "device: loss, gradient norm, every gradient and every parameter (law 1), names (2), the loss however rows are "
        "split (3), first values (4), saving and going on on another mesh (5), refusals (6), messages as `explain` "
        "predicts them (7), sizes that nothing divides (8).",
        "",
        f"**{len(cells)} cells** have passed with torch {results.torch} on CPU ({ranks} ranks): {legal} that train, "
        f"{len(cells) - legal} that are refused as they must be. Between them {len(met)} pairs and "
        f"{len(counts(cells, 3))} triples of features have met; [the triples](support_triples.md).",
        "",
        "```bash",
        "make gate                                     # the fixed cells of CI, in which any two features meet",
        f"{COMMAND} --minutes 60              # draws more, and prints the seed of each that fails",
        f'{COMMAND} --ask tp cp "chunked loss"  # what is known of some features together',
        "```",
        "",
        "A number counts the cells in which two features met; **no** is refused, see below; – cannot be; 0 has not been "
        "drawn.",
    ]
    for title, columns in GROUPS.items():
        lines += ["", f"## {title}", "", "| | " + " | ".join(_short(column) for column in columns) + " |"]
        lines += ["|---|" + "--:|" * len(columns), "| alone | "]
        lines[-1] += " | ".join(str(alone[(column,)]) for column in columns) + " |"
        for row in FEATURES:
            lines.append(f"| {row} | " + " | ".join(_entry(row, column, met) for column in columns) + " |")
    lines += ["", "## What is refused", "", "| together | why |", "|---|---|"]
    lines += [f"| {refusal.one} with {refusal.other} | {refusal.reason} |" for refusal in REFUSALS]
    return "\n".join(lines) + "\n"


def _triples_page(results: Results, cells: Sequence[Cell]) -> str:
    met = counts(cells, 3)
    number = {feature: index for index, feature in enumerate(FEATURES, 1)}
    by_pair: dict[tuple[int, int], list[str]] = {}
    for triple, times in met.items():
        one, two, three = sorted(number[feature] for feature in triple)
        by_pair.setdefault((one, two), []).append(f"{three}×{times}")
    lines = [
        "# Three features together",
        "",
        "<!-- Written by `make docs`; do not edit. -->",
        "",
        f"{len(met)} triples of features have met in the {len(cells)} cells of [the gate](support.md). A line `1 2: 5×9` "
        "says that features 1, 2 and 5 were together in 9 cells, which equalled one device. A triple with a refused pair "
        f'in it is refused. `{COMMAND} --ask tp cp "chunked loss"` asks by name.',
        "",
        *(f"{index}. {feature}" for feature, index in number.items()),
        "",
        "```text",
    ]
    for (one, two), thirds in sorted(by_pair.items()):
        lines.append(f"{one} {two}: {' '.join(sorted(thirds, key=lambda each: int(each.split('×')[0])))}")
    return "\n".join([*lines, "```", ""])


def _entry(row: str, column: str, met: Counter[tuple[str, ...]]) -> str:
    if any({refusal.one, refusal.other} == {row, column} for refusal in REFUSALS):
        return "**no**"
    if {row, column} == UNDRAWN:
        return "by name"
    if row == column or _cannot_meet(row, column):
        return "–"
    return str(met[tuple(sorted((row, column)))])


def _cannot_meet(row: str, column: str) -> bool:
    """Alternatives, and what only some runs have."""
    if any({row, column} <= group for group in ALTERNATIVES):
        return True
    for one, other in ((row, column), (column, row)):
        if one in ("ep", "etp") and other.startswith("model: ") and other not in MIXTURES:
            return True
        if one in ("zero 2", "zero 3") and (other == "pp" or other.startswith("pp: ")):
            return True
        needed = NEEDS.get(one)
        refused = any({refusal.one, refusal.other} == {needed, other} for refusal in REFUSALS)
        refused |= {needed, other} == UNDRAWN
        if needed is not None and refused:
            return True
    return False


def _short(feature: str) -> str:
    return feature.partition(": ")[2] or feature
