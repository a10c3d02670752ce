"""Expert parallelism on a module: `expert_parallel` shards stacked experts over `ep` and `etp`, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshkit.core import _torch
from meshkit.core.arguments import require
from meshkit.core.patch_class import patch_class
from meshkit.core.sharding import even_part
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.moe.routing import Overlapped, Routing
from meshkit.parallel.expert._dispatch import AllToAll, Dispatcher, OneRank
from meshkit.parallel.expert._exchange import join_rows, local_rows
from meshkit.parallel.expert._hot_experts import HotExperts, hot_experts_of, set_hot_experts
from meshkit.parallel.tensor.apply import compute_with, shard_parameter
from meshkit.plan import Style, match_table
from meshkit.plan.styles import style_table
from meshkit.strategy import ExpertPolicy


@dataclass(frozen=True)
class ExpertLayout:
    """One `experts()` module: the number of experts, the features of a row, and each parameter's dim that etp splits."""

    experts: int
    width: int
    dims: dict[str, int]


def expert_layouts(module: nn.Module, plan: Mapping[str, Style], *, ep: int, etp: int) -> dict[str, ExpertLayout]:
    """The `experts()` modules by name.

    Raises: PlanError for parameters that the style does not name, and for a rank that would hold no expert or feature.
    """
    modules = dict(module.named_modules())
    layouts = {}
    for name, style in match_table(plan, modules, what="module").items():
        if style.kind != "experts":
            continue
        dims = {**dict.fromkeys(style.columns, 1), **dict.fromkeys(style.rows, 2)}
        params = dict(modules[name].named_parameters(recurse=False))
        if set(params) != set(dims):
            raise PlanError(
                f"plan: experts() on {name!r} names the parameters {', '.join(dims)}, but the module has "
                f"{', '.join(params)}. Give their names as experts(columns=..., rows=...)."
            )
        shape = params[style.columns[0]].shape
        if not _serves(shape[0], ep):
            fit = ", ".join(str(ranks) for ranks in range(1, shape[0] + 1) if _serves(shape[0], ranks))
            raise PlanError(
                f"expert_parallel: {name!r} has {shape[0]} experts, and ep={ep} ranks with up to {-(-shape[0] // ep)} each "
                f"leave one without. Choose ep of {fit}; etp splits each expert further."
            )
        if not _serves(shape[1], etp):
            raise PlanError(
                f"expert_parallel: the experts of {name!r} have {shape[1]} hidden features, and etp={etp} ranks with up to "
                f"{-(-shape[1] // etp)} each leave one without. Choose a smaller etp; ep deals out whole experts."
            )
        layouts[name] = ExpertLayout(shape[0], shape[2], dims)
    return layouts


def _serves(count: int, ranks: int) -> bool:
    """Whether every rank gets at least one, in equal shares of which only the last may be smaller."""
    return -(-count // ranks) * (ranks - 1) < count


def expert_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, Style],
    tp: DeviceMesh | None = None,
    sequence: bool = False,
    policy: ExpertPolicy | None = None,
) -> nn.Module:
    """Share the experts of every `experts()` module of the plan over `ep`, and their features over `etp`, in place.

    mesh: one axis, `ep`, or two, `ep` x `etp`. They may be any ranks of dp_shard x cp x tp: each brings its own tokens.
    Such a module's forward is (x [N, C], routing, meanwhile=None) -> [N, C]. `meanwhile` is work that runs while rows travel
    (shared experts); it may be omitted. The module has stacked parameters [E, ...] and a method
    compute(rows [M, C], counts: list[int]) that runs its local experts on rows sorted by expert.
    tp: the axis of tensor parallelism of the rest of the model. Without sequence=True its ranks have the same tokens, and
    each dispatches an equal share of them.
    policy: capacity of experts, copies of busy experts, another dispatcher.
    Gradients are sums over all tokens, as everywhere: those of an expert's replicas on edp add up, nothing is divided.
    Wire: see `AllToAll`; with tp and without sequence, also an all-gather over tp in each direction.
    Raises: PlanError if ep or etp > 1 but the plan names no experts, or if a rank of ep would hold none.
    Source: Lepikhin et al. 2020; folding of the two views: Liu et al. 2025.
    """
    require("expert_parallel", "module", module, nn.Module)
    require("expert_parallel", "mesh", mesh, DeviceMesh)
    require("expert_parallel", "policy", policy, ExpertPolicy, NoneType)
    plan = style_table(plan, where="expert_parallel")
    if mesh.ndim > 2:
        raise PlanError(f"expert_parallel needs the axis ep, or ep and etp, but got {mesh.mesh_dim_names}.")
    ep, etp = mesh.size(0), mesh.size(1) if mesh.ndim == 2 else 1
    policy = policy or ExpertPolicy()
    # A module is left as it is on one rank under a plain policy: its own forward then computes all experts.
    for name, layout in plan_experts(module, plan, policy, ep=ep, etp=etp).items():
        if ep * etp > 1 or (tp is not None and tp.size() > 1) or policy != ExpertPolicy():
            split = tp if tp is not None and tp.size() > 1 and not sequence else None
            _share(module.get_submodule(name), layout, mesh, split, policy)
    return module


