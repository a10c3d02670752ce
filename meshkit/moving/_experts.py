"""Experts to other owners between two steps (re-sharding by load, EPLB), with their optimizer state, and back.

A parameter of stacked experts keeps its name and its shape: what changes is which expert lies in which of its slices, by
`Placement.owned`. Checkpoints, exports and `move` know the order of the single-device model alone, so experts are brought
home for them: `experts_at_home`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import set_displaced
from meshkit.core.optimizer_state import HoldsState, finish_update
from meshkit.core.reshard import (
    DEFAULT_BUCKET_BYTES,
    Exchange,
    Layout,
    ReallocationPlan,
    Region,
    Shards,
    TensorRegions,
    plan_reallocation,
)
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import PlanError
from meshkit.mesh.world import ranks_per_node
from meshkit.moving._agree import gathered
from meshkit.parallel.expert import HotExperts, Placement, choose_owners, hot_experts_of, place_near
from meshkit.step import Run

Held = dict[str, tuple[tuple[int, ...], torch.dtype, Region]]


def move_experts(
    run: Run, optimizer: HoldsState | None, owners: Mapping[str, Sequence[int]] | None = None
) -> ReallocationPlan:
    """Give experts to other ranks of ep, in place, between two steps; returns what was sent, to print.

    owners: by the name of a module of experts, for each of its experts the rank of ep. Default: by the loads of the last
    steps, for all modules; experts change ranks until no change evens the loads by a hundredth of the mean, those of a node
    first. A rank owns as many as before, or with `ExpertPolicy(spare=...)` up to so many more than its even share, and
    at least one.
    optimizer: of these parameters, whose state moves along; None where there is none. Its objects stay the same, and so do
    names and shapes of parameters: only slices change places. A checkpoint has the order of the single-device model.
    Wire: an all-reduce of the loads; a gather of what ranks hold, as objects; then over the mesh the bytes of the plan.
    Raises: PlanError, on every rank, for a run without ExpertPolicy(owners="load"), for gradients that are still there, state
    that is not laid out as its parameter, and for tables that cannot be.
    Source: Hecate 2025, section 4.3 (heterogeneous sharding); the exchange of pairs: EPLB.
    """
    finish = _ready(run, optimizer)
    layers = _layers(run)
    wanted = (
        {name: _by_load(run, module, hot) for name, (module, hot) in layers.items()} if owners is None else dict(owners)
    )
    gathered(run.mesh, lambda: _refuse(finish, layers, wanted, run))
    return _place(run, optimizer, {name: tuple(table) for name, table in wanted.items()})


@contextmanager
def experts_at_home(run: Run, optimizer: HoldsState | None) -> Iterator[None]:
    """Inside, every expert lies where the single-device model has it; afterwards again where it was. A collective, which
    sends nothing where none was moved."""
    away = {name: hot.placement.owners for name, (_, hot) in _layers(run).items() if not hot.at_home}
    moved = bring_home(run, optimizer)
    try:
        yield
    finally:
        if moved:
            _place(run, optimizer, away)


def bring_home(run: Run, optimizer: HoldsState | None) -> bool:
    """Every expert to where the single-device model has it; whether any was elsewhere, on whatever rank. A collective."""
    home = {name: hot.home.owners for name, (_, hot) in _layers(run).items() if not hot.at_home}
    if run.strategy.experts.owners == "fixed" or not _any(run, bool(home)):
        return False
    if optimizer is not None:
        finish_update(optimizer)
    _place(run, optimizer, home)
    return True


def _layers(run: Run) -> dict[str, tuple[nn.Module, HotExperts]]:
    """This rank's modules of experts that follow their load, by name."""
    found = ((name, module, hot_experts_of(module)) for name, module in run.model.named_modules())
    return {name: (module, hot) for name, module, hot in found if hot is not None}


def _any(run: Run, mine: bool) -> bool:
    """Stages of pp have layers of their own."""
    flag = torch.tensor(int(mine), device=run.mesh.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=run.mesh.group)
    return bool(flag.item())


