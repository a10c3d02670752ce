"""The state of a replica for one that comes: read off as it stands (snapshot), sent from rank to rank, and built up there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshkit.core.optimizer_state import IMPLEMENTATION
from meshkit.core.sharding import local_tensor, placed
from meshkit.errors import PlanError

HOST = torch.device("cpu")


class HasState(Protocol):
    """A scheduler, a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """What is told of a tensor before its values. on_host: where the optimizer keeps it, as a counter of steps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Of one rank. values: as they were given, with a `_Tensor` in the place of each tensor. tensors: their values, on the
    host, in the order in which they stand there."""

    values: Any
    tensors: list[Tensor]


def snapshot_of(values: Any) -> Snapshot:
    """A copy of dicts, lists and tuples, whose tensors the next step will write. Of a DTensor it has this rank's shard."""
    tensors: list[Tensor] = []

    def read(value: Any) -> Any:
        if isinstance(value, Tensor):
            local = local_tensor(value.detach())
            tensors.append(local.to(HOST, copy=True).contiguous())
            return _Tensor(dtype=local.dtype, shape=tuple(local.shape), on_host=local.device == HOST)
        return _inside(value, read)

    return Snapshot(values=read(values), tensors=tensors)


def refuse_parts(state: Mapping[str, Any]) -> None:
    """state: of a parameter. Raises: PlanError for tensors that keep their values in parts, as low-bit moments."""
    for key, value in state.items():
        if isinstance(value, Tensor) and type(local := local_tensor(value.detach())) not in (
            Tensor,
            torch.nn.Parameter,
        ):
            raise PlanError(
                f"the optimizer keeps {key!r} as a {type(local).__name__}, which a replica that comes to a meeting place "
                "cannot be given. Use an optimizer that keeps its state in plain tensors."
            )


def rebuilt(snapshot: Snapshot, device: torch.device) -> Any:
    """The values with their tensors, on the device of the run or on the host, as they were."""
    tensors = iter(snapshot.tensors)

    def build(value: Any) -> Any:
        if isinstance(value, _Tensor):
            return next(tensors).to(HOST if value.on_host else device)
        return _inside(value, build)

    return build(snapshot.values)


def _inside(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same dict, list or tuple, of what is changed in it; of anything else itself."""
    if type(value) is dict:
        return {key: change(each) for key, each in value.items()}
    return type(value)(map(change, value)) if type(value) in (list, tuple) else value


def options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of an optimizer's groups, as the learning rate; not how it computes."""
    return [{key: value for key, value in group.items() if key not in IMPLEMENTATION} for group in groups]


def set_options(groups: Sequence[dict[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(groups, given, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(value))  # in place: a captured graph reads this tensor
            else:
                group[key] = value


def laid_out(values: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """State of a parameter: tensors of its shard's shape become laid out as it."""
    shard = local_tensor(param).shape
    return {
        key: placed(param, value) if isinstance(value, Tensor) and value.shape == shard and value.ndim else value
        for key, value in values.items()
    }


def send(group: Any, snapshot: Snapshot) -> None:
    """To rank 1 of a group of two. Raises: RuntimeError where it is gone."""
    head = torch.frombuffer(bytearray(pickle.dumps(snapshot.values)), dtype=torch.uint8)
    for part in (torch.tensor([head.numel()]), head, *_messages(snapshot.tensors)):
        group.send([part], 1, 0).wait()


def receive(group: Any) -> Snapshot:
    """From rank 0 of a group of two. Raises: RuntimeError where it is gone."""
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], 0, 0).wait()
    head = torch.empty(int(size), dtype=torch.uint8)
    group.recv([head], 0, 0).wait()
    values = pickle.loads(head.numpy().data)
    tensors = [torch.empty(each.shape, dtype=each.dtype) for each in _described(values)]
    for part in _messages(tensors):
        group.recv([part], 0, 0).wait()
    return Snapshot(values=values, tensors=tensors)


def _messages(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Their bytes; nothing for a shard without elements."""
    yield from (tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel())


def _described(values: Any) -> Iterator[_Tensor]:
    if isinstance(values, _Tensor):
        yield values
    elif type(values) in (dict, list, tuple):
        for value in values.values() if type(values) is dict else values:
            yield from _described(value)
