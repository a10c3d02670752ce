"""Host memory of a node, which its ranks share: what they offload has to fit there too."""

from __future__ import annotations

from meshkit.cluster import Cluster
from meshkit.errors import ClusterError
from meshkit.preflight.estimate import Composed
from meshkit.preflight.search._space import Space


def node_bytes(memory: Composed, cluster: Cluster) -> int:
    """The most that ranks of one node have on their host; a node is a block of the innermost tier."""
    of_rank, spec, node = [rank.host_bytes for rank in memory.ranks], memory.spec, cluster.tiers[0].ranks
    if not any(of_rank):
        return 0
    ranks_of_stage = spec.world_size // spec.pp  # pp is the outermost axis
    held: dict[int, int] = {}
    for rank in range(spec.world_size):
        at = spec.placement[rank] if spec.placement else rank
        held[at // node] = held.get(at // node, 0) + of_rank[rank // ranks_of_stage]
    return max(held.values())


def fits_host(memory: Composed, cluster: Cluster) -> bool:
    """Whether every node has the memory; a cluster that says nothing of it is not asked."""
    return not cluster.host.memory_bytes or node_bytes(memory, cluster) <= cluster.host.memory_bytes


def refuse_disk(space: Space, cluster: Cluster) -> None:
    """Raises: ClusterError for activations on a disk of which nothing is known, as if it cost nothing."""
    if any(each is not None and each.to == "disk" for each in space.activations) and not cluster.host.disk_bytes_per_s:
        raise ClusterError(
            f"search: activations on 'disk' cannot be compared, since the cluster {cluster.name!r} says no "
            "host.disk_bytes_per_s. Give it, of a node, or offload to the host."
        )
