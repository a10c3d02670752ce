"""How many tokens a second does a slow link leave, by what crosses it? One picture of the newest rows of slow_links.jsonl.

python benchmarks/slow_link_picture.py        # draws docs/pictures/slow_links.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "slow_links.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "slow_links.svg"
COLOURS = {
    "summed in each step": "#7f7f7f",
    "quantized wires": "#1f77b4",
    "DiLoCo": "#2ca02c",
    "Streaming DiLoCo, int4": "#ff7f0e",
    "CO2": "#9467bd",
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 340, 56, 44, 12, 44
TOP_TOKENS = 4000


def links() -> list[tuple[str, dict[str, float]]]:
    """(link, tokens/s of each way to meet) from the fastest link to the slowest."""
    newest: dict[tuple[float, float], dict[str, Any]] = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        if row.get("question") == "tokens a second over a slow link":
            newest[-row["mbit"], row["delay_ms"]] = row["runs"]
    found = []
    for (less_mbit, delay_ms), runs in sorted(newest.items()):
        speed = f"{-less_mbit / 1000:g} Gbit/s" if less_mbit <= -1000 else f"{-less_mbit:g} Mbit/s"
        tokens = {name: run["tokens_per_s"] for name, run in runs.items()}
        tokens["summed in each step"] = tokens.pop("summed")
        tokens["quantized wires"] = tokens.pop(next(name for name in tokens if name.startswith("wires")))
        tokens["Streaming DiLoCo, int4"] = tokens.pop("Streaming DiLoCo")
        found.append((f"{speed}, {delay_ms:g} ms" if delay_ms else speed, tokens))
    return found


def draw(groups: list[tuple[str, dict[str, float]]]) -> str:
    def y(tokens: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - tokens / TOP_TOKENS)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    at = LEFT
    for name, colour in [*COLOURS.items(), ("never meeting", "#d62728")]:
        height, top = (10, 10) if name in COLOURS else (2, 14)
        parts.append(f'<rect x="{at}" y="{top}" width="10" height="{height}" fill="{colour}"/>')
        parts.append(f'<text x="{at + 14}" y="19" font-size="11">{name}</text>')
        at += 36 + round(6.2 * len(name))
    for tokens in range(0, TOP_TOKENS + 1, 1000):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tokens)}" y2="{y(tokens)}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tokens) + 4}" text-anchor="end">{tokens:,}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}" font-size="11">tokens a second</text>')
    group_width = (WIDTH - LEFT - RIGHT) / len(groups)
    bar = group_width * 0.8 / len(COLOURS)
    for place, (link, tokens_of) in enumerate(groups):
        left = LEFT + group_width * (place + 0.1)
        for index, (name, colour) in enumerate(COLOURS.items()):
            top = y(tokens_of[name])
            parts.append(
                f'<rect x="{left + bar * index:.1f}" y="{top:.1f}" width="{bar - 2:.1f}" height="{y(0) - top:.1f}" '
                f'fill="{colour}"/>'
            )
        alone = y(tokens_of["alone"])
        right = left + bar * len(COLOURS) - 2
        parts.append(
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{alone:.1f}" y2="{alone:.1f}" stroke="#d62728" stroke-width="2"/>'
        )
        middle = LEFT + group_width * (place + 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{link}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(links()))
    print(PICTURE)
