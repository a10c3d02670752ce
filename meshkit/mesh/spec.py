"""Mesh axes and their sizes (the topology), as data: two views of the same ranks, without a process group.

dp_shard may be nested, `dp_shard=4x8`: dp_inter (inter-node) x dp_intra (intra-node), and with it edp of the expert view.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from einops import rearrange

from meshkit.errors import MeshError

# The slowest axis first. `tp` is last, so its groups are neighbours inside of a node, on the fastest links: it sends most,
# several times in every layer. `pp` is first in both views, since a pipeline stage is the same ranks in both.
DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
# What an axis is made of where nodes are told apart, the slower one first.
NESTED = {"dp_shard": ("dp_inter", "dp_intra"), "edp": ("edp_inter", "edp_intra")}
# What other libraries call an axis.
_ELSEWHERE = {
    "dp": "Parameters are sharded over dp_shard (ZeRO, FSDP) and copied over dp_replicate (DDP). ",
    "fsdp": "Parameters are sharded over dp_shard. ",
    "ddp": "Parameters are copied over dp_replicate. ",
    "sp": "Sequence parallelism lies on tp: Strategy(sequence=True). ",
}


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Axis sizes. One dense axis may be -1: the ranks that are left.

    `MeshSpec(dp_shard=-1, tp=2).resolve(8)` has dp_shard=4. dp_intra: of the ranks of dp_shard, those inside of a node, for
    what is sharded inside of nodes alone; "dp_shard=4x8" is dp_shard=32 dp_intra=8. 1 tells no nodes apart.
    placement: which of the launcher's ranks is each rank of the mesh, as (0, 2, 1, 3), "placement=0-2-1-3" in a text; (), as
    they come. For links or devices that are unlike; it keeps the ranks of a node together. `meshkit.place` finds one.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    dp_intra: int = 1
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        is_row = isinstance(self.placement, Sequence) and not isinstance(self.placement, str)
        object.__setattr__(self, "placement", tuple(self.placement) if is_row else self.placement)
        if not is_row or any(type(rank) is not int for rank in self.placement):
            raise MeshError(
                f"mesh placement={self.placement!r}: a rank for each rank of the mesh, for example (0, 2, 1, 3)."
            )
        for axis, size in self.sizes(AXIS_NAMES).items():
            if axis in ("ep", "etp", "dp_intra") and size == -1:
                raise MeshError(f"mesh {axis}=-1: only {', '.join(DENSE_AXES)} can be -1. Give {axis} a size.")
            # True is an int in Python, and would be a size of 1.
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise MeshError(
                    f"mesh {axis}={size!r}: an axis size is a whole number of at least 1, or -1 for the ranks that are "
                    "left."
                )
        free = [axis for axis in DENSE_AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise MeshError(f"mesh {' '.join(f'{axis}=-1' for axis in free)}: only one axis can be -1. Fix the others.")

    @staticmethod
    def parse(text: str) -> MeshSpec:
        """`"dp_shard=2 tp=2"` to a spec. Axes may be separated by spaces or commas; axes not named have size 1.

        `"dp_shard=4x8"`: 4 nodes of 8 ranks; `"dp_shard=-1x8"`: as many nodes as there are.
        """
        sizes: dict[str, int] = {}
        placement: tuple[int, ...] = ()
        for word in text.replace(",", " ").split():
            axis, equals, value = word.partition("=")
            if not equals:
                raise MeshError(f'mesh "{text}": {word!r} is not axis=size. Write, for example, "dp_shard=2 tp=2".')
            if axis == "placement":
                if placement:
                    raise MeshError(f'mesh "{text}": placement is given twice. Keep one.')
                placement = _ranks_of(value, text)
                continue
            if axis not in AXIS_NAMES:
                raise MeshError(f'mesh "{text}": {no_axis(axis, "placement")}')
            if axis in sizes:
                raise MeshError(f'mesh "{text}": axis {axis!r} is given twice. Keep one.')
            nodes, nested, inside = value.partition("x") if axis == "dp_shard" else (value, "", "")
            if nested and "dp_intra" in sizes:
                raise MeshError(f'mesh "{text}": dp_intra is given twice, and as {value!r}. Keep one.')
            try:
                sizes[axis] = int(nodes)
                if nested:
                    sizes["dp_intra"] = int(inside)
            except ValueError:
                raise MeshError(f'mesh "{text}": the size of {axis!r} is {value!r}, not a whole number.') from None
            if nested and sizes[axis] != -1:
                sizes[axis] *= sizes["dp_intra"]
        return MeshSpec(**sizes, placement=placement)

    @property
    def text(self) -> str:
        """What `parse` reads: "pp=2 tp=2", without axes of size 1; of one rank it is empty."""
        words = [f"{axis}={size}" for axis, size in self.sizes(AXIS_NAMES).items() if size != 1]
        return " ".join(words + [f"placement={'-'.join(map(str, self.placement))}"] * bool(self.placement))

    @property
    def world_size(self) -> int:
        """Ranks this spec needs. Meaningful once no axis is -1."""
        return prod(getattr(self, axis) for axis in DENSE_AXES)

    @property
    def edp(self) -> int:
        """Data-parallel copies of each expert: what ep and etp leave of dp_shard × cp × tp."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def dp_inter(self) -> int:
        """Nodes of dp_shard; all of it where none are told apart."""
        return self.dp_shard // self.dp_intra

    @property
    def edp_inter(self) -> int:
        """Nodes of edp: those of dp_shard."""
        return self.dp_inter if self.dp_intra > 1 else self.edp

    @property
    def edp_intra(self) -> int:
        return self.edp // self.edp_inter

    def fits(self, other: MeshSpec) -> bool:
        """Whether `other`, without an axis of -1, is a mesh that this spec asks for. One without a placement takes any."""
        sizes = self.sizes(AXIS_NAMES).items()
        return self.placement in ((), other.placement) and all(
            size in (-1, getattr(other, axis)) for axis, size in sizes
        )

    def sizes(self, axes: tuple[str, ...] = DENSE_AXES) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in axes}

    def resolve(self, world_size: int, *, part: bool = False) -> MeshSpec:
        """This spec with -1 replaced and every size checked against the world, or the part of it that the mesh is on.

        Raises: MeshError with the arithmetic when the axes do not multiply to `world_size`.
        """
        if world_size < 1:  # the product of axes one of which is -1
            rest = next(axis for axis in DENSE_AXES if getattr(self, axis) == -1)
            raise MeshError(
                f"mesh {rest}=-1 is what is left of the world, whose size is not known here. Give {rest} a size."
            )
        where, change = ("the part", "ranks=") if part else ("the world", "--nproc-per-node")
        free = [axis for axis in DENSE_AXES if getattr(self, axis) == -1]
        fixed = prod(size for size in self.sizes().values() if size != -1)
        product = "*".join(f"{axis}={size}" for axis, size in self.sizes().items() if size not in (1, -1)) or "tp=1"
        if world_size % fixed:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise MeshError(
                f"mesh {product} needs a multiple of {fixed} ranks, but {where} has {world_size}. "
                f"Change {change}, or make the product of the axes one of {divisors}."
            )
        if not free and fixed != world_size:
            raise MeshError(
                f"mesh {product} uses {fixed} of the {world_size} ranks{' of the part' * part}. Start {fixed} ranks, put it "
                "on a part of them by init_mesh(ranks=...), or give one axis the size -1 to take all that are left, for "
                "example dp_shard=-1."
            )
        if self.placement and sorted(self.placement) != list(range(world_size)):
            raise MeshError(
                f"mesh placement={'-'.join(map(str, self.placement))}: name each of the ranks 0 to {world_size - 1} once, in "
                "the order of the mesh."
            )
        left: dict[str, Any] = dict.fromkeys(free, world_size // fixed)
        spec = dataclasses.replace(self, **left) if free else self
        # ep and etp are made of the ranks that share one copy of the dense parameters: dp_replicate copies the experts too.
        fold, experts = spec.dp_shard * spec.cp * spec.tp, spec.ep * spec.etp
        if fold % experts:
            raise MeshError(
                f"mesh ep={spec.ep} etp={spec.etp} needs ep*etp={experts} to divide "
                f"dp_shard*cp*tp={spec.dp_shard}*{spec.cp}*{spec.tp}={fold}. Choose ep and etp from the divisors of {fold}."
            )
        if spec.dp_shard % spec.dp_intra:
            raise MeshError(
                f"mesh dp_intra={spec.dp_intra}: the {spec.dp_shard} ranks of dp_shard are no whole number of nodes with "
                f"{spec.dp_intra}. Choose a divisor of {spec.dp_shard}."
            )
        node = spec.dp_intra * spec.cp * spec.tp
        if spec.dp_intra > 1 and node % experts:
            raise MeshError(
                f"mesh ep={spec.ep} etp={spec.etp} needs ep*etp={experts} to divide the dp_intra*cp*tp={node} ranks of a "
                f"node where dp_shard is nested. Choose from the divisors of {node}, or leave dp_intra away."
            )
        return spec

    def groups(self, *axes: str) -> list[list[int]]:
        """The ranks of every group of an axis, or of several axes of one view taken as one, ordered by first rank.

        Needs no process group.
        """
        # Both views number the same ranks, the last axis fastest, as DeviceMesh lays out its grid.
        axes = self.parts(*axes)
        view = self.parts(*(DENSE_AXES if {*axes} <= {*self.parts(*DENSE_AXES)} else EXPERT_AXES))
        sizes = {name: getattr(self, name) for name in view}
        others = [name for name in view if name not in axes]
        # For axis tp: "(pp dp_replicate dp_shard cp tp) -> (pp dp_replicate dp_shard cp) (tp)".
        pattern = f"({' '.join(view)}) -> ({' '.join(others)}) ({' '.join(axes)})"
        return sorted(rearrange(torch.arange(prod(sizes.values()), device="cpu"), pattern, **sizes).tolist())

    def parts(self, *axes: str) -> tuple[str, ...]:
        """The axes, each nested one as the two that it is made of."""
        return tuple(part for axis in axes for part in NESTED.get(axis, (axis,)))

    def describe(self, *, ranks_per_node: int = 8, ranks: Sequence[int] | None = None) -> str:
        """One line per axis of more than one rank: its groups of ranks and whether they stay inside a node. The expert view's
        own axes are there where it has some.

        ranks: the ranks of the world that the mesh is on; None is 0, 1, ...
        Needs no process group: a laptop can describe a mesh of 1024 ranks.
        """
        lines = [f"{self.world_size} rank{'s' * (self.world_size > 1)}, {ranks_per_node} per node"]
        world_ranks = range(self.world_size) if ranks is None else ranks
        nested = NESTED["dp_shard"] if self.dp_intra > 1 else ()
        for title, axes in (("dense", (*DENSE_AXES, *nested)), ("expert", EXPERT_AXES)):
            for axis in axes:
                size = getattr(self, axis)
                if size == 1 or (title == "expert" and (axis in DENSE_AXES or self.ep * self.etp == 1)):
                    continue  # pp and dp_replicate are the same in both views; alone, edp is dp_shard x cp x tp
                groups = [[world_ranks[index] for index in group] for group in self.groups(axis)]
                nodes = max(len({rank // ranks_per_node for rank in group}) for group in groups)
                link = "intra-node" if nodes == 1 else f"inter-node ({nodes} nodes a group)"
                shown = " ".join(str(group) for group in groups[:4]) + (
                    f" ... {len(groups)} groups" * (len(groups) > 4)
                )
                lines.append(f"  {title:6} {axis:12} {size:>4}  {link:28} {shown}")
        return "\n".join(lines)


def axes_of(name: str) -> tuple[str, ...]:
    """The axes that an axis of several in one, as "dp_shard_cp", is named by."""
    known = (*NESTED["dp_shard"], *NESTED["edp"], *DENSE_AXES, *EXPERT_AXES)  # edp_intra is no edp
    axis = next((axis for axis in known if name == axis or name.startswith(f"{axis}_")), None)
    if axis is None:
        raise MeshError(f"{name!r} is not made of the axes {', '.join(DENSE_AXES)} or {', '.join(EXPERT_AXES)}.")
    return (axis, *(axes_of(name[len(axis) + 1 :]) if name != axis else ()))


AXIS_NAMES = tuple(field.name for field in dataclasses.fields(MeshSpec) if field.name != "placement")


def _ranks_of(value: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, value.split("-")))
    except ValueError:
        raise MeshError(
            f'mesh "{text}": the placement is {value!r}. Write ranks, for example placement=0-2-1-3.'
        ) from None


def no_axis(name: str, *others: str) -> str:
    """Of a name that is none of an axis, for an error. others: names that may have been meant, too."""
    near = difflib.get_close_matches(name, [*others, *AXIS_NAMES], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else _ELSEWHERE.get(name, "")
    return f"there is no axis {name!r}. {hint}The axes are {', '.join(AXIS_NAMES)}."
