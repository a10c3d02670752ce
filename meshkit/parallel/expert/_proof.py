"""Proving that experts can be shared: their program, read without values, on every rank's part beside the whole."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.collectives import join_dim, reduce_from_axis
from meshkit.core.sharding import chunk
from meshkit.errors import PlanError
from meshkit.parallel.expert._stacks import ExpertLayout, packed_rows
from meshkit.parallel.tensor.apply import FakeAxis
from meshkit.plan import Style
from meshkit.program import CLOSED, CLOSED_BY_VALUE, Held, Trace, Unproved, prove, tensors, trace

# Sizes of the reading: no two alike, so that a dim that is taken for another one shows.
EXPERTS, WIDTH, CHOSEN, TOKENS_OF_RANK = 3, 7, 2, 5


def prove_experts(
    modules: Mapping[str, nn.Module], layouts: Mapping[str, ExpertLayout], styles: Mapping[str, Style], *, etp: int
) -> None:
    """Prove each kind of module that takes indices, on sizes of its own: with those of the model it would take minutes.

    Shown is that a token's output depends on its own row, indices and weights, and on the slices of its experts alone; with
    etp, that the outputs of parts of the features add up to those of all. Those of transformers are read by the
    implementation of their interface that looks at no values. Without etp, a forward of another module that depends on
    values is taken at its word; see `expert_parallel`.
    Raises: PlanError where that is not shown, with the operation.
    """
    proved: set[Hashable] = set()
    for name, layout in layouts.items():
        kind = _kind(modules[name], styles[name])
        if not layout.indexed or kind in proved:
            continue
        proved.add(kind)
        reading = _Reading(modules[name], styles[name], layout)
        full = reading.whole(etp)
        if full is None and etp == 1:
            continue
        try:
            if full is None:
                raise Unproved("its forward depends on values, so what it does with features cannot be read")
            _prove_slices(full)
            reading.prove_tokens(full, etp)
            if etp > 1:
                reading.prove_features(full, etp)
        except Unproved as error:
            raise PlanError(
                f"expert_parallel: {name!r} ({type(modules[name]).__name__}) is not shown to be the same on "
                f"{'etp' if etp > 1 else 'ep or tp'}: {str(error).rstrip('.')}. Leave the module whole: replicate()."
            ) from error


class _Part(nn.Module):
    """Experts, and what joins the results of all ranks."""

    def __init__(self, experts: nn.Module, join: Any = None) -> None:
        super().__init__()
        self.experts, self._join = experts, join

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.experts(x, index, weights)
        return out if self._join is None else self._join(out)


class _Reading:
    """One module of experts, read on small parameters."""

    def __init__(self, module: nn.Module, style: Style, layout: ExpertLayout) -> None:
        self.module, self.style, self.layout = module, style, layout

    def whole(self, etp: int) -> Trace | None:
        """The experts on all tokens with all features; None if they cannot be read."""
        try:
            full = self.read(2 * TOKENS_OF_RANK, features=2 * etp)
        except PlanError:
            return None
        return None if any(operation.op in (CLOSED, CLOSED_BY_VALUE) for operation in full.operations) else full

    def read(self, tokens: int, *, features: int, join: Any = None) -> Trace:
        floats = self.module.get_parameter(self.style.columns[0]).dtype
        x, weights = (torch.empty(tokens, size, dtype=floats, device="meta") for size in (WIDTH, CHOSEN))
        index = torch.empty(tokens, CHOSEN, dtype=torch.int64, device="meta")
        part = _Part(self._small(features), join)
        return trace(part, (x.requires_grad_(), index, weights.requires_grad_()), {})

    def _small(self, features: int) -> nn.Module:
        """The module with few experts, features and inputs."""
        small: nn.Module = object.__new__(type(self.module))
        small.__dict__.update(self.module.__dict__)
        small.__dict__["num_experts"] = EXPERTS
        small.__dict__["_parameters"] = {
            key: nn.Parameter(param.new_empty(self._shape(key, param, features), device="meta"))
            for key, param in self.module._parameters.items()
            if param is not None
        }
        return small

    def _shape(self, key: str, param: Tensor, features: int) -> tuple[int, ...]:
        shape = [EXPERTS, *[WIDTH] * (param.ndim - 1)]
        if key not in self.layout.biases:
            shape[self.layout.dims[key]] = features * (2 if key in self.layout.packed else 1)
        return tuple(shape)

    def prove_tokens(self, full: Trace, etp: int) -> None:
        """Two ranks with tokens of their own."""
        ranks, held = [], []
        for rank in range(2):
            ranks.append(self.read(TOKENS_OF_RANK, features=2 * etp, join=partial(_join_rows, FakeAxis(2, rank))))
            own = tuple(range(rank * TOKENS_OF_RANK, (rank + 1) * TOKENS_OF_RANK))
            held.append(
                {f"input {number}": Held("varying", 0, own) for number in range(3)}
                | {f"parameter experts.{key}": Held("replicated") for key in self.layout.dims}
            )
        prove(full, ranks, held)

    def prove_features(self, full: Trace, etp: int) -> None:
        """Ranks with features of their own, whose outputs are summed."""
        ranks, held = [], []
        for rank in range(etp):
            run, join = chunk(2 * etp, etp, rank), partial(_sum_outputs, FakeAxis(etp, rank))
            ranks.append(self.read(2 * TOKENS_OF_RANK, features=run.stop - run.start, join=join))
            own = {"input 0": Held("replicated"), "input 2": Held("replicated")}
            for key, dim in self.layout.dims.items():
                packed = self.layout.packed.get(key)
                rows = packed_rows(4 * etp, packed, etp, rank) if packed else range(run.start, run.stop)
                part = Held("partial") if key in self.layout.biases else Held("varying", dim, tuple(rows))
                own[f"parameter experts.{key}"] = part
            held.append(own)
        prove(full, ranks, held)


def _join_rows(axis: Any, out: Tensor) -> Tensor:
    return join_dim(out, 0, axis)


def _sum_outputs(axis: Any, out: Tensor) -> Tensor:
    return reduce_from_axis(out, axis)


def _kind(module: nn.Module, style: Style) -> Hashable:
    """Equal for modules that run the same: of one class, with the same numbers and modules of the same classes."""
    plain = int | float | str | None
    told = [(name, value if isinstance(value, plain) else type(value)) for name, value in vars(module).items()]
    return type(module), style, tuple(told), tuple(map(type, module.children()))


def _prove_slices(full: Trace) -> None:
    """Raises: Unproved where a parameter is read in another way than by the indices, of which each names one expert."""
    for operation in full.operations:
        for ref in tensors((operation.args, operation.kwargs)):
            source = full.storages[ref.storage].source
            if not source.startswith("parameter "):
                continue
            indices: Any = operation.args[1] if len(operation.args) > 1 else None
            by_index = (
                operation.name == "aten.index.Tensor" and ref is operation.args[0] and isinstance(indices, list | tuple)
            )
            named = tensors(indices) if by_index else []
            whole = ref.shape[0] == EXPERTS and ref.offset == 0
            if (
                len(named) != 1
                or indices[0] is None
                or not whole
                or full.storages[named[0].storage].source != "input 1"
            ):
                raise Unproved(
                    f"{operation}: it reads {source.removeprefix('parameter experts.')!r} not by the indices alone"
                )
