"""Experts to other owners between two steps (re-sharding by load, EPLB), with their optimizer state, and back.

A parameter of stacked experts keeps its name and its shape: what changes is which expert lies in which of its slices, by
`Placement.owned`. Checkpoints, exports and `move` know the order of the single-device model alone, so experts are brought
home for them: `experts_at_home`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
    volume,
)
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import PlanError
from meshkit.mesh.world import ranks_per_node
from meshkit.moving._agree import gathered
from meshkit.moving._optimizer import keeps_elsewhere, wants_even
from meshkit.parallel.expert import HotExperts, Placement, choose_owners, hot_experts_of, place_near
from meshkit.step import Run

Held = dict[str, tuple[tuple[int, ...], torch.dtype, Region]]
Tables = dict[str, tuple[int, ...]]
"""by the name of a module of experts, the rank of ep that owns each"""


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
    Memory: a copy of a stack of experts, or of several with up to `DEFAULT_BUCKET_BYTES`, at a time.
    Wire: gathers of the tables and of what ranks hold, as objects; an all-reduce of the loads; then over the mesh the bytes
    of the plan.
    Raises: PlanError, on every rank, for a run without ExpertPolicy(owners="load"), for gradients that are still there, hooks
    on parameters of experts, state that is not laid out as its parameter or kept elsewhere, and for tables that cannot be, or
    are not the same on every rank.
    Source: Hecate 2025, section 4.3 (heterogeneous sharding); the exchange of pairs: EPLB.
    """
    asked = _asked(run, owners)
    why = _ready(run, optimizer)
    layers, even = _layers(run), wants_even(optimizer)
    wanted = asked
    if wanted is None:
        wanted = {name: _by_load(run, module, hot, even=bool(even)) for name, (module, hot) in layers.items()}
    told = gathered(run.mesh, lambda: _refuse(why, layers, wanted, run, even))
    # One table for all that share a layer: by load, replicas on other nodes would choose other owners of the same experts.
    tables: Tables = {}
    for of_rank in told:
        tables = {**of_rank, **tables}
    return _place(run, optimizer, tables)


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


def _by_load(run: Run, module: nn.Module, hot: HotExperts, *, even: bool) -> tuple[int, ...]:
    """New owners by the rows of the last steps, of all ranks of ep x etp x edp x replicas."""
    totals = torch.tensor(hot.totals, device=run.mesh.device)
    over = run.mesh.expert_data
    for axis in range(over.ndim):  # replicas of an expert lie at the same place on every rank of edp
        if over.size(axis) > 1:
            dist.all_reduce(totals, group=over.get_group(axis))
    policy, placement = run.strategy.experts, hot.placement
    share = -(-placement.experts // placement.ranks)
    most = share + policy.spare if policy.spare and not even and not isinstance(module, FSDPModule) else None
    return choose_owners(placement.owners, totals.tolist(), hot.nodes, ranks=placement.ranks, most=most)


# ------------------------------------------------------------------------------------------------------ refusals


def _asked(run: Run, owners: Mapping[str, Sequence[int]] | None) -> Tables | None:
    """The tables that were given, on every rank the same; None for by load. Raises: PlanError, on every rank, where not."""
    given = gathered(
        run.mesh,
        lambda: None if owners is None else {name: tuple(map(int, table)) for name, table in owners.items()},
    )
    for rank, tables in zip(run.mesh.ranks, given, strict=True):
        if tables != given[0]:
            raise PlanError(
                f"move_experts: rank {rank} asks for owners={_shown(tables)}, and rank {run.mesh.ranks[0]} for "
                f"{_shown(given[0])}. Give the same on every rank."
            )
    return given[0]


def _shown(tables: Tables | None) -> str:
    return "None" if tables is None else str(tables)


def _ready(run: Run, optimizer: HoldsState | None) -> str:
    """Why experts cannot move now; empty where they can."""
    if run.strategy.experts.owners == "fixed":
        return "the run's ExpertPolicy has owners='fixed'. Make the run with ExpertPolicy(owners='load')."
    if optimizer is not None:
        finish_update(optimizer)
        if attribute := keeps_elsewhere(optimizer):
            return (
                f"a {type(optimizer).__name__} keeps tensors or an optimizer in its attribute {attribute!r}, which would not "
                "move along. Use an optimizer with all of its state in `state`, as mk.adamw has, or ExpertPolicy(copies=)."
            )
    names = {f"{layer}." for layer in _layers(run)}
    for name, param in run.named_parameters():
        if name.startswith(tuple(names)):
            if run.hooks.gradient.get(name) or run.hooks.accumulated.get(name):
                return (
                    f"{name!r} has a hook, which gets all experts in the order of the single-device model. Remove the hook, "
                    "or leave the experts where they are: ExpertPolicy(copies=) shares their tokens."
                )
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
    why: str, layers: Mapping[str, tuple[nn.Module, HotExperts]], wanted: Tables, run: Run, even: str
) -> Tables:
    """The tables, if they can be. even: what of the optimizer needs as many experts on each rank as now; else empty."""
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
        sizes, home = [len(owned) for owned in table.owned], _home_sizes(hot)
        if not all(sizes):
            raise PlanError(
                f"move_experts: {name!r} would leave rank {sizes.index(0)} of ep without an expert.\n{table}"
            )
        if isinstance(module, FSDPModule) and sizes != home:
            raise PlanError(
                f"move_experts: {name!r} is sharded by FSDP, whose shards are of {home} experts, but the table has {sizes}. "
                "Exchange experts one for one, or use a mesh with edp=1, no replicas and no Precision."
            )
        if even and sizes != home:
            raise PlanError(
                f"move_experts: {name!r} would have {sizes} experts on the ranks of ep, and not {home}, for which {even} was "
                "made. Exchange experts one for one, with ExpertPolicy(spare=0), or use mk.adamw on the device."
            )
    return wanted


