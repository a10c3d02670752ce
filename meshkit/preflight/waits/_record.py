"""Recording, on CPU, where the host would wait for a GPU, and what it would launch there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshkit.core.to_device import HOST
from meshkit.errors import MeshkitError
from meshkit.mesh import HostRanks, Mesh
from meshkit.preflight.waits._functions import DEVICE, Functions
from meshkit.preflight.waits._lies import Lies
from meshkit.preflight.waits._operators import Operators
from meshkit.preflight.waits._step import Waits
from meshkit.step import Run

_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier")

# What goes up the tree of hosts comes down again, which is waited for; not for the device, but for other hosts.
_OF_HOSTS: dict[str, Callable[[Operators, Any], Any]] = {
    "reduce": lambda operators, function: operators.unseen(function),
    "broadcast": lambda operators, function: _waited_for(operators, function),
    "scatter": lambda operators, function: _waited_for(operators, function),
}


def _waited_for(operators: Operators, function: Callable[..., Any]) -> Callable[..., Any]:
    seen, unseen = operators.with_objects("between hosts", function), operators.unseen(function)

    def call(ranks: HostRanks, *args: Any) -> Any:
        return (seen if ranks.size > 1 else unseen)(ranks, *args)

    return call


@contextmanager
def recording(run: Run | Mesh) -> Iterator[Waits]:
    """Counts, of a run on CPU, where the host would wait for a GPU and what it would launch; for one thread.

    Enter it before the optimizer is made, and `take` the first step away: what is made once is made then.
    Raises: MeshkitError on an accelerator, which has `torch.cuda.set_sync_debug_mode`.
    """
    mesh = run.mesh if isinstance(run, Run) else run
    if mesh.device != HOST:
        raise MeshkitError(
            f"waits.recording: the mesh is on {mesh.device}, and waits are counted on CPU, for a GPU that is not there. Use "
            'torch.cuda.set_sync_debug_mode("warn"), or a mesh on CPU.'
        )
    waits, lies = Waits(), Lies()
    if isinstance(run, Run):
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            lies[tensor] = "device"
            if tensor.grad is not None:
                lies[tensor.grad] = "device"
    operators = Operators(waits, lies)
    with ExitStack() as stack:
        for name in _OF_OBJECTS:
            function = operators.with_objects(name, getattr(dist, name))
            for owner in (dist, distributed_c10d):
                stack.enter_context(patch.object(owner, name, function))
        for name, wrap in _OF_HOSTS.items():
            stack.enter_context(patch.object(HostRanks, name, wrap(operators, getattr(HostRanks, name))))
        stack.enter_context(patch.object(torch, "Event", partial(_Event, operators)))
        stack.enter_context(patch.object(Mesh, "device", property(lambda mesh: DEVICE)))
        stack.enter_context(Functions(operators))
        stack.enter_context(operators)
        yield waits


class _Event:
    """Stands for `torch.Event`. The host waits for one of the same `take`; one from before has come."""

    def __init__(self, operators: Operators, *args: Any, **options: Any) -> None:
        self._operators, self._recorded = operators, -1

    def record(self, stream: Any = None) -> None:
        self._recorded = self._operators.waits.taken

    def synchronize(self) -> None:
        if self._recorded == self._operators.waits.taken:
            self._operators.wait("an event")
