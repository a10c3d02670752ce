"""The optimizer of a run that moves: the same object over other parameters, perhaps of another kind, with its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshkit.core import _torch
from meshkit.core.optimizer_state import (
    IMPLEMENTATION,
    HoldsState,
    ParameterFacts,
    Target,
    optimizer_state,
    optimizer_targets,
    parameter_names,
    set_optimizer,
)
from meshkit.core.reshard import DEFAULT_BUCKET_BYTES, ReallocationPlan, region_of
from meshkit.errors import PlanError
from meshkit.moving._agree import gathered
from meshkit.moving._changed import holds
from meshkit.moving._tensors import Held, move_tensors
from meshkit.optim import LowBitAdamW, Muon, OffloadedAdamW, ShardedAdamW, WholeMatrices, adamw_over
from meshkit.optim.host_offload import narrow
from meshkit.step import Run

OURS = (ShardedAdamW, OffloadedAdamW, LowBitAdamW)

# [Note: one optimizer, another kind]
# Schedules, hooks and loops hold the optimizer and the dicts of its groups, so both stay the same objects. One of meshkit's
# becomes what `adamw` would make for the new strategy: such an optimizer is made over the new parameters, and the old object
# takes over its class and its attributes. An optimizer on the host copies its parameters when it is made, so it is made when
# their values have come; that it may be made was seen before. Any other optimizer is the groups and the state that torch
# knows, and one that keeps parameters elsewhere is refused.


def refuse_optimizer(optimizer: Any) -> str:
    """Why it cannot be given other parameters; empty where it can."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        return f"optimizer is a {kind}. Give one torch.optim.Optimizer, that of the run."
    if isinstance(optimizer, OURS):
        if type(optimizer) in OURS:
            return ""
        return f"a {kind} is a subclass of one of meshkit's optimizers, and would become one of those. {_BY_CHECKPOINT}"
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        return f"a {kind} has state that is of no parameter, which a move would lose. {_BY_CHECKPOINT}"
    if attribute := _holder(optimizer, _is_tensor_or_optimizer):
        held = f"keeps tensors or an optimizer in its attribute {attribute!r}, which no move can know"
        return f"a {kind} {held}. {_BY_CHECKPOINT}"
    return ""


def _holder(optimizer: Optimizer, wanted: Callable[[Any], bool]) -> str:
    """The attribute in which an optimizer keeps such a value beside its state; empty if there is none."""
    attributes = (each for each in vars(optimizer).items() if each[0] not in ("param_groups", "state", "defaults"))
    return next((attribute for attribute, value in attributes if holds(value, wanted)), "")


def keeps_elsewhere(optimizer: HoldsState) -> str:
    """The attribute in which an optimizer that is none of meshkit's keeps another one, or tensors that are neither its state
    nor its parameters nor a number; empty if there is none."""
    if isinstance(optimizer, (*OURS, Muon)) or not isinstance(optimizer, Optimizer):
        return ""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return _holder(optimizer, lambda value: _is_tensor_or_optimizer(value) and not _is_harmless(value, params))


def _is_harmless(value: Tensor | Optimizer, params: set[int]) -> bool:
    return isinstance(value, Tensor) and (id(value) in params or value.numel() <= 1)


def wants_even(optimizer: HoldsState | None) -> str:
    """What of an optimizer is made for as many rows of each parameter as there were then; empty if nothing is."""
    if isinstance(optimizer, OffloadedAdamW):
        return "the memory on the host of OffloadedAdamW"
    if holds(getattr(optimizer, "__dict__", {}), lambda value: isinstance(value, WholeMatrices)):
        return f"the WholeMatrices of {type(optimizer).__name__}"
    return ""


def _is_tensor_or_optimizer(value: Any) -> bool:
    return isinstance(value, Tensor | Optimizer)


_BY_CHECKPOINT = "Save by mk.Checkpointer, and load into a run of the other strategy."