def _home_sizes(hot: HotExperts) -> list[int]:
    return [len(owned) for owned in hot.home.owned]


# -------------------------------------------------------------------------------------------------------- moving


@dataclass(frozen=True)
class _Stack:
    """A parameter of stacked experts, or what the optimizer has of one; and which experts lie in this rank's shard of it, in
    order, before and after."""

    tensor: Tensor
    old: Sequence[int]
    new: Sequence[int]

    @property
    def region(self) -> Region:
        """Of each expert, this rank's part."""
        return tuple((part.start, part.stop) for part in local_slices(self.tensor)[1:])

    def held(self, name: str, experts: Sequence[int]) -> Held:
        kind = tuple(self.tensor.shape[1:]), local_tensor(self.tensor).dtype, self.region
        return {f"{name}#{expert}": kind for expert in experts}


def _place(run: Run, optimizer: HoldsState | None, owners: Mapping[str, tuple[int, ...]]) -> ReallocationPlan:
    """Move parameters, and what the optimizer has of them. owners: of this rank's layers or all."""
    set_displaced(run.model, "")
    run.model.state_dict()  # for its side effect: FSDP puts its shards back
    layers, after = _layers(run), dict[str, Placement]()
    stacks: dict[str, _Stack] = {}
    for name, (module, hot) in layers.items():
        if name in owners and tuple(owners[name]) != hot.placement.owners:
            old = hot.placement.with_copies([()] * hot.placement.experts)
            after[name] = new = Placement(old.ranks, tuple(owners[name]), old.copies)
            sliced = isinstance(module, FSDPModule)
            for key, param in module.named_parameters(recurse=False):
                state = {} if optimizer is None else optimizer.state.get(param, {})
                kinds = {f"/{kind}": v for kind, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
                for kind, tensor in {"": param, **kinds}.items():
                    slots = (_slots(tensor, each, hot, sliced) for each in (old, new))
                    stacks[f"{name}.{key}{kind}"] = _Stack(tensor, *slots)
    away = sorted(
        name for name, (_, hot) in layers.items() if owners.get(name, hot.placement.owners) != hot.home.owners
    )
    plan, first_away = _move(run, stacks, away[:1])
    torch.autograd.graph.increment_version([stack.tensor for stack in stacks.values()])
    for name, new in after.items():
        module, hot = layers[name]
        hot.set_owners(new.owners)
        if run.later is not None:
            run.later.moved(module)
        place_near(run.model, name, new.owners, run.mesh)
    set_displaced(
        run.model,
        f"the experts of {first_away!r} are with other owners than the single-device model's order has, by move_experts. Put "
        "`with mk.moving.experts_at_home(run, optimizer):` around it."
        if first_away
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


def _move(run: Run, stacks: Mapping[str, _Stack], away: list[str]) -> tuple[ReallocationPlan, str]:
    """Give experts to their new owners, about `DEFAULT_BUCKET_BYTES` of a rank at a time, or a single stack.

    away: this rank's modules whose experts are not at home afterwards. Returns what was sent, and one of those, the same on
    every rank: stages of pp have others.
    """
    now, then = Held(), Held()
    for name, stack in stacks.items():
        now |= stack.held(name, stack.old)
        then |= stack.held(name, stack.new)
    told = gathered(run.mesh, lambda: (now, then, away))
    src = _layout([before for before, _, _ in told], run.mesh.ranks)
    dst = _layout([after for _, after, _ in told], run.mesh.ranks)
    plans = [
        _exchange(run, _part(src, keys), _part(dst, keys), {name: stacks[name] for name in names if name in stacks})
        for names, keys in _batches(dst, DEFAULT_BUCKET_BYTES)
    ]
    plan = ReallocationPlan(
        rounds=tuple(transfers for plan in plans for transfers in plan.rounds),
        copies=tuple(copy for plan in plans for copy in plan.copies),
        lower_bound_bytes=sum(plan.lower_bound_bytes for plan in plans),
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        ranks_per_node=ranks_per_node(),
    )
    return plan, min((name for *_, names in told for name in names), default="")


def _exchange(run: Run, src: Layout, dst: Layout, stacks: Mapping[str, _Stack]) -> ReallocationPlan:
    """stacks: those of this rank among the tensors of the layouts."""
    plan = plan_reallocation(src, dst, exact=True, bucket_bytes=DEFAULT_BUCKET_BYTES, ranks_per_node=ranks_per_node())
    sources, targets, regions = dict[str, Tensor](), dict[str, Tensor](), dict[str, Region]()
    for name, stack in stacks.items():
        local, sizes = local_tensor(stack.tensor), [stop - start for start, stop in stack.region]
        sources |= {f"{name}#{expert}": local[place] for place, expert in enumerate(stack.old)}
        targets |= {f"{name}#{expert}": local.new_empty(sizes) for expert in stack.new}
        regions |= {f"{name}#{expert}": stack.region for expert in (*stack.old, *stack.new)}
    Exchange(plan, run.mesh.group, run.mesh.device)(Shards(sources, regions), Shards(targets, regions))
    with torch.no_grad():
        for name, stack in stacks.items():
            _write(stack.tensor, [targets[f"{name}#{expert}"] for expert in stack.new])
    return plan


def _write(tensor: Tensor, parts: Sequence[Tensor]) -> None:
    local = local_tensor(tensor)
    if len(parts) == len(local):
        for place, part in enumerate(parts):
            local[place].copy_(part)
    else:
        assert isinstance(tensor, DTensor)
        _torch.set_local(tensor, torch.stack(list(parts)))


def _layout(of_ranks: Sequence[Held], ranks: tuple[int, ...]) -> Layout:
    tensors: dict[str, TensorRegions] = {}
    for rank, held in zip(ranks, of_ranks, strict=True):
        for key, (shape, dtype, region) in held.items():
            known = tensors.get(key)
            tensors[key] = TensorRegions(shape, dtype, {**(known.regions if known else {}), rank: region})
    return Layout(tensors, ranks)


def _part(layout: Layout, keys: Sequence[str]) -> Layout:
    return Layout({key: layout.tensors[key] for key in keys}, layout.ranks)


def _batches(layout: Layout, most_bytes: int) -> Iterator[tuple[list[str], list[str]]]:
    """(names of stacks, keys of their experts) in order; those of a batch have at most so many bytes on any rank, but where a
    single stack has more."""
    stacks: dict[str, list[str]] = {}
    for key in layout.tensors:
        stacks.setdefault(key.rpartition("#")[0], []).append(key)
    names, keys, batch_bytes = list[str](), list[str](), 0
    for name, of_stack in stacks.items():
        of_ranks = Counter[int]()
        for each in (layout.tensors[key] for key in of_stack):
            of_ranks.update({rank: volume(region) * each.dtype.itemsize for rank, region in each.regions.items()})
        most = max(of_ranks.values(), default=0)
        if names and batch_bytes + most > most_bytes:
            yield names, keys
            names, keys, batch_bytes = [], [], 0
        names, keys, batch_bytes = [*names, name], [*keys, *of_stack], batch_bytes + most
    if names:
        yield names, keys
