"""MetricSums: metrics of a loss added up over microbatches and ranks, as means and maxima of the step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.errors import DataError
from meshkit.mesh import Mesh


class MetricSums:
    """Sums of the metrics in `names`, and largest values (at least 0) of those in `maxima`.

    Ranks that compute no loss (earlier pipeline stages) have zeros.
    """

    def __init__(self, mesh: Mesh, names: tuple[str, ...], maxima: tuple[str, ...] = ()) -> None:
        self._mesh, self._names, self._maxima = mesh, names, maxima
        # fp64: in fp32 another split into microbatches would show in the last digits of a log.
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=mesh.device)
        self._largest = torch.zeros(len(maxima), dtype=torch.float64, device=mesh.device)

    def add(self, **values: Tensor) -> None:
        """Add the sum of each tensor to the metric of its name, or keep its maximum; a tensor may be empty.

        Raises: DataError if a metric is missing.
        """
        if missing := [name for name in (*self._names, *self._maxima) if name not in values]:
            raise DataError(
                f"MetricSums: there is no {', '.join(missing)} to add, only {', '.join(values)}. Choose from those."
            )
        # Stays on the device: reading a number here would make the host wait for it in every microbatch.
        self._sums += torch.stack([values[name].detach().double().sum() for name in self._names]).to(self._sums.device)
        for index, name in enumerate(self._maxima):
            if values[name].numel():
                self._largest[index] = torch.maximum(self._largest[index], values[name].detach().double().max())

    def means(self, count: Tensor | float) -> dict[str, float]:
        """Each sum over all ranks divided by `count`, each maximum as it is; then starts from zero. Every rank must call it.

        Wire: one all-reduce of the sums over the ranks with different tokens, with pp one over the stages; the same of
        maxima.
        """
        # Over pp too: stages without the loss add zeros, and every rank then logs and decides with the same numbers.
        for axis in (self._mesh.tokens, self._mesh["pp"]):
            if axis.size() > 1:
                dist.all_reduce(self._sums, group=axis.get_group())
                if self._maxima:
                    dist.all_reduce(self._largest, dist.ReduceOp.MAX, group=axis.get_group())
        means = [*(self._sums / max(float(count), 1.0)).tolist(), *self._largest.tolist()]
        self._sums, self._largest = torch.zeros_like(self._sums), torch.zeros_like(self._largest)
        return dict(zip((*self._names, *self._maxima), means, strict=True))
