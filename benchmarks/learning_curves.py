"""How held-out answers get right, as the recipes of reinforcement learning were run: one picture of the rows in results/.

python benchmarks/learning_curves.py        # draws docs/pictures/learning.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "learning.svg"
RECIPES = ("grpo", "ppo", "rejection_sampling")
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 320, 50, 16, 390, 40


def rows() -> list[tuple[str, dict[str, Any]]]:
    """The last row of each recipe, task and seed."""
    newest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for recipe in RECIPES:
        path = ROOT / "benchmarks" / "results" / f"{recipe}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            newest[recipe, row["task"], row["seed"]] = row
    return [(f"{recipe}, {task}, seed {seed}", row) for (recipe, task, seed), row in newest.items()]


def draw(curves: list[tuple[str, dict[str, Any]]]) -> str:
    last = max(row["curve"][-1][0] for _, row in curves)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(share: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 0.95, 1):
        parts.append(f'<line x1="{LEFT}" x2="{x(last)}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>')
        if share != 1:
            parts.append(f'<text x="{LEFT - 6}" y="{y(share) + 4}" text-anchor="end">{share}</text>')
    for step in range(0, last + 1, 100):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(last / 2)}" y="{HEIGHT - 6}" text-anchor="middle">step, or round</text>')
    for index, (name, row) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        points = [(0, row["held_out_before"]), *((step, held_out) for step, held_out, *_ in row["curve"])]
        points_text = " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in points)
        parts.append(f'<polyline points="{points_text}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = TOP + 14 + 20 * index
        end = f"{points[0][1]:.2f} to {points[-1][1]:.2f}"
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{at}">{name}: {end}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(rows()))
    print(PICTURE)
