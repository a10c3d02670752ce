"""Expert parallelism on a module: `expert_parallel` shards stacked experts over `ep` and `etp`, in place."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from meshkit.core.arguments import require
from meshkit.core.patch_class import patch_class
from meshkit.core.sharding import even_part
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.moe.routing import Overlapped, Routing
from meshkit.parallel.expert._dispatch import AllToAll, Dispatcher, OneRank
from meshkit.parallel.expert._exchange import join_rows, local_rows
from meshkit.parallel.expert._hot_experts import HotExperts, hot_experts_of, set_hot_experts
from meshkit.parallel.expert._indexed import add_compute, by_indices
from meshkit.parallel.expert._padded import PaddedAllToAll
from meshkit.parallel.expert._proof import prove_experts
from meshkit.parallel.expert._stacks import ExpertLayout, expert_layouts, local_views
from meshkit.parallel.tensor.local import compute_with, shard_parameter
from meshkit.plan import Style, match_table
from meshkit.plan.styles import style_table
from meshkit.strategy import ExpertPolicy


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
    compute(rows [M, C], counts: list[int]) that runs its local experts on rows sorted by expert. With `max_rows` counts are a
    tensor on the device, and there may be more rows than their sum: of those the output is not read.
    With takes="indices" its forward is transformers' (x [N, C], index [N, K], weights [N, K]) -> [N, C]: for each token, the
    sum over its choices of weights times what the expert makes of x; an index of E is no expert. It is called on a rank's
    experts as it is, with `num_experts` their number: that each expert reads its own slice of the stacks is the contract.
    tp: the axis of tensor parallelism of the rest of the model. Without sequence=True its ranks have the same tokens, and
    each dispatches an equal share of them.
    policy: capacity of experts, copies of busy experts, owners by load, padded rows, another dispatcher.
    Gradients are sums over all tokens, as everywhere: those of an expert's replicas on edp add up, nothing is divided.
    Wire: see `AllToAll`, with max_rows `PaddedAllToAll`; with tp and without sequence, also an all-gather over tp in each
    direction; with etp, where gate and up are halves of one parameter, an all-to-all over etp of the rows of it that other
    ranks need, in each direction.
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
    shared = 1 if tp is None else tp.size()
    for name, layout in plan_experts(module, plan, policy, ep=ep, etp=etp, tp=shared).items():
        if ep * etp * shared > 1 or policy != ExpertPolicy():
            split = tp if tp is not None and tp.size() > 1 and not sequence else None
            if policy.capacity is not None and policy.capacity.least == "angle":
                for router in routers_beside(module, name):
                    router.least_capacity = True
            _share(module.get_submodule(name), layout, mesh, split, policy)
    return module


def plan_experts(
    module: nn.Module, plan: Mapping[str, Style], policy: ExpertPolicy, *, ep: int, etp: int, tp: int = 1
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
    for name, layout in layouts.items():
        policy.refuse_other_number(name, layout.experts)
        if policy.capacity is not None and policy.capacity.least == "angle" and not routers_beside(module, name):
            raise PlanError(
                f"Capacity: least='angle' asks the router beside {name!r} for angles, but there is none that has "
                "least_capacity, as mk.models.Router. Leave least away."
            )
    if ep * etp * tp > 1:
        modules = dict(module.named_modules(remove_duplicate=False))
        prove_experts(modules, layouts, match_table(plan, modules, what="module"), etp=etp)
    return layouts


def routers_beside(module: nn.Module, experts: str) -> list[Any]:
    """The routers in the block of a module of experts that can say the least capacity."""
    parent = module.get_submodule(experts.rpartition(".")[0])
    return [child for child in parent.children() if hasattr(child, "least_capacity")]


def in_expert_view(spec: MeshSpec) -> bool:
    """Whether experts are sharded over other ranks than the rest of the model (see Axes and folding in docs/moe.md)."""
    return spec.ep * spec.etp * spec.tp > 1


def _share(
    module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh, split: DeviceMesh | None, policy: ExpertPolicy
) -> None:
    """Shard one module's experts and dispatch its tokens. split: the axis whose ranks have the same tokens, if any."""
    if layout.indexed:
        add_compute(module)
    # Hot experts go first: they remember the module's class before it is patched, and compute their copies with it.
    dispatcher = _dispatcher(layout.experts, mesh, policy)
    if policy.follows_load and isinstance(dispatcher, AllToAll):
        sends_views = bool(layout.packed) and mesh.ndim == 2 and mesh.size(1) > 1
        set_hot_experts(module, HotExperts(module, dispatcher, policy, sends_views))
    params = dict(module.named_parameters(recurse=False))
    views = local_views(module, layout, mesh) if mesh.size() > 1 else {}
    dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if dims:
        axes = mesh if len(dims) == mesh.ndim else mesh[(mesh.mesh_dim_names or ())[dims[0]]]
        for key, param in params.items():
            # ep shards the stack of experts (dim 0), etp the hidden features of each.
            placements = [Shard(0 if dim == 0 else layout.dims[key]) for dim in dims]
            module._parameters[key] = nn.Parameter(shard_parameter(param, axes, *placements), param.requires_grad)
    forward = _forward(dispatcher, split)
    forward = by_indices(module, forward) if layout.indexed else forward
    compute_with(module, views, forward)
    # The host reads row counts in every forward, and sizes depend on them: such code stays outside of compiled graphs.
    patch_class(module, forward=torch.compiler.disable(type(module).forward))


def _dispatcher(experts: int, mesh: DeviceMesh, policy: ExpertPolicy) -> Dispatcher:
    if policy.dispatcher is not None:
        dispatcher: Dispatcher = policy.dispatcher(experts, mesh)
        return dispatcher
    if mesh.size() == 1:
        return OneRank(experts, policy.capacity)
    if policy.max_rows is not None:
        return PaddedAllToAll.on(experts, mesh, policy.max_rows, policy.capacity)
    return AllToAll.on(experts, mesh, policy.capacity)


def _forward(dispatcher: Dispatcher, split: DeviceMesh | None) -> Any:
    def dispatch(self: Any, x_NC: Tensor, routing: Routing, meanwhile: Overlapped | None) -> Tensor:
        hot = hot_experts_of(self)
        if hot is not None:
            return hot.run(self, x_NC, routing, self.compute, meanwhile).to(x_NC.dtype)
        if isinstance(dispatcher, AllToAll | PaddedAllToAll):
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
        local_routing = Routing(chosen, local_rows(routing.weights_NK, sizes, group), routing.least_E)
        return join_rows(dispatch(self, local_rows(x_NC, sizes, group), local_routing, meanwhile), sizes, group)

    return forward
