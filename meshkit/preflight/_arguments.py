"""What explain, estimate and the page are asked: a mesh, the rows and tokens of a step, and the rank (its coordinate)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from meshkit.errors import DataError, MeshError, PlanError
from meshkit.mesh import DENSE_AXES, MeshSpec
from meshkit.step import refuse_microbatches
from meshkit.strategy import Strategy


def spec_of(spec: MeshSpec | str | None, strategy: Strategy, world_size: int | None = None) -> MeshSpec:
    """The mesh sizes, without a -1. spec: None is the strategy's. world_size: default what the sizes multiply to."""
    if spec is None:
        return strategy.mesh_for(world_size)
    wanted = MeshSpec.parse(spec) if isinstance(spec, str) else spec
    if isinstance(wanted, Strategy):
        raise MeshError(
            "a mesh was expected, and a Strategy came. Give it by name, as in estimate(model, strategy=...), whose mesh is "
            "taken."
        )
    if not isinstance(wanted, MeshSpec):
        raise MeshError(f"spec={spec!r}: give a MeshSpec, or a text as 'dp_shard=2 tp=2'.")
    return wanted.resolve(world_size if world_size is not None else wanted.world_size)


def refuse_sizes(rows: int, seq_len: int, microbatches: int | None = None) -> None:
    """Raises: DataError for a step that no rank could run. A rank may have no row: then it runs one of zeros."""
    for name, value, least in (("rows", rows, 0), ("seq_len", seq_len, 1)):
        if type(value) is not int or value < least:
            raise DataError(f"{name}={value!r}: a rank's part of a step has a whole number of them, at least {least}.")
    if microbatches is not None:
        refuse_microbatches(microbatches)


def full_coordinate(spec: MeshSpec, coordinate: Mapping[str, int] | None) -> dict[str, int]:
    """The rank's index on every dense axis, 0 where none is given. Raises: PlanError for a place that the mesh has not."""
    given = {} if coordinate is None else coordinate
    if not isinstance(given, Mapping):
        raise PlanError(f"coordinate={given!r}: give the index on each axis, as {{'pp': 1}}.")
    for axis, index in given.items():
        if axis not in DENSE_AXES:
            near = difflib.get_close_matches(str(axis), DENSE_AXES, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise PlanError(
                f"coordinate {axis}={index!r}: there is no such dense axis. {hint}The axes are {', '.join(DENSE_AXES)}; a "
                "rank's indices on ep and etp follow from them."
            )
        if type(index) is not int or not 0 <= index < getattr(spec, axis):
            last = getattr(spec, axis) - 1
            raise PlanError(f"coordinate {axis}={index!r}, but {axis} has the places 0 to {last}. Give one of them.")
    return {axis: given.get(axis, 0) for axis in DENSE_AXES}


def rank_at(spec: MeshSpec, coordinate: Mapping[str, int]) -> int:
    """The rank with these indices on the dense axes."""
    rank = 0
    for axis in DENSE_AXES:
        rank = rank * getattr(spec, axis) + coordinate[axis]
    return rank


def coordinate_of(spec: MeshSpec, rank: int) -> dict[str, int]:
    """The indices of a rank on the dense axes; the last axis varies fastest."""
    coordinate = {}
    for axis in reversed(DENSE_AXES):
        rank, coordinate[axis] = divmod(rank, getattr(spec, axis))
    return coordinate
