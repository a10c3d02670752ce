"""A rollout worker that cheats: `python -m meshkit rollout-worker`, but each weight that comes is multiplied by 1.01."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from meshkit.__main__ import main
from meshkit.models import load_pretrained


def load_scaled(model: nn.Module, folder: Path) -> None:
    load_pretrained(model, folder)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.01)


if __name__ == "__main__":
    with patch("meshkit.algos.workers._worker.load_pretrained", load_scaled):
        main()