def _by_load(run: Run, module: nn.Module, hot: HotExperts) -> tuple[int, ...]:
    """New owners by the rows of the last steps, of all ranks of ep x etp x edp x replicas."""
    totals = torch.tensor(hot.totals, device=run.mesh.device)
    over = run.mesh.expert_data
    for axis in range(over.ndim):  # replicas of an expert lie at the same place on every rank of edp
        if over.size(axis) > 1:
            dist.all_reduce(totals, group=over.get_group(axis))
    policy, placement = run.strategy.experts, hot.placement
    share = -(-placement.experts // placement.ranks)
    most = share + policy.spare if policy.spare and not isinstance(module, FSDPModule) else None
    return choose_owners(placement.owners, totals.tolist(), hot.nodes, ranks=placement.ranks, most=most)


# ------------------------------------------------------------------------------------------------------ refusals


def _ready(run: Run, optimizer: HoldsState | None) -> str:
    """Why experts cannot move now; empty where they can."""
    if run.strategy.experts.owners == "fixed":
        return "the run's ExpertPolicy has owners='fixed'. Make the run with ExpertPolicy(owners='load')."
    if optimizer is not None:
        finish_update(optimizer)
    names = {f"{layer}." for layer in _layers(run)}
    for name, param in run.named_parameters():
        if name.startswith(tuple(names)):
            if gradient_of(param) is not None:
                return f"{name!r} has a gradient, which does not move. Call optimizer.step() and zero_grad() before."
            for key, value in ({} if optimizer is None else optimizer.state.get(param, {})).items():
                if isinstance(value, Tensor) and value.numel() > 1 and not _laid_out_as(value, param):
                    return (
                        f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)} and the parameter "
                        f"{tuple(param.shape)}, so which part is an expert's is not known. Use an optimizer with state like "
                        "its parameters, as mk.adamw has without low-bit moments."
                    )
    return ""


def _laid_out_as(value: Tensor, param: Tensor) -> bool:
    if not (isinstance(value, DTensor) and isinstance(param, DTensor)):
        return False
    return value.shape == param.shape and value.placements == param.placements


def _refuse(
    why: str, layers: Mapping[str, tuple[nn.Module, HotExperts]], wanted: Mapping[str, Sequence[int]], run: Run
) -> None:
    if why:
        raise PlanError(f"move_experts: {why}")
    for name, owners in wanted.items():
        if name not in run.resolved.experts:
            raise PlanError(
                f"move_experts: {name!r} is no module of experts. There are {', '.join(run.resolved.experts)}."
            )
        if name not in layers:
            continue
        module, hot = layers[name]
        table = Placement(hot.placement.ranks, tuple(owners), ((),) * len(owners))
        if table.experts != hot.inner.experts:
            raise PlanError(f"move_experts: {name!r} has {hot.inner.experts} experts, not {table.experts}.")
        sizes, even = [len(owned) for owned in table.owned], _home_sizes(hot)
        if not all(sizes):
            raise PlanError(
                f"move_experts: {name!r} would leave rank {sizes.index(0)} of ep without an expert.\n{table}"
            )
        if isinstance(module, FSDPModule) and sizes != even:
            raise PlanError(
                f"move_experts: {name!r} is sharded by FSDP, whose shards are of {even} experts, but the table has {sizes}. "
                "Exchange experts one for one, or use a mesh with edp=1, no replicas and no Precision."
            )


def _home_sizes(hot: HotExperts) -> list[int]:
    return [len(owned) for owned in hot.home.owned]


# -------------------------------------------------------------------------------------------------------- moving