def plan_experts(
    module: nn.Module, plan: Mapping[str, Style], policy: ExpertPolicy, *, ep: int, etp: int
) -> dict[str, ExpertLayout]:
    """The layout of each `experts()` module of the plan. Changes nothing. Raises: PlanError as `expert_parallel` does."""
    layouts = expert_layouts(module, plan, ep=ep, etp=etp)
    if not layouts and ep * etp > 1:
        raise PlanError(
            f"expert_parallel: ep={ep} etp={etp}, but the plan has no experts(). Name the modules that hold stacked experts, "
            "or leave ep and etp away."
        )
    if not layouts and policy != ExpertPolicy():
        raise PlanError(
            f"{policy}, but the plan has no experts() that it could be about. Name the modules that hold stacked experts, or "
            "leave the policy away."
        )
    if layouts:
        policy.refuse_misfit(ep=ep, etp=etp)
    return layouts


def in_expert_view(spec: MeshSpec) -> bool:
    """Whether experts are sharded over other ranks than the rest of the model (see Axes and folding in docs/moe.md)."""
    return spec.ep * spec.etp * spec.tp > 1


def _share(
    module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh, split: DeviceMesh | None, policy: ExpertPolicy
) -> None:
    """Shard one module's experts and dispatch its tokens. split: the axis whose ranks have the same tokens, if any."""
    # Hot experts go first: they remember the module's class before it is patched, and compute their copies with it.
    dispatcher = _dispatcher(layout.experts, mesh, policy)
    if policy.hot and isinstance(dispatcher, AllToAll):
        set_hot_experts(module, HotExperts(module, dispatcher, policy.hot, policy.history))
    params = dict(module.named_parameters(recurse=False))
    dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if dims:
        axes = mesh if len(dims) == mesh.ndim else mesh[(mesh.mesh_dim_names or ())[dims[0]]]
        for key, param in params.items():
            # ep shards the stack of experts (dim 0), etp the hidden features of each.
            placements = [Shard(0 if dim == 0 else layout.dims[key]) for dim in dims]
            module._parameters[key] = nn.Parameter(shard_parameter(param, axes, *placements), param.requires_grad)
    # Inside of forward, parameters are plain local tensors: grouped matmuls know no DTensor.
    compute_with(module, dict.fromkeys(params, _local) if dims else {}, _forward(dispatcher, split))
    # The host reads row counts in every forward, and sizes depend on them: such code stays outside of compiled graphs.
    patch_class(module, forward=torch.compiler.disable(type(module).forward))


def _dispatcher(experts: int, mesh: DeviceMesh, policy: ExpertPolicy) -> Dispatcher:
    if policy.dispatcher is not None:
        dispatcher: Dispatcher = policy.dispatcher(experts, mesh)
        return dispatcher
    if mesh.size() == 1:
        return OneRank(experts, policy.capacity)
    return AllToAll.on(experts, mesh, policy.capacity)


def _local(param: nn.Parameter | None) -> Tensor:
    assert isinstance(param, DTensor)
    return _torch.local_shard(param)


def _forward(dispatcher: Dispatcher, split: DeviceMesh | None) -> Any:
    def dispatch(self: Any, x_NC: Tensor, routing: Routing, meanwhile: Overlapped | None) -> Tensor:
        hot = hot_experts_of(self)
        if hot is not None:
            return hot.run(self, x_NC, routing, self.compute, meanwhile).to(x_NC.dtype)
        if isinstance(dispatcher, AllToAll):
            return dispatcher(x_NC, routing, self.compute, meanwhile).to(x_NC.dtype)
        return dispatcher(x_NC, routing, self.compute).to(x_NC.dtype)

    def forward(self: Any, x_NC: Tensor, routing: Routing, meanwhile: Overlapped | None = None) -> Tensor:
        if split is None:
            return dispatch(self, x_NC, routing, meanwhile)
        # Shares may be empty, where there are fewer tokens than ranks: dispatchers take ranks without rows.
        group, ranks = split.get_group(), split.size()
        sizes = [len(even_part(len(x_NC), ranks, rank)) for rank in range(ranks)]
        chosen = routing.experts_NK.split(sizes)[dist.get_rank(group)]  # indices: no gradient, so a plain slice
        # Ranks of tp hold the same tokens: each dispatches its share, so no row is sent or computed twice.
        local_routing = Routing(chosen, local_rows(routing.weights_NK, sizes, group))
        return join_rows(dispatch(self, local_rows(x_NC, sizes, group), local_routing, meanwhile), sizes, group)

    return forward
