"""Private PyTorch names, imported here and nowhere else.

Each line says which versions it was checked against and what would replace it.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# 2.11, 2.15: exact for uneven shards and for FSDP over TP (_StridedShard). No public replacement yet.
__all__ = ["flatten_mesh", "global_offset"]


def global_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis made of all axes of `mesh`. 2.11, 2.15: `_flatten` is still private; keep the returned object."""
    return mesh._flatten(name)
