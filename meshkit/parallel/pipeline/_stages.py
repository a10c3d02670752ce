"""Pipeline stages, as data: how blocks, and what lies before, between and after them, are shared among stages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from weakref import WeakKeyDictionary

from torch import nn

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._flow import Flow, data_flow, outermost, positions
from meshkit.program import Trace


@dataclass(frozen=True)
class Stages:
    """blocks[stage]: names of its blocks, in order; head and tail: modules with parameters before and after the blocks.
    between[stage]: those that are called between blocks, after the first of this stage's."""

    blocks: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    between: tuple[tuple[str, ...], ...] = ()

    @property
    def count(self) -> int:
        return len(self.blocks)

    def modules_of(self, stage: int) -> tuple[str, ...]:
        head = self.head if stage == 0 else ()
        tail = self.tail if stage == self.count - 1 else ()
        between = self.between[stage] if self.between else ()
        return (*head, *self.blocks[stage], *between, *tail)

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the modules of all stages."""
        return frozenset(self._by_module)

    @cached_property
    def _by_module(self) -> dict[str, int]:
        return {name: stage for stage in range(self.count) for name in self.modules_of(stage)}

    def stage_of(self, name: str) -> int | None:
        """The stage of this module or tensor, or of the module that contains it; None for what is outside of all stages."""
        while name and name not in self._by_module:
            name = name.rpartition(".")[0]
        return self._by_module.get(name)


def plan_stages(
    model: nn.Module,
    blocks: Sequence[str],
    count: int,
    *,
    split: Sequence[int] | None = None,
    read: Trace | None = None,
) -> Stages:
    """Share the blocks among `count` stages, in the order of their calls, so that the most expensive stage is as cheap as
    possible.

    The cost of a block, and of the tail, is its number of parameters; an embedding is a lookup and costs nothing. split:
    number of blocks of each stage, in place of the costs; 0 for an embedding or a head alone. read: the model's program,
    which tells when modules are called; without it, they are taken to be called in the order in which the model registers
    them.
    Raises: PlanError for more stages than blocks, a split that does not add up, and parameters that are in no module before,
    in or after the blocks.
    """
    if not blocks:
        raise PlanError(
            "pipeline: the plan names no blocks to share among stages. Name the repeated layers in its `blocks`."
        )
    if split is None:
        refuse_more_stages(blocks, count)
    if read is not None:
        blocks = _in_order_of_calls(blocks, read)
    head, tail, called_between = _ends(model, blocks, read)
    if split is not None:
        least = [int(not head), *[1] * (count - 2), int(not tail)]  # embedding and head may have stages of their own
        if len(split) != count or sum(split) != len(blocks) or any(map(int.__lt__, split, least)):
            raise PlanError(
                f"pipeline: split={tuple(split)} does not share {len(blocks)} blocks among {count} stages. Give {count} "
                f"numbers of at least 1 that add up to {len(blocks)}; the first and the last, with embedding and head, may "
                "be 0."
            )
        sizes = list(split)
    else:
        modules = dict(model.named_modules())
        costs = [_cost(modules[name]) for name in blocks]
        sizes = balanced(costs, count, last=sum(_cost(modules[name]) for name in tail))
    edges = [0, *accumulate(sizes)]
    between = tuple(
        tuple(name for name, after in called_between.items() if edges[i] < after <= edges[i + 1]) for i in range(count)
    )
    stages = Stages(tuple(tuple(blocks[edges[i] : edges[i + 1]]) for i in range(count)), head, tail, between)
    _refuse_shared(model, stages)
    return stages


def refuse_more_stages(blocks: Sequence[str], count: int) -> None:
    """Than there are blocks."""
    if count > len(blocks):
        raise PlanError(
            f"pipeline: {count} stages need at least {count} blocks, but the model has {len(blocks)}. Use fewer stages."
        )


def _in_order_of_calls(blocks: Sequence[str], read: Trace) -> list[str]:
    """A block that is not called stays behind the one before it."""
    first: dict[str, int] = {}
    for number, call in enumerate(read.calls):
        first.setdefault(call.name, number)
    places: list[int] = []
    for name in blocks:
        places.append(first.get(name, places[-1] if places else -1))
    return [name for _, name in sorted(zip(places, blocks, strict=True), key=lambda each: each[0])]


def _refuse_shared(model: nn.Module, stages: Stages) -> None:
    """A block that runs twice, and a parameter of several stages, of which only a head's and a tail's are summed."""
    names: dict[int, str] = {}
    blocks = {name for stage in stages.blocks for name in stage}
    # With duplicates: a shared module has its second name only there.
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.setdefault(id(module), name)
        if first != name and first in blocks:
            raise PlanError(
                f"pipeline: {name!r} is the same module as the block {first!r}, which would run in two places. Use a mesh "
                "without pp, or blocks of their own."
            )
    held: dict[int, tuple[str, int]] = {}
    for stage, own in enumerate(stages.blocks):
        for block in (*own, *stages.between[stage]):
            for key, param in model.get_submodule(block).named_parameters():
                name = f"{block}.{key}"
                first, before = held.setdefault(id(param), (name, stage))
                if before != stage:
                    raise PlanError(
                        f"pipeline: {name!r} of stage {stage} is the same parameter as {first!r} of stage {before}, whose "
                        "gradients would not be summed. Use a mesh without pp, or PipelinePolicy(stages=...) that keeps "
                        "them together."
                    )
    for name in (*stages.head, *stages.tail):
        for key, param in model.get_submodule(name).named_parameters():
            if id(param) in held:
                raise PlanError(
                    f"pipeline: {name}.{key} is the same parameter as {held[id(param)][0]!r} of a block, and their gradients "
                    "would not be summed. Use a mesh without pp."
                )


def holders(model: nn.Module, stages: Stages) -> dict[str, set[int]]:
    """By name of a parameter or buffer: the stages that hold it, under this or another name. Those of none are left out."""
    found: dict[int, set[int]] = {}
    names: dict[str, int] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names[name] = id(tensor)
            stage = stages.stage_of(name)
            if stage is not None:
                found.setdefault(id(tensor), set()).add(stage)
    return {name: found[key] for name, key in names.items() if key in found}


def flow_of(read: Trace, model: nn.Module, stages: Stages) -> Flow:
    """See `data_flow`."""
    held = holders(model, stages)
    return data_flow(read, stages.count, stages.stage_of, modules=stages.names, holders=lambda name: held.get(name, ()))


def balanced(costs: Sequence[int], count: int, *, last: int = 0) -> list[int]:
    """Sizes of `count` runs, none empty, whose largest sum is smallest; `last` is added to the last run's."""
    # Dynamic programming over (runs, costs taken): exact, and small enough for any number of layers.
    before = [0, *accumulate(costs)]
    # best[k][n]: (largest sum of the first n costs in k runs, where the last run begins)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for run in range(1, count + 1):
        extra = last if run == count else 0
        best.append(
            {
                # On a tie the least start, so that all ranks cut alike.
                end: min(
                    (max(best[run - 1][start][0], before[end] - before[start] + extra), start)
                    for start in range(run - 1, end)
                    if start in best[run - 1]
                )
                for end in range(run, len(costs) + 1)
            }
        )
    sizes, end = [], len(costs)
    for run in range(count, 0, -1):
        start = best[run][end][1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


def _cost(module: nn.Module) -> int:
    # A weight of a matrix costs 6 FLOPs for every token, 2 forward and 4 backward; attention itself is alike in all blocks.
    return sum(param.numel() for param in module.parameters())


_KNOWN: WeakKeyDictionary[Trace, dict[Hashable, dict[str, int]]] = WeakKeyDictionary()


def _positions(read: Trace, blocks: tuple[str, ...], names: tuple[str, ...]) -> dict[str, int]:
    """By module outside of blocks, how many were called before it; told once of a trace, for any number of stages."""
    known = _KNOWN.setdefault(read, {})
    if (blocks, names) not in known:
        known[blocks, names] = positions(read, blocks, outermost(read, blocks, names))
    return known[blocks, names]


def _ends(
    model: nn.Module, blocks: Sequence[str], read: Trace | None
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    """Modules with parameters before and after the blocks, in the order in which the model registers them; and those between,
    with the number of blocks before them."""
    position: dict[str, int] = {}
    last = len(blocks)
    if read is not None:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        position = _positions(read, tuple(blocks), tuple(names))
        called = {call.name for call in read.calls}
        last = max((index + 1 for index, block in enumerate(blocks) if block in called), default=0)
    inside = set(blocks)
    head: list[str] = []
    tail: list[str] = []
    between: dict[str, int] = {}
    seen_blocks = False
    for name, module in model.named_modules():
        if name in inside:
            seen_blocks = True
        elif any(name.startswith(f"{other}.") for other in (*blocks, *head, *tail, *between)):
            continue
        elif name in position:
            if 0 < position[name] < last:
                between[name] = position[name]
            else:
                (tail if position[name] else head).append(name)
        elif list(module.parameters(recurse=False)):
            if any(block.startswith(f"{name}.") or not name for block in blocks):
                raise PlanError(
                    f"pipeline: {name or 'the model'!r} holds parameters beside its blocks, so they belong to no stage. Put "
                    "them into a module of their own before or after the blocks."
                )
            (tail if seen_blocks else head).append(name)
    return tuple(head), tuple(tail), between