class Moving:
    """An optimizer on its way from the parameters of `old` to those of `new`.

    Wire: two all-gathers over the mesh as objects: of what ranks hold, and of whether all can take it.
    Raises: PlanError, on every rank, before anything is changed: for state that is kept in another way under the new
    strategy, for groups that stages have not alike, and for state that cannot be laid out.
    """

    def __init__(self, optimizer: Optimizer, old: Run, new: Run) -> None:
        self.optimizer, self._new = optimizer, new
        self._state: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._facts: dict[str, ParameterFacts] = {}
        self._dtypes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        number_of: dict[str, int] = {}
        told = gathered(old.mesh, lambda: self._held(old))
        for facts, dtypes, numbers, _ in told:
            self._facts |= facts
            self._dtypes |= dtypes
            number_of |= numbers
        self._names = parameter_names(new.model)
        params: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for param in new.parameters():
            if (name := self._names[id(param)]) in number_of:
                params[number_of[name]].append(param)
        gathered(old.mesh, lambda: self._refuse({groups for *_, groups in told}, params))

    def _held(self, old: Run) -> tuple[dict[str, ParameterFacts], dict[str, Any], dict[str, int], int]:
        """(facts, shape and dtype of state by key, the group of each parameter by number, how many groups)"""
        names = parameter_names(old.model)
        self._state, facts = optimizer_state(self.optimizer, names, replicas=True)
        dtypes = {key: (tuple(each.shape), each.dtype) for key, each in self._state.items()}
        groups = self.optimizer.param_groups
        numbers = {names[id(param)]: number for number, group in enumerate(groups) for param in group["params"]}
        return facts, dtypes, numbers, len(groups)

    def _refuse(self, counts: set[int], params: list[list[Tensor]]) -> None:
        """Make the optimizer that there will be, as far as it goes without values, and look whether it takes the state."""
        if len(counts) > 1:
            raise PlanError(
                f"the optimizer has {min(counts)} groups of parameters on one stage and {max(counts)} on another. Make it "
                "with the same groups on every rank, one without parameters where a stage has none of them."
            )
        ours = isinstance(self.optimizer, OURS)
        self._groups = []
        for group, each in zip(self.optimizer.param_groups, params, strict=True):
            names = {"param_names": [self._names[id(param)] for param in each]} if "param_names" in group else {}
            self._groups.append({**group, **names, "params": each})
            if ours:
                self._groups[-1].pop("state_kind", None)
        policy = self._new.resolved.memory.optimizer
        self._twin = self._remake() if ours and policy.offload is None else None
        after = _Groups(self._groups) if self._twin is None else self._twin
        if ours and self._twin is None:
            for group in self._groups:
                group |= {"state_kind": "fp32 masters"} if any(map(narrow, group["params"])) else {}
        for number, (before, then) in enumerate(zip(self.optimizer.param_groups, after.param_groups, strict=True)):
            kinds = [group.get("state_kind", "plain") for group in (before, then)]
            if ours and then["params"] and kinds[0] != kinds[1] and self._state:
                raise PlanError(
                    f"the optimizer's group {number} has its state as {kinds[0]!r}, and under the new strategy as "
                    f"{kinds[1]!r}: moments cannot become the other bit for bit. Keep memory.optimizer as it is."
                )
        self._wanted(after)

    def _remake(self) -> Optimizer | None:
        groups = [
            {
                key: value
                for key, value in group.items()
                if key == "params" or key not in (*IMPLEMENTATION, "state_kind")
            }
            for group in self._groups
        ]
        return adamw_over(self._new, self.optimizer, groups)

    def _wanted(self, after: Any) -> dict[str, Target]:
        return optimizer_targets(after, self._names, self._dtypes, self._facts)

    def move(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> ReallocationPlan:
        """The state, once the model has its values. See `move_tensors`."""
        if isinstance(self.optimizer, OURS) and self._twin is None:
            self._twin = self._remake()
        targets = self._wanted(_Groups(self._groups) if self._twin is None else self._twin)
        wanted: Held = {}
        for key, target in targets.items():
            like = target.like if target.like is not None else torch.empty(target.shape, device="meta")
            wanted[key] = target.shape, self._dtypes[key][1], region_of(like)

        def make(key: str) -> Tensor:
            self._made[key] = targets[key].make()
            return self._made[key]

        return move_tensors(self._new.mesh, self._state, wanted, make, bucket_bytes)

    def commit(self) -> None:
        """The optimizer is the new one. See [Note: one optimizer, another kind]."""
        groups = self.optimizer.param_groups
        if self._twin is not None:
            self._become(self._twin)
        for group, new in zip(groups, (self._twin or _Groups(self._groups)).param_groups, strict=True):
            group.clear()
            group.update(new)
        self.optimizer.param_groups = groups
        if self._twin is None:
            self.optimizer.state.clear()
        set_optimizer(self.optimizer, self._names, self._made, self._facts)
        if isinstance(self.optimizer, OffloadedAdamW):
            self.optimizer.take_over()

    def _become(self, twin: Optimizer) -> None:
        optimizer, same = vars(self.optimizer), type(twin) is type(self.optimizer)
        kept = {
            name: value for name, value in optimizer.items() if name.startswith("_optimizer_") or name == "_opt_called"
        }
        tracked = _torch.tracks_steps(self.optimizer)
        if same:
            optimizer.update({**vars(twin), **kept, "defaults": optimizer["defaults"]})
            return
        optimizer.clear()
        self.optimizer.__class__ = type(twin)
        optimizer.update({**vars(twin), **kept})
        if tracked:
            _torch.track_steps(self.optimizer)


class _Groups:
    """What there is to know of an optimizer of torch's before it is changed."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
