"""The table of docs/waits.md: host waits and launches of a step, for models and meshes. `python -m tests.laws.waits`"""

from __future__ import annotations

from tests.laws.gate.cell import Cell
from tests.laws.waits.measure import Numbers, numbers, optimizer_launches, with_layers
from tests.world import pool

MODELS = ("dense", "tied", "transformers", "lora", "moe", "mla")
MESHES = ("dp_shard=4", "dp_shard=2 tp=2", "dp_shard=2 cp=2", "pp=2 dp_shard=2", "dp_shard=4 ep=4")
FEW, MANY = 4, 8  # layers; a layer's numbers are the difference


def largest(cell: Cell) -> Numbers:
    """Of the rank that launches most."""
    return max(pool(cell.spec.world_size).run(numbers, cell, timeout_s=400), key=lambda each: each.launches)


def row(model: str, mesh: str) -> str:
    cell = Cell(model=model, mesh=mesh, precision="fp32")
    few, many = (largest(with_layers(cell, count)) for count in (FEW, MANY))
    layers = (MANY - FEW) // cell.spec.pp  # of a rank
    waits = (len(many.waits) - len(few.waits)) / layers
    launches = (many.launches - few.launches) / layers
    copied = many.copied_bytes / many.batch_bytes
    if few.mixed or many.mixed:
        raise SystemExit(f"{cell}: tensors of the host and the device meet: {few.mixed or many.mixed}")
    return f"| {model} | {mesh} | {len(few.waits)} | {waits:g} | {launches:g} | {many.clip} | {many.optimizer} | {copied:.2g} |"


def main() -> None:
    print("| model | mesh | waits, 4 layers | each further layer | launches of a layer | clip | AdamW | batch copied |")
    print("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        for mesh in MESHES:
            print(row(model, mesh), flush=True)
    print("\n| optimizer | 8 matrices | 64 matrices |\n|---|---|---|")
    for states in ("fp32", "8bit", "4bit", "fp8"):
        found = [pool(1).run(optimizer_launches, states, count)[0] for count in (8, 64)]
        print(f"| {states} | {found[0]} | {found[1]} |", flush=True)


if __name__ == "__main__":
    main()
