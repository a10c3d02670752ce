"""How evenly the experts of a step are used, as numbers and as a picture.

Dims: L routers (layers), E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshkit.auxiliary import balance

CELL_PX = 12
WHITE, RED, BLUE = (1.0, 1.0, 1.0), (0.80, 0.15, 0.10), (0.10, 0.30, 0.70)


def load_scalars(counts: Mapping[str, Tensor]) -> dict[str, float]:
    """What a logger takes of the tokens per expert, by router; see `meshkit.auxiliary.balance`.

    The load of the fullest expert over the mean, and the entropy, are means over the layers; `_worst_layer` is the layer
    with the fullest, and `load_by_layer` has each. Unused experts are those of all layers together.
    """
    if not counts:
        return {}
    rows = torch.stack([torch.stack([value.float() for value in balance(one)]) for one in counts.values()])
    fullest, entropy, unused = rows.unbind(1)
    whole = torch.stack([fullest.mean(), fullest.max(), entropy.mean(), unused.sum()])
    *values, by_layer = *whole.tolist(), fullest.tolist()
    names = ("max_over_mean", "max_over_mean_worst_layer", "entropy", "unused_experts")
    out = {f"load/{name}": value for name, value in zip(names, values, strict=True)}
    return out | {f"load_by_layer/{name}": value for name, value in zip(counts, by_layer, strict=True)}


def load_picture(counts: Mapping[str, Tensor]) -> Tensor:
    """Layers from top to bottom, experts from left to right: uint8 [3, H, W].

    White is the mean of the layer, blue less down to nothing, red more up to twice the mean and beyond.
    """
    counts_LE = torch.stack(list(counts.values())).float().cpu()
    away_LE1 = (counts_LE / counts_LE.mean(1, keepdim=True) - 1).clamp(-1, 1).unsqueeze(-1)
    white, red, blue = (torch.tensor(colour) for colour in (WHITE, RED, BLUE))
    pixels_LE3 = white + away_LE1.clamp(min=0) * (red - white) + away_LE1.clamp(max=0) * (white - blue)
    cells_HW3 = pixels_LE3.repeat_interleave(CELL_PX, 0).repeat_interleave(CELL_PX, 1)
    return (255 * cells_HW3).round().to(torch.uint8).movedim(-1, 0)
