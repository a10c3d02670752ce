"""The table of docs/waits.md: host waits and launches of a step, for models and meshes. `python -m tests.laws.waits`"""

from __future__ import annotations

from tests.laws.gate.cell import ROUTED, Cell
from tests.laws.waits.measure import in_fake_world, optimizers_in_fake_world, with_layers

MODELS = ("dense", "tied", "transformers", "lora", "moe", "mla")
MESHES = ("dp_shard=4", "dp_shard=2 tp=2", "dp_shard=2 cp=2", "pp=2 dp_shard=2")
FOLDED, REPLICATED = "dp_shard=4 ep=4", "dp_replicate=2 dp_shard=2"  # the fifth, with and without experts
FEW, MANY = 2, 4  # layers of a rank; a layer's numbers are the difference


def row(model: str, mesh: str) -> str:
    cell = Cell(model=model, mesh=mesh, precision="fp32")
    few, many = (in_fake_world(with_layers(cell, count * cell.spec.pp)) for count in (FEW, MANY))
    waits = (len(many.waits) - len(few.waits)) / (MANY - FEW)
    launches = (many.launches - few.launches) / (MANY - FEW)
    copied = many.copied_bytes / many.batch_bytes
    assert not (few.mixed or many.mixed), (
        f"{cell}: tensors of the host and of the device meet: {few.mixed or many.mixed}"
    )
    told = (len(few.waits), f"{waits:g}", f"{launches:g}", many.clip, many.optimizer, f"{copied:.2g}")
    return " | ".join(("", model, mesh, *map(str, told), "")).strip()


def main() -> None:
    print("| model | mesh | waits, 2 layers | each further layer | launches of a layer | clip | AdamW | batch copied |")
    print("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        for mesh in (*MESHES, FOLDED if model in ROUTED else REPLICATED):
            print(row(model, mesh), flush=True)
    print("\n| optimizer | 8 matrices | 64 matrices |\n|---|---|---|")
    for states in ("fp32", "8bit", "4bit", "fp8"):
        found = optimizers_in_fake_world(states, 8, 64)
        print(f"| {states} | {found[0]} | {found[1]} |", flush=True)


if __name__ == "__main__":
    main()
