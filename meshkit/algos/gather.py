"""What the data ranks have, on all of them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from meshkit.mesh import Mesh

Gathered = TypeVar("Gathered")


def gather_over_data(mesh: Mesh, own: Gathered) -> list[Gathered]:
    """What each data rank has, in their order; the same on every rank, which must all call it.

    Wire: over the ranks with different tokens, a gather of objects.
    """
    if mesh.data_ranks == 1:
        return [own]
    found: list[Any] = [None] * mesh.tokens.size()
    dist.all_gather_object(found, (mesh.data_rank, own), group=mesh.tokens.get_group())
    by_rank = dict(found)  # ranks of cp have the same
    return [by_rank[rank] for rank in range(mesh.data_ranks)]
