"""Hooks that are put on modules after the model was split: they may watch, and may not change what they see.

What a hook does is read with the model by `parallelize`. Of a later one nothing is proved: a mean over tokens, of which each
rank has some, would be of the rank's alone. Most watch and return nothing (norms of activations, profilers, trackers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshkit.core._torch import tree_leaves
from meshkit.core.code import is_ours
from meshkit.errors import PlanError

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


class LaterHooks:
    """Hooks of modules that are younger than this object."""

    def __init__(self) -> None:
        self._first = RemovableHandle.next_id

    def look_at(self, name: str, module: nn.Module) -> None:
        """Let the module's later hooks raise a PlanError when they return something, or write what they are given.

        name: of the module, for errors.
        """
        for kind, said in _KINDS.items():
            hooks: dict[int, Any] = getattr(module, kind)
            for number in [each for each in hooks if each >= self._first] if hooks else ():
                if not (isinstance(hooks[number], _Watching) or is_ours(hooks[number]) or _is_of_fsdp(hooks[number])):
                    hooks[number] = _Watching(hooks[number], kind, f"a {said} of {name or 'the model'!r}")


class _Watching:
    def __init__(self, hook: Callable[..., Any], kind: str, what: str) -> None:
        self._hook, self._what = hook, what
        self.__module__ = str(getattr(hook, "__module__", ""))  # it is still who made it that is asked for
        self._changed = -1 if kind == "_forward_hooks" else 1  # the argument in whose place it may give another

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        seen = list(_tensors((args, kwargs)))
        before = [tensor._version for tensor in seen]
        returned = self._hook(*args, **kwargs)
        same = returned is None or returned is args[self._changed]
        if not same or before != [tensor._version for tensor in seen]:
            raise PlanError(
                f"{self._what}, put there after parallelize, changes what it sees, and nothing is proved of it. Register it "
                "before parallelize, which reads what it does; a hook that returns None and writes nothing may come later."
            )


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_inference())


def _is_of_fsdp(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")
