"""The program: the model as it is before anything is split. All decisions read it, and none reads the module on a rank.

A traced program will enter here, as further fields of `Program`: operations, and data flow between modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import NoneType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from meshkit.core.arguments import require
from meshkit.core.model_state import full_model_of
from meshkit.errors import PlanError
from meshkit.program._copy import mode_of, without_values
from meshkit.program._example import Example
from meshkit.program._records import Trace
from meshkit.program._repeat import twice
from meshkit.program._trace import trace

KEPT = 6  # readings; one of 80 layers takes 9 MB
Again = Callable[[nn.Module, Callable[[], Trace]], Trace]


@dataclass(frozen=True, eq=False)
class Program:
    """model: the modules of all stages. Its tensors' shapes and dtypes are read, never their values. example: by which its
    forward is read; None is one of token ids where the model takes those. is_proved: a copy for looking at, with fewer blocks
    than a program whose layouts were proved; nothing is proved of it."""

    model: nn.Module
    example: Example | None = None
    is_proved: bool = False

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """By name, each once."""
        return dict(self.model.named_modules())

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, each once."""
        return dict(self.model.named_parameters())

    @cached_property
    def trained(self) -> frozenset[str]:
        """Every name of the parameters that require a gradient, tied ones under each of theirs."""
        named = self.model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, param in named if param.requires_grad)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the first parameter: what the model computes in, unless a `Precision` says otherwise."""
        return next(self.model.parameters()).dtype

    def read(self, example: Example, closed: Mapping[str, str]) -> Trace:
        """The trace of the forward on an example; read once. Raises as `trace` does."""
        return self.kept(
            ("model", frozenset(closed.items())),
            example,
            lambda again: trace(self.model, example.args, example.kwargs, closed=closed, again=again),
        )

    def kept(self, of: Hashable, example: Example, read: Callable[[Again], Trace]) -> Trace:
        """What `read` returns, read once, for the last few. of: what is read beside the arguments of `example`.

        read: is given what calls the model a second time, see `trace`.
        """
        mode = mode_of(self.model)
        key = of, example.key, mode
        if key not in self._readings:
            self._readings[key] = example.objects, read(partial(twice, known=mode in self.called_twice))
            self.called_twice.add(mode)
            if len(self._readings) > KEPT:
                self._readings.popitem(last=False)
        self._readings.move_to_end(key)
        return self._readings[key][1]

    @cached_property
    def _readings(self) -> OrderedDict[Hashable, tuple[list[object], Trace]]:
        return OrderedDict()

    @cached_property
    def shown(self) -> dict[Hashable, object]:
        """What proofs about the program have shown, by what they were about: strategies that differ elsewhere ask again."""
        return {}

    @cached_property
    def called_twice(self) -> set[tuple[bool, ...]]:
        """The modes (which modules are in training) in which the model was called twice, and ran the same."""
        return set()

    def frozen(self) -> Program:
        """The same program of a copy without values, which does not change when the model does."""
        return Program(without_values(self.model), self.example)


def read_program(model: nn.Module, example: Example | None = None) -> Program:
    """The program of a model, before anything is done to it. example: by which its forward is read.

    Raises: PlanError for a model cut into pipeline stages, of which this rank has only some, for one that is split over a
    mesh already, for one that is partly on meta, and for what is no module.
    """
    require("parallelize", "model", model, nn.Module)
    require("parallelize", "example", example, Example, NoneType)
    if full_model_of(model) is not None:
        raise PlanError(
            f"{type(model).__name__}: this model has the stages of one rank of pp only. Give the whole one: "
            "`run.full_model`, or the model before parallelize."
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise PlanError(
                f"{type(model).__name__}: {name!r} has no shape yet, for its module is lazy and gets it from its first "
                "input. Run the model once on a batch before parallelize: `with torch.no_grad(): model(...)`."
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise PlanError(
                f"{type(model).__name__}: {name!r} is split over a mesh already. Give the model before parallelize, or "
                "`run.full_model`."
            )
    plain = [param.is_meta for param in model.parameters() if type(param.data) is Tensor]
    if any(plain) and not all(plain):
        raise PlanError("parallelize: some parameters are on meta and some not. Build the whole model in one place.")
    return Program(model, example)
