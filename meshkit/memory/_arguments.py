"""The arguments of a block that runs again in backward: its tensors apart, and what its forward changes of the others."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from meshkit.core._torch import Handed, tree_flatten, tree_unflatten
from meshkit.errors import PlanError

_PLAIN = (int, float, complex, str, bytes, type(None), Tensor, nn.Module)


def tensors_of(args: Any, kwargs: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """(tensors among the arguments, also keyword arguments and members of tuples; a function that rebuilds the arguments)."""
    # [Note: what a checkpoint keeps of its inputs]
    # A non-reentrant checkpoint saves its positional tensors through autograd, so that an activation offload around it moves
    # them. A tensor passed by name or inside of a tuple would stay on the device, in a closure, as long as the graph lives.
    leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_leaf)
    tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[index] for index in tensor_indices]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        filled = list(rest)
        for index, tensor in zip(tensor_indices, tensors, strict=True):
            filled[index] = tensor
        return tree_unflatten(filled, structure)

    return tensors, rebuild


class Changes:
    """What the first forward of a block changes of what it is given: containers go back to the caller, for each forward gets
    copies; objects are not copied, and one that changes would change again in backward."""

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        self._name, self._given = name, (args, tuple(kwargs.values()))
        leaves, _ = tree_flatten(self._given, is_leaf=_is_leaf)
        self._objects = [leaf for leaf in leaves if not isinstance(leaf, _PLAIN) and not _is_ours(leaf)]
        self._states = [_state_of(each) for each in self._objects]
        self._handed = Handed((), ())

    def begin(self, args: Any, kwargs: Any) -> None:
        """args, kwargs: the rebuilt ones."""
        self._handed = Handed(self._given, (args, tuple(kwargs.values())))

    def end(self) -> None:
        """Raises: PlanError for an object that has changed."""
        for held, state in zip(self._objects, self._states, strict=True):
            after = _state_of(held)
            if any(after.get(key) != value for key, value in state.items()):
                raise PlanError(
                    f"recompute: the forward of a {self._name} changes a {type(held).__name__} that it is given, and would "
                    'do so again in backward. Hand a list or a dict on, return what it adds, or use recompute="none" for it.'
                )
        self._handed.write_back()


def _is_leaf(value: Any) -> bool:
    """Whether pytree traversal stops here. Only containers are opened; masks and caches stay one object."""
    return not isinstance(value, tuple) and type(value) not in (list, dict, OrderedDict, defaultdict, deque)


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "meshkit"


def _state_of(held: object) -> dict[str, int]:
    """How long the lists are that it is or holds, and which tensors it holds. What is made once, or is looked up by keys, may
    be made: the second time it is there."""
    named = {"": held, **(vars(held) if hasattr(held, "__dict__") else {})}
    lengths = {key: len(each) for key, each in named.items() if isinstance(each, list | deque)}
    return lengths | {key: id(each) for key, each in named.items() if isinstance(each, Tensor)}