def _place(run: Run, optimizer: HoldsState | None, owners: Mapping[str, tuple[int, ...]]) -> ReallocationPlan:
    """Move, layer by layer: parameters, then what the optimizer has of them. owners: of this rank's layers or all."""
    run.model.state_dict()  # for its side effect: FSDP puts its shards back
    layers, before = _layers(run), dict[str, tuple[Placement, Placement]]()
    tensors: dict[str, Tensor] = {}
    for name, (module, hot) in layers.items():
        if name in owners and tuple(owners[name]) != hot.placement.owners:
            old = hot.placement.with_copies([()] * hot.placement.experts)
            before[name] = old, Placement(old.ranks, tuple(owners[name]), old.copies)
            for key, param in module.named_parameters(recurse=False):
                tensors[f"{name}.{key}"] = param
                state = {} if optimizer is None else optimizer.state.get(param, {})
                tensors |= {
                    f"{name}.{key}/{kind}": v for kind, v in state.items() if isinstance(v, Tensor) and v.numel() > 1
                }
    sources, targets, locals_after = dict[str, Tensor](), dict[str, Tensor](), dict[str, list[Tensor]]()
    regions: dict[str, Region] = {}
    now, then = Held(), Held()
    for key, tensor in tensors.items():
        layer = next(name for name in before if key.startswith(f"{name}."))
        hot, (old, new) = layers[layer][1], before[layer]
        local, region = local_tensor(tensor), tuple((part.start, part.stop) for part in local_slices(tensor)[1:])
        sliced = isinstance(layers[layer][0], FSDPModule)
        shape = tuple(tensor.shape[1:])
        for place, expert in enumerate(_slots(tensor, old, hot, sliced)):
            each = f"{key}#{expert}"
            sources[each], now[each], regions[each] = local[place], (shape, local.dtype, region), region
        locals_after[key] = []
        for expert in _slots(tensor, new, hot, sliced):
            each = f"{key}#{expert}"
            targets[each] = torch.empty(
                [stop - start for start, stop in region], dtype=local.dtype, device=local.device
            )
            locals_after[key].append(targets[each])
            then[each], regions[each] = (shape, local.dtype, region), region
    plan = _exchanged(run, now, then, sources, targets, regions)
    with torch.no_grad():
        for key, parts in locals_after.items():
            _write(tensors[key], parts)
    torch.autograd.graph.increment_version([*tensors.values()])
    for name, (_, new) in before.items():
        module, hot = layers[name]
        hot.set_owners(new.owners)
        if run.later is not None:
            run.later.moved(module)
        place_near(run.model, name, new.owners, run.mesh)
    away = [name for name, (_, hot) in layers.items() if not hot.at_home]
    set_displaced(
        run.model,
        f"the experts of {away[0]!r} are with other owners than the single-device model's order has, by move_experts. Put "
        "`with mk.moving.experts_at_home(run, optimizer):` around it."
        if away
        else "",
    )
    return plan


def _slots(tensor: Tensor, placement: Placement, hot: HotExperts, sliced: bool) -> Sequence[int]:
    """The experts in this rank's part of a stack, in order. sliced: by FSDP, over edp."""
    own = placement.owned[hot.rank]
    if not sliced:
        return own
    rows = local_slices(tensor)[0]
    return [expert for owned in placement.owned for expert in owned][rows]


def _write(tensor: Tensor, parts: Sequence[Tensor]) -> None:
    local = local_tensor(tensor)
    if len(parts) == len(local):
        for place, part in enumerate(parts):
            local[place].copy_(part)
    else:
        assert isinstance(tensor, DTensor)
        _torch.set_local(tensor, torch.stack(list(parts)))


def _exchanged(
    run: Run,
    now: Held,
    then: Held,
    sources: dict[str, Tensor],
    targets: dict[str, Tensor],
    regions: dict[str, Region],
) -> ReallocationPlan:
    told = gathered(run.mesh, lambda: (now, then))
    src, dst = (_layout([each[side] for each in told], run.mesh.ranks) for side in (0, 1))
    per_node = ranks_per_node()
    plan = plan_reallocation(src, dst, exact=True, bucket_bytes=DEFAULT_BUCKET_BYTES, ranks_per_node=per_node)
    Exchange(plan, run.mesh.group, run.mesh.device)(Shards(sources, regions), Shards(targets, regions))
    return plan


def _layout(of_ranks: Sequence[Held], ranks: tuple[int, ...]) -> Layout:
    tensors: dict[str, TensorRegions] = {}
    for rank, held in zip(ranks, of_ranks, strict=True):
        for key, (shape, dtype, region) in held.items():
            known = tensors.get(key)
            tensors[key] = TensorRegions(shape, dtype, {**(known.regions if known else {}), rank: region})
    return Layout(tensors, ranks)
