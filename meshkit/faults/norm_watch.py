"""Gradient norms by rank: whose share of the squared norm is another than its running median, an outlier."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.mesh import Mesh

KEPT = 100  # steps of which the median is
LEAST = 10  # steps before anything is said
FACTOR = 100.0  # of the odds: ten of the norm, which few bits of an exponent exceed and no rows do


@dataclass(frozen=True)
class Outlier:
    """rank: of the world. share, usual: of the squared gradient norm of all ranks, and its median over the last steps."""

    step: int
    rank: int
    host: str
    share: float
    usual: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: rank {self.rank} on {self.host} has {_percent(self.share)} of the squared gradient norm of "
            f"all ranks, and usually {_percent(self.usual)}. Its rows may be odd, or its processor or memory."
        )


class NormWatch:
    """Keeps each rank's share of the squared norm over steps; needs two ranks.

    Wire: in each `gather` an all-gather of 8 bytes for each step since the last.
    """

    # [Note: odds]
    # A rank's squares over those of all other ranks, and no share: of two ranks one that has half cannot become a hundred
    # times as much. And no norms: what makes all ranks' gradients large, as a hard batch, leaves the odds.

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._new: list[Tensor] = []
        self._is_new = True  # no squares of this step yet
        self._odds = torch.zeros(0, mesh.spec.world_size, dtype=torch.float64)  # [steps, ranks]

    def begin(self) -> None:
        """A step begins."""
        self._is_new = True

    def add(self, squares: Tensor) -> None:
        """squares: of this rank's gradients, fp64 []. Of a step whose norm is asked for twice the last counts."""
        if not self._is_new and self._new:
            self._new.pop()
        self._new.append(squares.detach().to(self._mesh.device))
        self._is_new = False

    def forget(self) -> None:
        self._new.clear()

    def gather(self, step: int) -> Outlier | None:
        """The first outlier since the last call, the same on every rank. step: of the newest squares. A collective."""
        ranks = self._mesh.spec.world_size
        if ranks == 1 or not self._new:
            self._new.clear()
            return None
        mine = torch.stack(self._new)
        self._new.clear()
        gathered = mine.new_empty(ranks * len(mine))
        dist.all_gather_into_tensor(gathered, mine, group=self._mesh.group)
        squares = gathered.reshape(ranks, -1).T.cpu()  # [steps, ranks]
        odds = squares / (squares.sum(1, keepdim=True) - squares)
        found = first_outlier(self._odds, odds)
        self._odds = torch.cat([self._odds, odds])[-KEPT:]
        if found is None:
            return None
        row, rank, usual = found
        hosts: list[str] = [""] * ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=self._mesh.group)  # on every rank: all found the same
        shares = _share(float(odds[row, rank])), _share(usual)
        return Outlier(step - len(odds) + 1 + row, self._mesh.ranks[rank], hosts[rank], *shares)


def first_outlier(before: Tensor, new: Tensor) -> tuple[int, int, float] | None:
    """(row of new, rank, its usual odds) of the first odds beyond `FACTOR` times their median. before, new: [steps, ranks]"""
    for row, odds in enumerate(new):
        known = torch.cat([before, new[:row]])[-KEPT:]
        if len(known) < LEAST:
            continue
        usual = known.nanmedian(0).values  # of steps with a gradient; infinite where a rank has them all
        known_of = (usual > 0) & usual.isfinite() & ~odds.isnan()  # a rank that usually has none has no usual share
        times = torch.where(known_of, odds / usual, 0.0)
        rank = int(times.argmax())
        if float(times[rank]) > FACTOR:
            return row, rank, float(usual[rank])
    return None


def _share(odds: float) -> float:
    return odds / (1 + odds) if odds < float("inf") else 1.0


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
