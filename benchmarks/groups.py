"""How many process groups, calls that make them, and sockets has a rank, on meshes of 8 to 16,384 ranks?

    python benchmarks/groups.py    # a table, from fake worlds of that size in this process

Calls are of new_group and split_group by init_mesh. The default group is one of the groups; pairs are the groups of two ranks
that the messages of a pipeline take. Groups of the host are those in `mesh.host`, as many again of a Checkpointer, and those
of cp; gloo's sockets are one to listen, and one for each other rank of each. Both of the first rank of all, which has the
most. What NCCL opens is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

import meshkit as mk
from meshkit.mesh import MeshSpec, fake_world
from meshkit.mesh.host import levels

MESHES = {
    8: ("pp=2 dp_shard=2 tp=2", "dp_shard=2 cp=2 tp=2 ep=2", "dp_replicate=2 dp_shard=4"),
    1024: ("pp=8 dp_shard=16 tp=8", "dp_shard=64 cp=2 tp=8 ep=32", "dp_replicate=8 dp_shard=128"),
    16384: ("pp=16 dp_shard=128 tp=8", "pp=8 dp_shard=128 cp=2 tp=8 ep=64", "dp_replicate=32 dp_shard=64 tp=8"),
}
"""dense on three axes, experts on four, replicas; by ranks"""


@contextmanager
def counting() -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("new_group", "split_group"):
            function = counted(name)
            for owner in (dist, distributed_c10d, device_mesh):
                stack.enter_context(patch.object(owner, name, function))
        yield calls


def row(text: str) -> tuple[str, ...]:
    spec = MeshSpec.parse(text)
    world = prod(spec.sizes().values())
    with counting() as calls, fake_world(world, rank=world // 2):
        mesh = mk.init_mesh(text, device_type="cpu")
        mesh["ep"].get_group()
        every = [len(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values() if world // 2 in ranks]
    pairs = 2 * min(2, spec.pp - 1)  # both ways to each neighbour in the ring of stages
    of_host = [group for ranks in (world, world, spec.cp) for level in levels(ranks) for group in level if 0 in group]
    sockets = sum(map(len, of_host))
    counts = (len(every), pairs, len(of_host), sockets)
    return f"{world:,}", f"`{text}`", f"{sum(calls.values()):,}", *map(str, counts)


def main() -> None:
    print("| ranks | mesh | calls | groups | pairs | host groups | gloo's sockets |\n|---|---|---|---|---|---|---|")
    for texts in MESHES.values():
        for text in texts:
            print(f"| {' | '.join(row(text))} |", flush=True)


if __name__ == "__main__":
    main()
