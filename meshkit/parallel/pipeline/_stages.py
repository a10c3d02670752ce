"""Pipeline stages: how blocks are shared among stages, and how one model object runs as any of them.

A stage runs the model's own forward with the modules of other stages replaced by stand-ins. Those of blocks before it pass on
the received hidden state, those of blocks and tail after it pass on its output, and that of the embedding returns zeros of
the right shape. So every rank computes positions and masks from the batch itself, only the hidden state travels, and the
model's code needs no change. A rank has one model object with the modules of all its stages under their own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.errors import PlanError


@dataclass(frozen=True)
class Stages:
    """blocks[stage]: names of its blocks, in order; head and tail: modules with parameters before and after the blocks."""

    blocks: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.blocks)

    def modules_of(self, stage: int) -> tuple[str, ...]:
        head = self.head if stage == 0 else ()
        tail = self.tail if stage == self.count - 1 else ()
        return (*head, *self.blocks[stage], *tail)

    @cached_property
    def _by_module(self) -> dict[str, int]:
        return {name: stage for stage in range(self.count) for name in self.modules_of(stage)}

    def stage_of(self, name: str) -> int | None:
        """The stage of this module or tensor, or of the module that contains it; None for what is outside of all stages."""
        while name and name not in self._by_module:
            name = name.rpartition(".")[0]
        return self._by_module.get(name)


def plan_stages(model: nn.Module, blocks: Sequence[str], count: int, *, split: Sequence[int] | None = None) -> Stages:
    """Share the blocks among `count` stages, in order, so that the most expensive stage is as cheap as possible.

    The cost of a block, and of the tail, is its number of parameters; an embedding is a lookup and costs nothing. split:
    number of blocks of each stage, in place of the costs.
    Raises: PlanError for more stages than blocks, a split that does not add up, and parameters that are in no module before,
    in or after the blocks.
    """
    if not blocks:
        raise PlanError(
            "pipeline: the plan names no blocks to share among stages. Name the repeated layers in its `blocks`."
        )
    if count > len(blocks):
        raise PlanError(
            f"pipeline: {count} stages need at least {count} blocks, but the model has {len(blocks)}. Use fewer stages."
        )
    head, tail = _ends(model, blocks)
    if split is not None:
        if len(split) != count or sum(split) != len(blocks) or min(split) < 1:
            raise PlanError(
                f"pipeline: split={tuple(split)} does not share {len(blocks)} blocks among {count} stages. Give {count} "
                f"numbers of at least 1 that add up to {len(blocks)}."
            )
        sizes = list(split)
    else:
        modules = dict(model.named_modules())
        costs = [_cost(modules[name]) for name in blocks]
        sizes = balanced(costs, count, last=sum(_cost(modules[name]) for name in tail))
    edges = [0, *accumulate(sizes)]
    stages = Stages(tuple(tuple(blocks[edges[i] : edges[i + 1]]) for i in range(count)), head, tail)
    _refuse_shared(model, stages)
    return stages


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
        for block in own:
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


def _ends(model: nn.Module, blocks: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules with parameters before and after the blocks, in the order in which the model registers them."""
    inside = set(blocks)
    head: list[str] = []
    tail: list[str] = []
    # Registered before or after the blocks: in which order they are called only a run could tell.
    seen_blocks = False
    for name, module in model.named_modules():
        if name in inside:
            seen_blocks = True
        elif any(name.startswith(f"{block}.") for block in blocks):
            continue
        elif list(module.parameters(recurse=False)):
            if any(block.startswith(f"{name}.") or not name for block in blocks):
                raise PlanError(
                    f"pipeline: {name or 'the model'!r} holds parameters beside its blocks, so they belong to no stage. Put "
                    "them into a module of their own before or after the blocks."
                )
            (tail if seen_blocks else head).append(name)
    return tuple(head), tuple(tail)


# ----------------------------------------------------------------------------------------------------- stand-ins


class Absent(nn.Module):
    """Stand-in for a module of another stage: returns its first argument.

    If that is a view, it returns its base: models of transformers pass the head only the last tokens, but the stage has to
    return all of them.
    """

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return _torch.own_memory(x)


class AbsentEmbedding(nn.Module):
    """Stand-in for the embedding of another stage: zeros of its shape, expanded from one element."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype, self.called = width, dtype, False

    def forward(self, ids: Tensor) -> Tensor:
        if self.called:
            raise PlanError(
                "pipeline: the model looks up its embedding a second time, as modules that predict further ahead "
                "do, but only the first stage has it. Use a mesh without pp, or a model without them."
            )
        self.called = True
        # Models take the dtype and device of masks and rotary tables from it, so both are those of the hidden state.
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class Received(nn.Module):
    """Stand-in for the last block before the stage: returns the received hidden state, whatever its own input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.hidden


def stand_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return AbsentEmbedding(module.embedding_dim, dtype) if isinstance(module, nn.Embedding) else Absent()


class StagedModel:
    """A model of which this rank holds some stages; it runs as one stage at a time."""

    def __init__(self, model: nn.Module, stages: Stages, local_stages: Sequence[int], dtype: torch.dtype) -> None:
        """Replaces modules of other ranks by stand-ins, in place."""
        self.model, self.stages, self.local_stages = model, stages, tuple(local_stages)
        local_modules = {name for stage in local_stages for name in stages.modules_of(stage)}
        # Of this rank's own modules too: they are absent while another of its stages runs.
        self._absent: dict[str, nn.Module] = {}
        for stage in range(stages.count):
            for name in stages.modules_of(stage):
                self._absent[name] = stand_in(model.get_submodule(name), dtype)
                if name not in local_modules:
                    _put(model, name, self._absent[name])

    @contextmanager
    def running(self, stage: int, hidden: Tensor | None) -> Iterator[nn.Module]:
        """Inside, the model is this stage. hidden: its received input, None for the first stage."""
        present = set(self.stages.modules_of(stage))
        # Each forward may look up a missing embedding once; a second lookup is another model than the stand-in stands for.
        for module in self._absent.values():
            if isinstance(module, AbsentEmbedding):
                module.called = False
        swapped: dict[str, nn.Module] = {}
        for other in self.local_stages:
            for name in self.stages.modules_of(other):
                if name not in present:
                    swapped[name] = _put(self.model, name, self._absent[name])
        if hidden is not None:
            # The stand-in directly before the stage yields the received input; whatever earlier ones return is dropped.
            last_before = self.stages.blocks[stage - 1][-1]
            before = _put(self.model, last_before, Received(hidden))
            # If this rank also holds that block, it was swapped above: the module to restore is the first one.
            swapped.setdefault(last_before, before)
        try:
            yield self.model
        finally:
            for name, module in swapped.items():
                _put(self.model, name, module)


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Replace a submodule in `_modules`, past any `__setattr__` of the parent; returns the old one."""
    parent, _, key = name.rpartition(".")
    owner = model.get_submodule(parent)
    old = owner._modules[key]
    assert old is not None
    owner._modules[key] = module
    return old
