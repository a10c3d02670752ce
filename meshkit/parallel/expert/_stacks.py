"""Layouts of stacked experts: which dim of each parameter etp splits, and the local tensor that a forward computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.sharding import chunk
from meshkit.errors import PlanError
from meshkit.parallel.expert._exchange import exchange
from meshkit.plan import Style, match_table
from meshkit.plan.styles import Packed

View = Callable[[nn.Parameter | None], Tensor | None]


@dataclass(frozen=True)
class ExpertLayout:
    """One `experts()` module: the number of experts, the features of a row, and each parameter's dim that etp splits.

    packed: parameters with two projections in one, and how. biases: of outputs, of which each rank of etp adds its part.
    indexed: whether its forward takes indices and weights instead of a `Routing`.
    """

    experts: int
    width: int
    dims: dict[str, int]
    packed: dict[str, Packed] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    indexed: bool = False


def expert_layouts(module: nn.Module, plan: Mapping[str, Style], *, ep: int, etp: int) -> dict[str, ExpertLayout]:
    """The `experts()` modules by name.

    Raises: PlanError for parameters that are not as the style says, and for a rank that would hold no expert or feature.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    layouts = {}
    for name, style in match_table(plan, modules, what="module").items():
        if style.kind == "experts":
            layouts[name] = _layout(name, modules[name], style)
            _refuse_idle(name, layouts[name], _features(modules[name], style, layouts[name]), ep=ep, etp=etp)
    return layouts


def _layout(name: str, module: nn.Module, style: Style) -> ExpertLayout:
    params = dict(module.named_parameters(recurse=False))
    if set(params) != {*style.columns, *style.rows}:
        raise PlanError(
            f"plan: experts() on {name!r} names the parameters {', '.join((*style.columns, *style.rows))}, but the module "
            f"has {', '.join(params)}. Give their names as experts(columns=..., rows=...)."
        )
    if len({len(param) for param in params.values()}) > 1:
        shapes = ", ".join(f"{key} {list(param.shape)}" for key, param in params.items())
        raise PlanError(
            f"plan: experts() on {name!r} needs parameters with a slice for each expert, but it has {shapes}. Leave the "
            "module whole: replicate()."
        )
    up, down = (2, 1) if style.transposed else (1, 2)
    matrices = {key: up for key in style.columns if params[key].ndim > 2}
    matrices |= {key: down for key in style.rows if params[key].ndim > 2}
    first = params[style.columns[0]]
    return ExpertLayout(
        experts=len(first),
        width=first.shape[3 - up],
        # Biases have one dim after the experts': features, or outputs, which etp splits too.
        dims={key: matrices.get(key, 1) for key in (*style.columns, *style.rows)},
        packed=dict.fromkeys(style.columns, style.packed) if style.packed else {},
        biases=tuple(key for key in style.rows if key not in matrices),
        indexed=style.takes == "indices",
    )


def _features(module: nn.Module, style: Style, layout: ExpertLayout) -> int:
    key = style.columns[0]
    return module.get_parameter(key).shape[layout.dims[key]] // (2 if style.packed else 1)


def _refuse_idle(name: str, layout: ExpertLayout, features: int, *, ep: int, etp: int) -> None:
    if not _serves(layout.experts, ep):
        fit = ", ".join(str(ranks) for ranks in range(1, layout.experts + 1) if _serves(layout.experts, ranks))
        raise PlanError(
            f"expert_parallel: {name!r} has {layout.experts} experts, and ep={ep} ranks with up to "
            f"{-(-layout.experts // ep)} each leave one without. Choose ep of {fit}; etp splits each expert further."
        )
    if not _serves(features, etp):
        raise PlanError(
            f"expert_parallel: the experts of {name!r} have {features} hidden features, and etp={etp} ranks with up to "
            f"{-(-features // etp)} each leave one without. Choose a smaller etp; ep deals out whole experts."
        )


def _serves(count: int, ranks: int) -> bool:
    """Whether every rank gets at least one, in equal shares of which only the last may be smaller."""
    return -(-count // ranks) * (ranks - 1) < count


# ------------------------------------------------------------------------------------------- inside of a forward


def local_views(module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh) -> dict[str, View]:
    """For each parameter, what the module's forward reads in its place: the part of this rank, a plain tensor.

    It is as the parameter of a module with fewer experts and fewer features: grouped matmuls know no DTensor.
    """
    etp = mesh.get_group(1) if mesh.ndim == 2 and mesh.size(1) > 1 else None
    views: dict[str, View] = {}
    for key, param in module.named_parameters(recurse=False):
        views[key] = _local
        if etp is not None and key in layout.packed:
            views[key] = _packed_view(param.shape[layout.dims[key]], layout.dims[key], layout.packed[key], etp)
        elif etp is not None and key in layout.biases:
            views[key] = _bias_view(param.shape[1], etp)
    return views


def _local(param: nn.Parameter | None) -> Tensor:
    assert isinstance(param, DTensor)
    return _torch.local_shard(param)


def _bias_view(outputs: int, etp: ProcessGroup) -> View:
    """Zeros for the outputs of other ranks: results are summed over etp, and each output's bias is to be added once."""
    held = chunk(outputs, etp.size(), etp.rank())

    def view(param: nn.Parameter | None) -> Tensor:
        return F.pad(_local(param), (held.start, outputs - held.stop))

    return view


# [Note: gate and up in one parameter]
# A rank of etp computes some hidden features, so it needs their rows of gate and their rows of up. Its shard is one run of
# rows, as every shard that checkpoints know: of halves, rows of gate alone or of up alone. So ranks of etp hold runs, and
# exchange rows for each forward. Other ways were worse: a shard of two runs has no place in checkpoints, and whole copies
# on every rank are what etp is there to avoid.


def _packed_view(rows: int, dim: int, packed: Packed, etp: ProcessGroup) -> View:
    """Wire: an all-to-all over etp of what others need, in forward and in backward; nothing where all have their own."""
    moved, rank = packed_moves(rows, packed, etp.size()), etp.rank()
    if not any(rows_of for source, to in enumerate(moved) for other, rows_of in enumerate(to) if source != other):
        return _local
    held = chunk(rows, etp.size(), rank)
    order = torch.tensor([row - held.start for to_rank in moved[rank] for row in to_rank], dtype=torch.int64)
    sent, received = [len(to_rank) for to_rank in moved[rank]], [len(source[rank]) for source in moved]

    def view(param: nn.Parameter | None) -> Tensor:
        local = _local(param)
        leaving = local.movedim(dim, 0).index_select(0, order.to(local.device))
        # From rank to rank and within a rank, rows come in their order, which is that in which they are computed with.
        return exchange(leaving, sent, received, etp).movedim(0, dim).contiguous()

    return view


def packed_moves(rows: int, packed: Packed, ranks: int) -> list[list[list[int]]]:
    """For each rank of etp and each rank that it sends to, itself too: the rows of gate and up, in ascending order."""
    held = [chunk(rows, ranks, rank) for rank in range(ranks)]
    needed = [packed_rows(rows, packed, ranks, rank) for rank in range(ranks)]
    return [[[row for row in rows_of if run.start <= row < run.stop] for rows_of in needed] for run in held]


def packed_rows(rows: int, packed: Packed, ranks: int, rank: int) -> Sequence[int]:
    """The rows of gate and up that one rank of etp computes with, in ascending order."""
    features = chunk(rows // 2, ranks, rank)
    if packed == "pairs":
        return list(range(2 * features.start, 2 * features.stop))
    return [*range(features.start, features.stop), *range(rows // 2 + features.start, rows // 2 + features.stop)]
