"""Does a bias alone keep the load of experts even?

    python benchmarks/moe_balance.py                       # minutes; --ranks 4 for four processes

Trains the demo of examples/moe_pretrain.py twice from the same weights on the same tokens, with its bias and without any
balance, and draws the load of the fullest expert over the mean, of the worst layer, at each step. A run that is complete
under --out is not repeated.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import tyro
from rows import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "moe_balance.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "moe_balance.svg"
WORST, MEAN, LAYER = "load/max_over_mean_worst_layer", "load/max_over_mean", "load_by_layer/"


@dataclass(frozen=True, kw_only=True)
class Settings:
    bias_speed: float = 1e-2
    steps: int = 200
    after: int = 20
    """steps that a run goes on for after these: loads are averaged over them"""
    mesh: str = "dp_shard=-1"
    ranks: int = 1
    limit: float = 1.3
    """the load that is asked for, a line in the picture"""
    out: Path = Path("runs/moe_balance")
    record: bool = False
    """append a row for each run to benchmarks/results/moe_balance.jsonl, and draw docs/pictures/moe_balance.svg"""


def run(speed: float, settings: Settings) -> list[dict[str, Any]]:
    """The lines of the run's log."""
    out = settings.out.resolve() / f"s{speed:g}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
    flags = ["--mesh", settings.mesh, "--bias-speed", f"{speed:g}", "--out", str(out)]
    for steps in (settings.steps, settings.steps + settings.after):
        recipe = [str(ROOT / "examples" / "moe_pretrain.py"), *flags, "--steps", str(steps)]
        subprocess.run([*launch, *recipe], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def summary(last: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over these steps: of the worst layer of each step, of all layers, of each layer, of the loss."""

    def average(key: str) -> float:
        return round(mean(line[key] for line in last), 4)

    return {
        "worst_layer_of_each_step": average(WORST),
        "all_layers": average(MEAN),
        "layers": {key.removeprefix(LAYER): average(key) for key in last[0] if key.startswith(LAYER)},
        "loss": average("loss"),
        "held_out_bits_per_byte": round(last[-1]["held_out_bits_per_byte"], 4),
    }


# ------------------------------------------------------------------------------------------------------- drawing

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 116, 30, 36
COLOURS = ("#c0392b", "#2166ac")


def draw(curves: dict[str, list[float]], *, limit: float) -> str:
    """An SVG of each curve over its steps."""
    steps = max(len(curve) for curve in curves.values())
    top = max(max(curve) for curve in curves.values())

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / steps, 1)

    def y(load: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (load - 1) / (top - 1), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18">tokens of the fullest expert over the mean, worst layer</text>',
    ]
    for load in range(1, int(top) + 1):
        parts += [
            f'<path d="M{LEFT} {y(load)}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(load) + 4}" text-anchor="end">{load}</text>',
        ]
    for step in range(0, steps + 1, 50):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts += [
        f'<text x="{x(steps / 2)}" y="{HEIGHT - 3}" text-anchor="middle">step</text>',
        f'<path d="M{LEFT} {y(limit)}H{WIDTH - RIGHT}" stroke="#333" stroke-dasharray="4 4"/>',
    ]
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        points = " ".join(f"{x(step)},{y(load)}" for step, load in enumerate(curve, start=1))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{WIDTH - RIGHT + 8}" y="{y(mean(curve[-20:])) + 4}" fill="{colour}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(settings: Settings) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    logs = {name: run(speed, settings) for name, speed in (("no balance", 0.0), ("bias", settings.bias_speed))}
    for name, lines in logs.items():
        print(f"{name}: last {settings.after} of {len(lines)} steps {summary(lines[-settings.after :])}")
    if not settings.record:
        return
    PICTURE.write_text(
        draw({name: [line[WORST] for line in lines] for name, lines in logs.items()}, limit=settings.limit)
    )
    shared = {**environment(), **{key: value for key, value in dataclasses.asdict(settings).items() if key != "out"}}
    del shared["record"]
    with RESULTS.open("a") as file:
        for name, lines in logs.items():
            curves = {key: [round(line[of], 3) for line in lines] for key, of in (("worst", WORST), ("loss", "loss"))}
            file.write(
                json.dumps({**shared, "balance": name, "after_steps": summary(lines[-settings.after :]), **curves})
                + "\n"
            )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
