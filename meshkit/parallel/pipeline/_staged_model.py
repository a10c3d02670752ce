"""How one model object runs as any stage of a pipeline.

A stage runs the model's own forward with the modules of other stages replaced by stand-ins. They return what was received of
earlier stages, and for the rest tensors without values; see `_flow`. So every rank computes positions and masks from the
batch itself, as it does whatever else lies between modules, and the model's code needs no change. A rank has one model object
with the modules of all its stages under their own names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.sharding import local_tensor
from meshkit.errors import StepError
from meshkit.parallel.pipeline._flow import PLAIN, Flow, Value, plain_leaves
from meshkit.parallel.pipeline._stages import Stages
from meshkit.program import TensorRef, copied


@dataclass(eq=False)
class Running:
    """One forward of a stage. handed: what it hands on, filled by calls. edges: their places in the graph."""

    flow: Flow
    stage: int
    received: Mapping[Value, Tensor]
    sends: frozenset[Value]
    calls: int = 0
    handed: dict[Value, Tensor] = field(default_factory=dict)
    edges: dict[Value, GradientEdge] = field(default_factory=dict)

    def begin(self, name: str) -> int:
        """The number of this call. Raises: StepError if the program has another one here."""
        number = self.calls
        wanted = self.flow.calls[number].name if number < len(self.flow.calls) else "the end of the forward"
        if name != wanted:
            raise StepError(
                f"pipeline: the forward calls {name!r} where it called {wanted!r} when it was read, so what stages hand on "
                "is not known. Blocks that are skipped or repeated by chance or by values need a mesh without pp."
            )
        self.calls += 1
        return number

    def end(self) -> None:
        if self.calls < len(self.flow.calls):
            raise StepError(
                f"pipeline: the forward ended without {self.flow.calls[self.calls].name!r}, which it called when it was "
                "read, so what stages hand on is not known. Blocks that are skipped by chance or by values need a mesh "
                "without pp."
            )


class OnAnotherRank(AttributeError):
    """An AttributeError, so that whoever only asks for an attribute gets an answer."""


# What Python asks of a class, and not of its instances, of a module that holds others by number or by key.
_CONTAINER: dict[str, Any] = {
    "__getitem__": lambda standing, key: standing._meshkit_parts(f"[{key!r}]")[key],
    "__iter__": lambda standing: iter(standing._meshkit_parts("modules")),
    "__contains__": lambda standing, key: key in standing._meshkit_parts("modules"),
    "__len__": lambda standing: len(standing._meshkit_like),  # whether it is true asks for it too, at any time
}


def _standing_for(base: Hashable, kind: type) -> Any:
    """A subclass of `base` under the name of a module's class, which holds modules if that does."""
    return _under_name(base, kind.__name__, frozenset(key for key in _CONTAINER if hasattr(kind, key)))


@cache
def _under_name(base: Hashable, name: str, container: frozenset[str]) -> type:
    asked = {key: _CONTAINER[key] for key in container}
    return type(name, (base,), {"__slots__": (), **asked})  # type: ignore[arg-type]  # stubs: a class


