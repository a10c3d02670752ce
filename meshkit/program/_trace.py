"""The trace of a model (graph, dataflow): the operators of one forward, read once without values, as data.

Operators are PyTorch's own (aten), seen below autograd, so every way to write an addition is one of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy as copy_of
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshkit.core import _torch
from meshkit.core._torch import DataDependentOutputException, DynamicOutputShapeException, tree_map
from meshkit.errors import PlanError
from meshkit.moe.aux_loss import collect_nothing
from meshkit.program._backward import checkpoints_run
from meshkit.program._copy import copied, originals
from meshkit.program._guess import EndlessLoop, Guess
from meshkit.program._lines import model_line
from meshkit.program._recorder import NoGuess, Recorder, Unfused
from meshkit.program._records import (
    CLOSED,
    CLOSED_BY_VALUE,
    Fold,
    OnlyAlone,
    ReadingError,
    Rewritten,
    Trace,
    Unreadable,
)
from meshkit.program._state import NEW, cells, same, state, view_of


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    closed: Mapping[str, str] = MappingProxyType({}),
    fold: Fold | None = None,
    again: Callable[[nn.Module, Callable[[], Trace]], Trace] | None = None,
    guess: Guess | None = None,
) -> Trace:
    """Run the model's forward on tensors without values. Changes nothing of the model.

    args, kwargs: of the model's forward; tensors give their shapes and dtypes only. closed: modules that are read as one
    operation, by name -> the operation's name; each returns a tensor like its first. So is a module that makes tensors whose
    sizes depend on values, CLOSED, or that reads a value, CLOSED_BY_VALUE. fold: blocks that are left out. again: is given
    the copy that is read, and what reads it, which it may do more than once. guess: what is read as values of floats.
    Raises: PlanError for a model that does so itself: then the program is not the same for every batch; ReadingError for
    whatever else the forward raises.
    """
    closed = dict(closed)
    guessed: list[str] = []
    while True:
        recorder = Recorder(fold, guess)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return _trace(model, args, kwargs, closed, recorder, again)
        except (Unreadable, OnlyAlone, EndlessLoop):
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            name = recorder.failed
            while name in closed:  # a hook on it, which is not closed with it
                name = name.rpartition(".")[0]
            kind = CLOSED_BY_VALUE if isinstance(error, DataDependentOutputException) else CLOSED
            if not name:
                raise PlanError(
                    f"{type(model).__name__} at {model_line(error)}: what runs next depends on a tensor's values, so one "
                    "reading does not show what other batches do. Write it without (torch.where), or use dp axes only where "
                    "it just looks at them."
                ) from error
        except Exception as error:
            kind = closed[guessed[-1]] if guessed else CLOSED
            # A module that was closed may return something else than a tensor like its first; then so is what is around it.
            name = guessed[-1].rpartition(".")[0] if guessed else ""
            if not name and guessed:
                raise PlanError(
                    f"{guessed[0]} of {type(model).__name__}: what runs next depends on a tensor's values, so one reading "
                    "does not show what other batches do. Write it without (torch.where), or use dp axes only where it just "
                    "looks at them."
                ) from error
            if not name:
                raise ReadingError(recorder.failed, model_line(error), error) from error
        # All of its class at once: a reading for each layer of a deep model would take as many times as long.
        alike = type(model.get_submodule(name))
        named = (
            [name]
            if alike.__module__.startswith("torch.")
            else [n for n, m in model.named_modules() if type(m) is alike]
        )
        closed.update(dict.fromkeys((each for each in named if each), kind))
        guessed.append(name)


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    closed: Mapping[str, str],
    recorder: Recorder,
    again: Callable[[nn.Module, Callable[[], Trace]], Trace] | None,
) -> Trace:
    # Neither routers' reports nor whoever watches operators or saves tensors may know of a forward that is only read.
    unseen = saved_tensors_hooks(lambda x: x, lambda x: x)
    with collect_nothing(), _torch.without_modes(), _torch.without_fake_errors(), unseen:
        fake = _torch.fake_mode()

        def without_value(value: Any) -> Any:
            return _torch.fake_like(fake, value) if isinstance(value, Tensor) else value

        copy = _fake_copy(model, fake)
        args, kwargs = tree_map(without_value, (args, kwargs))
        recorder.known = originals(model)
        recorders, now = iter((recorder,)), [recorder]
        for name, operation in closed.items():  # once: a reading must not change what is read
            _close(copy.get_submodule(name), operation, now)

        def read() -> Trace:
            now[0] = next(recorders, None) or recorder.anew()
            return _recorded(copy, args, kwargs, now[0], fake)

        return read() if again is None else again(copy, read)


def _recorded(
    copy: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recorder: Recorder,
    fake: Any,
) -> Trace:
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        recorder.name_storage(tensor, f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}")
    for index, value in enumerate(args):
        recorder.name_inputs(str(index), value)
    for key, value in kwargs.items():
        recorder.name_inputs(key, value)
    recorder.leave_out(copy)
    memory = {name: _torch.storage_key(param) for name, param in copy.named_parameters()}
    had, buffers = state(copy), dict(copy.named_buffers())
    watched = _torch.before_backwards(recorder.look_at_backward)
    with recorder.watching(copy), fake, recorder, Unfused(recorder), checkpoints_run(), watched:
        copy(*args, **kwargs)
    recorder.keep(
        {cell.label: cell.value for cell in cells(copy) if not same(had.get(cell.key, NEW), view_of(cell.value))}
    )
    now = dict(copy.named_buffers())
    recorder.note_assigned({name: now[name] for name in buffers if name in now and now[name] is not buffers[name]})
    for name, param in copy.named_parameters():
        if memory.get(name) not in (None, _torch.storage_key(param)):
            raise Rewritten(copy, f"gives its parameter {name!r} other data in forward")
    return recorder.trace()


def _close(module: nn.Module, operation: str, now: Sequence[Recorder]) -> None:
    """Let a module be one operation, of its inputs and parameters. now: the recorder that notes it."""
    # The gradients of experts are their own axes' matter; those of other modules are followed.
    params = list(module.parameters()) if operation in (CLOSED, CLOSED_BY_VALUE) else []

    def run(inputs: Any, params: list[Tensor]) -> Tensor:
        first = next((leaf for leaf in _torch.tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
        if first is None or not first.is_floating_point():
            raise NoGuess
        out = first.clone()
        return out.requires_grad_() if any(param.requires_grad for param in params) and not out.requires_grad else out

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = now[0].note(operation, run, ((args, kwargs), params), {})
        out._guessed = True
        return out

    module.__dict__["forward"] = forward


def _fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    made: dict[int, Any] = {}
    for param in model.parameters():
        made[id(param)] = _torch.fake_parameter(mode, param)
        made[id(param)].__dict__.update(param.__dict__)
    for buffer in model.buffers():
        made[id(buffer)] = _torch.fake_like(mode, buffer)
    copy = copied(model, made, {})
    for module in copy.modules():
        # transformers' experts, by a way that loops over no values.
        config = module.__dict__.get("config")
        if config is not None and getattr(config, "_experts_implementation", None) is not None:
            config = copy_of(config)
            config._experts_implementation = "batched_mm"
            module.__dict__["config"] = config
    return copy
