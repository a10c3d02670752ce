"""Reading the program of a staged model: the data flow between its stages for a batch of given shapes, without values.

The forward is read again for batches of another kind, and in training and evaluation apart, and for other sizes until they
tell how the flow follows them. What depends on values cannot be read, and is refused.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.asked_once import AskedOnce, shapes
from meshkit.core.code import code_of
from meshkit.core.noting import AnyMask
from meshkit.errors import PlanError
from meshkit.parallel.pipeline._flow import Flow, plain_leaves
from meshkit.parallel.pipeline._sizes import Readings, Sizes
from meshkit.parallel.pipeline._stages import Stages, flow_of
from meshkit.program import ReadingError, Trace, follow_mode, mode_of, tensors, trace, twice

KEPT = 64  # flows of different sizes
Guard = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class Reading:
    """model: as it runs on this rank, but with the modules of all stages, and without values; nothing else uses it. closed:
    modules whose inside is not read, as in `trace`. guards: called with the model, and the arguments that it is about to be
    called with for the first time in these sizes. called_twice: the modes in which the model was called twice before it was
    split. asked: ranks of the same `place` read the same model, and one reads for all."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        closed: Mapping[str, str],
        guards: Sequence[Guard] = (),
        called_twice: Set[tuple[bool, ...]] = frozenset(),
        asked: AskedOnce | None = None,
        place: int = 0,
    ) -> None:
        self._asked, self._place = asked or AskedOnce(None), place
        self.model, self.stages, self.closed, self.guards = model, stages, closed, guards
        self._flows: OrderedDict[Any, Flow] = OrderedDict()
        self._readings: dict[Any, Readings] = {}
        self._called_twice = set(called_twice)

    def flow(
        self, running: nn.Module, microbatch: Any, loss: Any, call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> Flow:
        """The flow of a microbatch. running: says what is in training. call: what the loss function calls the model with."""
        kind, sizes = self.kind(running, microbatch, loss), _like(microbatch)[1]
        if (kind, sizes) not in self._flows:
            for guard in self.guards:
                guard(running, *call())
            readings = self._readings.setdefault(kind, Readings())
            flow = readings.infer(sizes)
            if flow is None:
                flow = self._read(running, *call())
                readings.add(sizes, flow)
            self._flows[kind, sizes] = flow
            if len(self._flows) > KEPT:
                self._flows.popitem(last=False)
        return self._flows[kind, sizes]

    def kind(self, running: nn.Module, microbatch: Any, loss: Any) -> Hashable:
        """What microbatches have alike whose flows differ in numbers alone."""
        return _like(microbatch)[0], code_of(loss), torch.is_grad_enabled(), mode_of(running)

    def _read(self, running: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
        follow_mode(self.model, running)
        args, kwargs = _torch.tree_map(_unmasked, (args, kwargs))
        mode, accepted = mode_of(self.model), self._accepted(kwargs)

        def answer() -> Flow:
            again = partial(twice, known=mode in self._called_twice)
            try:
                read = trace(self.model, args, accepted, closed=self.closed, again=again)
            except ReadingError as error:
                raise PlanError(f"pipeline: the model does not run on tensors without values: {error}") from error
            _refuse_mixed_logits(read)
            given = plain_leaves((read.calls[0].args, dict(read.calls[0].kwargs)))
            return replace(flow_of(read, self.model, self.stages), given=given)

        flow = self._asked.ask(("flow", self._place, mode, shapes((args, accepted))), answer)
        self._called_twice.add(mode)
        return flow

    def _accepted(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Without what a split batch has and context parallelism takes away: a mask, and positions that the model counts."""
        parameters = inspect.signature(self.model.forward).parameters
        split = {name for name, value in kwargs.items() if isinstance(value, AnyMask)}
        if split and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            split.add("position_ids")
        return {name: value for name, value in kwargs.items() if name in parameters or name not in split}


def _refuse_mixed_logits(read: Trace) -> None:
    """Before anything runs: else only the ranks of the last stage would know. Raises: PlanError."""
    distributed: set[int] = set()
    for operation in read.operations:
        refs = tensors((operation.args, dict(operation.kwargs)))
        if operation.name == "sharded_logits" or any(ref.storage in distributed for ref in refs):
            distributed |= {ref.storage for ref in tensors(operation.outputs)}
            plain = [ref for ref in refs if ref.shape and ref.storage not in distributed]
            if plain and operation.name != "sharded_logits":
                raise PlanError(
                    f"pipeline: {operation} computes with logits that are split over tp and {plain[0]} that is not. Let the "
                    "forward return the logits, and the loss function compute with them; or use tp=1."
                )


def _unmasked(value: Any) -> Any:
    """Attention over other ranks' keys, or those of a cache, is not run."""
    return AnyMask() if hasattr(value, "attend") and not isinstance(value, Tensor) else value


def _like(tree: Any) -> tuple[Any, Sizes]:
    """(what batches have alike whose flows differ in numbers alone, their sizes)."""
    leaves, spec = _torch.tree_flatten(tree)
    kinds = tuple(
        (leaf.ndim, leaf.dtype)
        if isinstance(leaf, Tensor)
        else (type(leaf), str(leaf) if isinstance(leaf, bool | int | str) else "")
        for leaf in leaves
    )
    return (str(spec), kinds), tuple(size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)
