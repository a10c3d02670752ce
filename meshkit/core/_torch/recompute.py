"""Activation checkpointing (recompute): selective checkpoints whose kept results are offloaded; where backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachingTorchDispatchMode, _VersionWrapper, create_selective_checkpoint_contexts

_c10d = torch.ops._c10d_functional


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, as a recomputed forward is.

    Private: torch._C._current_graph_task_id, -1 outside of one. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return torch._C._current_graph_task_id() != -1


def ignore_profiler_marks() -> None:
    """Let selective checkpoints look past `record_function`, which FSDP's hooks call more often when a block runs again.

    Private: SAC_IGNORED_OPS, the operators that they do not count. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    profiler = torch.ops.profiler
    marks = (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(marks)


def selective_contexts(policy: Callable[..., Any]) -> tuple[Any, Any]:
    """The contexts of `checkpoint(context_fn=)` for a selective policy, whose kept results go through saved_tensors_hooks.

    The hooks are those around the checkpoint, an offload's: kept results go through them as all else that waits for backward.
    Private: _CachingTorchDispatchMode. Checked: 2.11, where kept results pass the hooks by, and 2.15. Replaced by:
    checkpoint(respect_saved_tensors_hooks=True) of 2.15, once it waits: it packs a result as soon as the operator returns.
    See [Note: what is on the wire is not packed].
    """
    caching, cached = create_selective_checkpoint_contexts(policy)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not torch.compiler.is_compiling():
        caching.__class__ = _CachingThroughHooks
        caching.hooks, caching.in_flight = hooks, {}
    return caching, cached


# [Note: what is on the wire is not packed]
# A collective returns before its message has come, and an offload that packs the result copies it: on its own stream, which
# does not follow the wire. So results of collectives are held back until `wait_tensor` is called on their storage, whose
# result is the same storage, and both are packed then: the offload moves them once.


class _CachingThroughHooks(_CachingTorchDispatchMode):
    """2.11 keeps results in a list for each operator, 2.15 in a dict by number of call."""

    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
    in_flight: dict[int, list[Any]]  # results of collectives that nobody has waited for, by address of the storage
    respect_saved_tensors_hooks = property(
        lambda self: False, lambda self, value: None
    )  # 2.15 sets it, and warns at None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._newest(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kept = self._newest(func, args)
        wrappers = [] if kept is before else [leaf for leaf in tree_leaves(kept) if type(leaf) is _VersionWrapper]
        wrappers = [wrapper for wrapper in wrappers if isinstance(wrapper.val, Tensor)]
        # See [Note: what is on the wire is not packed].
        if func is _c10d.wait_tensor.default:
            wrappers += self.in_flight.pop(args[0].untyped_storage()._cdata, [])
        elif func.namespace == _c10d.all_reduce.default.namespace:
            for wrapper in wrappers:
                self.in_flight.setdefault(wrapper.val.untyped_storage()._cdata, []).append(wrapper)
            return out
        pack, unpack = self.hooks
        # As torch does it: aliases made below autograd share a version counter only with this key.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            for wrapper in wrappers:
                wrapper.val = _packed(pack(wrapper.val), unpack)
                wrapper.__class__ = _PackedWrapper
        return out

    def _newest(self, func: Any, args: Any) -> Any:
        """What was kept last of the operator; None if nothing was."""
        if not hasattr(self, "func_counter"):
            return (self.storage.get(func) or [None])[-1]
        entries = self.storage.get(torch.utils.checkpoint._sac_storage_key(func, args))
        return next(reversed(entries.values())) if entries else None


class _PackedWrapper(_VersionWrapper):
    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        value: Any = self.val
        return value()


def _packed(value: Any, unpack: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    return lambda: unpack(value)
