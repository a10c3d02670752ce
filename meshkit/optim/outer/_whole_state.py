"""All that a replica of local updates has, for one that comes: read off by name, and written there; what both have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshkit.core.model_state import model_tensors
from meshkit.core.optimizer_state import optimized, parameter_names
from meshkit.core.sharding import local_tensor
from meshkit.optim.outer._hand_on import (
    HasState,
    Snapshot,
    laid_out,
    options,
    rebuilt,
    refuse_parts,
    set_options,
    snapshot_of,
)
from meshkit.optim.outer._state import Entry, JoinedState
from meshkit.step import Run

SCHEDULED = ("lr", "initial_lr")  # they change in a run, and are handed on


@dataclass(kw_only=True)
class WholeState:
    """params: of the optimizer, also those that do not train, by name in the order of the model, which is the same on all
    replicas. follow: what moves to where the state is."""

    inner: Optimizer
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    follow: Sequence[HasState]

    @classmethod
    def of(cls, run: Run, inner: Optimizer, follow: Sequence[HasState]) -> WholeState:
        """Raises: CheckpointError for an optimizer of other parameters than the run's."""
        tensors = model_tensors(run.model)  # first for its side effect: FSDP puts its shards back
        names = parameter_names(run.model)
        held = {name: param for name, param, _ in optimized(inner, names)}
        buffers = {id(buffer) for buffer in run.model.buffers()}
        return cls(
            inner=inner,
            params={name: held[name] for name in names.values() if name in held},
            buffers={name: tensor for name, tensor in tensors.items() if id(tensor) in buffers},
            follow=follow,
        )

    @property
    def facts(self) -> dict[str, str]:
        """What this one and those whose state it may get must have alike, beside the model."""
        names = {id(param): name for name, param in self.params.items()}
        order = list(self.params)
        groups = []  # in the order of the model, whatever the optimizer's
        for group, given in zip(self.inner.param_groups, options(self.inner.param_groups), strict=True):
            own = sorted((names[id(param)] for param in group["params"]), key=order.index)
            said = {key: _text(value) for key, value in sorted(given.items()) if key not in SCHEDULED}
            groups.append((own, ", ".join(f"{key}={value}" for key, value in said.items())))
        groups.sort(key=lambda group: order.index(group[0][0]) if group[0] else -1)
        digest = hashlib.sha256(repr([own for own, _ in groups]).encode()).hexdigest()[:12]
        kind = type(self.inner)
        return {
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "optimizer's options": "; ".join(dict.fromkeys(said for _, said in groups)),
            "optimizer's groups": f"{len(groups)} of {len(order)} parameters ({digest})",
            "following": ", ".join(type(each).__qualname__ for each in self.follow) or "nothing",
        }

    def refuse_parts(self) -> bool:
        """Whether the inner optimizer has a state yet. Raises: PlanError for one that cannot be handed on."""
        for values in self.inner.state.values():
            refuse_parts(values)
        return bool(self.inner.state)

    def read(self, state: JoinedState, entries: dict[Tensor, Entry], *, is_end: bool) -> Snapshot:
        """All that this replica goes on from, but for what is each one's own: tokens and errors."""
        return snapshot_of(
            {
                "params": {name: (state[param], _outer_value(entries, param)) for name, param in self.params.items()},
                "buffers": self.buffers,
                "options": [
                    (
                        [name for name, param in self.params.items() if any(param is each for each in group["params"])],
                        given,
                    )
                    for group, given in zip(self.inner.param_groups, options(self.inner.param_groups), strict=True)
                ],
                "follow": [each.state_dict() for each in self.follow],
                "is_end": is_end,
            }
        )

    def write(self, state: JoinedState, entries: dict[Tensor, Entry], snapshot: Snapshot, device: torch.device) -> bool:
        """The state of another replica becomes this one's. Returns whether the run's last meeting had made it."""
        given = rebuilt(snapshot, device)
        for name, param in self.params.items():
            values, outer = given["params"][name]
            if (entry := entries.get(param)) is not None:
                error = None if entry.error is None else torch.zeros_like(entry.error)
                values |= {"outer_tokens": torch.zeros(()), "outer_error": error}
            state[param] = laid_out(values, param)
            local_tensor(param).copy_(outer)
        for name, buffer in self.buffers.items():
            local_tensor(buffer).copy_(given["buffers"][name])
        of_name = {name: values for names, values in given["options"] for name in names}
        name_of = {id(param): name for name, param in self.params.items()}
        groups = [group for group in self.inner.param_groups if group["params"]]
        set_options(groups, [of_name[name_of[id(group["params"][0])]] for group in groups])
        for each, values in zip(self.follow, given["follow"], strict=True):
            each.load_state_dict(values)
        return bool(given["is_end"])


def _outer_value(entries: dict[Tensor, Entry], param: Tensor) -> Tensor:
    entry = entries.get(param)
    return param if entry is None or entry.parameter is None else entry.parameter


def _text(value: Any) -> str:
    """As little of it as tells it from others."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    plain = value is None or isinstance(value, bool | int | float | str | tuple | list)
    return repr(value) if plain else type(value).__qualname__
