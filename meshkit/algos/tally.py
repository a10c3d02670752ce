"""Sums of what a loss sees on its way, added up over microbatches and ranks, to be means of the step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.errors import DataError
from meshkit.mesh import Mesh


class Tally:
    """names: what is added. Ranks that compute no loss, those of earlier stages, have zeros."""

    def __init__(self, mesh: Mesh, names: tuple[str, ...]) -> None:
        self._mesh, self._names = mesh, names
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=mesh.device)

    def add(self, **values: Tensor) -> None:
        """Add the sum of each tensor to what has its name."""
        if set(values) != set(self._names):
            raise DataError(f"Tally of {', '.join(self._names)} was given {', '.join(values)}. Give each of them.")
        self._sums += torch.stack([values[name].detach().double().sum() for name in self._names]).to(self._sums.device)

    def means(self, count: Tensor | float) -> dict[str, float]:
        """Each sum over all ranks over `count`, and begin anew. Every rank must call it.

        Wire: one all-reduce of the sums over the ranks with different tokens, and with pp one over the stages.
        """
        for axis in (self._mesh.tokens, self._mesh["pp"]):
            if axis.size() > 1:
                dist.all_reduce(self._sums, group=axis.get_group())
        means = (self._sums / max(float(count), 1.0)).tolist()
        self._sums = torch.zeros_like(self._sums)
        return dict(zip(self._names, means, strict=True))
