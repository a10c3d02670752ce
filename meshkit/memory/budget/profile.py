"""Profiling blocks for the memory budget: bytes and time of each treatment, by running the block on fake tensors.

No ranks and no device are needed. Ranks with the same blocks compute the same numbers and so make the same choice: sizes are
those of the first rank of tp, which has the largest shards.
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
from meshkit.parallel.pipeline import Cut
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
    """Choose the treatments of the blocks of each rank of pp, by `memory.recompute`, a Budget.

    model: the full model, before any change. blocks: of the full model. device: the type of device whose kernels will run;
    they differ in what they save.
    Raises: PlanError for models whose memory is not known beforehand, and if nothing fits, on this or another rank of pp:
    all ranks raise together, or the others would wait for one that did.
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
    peak_live = cut.checked(spec.pp, budget.microbatches).peak_live
    chosen = []
    for pp_rank in range(spec.pp):
        local_offers = {name: offer for name, offer in offers.items() if cut.runs(name, pp_rank)}
        counted = _of_a_step(local_offers, peak_live[pp_rank], len(cut.stages_of(pp_rank)), budget)
        beside = _beside(memory.offload, peak_live[pp_rank])
        chosen.append(choose(counted, budget.bytes, beside, rank=f"pp rank {pp_rank}"))
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
    """The offers of every block, for one microbatch. Equal blocks are profiled once."""
    sequence = layout is not None and layout.sequence
    regathers = (False, True) if sequence else (False,)
    # With sequence parallelism blocks are given a shard of the tokens, except those that split it from all tokens themselves.
    cutters = {call.module for call in layout.calls if call.kind == "split"} if layout is not None else set()
    known: dict[Any, list[Offer]] = {}
    offers: dict[str, list[Offer]] = {}
    for name, call in calls.items():
        block = model.get_submodule(name)
        cutting = layout.size if layout is not None and sequence and name not in cutters else 1
        alike = _signature(block, call), cutting
        if alike not in known:

            def build(regather: bool, on: str, name: str = name, block: nn.Module = block) -> nn.Module:
                copied = _fake_copy(block, on, compute)
                return copied if layout is None else shard_without_ranks(copied, name, layout, regather=regather)

            known[alike] = list(_offers(build, call, cutting, budget, regathers, device, offload))
        offers[name] = [
            (option, treatment) for option, treatment in known[alike] if name in movable or not treatment.offload
        ]
    return offers


def _beside(offload: ActivationOffload | None, live: int) -> int:
    """How many other blocks' offloaded bytes are on the device while one block runs.

    In forward that is one that still leaves. In backward these are the blocks fetched ahead, and, if forwards of other
    microbatches are interleaved (live > 1), those that still leave.
    """
    ahead = offload.ahead if offload is not None else 0
    return ahead + BLOCKS_LEAVING if live > 1 else max(ahead, BLOCKS_LEAVING - 1)


def _of_a_step(offers: dict[str, list[Offer]], live: int, stages: int, budget: Budget) -> dict[str, list[Offer]]:
    """Scale offers from one microbatch to a step that keeps `live` (stage, microbatch) pairs alive over `stages` stages."""
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
    """Yields every treatment with its bytes and the time it adds to keeping everything.

    Copies overlap compute: a copy adds only the time by which it exceeds the block's own forward, or backward.
    """
    everything, shortest = 0, 0.0
    for regather in regathers:
        for mode in MODES:
            if regather and mode.mode == "full":
                continue  # the same as without
            try:
                # A block for each measurement, since `treat` changes it.
                kept_bytes, _ = _kept_bytes(build(regather, device), call, Treatment(mode, regather), cutting, device)
                forward, backward = _seconds(build(regather, "cpu"), call, Treatment(mode, regather), cutting, budget)
            except PlanError:
                if mode.mode != "activation":
                    raise
                continue  # no feed-forward that can be recomputed so
            if mode.mode == "none" and not regather:
                everything, shortest = kept_bytes, forward + backward
            name = mode.mode + (" + regather" if regather else "")
            longer = max(0.0, forward + backward - shortest)
            yield Option(name, kept_bytes, longer, max(0, everything - kept_bytes)), Treatment(mode, regather)
            if offload is None:
                continue
            treatment = Treatment(mode, regather, offload=True)
            remaining, moved = _kept_bytes(build(regather, device), call, treatment, cutting, device, offload)
            if remaining >= kept_bytes:
                continue  # all storages are smaller than `min_bytes`
            copy = moved / budget.rates.host_bytes_per_s
            longer += max(0.0, copy - forward) + max(0.0, copy - backward)
            yield Option(f"{name} + offload", remaining, longer, max(moved, everything - remaining), moved), treatment


def _kept_bytes(
    block: nn.Module,
    call: Call,
    treatment: Treatment,
    cutting: int,
    device: str,
    offload: ActivationOffload | None = None,
) -> tuple[int, int]:
    """(bytes alive after forward because backward needs them, bytes that offload moves); shared inputs are not counted."""
    with _fake_mode(), torch.device(device):
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
    """(seconds of forward, seconds of backward with its recompute)."""
    with _fake_mode():
        treat(block, treatment)
        args, kwargs = _inputs(call, cutting, "cpu")
        work = Work(budget.rates)
        with work:
            out = _tensors(block(*args, **kwargs))[0]
            forward = work.seconds
            out.backward(torch.empty_like(out))
    return forward, work.seconds - forward


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """One mode for all blocks: fake tensors of two modes cannot meet."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake_copy(module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """A copy of the module with fake tensors: shapes and dtypes without values."""
    with _fake_mode():
        copies: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=kind, device=device)
            copies[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        # deepcopy's memo: each tensor is replaced where it is referred to, so tied ones stay tied and no value is copied.
        return copy.deepcopy(module, copies)


def _calls(
    model: nn.Module, blocks: Sequence[str], budget: Budget, spec: MeshSpec, dtype: torch.dtype, device: str
) -> dict[str, Call]:
    """How the model calls each block, for one rank's tokens of a microbatch."""
    calls: dict[str, Call] = {}
    fake_model = _fake_copy(model, device, dtype)
    for name in blocks:

        def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls[name] = tree_map(_described, (args, kwargs))

        fake_model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    # Rounded up, for cp as the longest rank has them, and for tp as padded rows are.
    tokens = -(-budget.seq_len // spec.cp)
    tokens = -(-tokens // spec.tp) * spec.tp
    with _fake_mode(), torch.no_grad():
        fake_model(torch.empty(budget.rows, tokens, dtype=torch.int64, device=device))
    return calls


class _Shape:
    """Shape and dtype of a tensor argument, from which `_inputs` makes a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _described(value: Any) -> Any:
    return _Shape(value) if isinstance(value, Tensor) else value


def _inputs(call: Call, cutting: int, device: str) -> Call:
    """Make tensors for a call. The first is the hidden state, which is split over the ranks of tp and needs a gradient."""
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
    """Blocks with equal signatures have equal offers."""
    params = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    inputs = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(call) if isinstance(leaf, _Shape))
    return str(block), params, inputs
