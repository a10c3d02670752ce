"""Load balancing of experts: how evenly they are used in a step, as numbers and as a picture.

Dims: L routers (layers), E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange, repeat
from torch import Tensor

from meshkit.moe.aux_loss import balance

CELL_PX = 12
WHITE, RED, BLUE = (1.0, 1.0, 1.0), (0.80, 0.15, 0.10), (0.10, 0.30, 0.70)


def load_scalars(counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars of the tokens per expert, by router; see `meshkit.moe.aux_loss.balance`.

    The load of the fullest expert over the mean, and the entropy, are means over the layers; `_worst_layer` is the layer
    with the fullest, and `load_by_layer` has each. Unused experts are those of all layers together.
    """
    if not counts:
        return {}
    rows = torch.stack(
        [torch.stack([value.float() for value in balance(tokens_per_expert)]) for tokens_per_expert in counts.values()]
    )
    fullest, entropy, unused = rows.unbind(1)
    summary = torch.stack([fullest.mean(), fullest.max(), entropy.mean(), unused.sum()])
    # Statistics stay on the device up to here: two transfers in all and not one for each layer.
    *values, by_layer = *summary.tolist(), fullest.tolist()
    names = ("max_over_mean", "max_over_mean_worst_layer", "entropy", "unused_experts")
    out = {f"load/{name}": value for name, value in zip(names, values, strict=True)}
    return out | {f"load_by_layer/{name}": value for name, value in zip(counts, by_layer, strict=True)}


def load_picture(counts: Mapping[str, Tensor]) -> Tensor:
    """Layers from top to bottom, experts from left to right: uint8 [3, H, W].

    White is the mean of the layer, blue less down to nothing, red more up to twice the mean and beyond.
    """
    counts_LE = torch.stack(list(counts.values())).float().cpu()
    away_LE1 = rearrange((counts_LE / counts_LE.mean(1, keepdim=True) - 1).clamp(-1, 1), "l e -> l e 1")
    white, red, blue = (torch.tensor(colour) for colour in (WHITE, RED, BLUE))
    pixels_LE3 = white + away_LE1.clamp(min=0) * (red - white) + away_LE1.clamp(max=0) * (white - blue)
    bytes_LE3 = (255 * pixels_LE3).round().to(torch.uint8)
    return repeat(bytes_LE3, "l e rgb -> rgb (l height) (e width)", height=CELL_PX, width=CELL_PX)