class Absent(nn.Module):
    """Stand-in for a module of another stage, under the name of its class. like: the module without values, whose attributes
    it shows."""

    def __new__(cls, staged: StagedModel, name: str, like: nn.Module) -> Absent:
        absent: Absent = object.__new__(_standing_for(cls, type(like)))  # type: ignore[arg-type]  # it is hashable
        return absent

    def __init__(self, staged: StagedModel, name: str, like: nn.Module) -> None:
        super().__init__()
        # Past nn.Module: neither is a part of this one.
        vars(self).update(_staged=staged, _name=name, _like=like, _twin=None, training=like.training)

    @property  # type: ignore[misc]  # stubs: an attribute
    def __class__(self) -> Any:
        """While the model runs, that of the module, which a forward may ask for by isinstance."""
        staged = vars(self).get("_staged")
        return type(self) if staged is None or not staged.shows else type(vars(self)["_like"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_staged"].skip(vars(self)["_name"], args, kwargs)

    def __getattr__(self, key: str) -> Any:
        twin = self._meshkit_parts(repr(key))
        try:
            return getattr(twin, key)
        except AttributeError as error:
            name = vars(self)["_name"]
            raise OnAnotherRank(f"{name!r} is on another rank of pp, and had no {key!r} before it ran there") from error

    # [Note: parameters of other stages]
    # A forward and a loss may go through all of the model's parameters: to take the dtype of the first, to count them, or
    # for a penalty on them. They are shown those of other stages, without values: so what is counted is right, and what is
    # computed of them has no values either and is refused. Between steps a rank has its own ones alone.

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        staged = vars(self)["_staged"]
        if not staged.shows:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        with staged.tying(vars(self)["_name"], self._without_values()) as twin:
            yield from twin.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        shows = vars(self)["_staged"].shows
        return self._without_values().named_children() if shows else super().named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        shows = vars(self)["_staged"].shows
        return self._without_values().state_dict(*args, **kwargs) if shows else super().state_dict(*args, **kwargs)

    def _meshkit_parts(self, asked: str) -> nn.Module:
        # In its forward, a model may ask a layer for its kind, or a head for the dtype of its weight.
        staged = vars(self).get("_staged")
        if staged is None or not staged.runs:
            name = vars(self).get("_name", "this module")
            raise OnAnotherRank(f"{name!r} is on another rank of pp, so its {asked} cannot be read here")
        return self._without_values()

    @property
    def _meshkit_like(self) -> nn.Module:
        like: nn.Module = vars(self)["_like"]
        return like

    def _without_values(self) -> nn.Module:
        if vars(self)["_twin"] is None:
            vars(self)["_twin"] = vars(self)["_staged"].twin(vars(self)["_like"])
        twin: nn.Module = vars(self)["_twin"]
        return twin


class Present:
    """In place of a module of the stage that runs, under the name of its class: calls it, and keeps what it returns for other
    stages."""

    __slots__ = ("_meshkit_module", "_meshkit_name", "_meshkit_staged")

    def __new__(cls, staged: StagedModel, name: str, module: nn.Module) -> Present:
        present: Present = object.__new__(_standing_for(cls, type(module)))  # type: ignore[arg-type]  # it is hashable
        return present

    def __init__(self, staged: StagedModel, name: str, module: nn.Module) -> None:
        object.__setattr__(self, "_meshkit_staged", staged)
        object.__setattr__(self, "_meshkit_name", name)
        object.__setattr__(self, "_meshkit_module", module)

    @property  # type: ignore[misc]  # stubs: an attribute
    def __class__(self) -> Any:
        return type(self._meshkit_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._meshkit_staged.call(self._meshkit_name, self._meshkit_module, args, kwargs)

    @property
    def _meshkit_like(self) -> Any:
        return self._meshkit_module

    def _meshkit_parts(self, asked: str) -> Any:
        return self._meshkit_module

    def __getattr__(self, key: str) -> Any:
        return getattr(self._meshkit_module, key)

    def __setattr__(self, key: str, value: Any) -> None:
        setattr(self._meshkit_module, key, value)


class StagedModel:
    """A model of which this rank holds some stages; it runs as one stage at a time."""

    def __init__(
        self, model: nn.Module, full: nn.Module, stages: Stages, local_stages: Sequence[int], device: torch.device
    ) -> None:
        """Replaces modules of other ranks by stand-ins, in place. full: the model before it was split, without values."""
        self.model, self.stages, self.local_stages = model, stages, tuple(local_stages)
        self.device, self._fake = device, _torch.fake_mode()
        self._running: Running | None = None
        self._in_loss = False
        self._has_values = True
        self._without_values: dict[int, Any] = {}  # by id of the full model's tensors
        self._placeholders: dict[Hashable, Tensor] = {}
        local_modules = {name for stage in local_stages for name in stages.modules_of(stage)}
        self._tied = _tied(full, stages, local_stages)
        # Of this rank's own modules too: they are absent while another of its stages runs.
        self._absent: dict[str, nn.Module] = {}
        for stage in range(stages.count):
            for name in stages.modules_of(stage):
                self._absent[name] = Absent(self, name, full.get_submodule(name))
                if name not in local_modules:
                    _put(model, name, self._absent[name])

    @property
    def runs(self) -> bool:
        return self._running is not None

    @property
    def shows(self) -> bool:
        """See [Note: parameters of other stages]."""
        return self._in_loss or self._running is not None

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """Around a loss function, which calls the model."""
        param = next(self.model.parameters(), None)  # of this rank
        self._has_values = param is None or not _torch.is_fake(local_tensor(param))
        before, self._in_loss = self._in_loss, True
        try:
            yield
        finally:
            self._in_loss = before

    @property
    def has_values(self) -> bool:
        """False in an estimate: there what other stages return cannot be told from the rest."""
        return self._has_values

    @contextmanager
    def running(self, stage: int, flow: Flow, received: Mapping[Value, Tensor]) -> Iterator[Running]:
        """Inside, the model is this stage."""
        present = set(self.stages.modules_of(stage))
        sends = frozenset(flow.cuts[stage] if stage < self.stages.count - 1 else ())
        run = Running(flow, stage, received, sends)
        for value in sends & received.keys():
            run.handed[value] = received[value].detach()
            if received[value].requires_grad:
                run.edges[value] = get_gradient_edge(received[value])
        swapped: dict[str, Any] = {}
        for other in self.local_stages:
            for name in self.stages.modules_of(other):
                own = self.model.get_submodule(name)
                swapped[name] = _put(
                    self.model, name, Present(self, name, own) if name in present else self._absent[name]
                )
        before, self._running = self._running, run
        try:
            yield run
        finally:
            self._running = before
            for name, module in swapped.items():
                _put(self.model, name, module)

    def call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module of this stage."""
        run = self._running
        if run is None or _torch.in_backward():  # a recomputed forward: what it hands on has been sent
            return module(*args, **kwargs)
        number = run.begin(name)
        output = module(*args, **kwargs)
        told, found = plain_leaves(run.flow.calls[number].output), plain_leaves(output)
        if told != found:
            raise StepError(
                f"pipeline: {name!r} returned {_apart(found, told)} when it was read, which is what other stages were told. "
                "Return tensors, or what is the same in every step, or use a mesh without pp."
            )
        wanted = [value for value in run.sends if value.call == number]
        if not wanted:
            return output
        leaves, spec = _torch.tree_flatten(output)
        if len(leaves) != len(_torch.tree_leaves(run.flow.calls[number].output)):
            raise StepError(f"pipeline: {name!r} returned another structure than when it was read.")
        for value in wanted:
            leaf, ref = leaves[value.leaf], run.flow.refs[value]
            _refuse_unlike(leaf, ref, name, self.has_values)
            run.handed[value] = leaf.detach().clone() if value in run.flow.written else leaf.detach()
            if leaf.requires_grad:
                # The rest of the forward gets an alias: hooks on it, and writes to it, are the next stage's to do.
                run.edges[value] = get_gradient_edge(leaf)
                leaves[value.leaf] = leaf.clone() if value in run.flow.written else leaf.view_as(leaf)
        return _torch.tree_unflatten(leaves, spec)

    def skip(self, name: str, args: Any, kwargs: Any) -> Any:
        """A module of another stage."""
        run = self._running
        if run is None or _torch.in_backward():
            raise StepError(
                f"pipeline: {name!r} is on another stage, but was called outside of a forward, or by activation "
                "checkpointing that spans stages. Checkpoint single blocks, and call the model by its run."
            )
        number = run.begin(name)
        told, spec, recorded = run.flow.outputs[number]
        given = _torch.tree_leaves((args, kwargs))
        leaves = list(told)
        for index, leaf in enumerate(told):
            value = Value(number, index)
            if isinstance(leaf, TensorRef) and value not in run.received and leaf in recorded:
                leaves[index] = given[recorded.index(leaf)]  # it returns what it was given
            elif isinstance(leaf, TensorRef):
                leaves[index] = self._given(run, value, leaf)
            elif not isinstance(leaf, PLAIN) and len(given) == len(recorded):
                same = next((mine for mine, theirs in zip(given, recorded, strict=True) if theirs is leaf), leaf)
                leaves[index] = same  # an object that the module was given and returns, as a cache of keys
        return _torch.tree_unflatten(leaves, spec)

    def _given(self, run: Running, value: Value, ref: TensorRef) -> Tensor:
        if value in run.received:
            tensor = run.received[value]
            if value in run.flow.written:
                return tensor.clone()
            # An alias where it is handed on too: hooks on it are not for the gradient of later stages, which have their own.
            return tensor.view_as(tensor) if value in run.sends and tensor.requires_grad else tensor
        return self.empty(ref) if ref.storage in run.flow.between else self.placeholder(ref)

    def placeholder(self, ref: TensorRef) -> Tensor:
        """For what nothing reads but modules of other stages: one for all of its shape, since making one takes longer than a
        block's launches."""
        key = (ref.shape, ref.stride, ref.dtype, ref.requires_grad and torch.is_grad_enabled())
        found = self._placeholders.get(key)
        if found is None or found._backward_hooks:  # which would pile up
            found = self._placeholders[key] = self.empty(ref)
        return found

    def empty(self, ref: TensorRef) -> Tensor:
        """A tensor without values. What is computed of it has none either."""
        if not self.has_values:  # an estimate counts memory, of which there is none: one element stands for all
            one = torch.empty_strided(ref.shape, (0,) * len(ref.shape), dtype=ref.dtype, device=self.device)
            return one.requires_grad_(ref.requires_grad and torch.is_grad_enabled())
        with self._fake:
            tensor = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=self.device)
        if ref.requires_grad and torch.is_grad_enabled():
            return tensor.requires_grad_().clone()  # no leaf: those take no writes
        return tensor

    def twin(self, module: nn.Module) -> nn.Module:
        """The module with tensors that have shapes and no values."""
        made = self._without_values  # what two modules share, their twins do
        with self._fake:
            for param in module.parameters():
                if id(param) not in made:
                    empty = torch.empty(param.shape, dtype=param.dtype, device=self.device)
                    made[id(param)] = nn.Parameter(empty, param.requires_grad)
            for buffer in module.buffers():
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        return copied(module, made, {})

    @contextmanager
    def tying(self, name: str, twin: nn.Module) -> Iterator[nn.Module]:
        """Inside, the twin of a module of another stage has the tied parameters of this rank: each counts once."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        for tied, local in self._tied.items():
            if tied.startswith(f"{name}."):
                path, _, key = tied[len(name) + 1 :].rpartition(".")
                params = twin.get_submodule(path)._parameters
                before.append((params, key, params[key]))
                params[key] = self.model.get_parameter(local)
        try:
            yield twin
        finally:
            for params, key, param in before:
                params[key] = param


def _tied(full: nn.Module, stages: Stages, local_stages: Sequence[int]) -> dict[str, str]:
    """Parameters of other ranks' modules, that modules of this rank have too: name there -> name here."""
    here: dict[int, str] = {}
    there: list[tuple[str, int]] = []
    for name, param in full.named_parameters(remove_duplicate=False):
        if (stage := stages.stage_of(name)) in local_stages:
            here.setdefault(id(param), name)
        elif stage is not None:
            there.append((name, id(param)))
    return {name: here[key] for name, key in there if key in here}


def _apart(now: tuple[Any, ...], before: tuple[Any, ...]) -> str:
    """The first that differs."""
    one, other = next((pair for pair in zip(now, before, strict=False) if pair[0] != pair[1]), (now, before))
    return f"{one!r}, and {other!r}"


def refuse_other_arguments(flow: Flow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises: StepError where the model is called with other numbers or names than when it was read."""
    found = plain_leaves((args, kwargs))
    if found != flow.given:
        raise StepError(
            f"pipeline: the model is called with {_apart(found, flow.given)} when it was read, so what stages hand on is not "
            "known. Let the batch have what changes, which is read anew, or use a mesh without pp."
        )


def _refuse_unlike(value: Any, ref: TensorRef, name: str, has_values: bool) -> None:
    if not isinstance(value, Tensor) or (_torch.is_fake(value) and has_values):
        raise StepError(
            f"pipeline: {name!r} returned what has no values on this rank, so it has read something of another stage that it "
            "did not when the model was read. Use a mesh without pp."
        )
    if isinstance(value, DTensor):
        raise StepError(
            f"pipeline: on tp {name!r} returned a DTensor, which another stage cannot be sent: it computed with a parameter "
            "that tp holds as a DTensor, outside of the module that the plan covers. Use a mesh without pp or without tp."
        )
    if tuple(value.shape) != ref.shape or value.dtype != ref.dtype:
        raise StepError(
            f"pipeline: {name!r} returned {list(value.shape)} in {value.dtype}, but by what was read a batch of these sizes "
            f"gives {list(ref.shape)} in {ref.dtype}. Shapes must not depend on values, nor be rounded up inside the model: "
            "pad the batch, or use a mesh without pp."
        )


def _put(model: nn.Module, name: str, module: Any) -> Any:
    """Replace a submodule in `_modules`, past any `__setattr__` of the parent; returns the old one."""
    parent, _, key = name.rpartition(".")
    owner = model.get_submodule(parent)
    old = owner._modules[key]
    assert old is not None
    owner._modules[key] = module
    return old
