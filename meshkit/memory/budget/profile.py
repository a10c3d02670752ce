"""What each treatment of a block would keep and cost on a rank: the block is run on tensors that have shapes and no values.

No ranks are needed, and every rank that runs the same blocks finds the same, so that all of them choose alike: sizes are
those of the first rank of tp, which has the largest parts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core._torch import FakeTensorMode, tree_leaves, tree_map
from meshkit.errors import PlanError
from meshkit.memory._recompute import Treatment, may_move, treat
from meshkit.memory.budget.choose import Choice, Offer, choose
from meshkit.memory.budget.knapsack import Option
from meshkit.memory.budget.work import Kept, Work
from meshkit.memory.offload import BLOCKS_LEAVING, Moved
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Cut, check
from meshkit.parallel.tensor.apply import SEQUENCE_DIM, shard_without_ranks
from meshkit.parallel.tensor.layout import TensorLayout, tensor_layout
from meshkit.plan import Plan
from meshkit.strategy import ActivationOffload, Budget, MemoryPolicy, Recompute

MODES = (Recompute(mode="none"), Recompute(mode="activation"), Recompute(mode="selective"), Recompute(mode="full"))
Call = tuple[tuple[Any, ...], dict[str, Any]]


def choose_for_blocks(
    model: nn.Module,
    spec: MeshSpec,
    *,
    plan: Plan,
    memory: MemoryPolicy,
    blocks: Sequence[str],
    sequence: bool,
    compute: torch.dtype,
    device: str,
    cut: Cut | None = None,
) -> list[Choice]:
    """What becomes of the blocks that each rank of pp runs, by `memory.recompute`, a Budget.

    model: whole and before anything is done to it. blocks: of the whole model. device: whose kernels are asked what they
    keep.
    Raises: PlanError for what cannot be told beforehand, and if nothing fits, here or on another rank of pp: what one rank
    refuses all refuse, or the others would wait for it.
    """
    budget = memory.recompute
    assert isinstance(budget, Budget)
    movable = may_move(memory, blocks)
    _refuse(plan, memory.offload, movable, blocks)
    layout = tensor_layout(model, plan.tensor, size=spec.tp, sequence=sequence) if spec.tp > 1 else None
    called = _calls(model, blocks, budget, spec, compute, device)
    calls = {name: called[name] for name in blocks}
    offers = _offers_by_block(model, calls, layout, budget, memory.offload, movable, compute, device)
    if cut is None:
        return [choose(_of_a_step(offers, 1, 1, budget), budget.bytes, _beside(memory.offload, 1))]
    peak_live = check(cut.generate(spec.pp, budget.microbatches)).peak_live
    chosen = []
    for place in range(spec.pp):
        held = {name: offer for name, offer in offers.items() if cut.runs(name, place)}
        counted = _of_a_step(held, peak_live[place], len(cut.stages_of(place)), budget)
        beside = _beside(memory.offload, peak_live[place])
        chosen.append(choose(counted, budget.bytes, beside, rank=f"pp rank {place}"))
    return chosen


def _refuse(plan: Plan, offload: ActivationOffload | None, movable: Collection[str], blocks: Sequence[str]) -> None:
    if any(style.kind == "experts" for style in plan.tensor.values()):
        raise PlanError(
            "Budget: what routed experts keep depends on where tokens go. Use Recompute(mode=...) for models with experts."
        )
    if offload is not None and not movable:
        raise PlanError(
            f"Budget with ActivationOffload(keep_last={offload.keep_last}): all {len(blocks)} blocks keep theirs, so none "
            "can be offloaded. Give a smaller keep_last, or leave offload away."
        )


def _offers_by_block(
    model: nn.Module,
    calls: Mapping[str, Call],
    layout: TensorLayout | None,
    budget: Budget,
    offload: ActivationOffload | None,
    movable: Collection[str],
    compute: torch.dtype,
    device: str,
) -> dict[str, list[Offer]]:
    """Every treatment of every block, for a microbatch. Blocks that are alike are run once."""
    sequence = layout is not None and layout.sequence
    regathers = (False, True) if sequence else (False,)
    # Blocks that cut the stream themselves are given whole tokens.
    cutters = {call.module for call in layout.calls if call.kind == "split"} if layout is not None else set()
    known: dict[Any, list[Offer]] = {}
    offers: dict[str, list[Offer]] = {}
    for name, call in calls.items():
        block = model.get_submodule(name)
        cutting = layout.size if layout is not None and sequence and name not in cutters else 1
        alike = _signature(block, call), cutting
        if alike not in known:

            def build(regather: bool, on: str, name: str = name, block: nn.Module = block) -> nn.Module:
                made = _without_values(block, on, compute)
                return made if layout is None else shard_without_ranks(made, name, layout, regather=regather)

            known[alike] = list(_offers(build, call, cutting, budget, regathers, device, offload))
        offers[name] = [
            (option, treatment) for option, treatment in known[alike] if name in movable or not treatment.offload
        ]
    return offers


def _beside(offload: ActivationOffload | None, live: int) -> int:
    """Of how many blocks the moved bytes are on the device, besides those of the one that runs: in forward of one that
    leaves, in backward of those fetched ahead, and of those that still leave if forwards of other microbatches lie between.
    """
    ahead = offload.ahead if offload is not None else 0
    return ahead + BLOCKS_LEAVING if live > 1 else max(ahead, BLOCKS_LEAVING - 1)


def _of_a_step(offers: dict[str, list[Offer]], live: int, stages: int, budget: Budget) -> dict[str, list[Offer]]:
    """Offers for a microbatch as offers for a step, of whose passes `live` are held at a time, over `stages` stages."""
    return {
        name: [
            (replace(o, bytes=-(-o.bytes * live // stages), seconds=o.seconds * budget.microbatches), treatment)
            for o, treatment in of_block
        ]
        for name, of_block in offers.items()
    }


def _offers(
    build: Callable[[bool, str], nn.Module],
    call: Call,
    cutting: int,
    budget: Budget,
    regathers: tuple[bool, ...],
    device: str,
    offload: ActivationOffload | None,
) -> Iterator[Offer]:
    """Every treatment, with what it keeps, and what it takes longer than keeping everything.

    Copies run beside compute: one takes time as far as it is longer than the forward, or the backward, of the block itself.
    """
    everything, shortest = 0, 0.0
    for regather in regathers:
        for mode in MODES:
            if regather and mode.mode == "full":
                continue  # the same as without
            try:
                kept, _ = _kept(build(regather, device), call, Treatment(mode, regather), cutting, device)
                forward, backward = _seconds(build(regather, "cpu"), call, Treatment(mode, regather), cutting, budget)
            except PlanError:
                if mode.mode != "activation":
                    raise
                continue  # no feed-forward whose middle could be made again
            if mode.mode == "none" and not regather:
                everything, shortest = kept, forward + backward
            name = mode.mode + (" + regather" if regather else "")
            longer = max(0.0, forward + backward - shortest)
            yield Option(name, kept, longer, max(0, everything - kept)), Treatment(mode, regather)
            if offload is None:
                continue
            treatment = Treatment(mode, regather, offload=True)
            stays, moved = _kept(build(regather, device), call, treatment, cutting, device, offload)
            if stays >= kept:
                continue  # all storages are smaller than `min_bytes`
            copy = moved / budget.rates.host_bytes_per_s
            longer += max(0.0, copy - forward) + max(0.0, copy - backward)
            yield Option(f"{name} + offload", stays, longer, max(moved, everything - stays), moved), treatment


def _kept(
    block: nn.Module,
    call: Call,
    treatment: Treatment,
    cutting: int,
    device: str,
    offload: ActivationOffload | None = None,
) -> tuple[int, int]:
    """Bytes that are alive after forward because backward will ask for them, and those that offload moves elsewhere; what all
    blocks are given is not counted.
    """
    with _no_values(), torch.device(device):
        treat(block, treatment)
        args, kwargs = _inputs(call, cutting, device)
        kept = Kept(_tensors((args, kwargs, list(block.parameters()))))
        moved = (
            Moved(offload, [*block.parameters(), *block.buffers(), *_tensors((args, kwargs))])
            if offload is not None
            else None
        )
        with kept:
            # The input counts where it is kept; so it may not be a leaf, which autograd holds in any case.
            first = _tensors((args, kwargs))[0]
            args, kwargs = tree_map(lambda value: value.clone() if value is first else value, (args, kwargs))
            with moved or nullcontext():
                graph = _tensors(block(*args, **kwargs))[0].grad_fn
        del args, kwargs
    assert graph is not None
    return kept.bytes, moved.bytes if moved is not None else 0


def _seconds(block: nn.Module, call: Call, treatment: Treatment, cutting: int, budget: Budget) -> tuple[float, float]:
    """Of forward and of backward, with what runs again in it."""
    with _no_values():
        treat(block, treatment)
        args, kwargs = _inputs(call, cutting, "cpu")
        work = Work(budget.rates)
        with work:
            out = _tensors(block(*args, **kwargs))[0]
            forward = work.seconds
            out.backward(torch.empty_like(out))
    return forward, work.seconds - forward


@functools.cache
def _no_values() -> FakeTensorMode:
    """One for all: tensors of another would be copied."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _without_values(module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """A copy whose tensors have shapes only."""
    with _no_values():
        copies: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=kind, device=device)
            copies[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        return copy.deepcopy(module, copies)


def _calls(
    model: nn.Module, blocks: Sequence[str], budget: Budget, spec: MeshSpec, dtype: torch.dtype, device: str
) -> dict[str, Call]:
    """How the model calls each block, for one rank's tokens of a microbatch."""
    calls: dict[str, Call] = {}
    whole = _without_values(model, device, dtype)
    for name in blocks:

        def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls[name] = tree_map(_described, (args, kwargs))

        whole.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    tokens = -(-budget.seq_len // spec.cp)
    tokens = -(-tokens // spec.tp) * spec.tp
    with _no_values(), torch.no_grad():
        whole(torch.empty(budget.rows, tokens, dtype=torch.int64, device=device))
    return calls


class _Shape:
    """A tensor that is to be made."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _described(value: Any) -> Any:
    return _Shape(value) if isinstance(value, Tensor) else value


def _inputs(call: Call, cutting: int, device: str) -> Call:
    """Tensors for a call. The first is the hidden state, which is cut over the ranks of tp and has a gradient."""
    first = next(leaf for leaf in tree_leaves(call) if isinstance(leaf, _Shape))

    def make(value: Any) -> Any:
        if not isinstance(value, _Shape):
            return value
        shape = list(value.shape)
        if value is first:
            shape[SEQUENCE_DIM] //= cutting
        return torch.empty(shape, dtype=value.dtype, device=device, requires_grad=value is first)

    args, kwargs = tree_map(make, call)
    return args, kwargs


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _signature(block: nn.Module, call: Call) -> Any:
    """Blocks with the same one keep and do the same."""
    params = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    inputs = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(call) if isinstance(leaf, _Shape))
    return str(block), params, inputs
