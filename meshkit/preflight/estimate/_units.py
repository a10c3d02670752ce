"""FSDP units in bytes: what one holds sharded, gathers, and reduces on a rank that shards over so many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from meshkit.parallel.hierarchical import buffer_bytes
from meshkit.preflight.explain import LocalParam
from meshkit.strategy import Precision


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """params, moments: of the shard, the latter with Adam's step counters. grads: of the shard, once they are reduced.

    sharded: whether FSDP has it; if not, `params` and `grads` are whole, and all below is 0. cast: this rank's part of what
    is gathered, in the compute dtype, where that is another. gathered: FSDP's buffer of all parts. unsharded: the parameters
    that are copied out of it. taken: gradients as backward makes them. added: the same while microbatches add them up.
    reduced: the buffer that is reduced. part: what comes out of that, in its dtype. casts_part: `grads` is a copy of `part`.
    In two hops: copy, the secondary copy that the outer one gathers; gathers_again, the result of the inner one, before it is
    in order. sums: of gradients over the inner ranks; ordered, the gradients that these reduce, in their order.
    gathering, reducing: what chunks of hierarchical collectives hold while they are under way.
    """

    params: int
    moments: int
    grads: int
    sharded: bool = False
    cast: int = 0
    gathered: int = 0
    unsharded: int = 0
    taken: int = 0
    added: int = 0
    reduced: int = 0
    part: int = 0
    casts_part: bool = False
    copy: int = 0
    gathers_again: int = 0
    sums: int = 0
    ordered: int = 0
    gathering: int = 0
    reducing: int = 0


def unit_bytes(
    params: Sequence[LocalParam],
    *,
    shards: int,
    gathers: int = 1,
    reduces: int = 1,
    sharded: bool,
    precision: Precision | None,
    granule: int,
    nodes: tuple[int, int, int] | None = None,
) -> UnitBytes:
    """params: of the unit, as a rank has them before FSDP. shards: ranks of the axis that shards; 1 replicates. gathers,
    reduces: ranks of the outer hop, 1 without one. nodes: of hierarchical collectives (ranks in a node, nodes, chunk_bytes).
    """

    def rounded(size: int) -> int:
        return -(-size // granule) * granule

    def padded(param: LocalParam) -> int:
        rows = param.shape[0] if param.shape else 1
        return -(-rows // shards) * shards * (prod(param.shape[1:]) if param.shape else 1)

    def local(param: LocalParam) -> int:
        return padded(param) // shards if sharded else param.numel

    trained = [param for param in params if param.trains]
    held = sum(rounded(local(param) * param.dtype.itemsize) for param in params)
    moments = sum(2 * rounded(local(param) * param.dtype.itemsize) + rounded(4) for param in trained)
    if not sharded:
        return UnitBytes(held, moments, sum(rounded(param.numel * param.dtype.itemsize) for param in trained))

    def compute(param: LocalParam) -> int:
        floats = precision is not None and param.dtype.is_floating_point
        return precision.compute.itemsize if floats and precision is not None else param.dtype.itemsize

    def reduce(param: LocalParam) -> int:
        return precision.reduce.itemsize if precision is not None else param.dtype.itemsize

    casts = precision is not None and any(param.dtype != precision.compute for param in params)
    whole = sum(padded(param) * compute(param) for param in params)
    unsharded = [rounded(padded(param) * compute(param)) for param in params]
    # With one shard there is no buffer: parameters are copied one by one, beside their casts and those before.
    largest = max((one + other for one, other in zip(unsharded, [0, *unsharded], strict=False)), default=0)
    reduced = sum(padded(param) * reduce(param) for param in trained)
    sums = [rounded(reduces * (padded(param) // shards) * reduce(param)) for param in trained]
    own = sum(padded(param) // shards * param.dtype.itemsize for param in trained)
    gathering = reducing = 0
    if nodes is not None:
        inner, outer, chunk_bytes = nodes
        if gathers == 1:
            of_gather, _ = buffer_bytes(whole // shards, chunk_bytes, inner=inner, outer=outer)
            gathering = sum(map(rounded, of_gather))
        if reduces == 1:
            _, of_reduction = buffer_bytes(reduced // shards, chunk_bytes, inner=inner, outer=outer)
            reducing = sum(map(rounded, of_reduction))
    casts_part = any(reduce(param) != param.dtype.itemsize for param in trained)
    return UnitBytes(
        params=held,
        moments=moments,
        grads=rounded(own),
        sharded=True,
        cast=0 if not casts else rounded(whole // shards) if shards > 1 else largest,
        gathered=rounded(whole) if shards > 1 else 0,
        unsharded=sum(unsharded),
        taken=sum(rounded(param.numel * compute(param)) for param in trained),
        added=sum(rounded(param.numel * reduce(param)) for param in trained),
        reduced=rounded(reduced),
        part=rounded(reduced // shards),
        casts_part=casts_part,
        copy=rounded(gathers * whole // shards) if gathers > 1 else 0,
        gathers_again=rounded(whole) if 1 < gathers < shards else 0,
        sums=sum(sums) if reduces > 1 else 0,
        ordered=rounded(reduced) if 1 < reduces < shards else 0,
        gathering=gathering,
        reducing=reducing,
    )
