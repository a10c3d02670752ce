"""What a forward writes (buffers, running statistics, state, new parameters): the model before it, to compare with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshkit.core._torch import modes_are_off, tree_leaves
from meshkit.program import is_record


class _Reads(TorchFunctionMode):
    """Notes which of some tensors a function is given. tensors: by id."""

    def __init__(self, tensors: dict[int, str]) -> None:
        super().__init__()
        self.tensors, self.names = tensors, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in () if modes_are_off() else tree_leaves((args, kwargs)):  # of what only reads the forward
            if isinstance(leaf, Tensor) and (name := self.tensors.get(id(leaf))):
                self.names.add(name)
        return func(*args, **(kwargs or {}))


class Snapshot:
    """A model's buffers, plain tensors and names of parameters before a forward, to see what it writes.

    Plain tensors are those that modules hold as attributes. One that is read and replaced is carried from step to step. What
    a forward leaves behind for the loss, or for a log, is replaced too, and not read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = _parameter_slots(model)
        self.buffers = _versions(dict(model.named_buffers()))
        self._state = _versions(_plain_tensors(model))
        self.reads = _Reads({id(tensor): name for name, (tensor, _) in self._state.items()})

    def written(self) -> dict[str, Tensor]:
        """Buffers and state that are not what they were."""
        buffers, state = dict(self._model.named_buffers()), _plain_tensors(self._model)
        changed = {name: tensor for name, tensor in buffers.items() if _changed(tensor, self.buffers.get(name))}
        for name, (tensor, version) in self._state.items():
            now = state.get(name)
            if tensor._version != version or (now is not tensor and name in self.reads.names and now is not None):
                changed[name] = tensor if now is None else now
        # A container that grows, of which something has been read: a next forward may read what is new in it.
        grown = {name.partition("[")[0] for name in self.reads.names if "[" in name}
        for name, tensor in state.items():
            if name not in self._state and name.partition("[")[0] in grown:
                changed[name] = tensor
        return changed

    def made(self) -> list[str]:
        return sorted(_parameter_slots(self._model) - self._parameters)


def _parameter_slots(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _versions(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {name: (tensor, tensor._version) for name, tensor in tensors.items()}


def _changed(tensor: Tensor, before: tuple[Tensor, int] | None) -> bool:
    return before is None or before[0] is not tensor or before[1] != tensor._version


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Attributes of modules that are tensors, and neither parameters nor buffers, nor other names of those."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _TABLES:
                for where, tensor in _tensors_in(value, f"{prefix}.{key}" if prefix else key, 0):
                    if not isinstance(tensor, nn.Parameter) and id(tensor) not in registered:
                        found[where] = tensor
    return found


def _tensors_in(value: Any, where: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Those of lists, deques, tuples, dicts and records too."""
    if isinstance(value, Tensor):
        yield where, value
    elif depth < _DEEPEST:
        inside: Any = ()
        if isinstance(value, list | tuple | deque):
            inside = value
        elif isinstance(value, dict):
            inside = value.values()
        elif is_record(value):
            inside = vars(value).values()
        if len(inside) <= _LONGEST:
            for index, item in enumerate(inside):
                yield from _tensors_in(item, f"{where}[{index}]", depth + 1)


_DEEPEST, _LONGEST = 3, 4096  # what is more holds data, as a tokenizer's words
_TABLES = frozenset(vars(nn.Module()))
