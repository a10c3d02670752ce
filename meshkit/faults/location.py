"""Location of a process in its training (step, direction, module, line), read from its stack when someone asks.

Three facts are in no stack and are recorded: the number of the step; the block whose backward runs, since it has no Python
frame of its own; and that a thread waits for other ranks, which it marks by `meshkit.core.waiting`.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core._torch import tree_leaves
from meshkit.core.calls import ring
from meshkit.core.waiting import waits_of

Frame = tuple[FrameType, int]  # and the line it is at
_CALLED_FROM_EVERYWHERE = ("core", "step")  # parts that others call
_BACKWARD = "_engine_run_backward"  # torch's function around a backward pass
_RECORDS = (waits_of.__module__, _torch.record_calls.__module__)  # they stand around what they mark and record
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_module_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass
class _Now:
    step: int | None = None  # under way: one more than those that are done
    backward: str = ""  # the block whose backward began last


_now = _Now()


@dataclass(frozen=True, kw_only=True)
class Location:
    """text: step, direction, module, room of meshkit, what it waits for, line. waits: whether it waits for other ranks."""

    text: str
    waits: bool


def begin_step(step: int) -> None:
    """Record the number of the step that begins. `Meter` calls it."""
    _now.step, _now.backward = step, ""
    ring.step = step


def register_modules(model: nn.Module, blocks: Iterable[str]) -> None:
    """Let locations name the modules of the model, and the block in backward. `parallelize` calls it."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        _module_names[module] = name or "the model"
    for name in blocks:
        _follow_backward(modules[name], name)


def _follow_backward(block: nn.Module, name: str) -> None:
    def begins(grad: Tensor) -> None:
        _now.backward = name

    # A hook on the output tensor, not a module hook: full backward hooks wrap inputs and outputs in autograd nodes, which
    # would change the graph that recompute and FSDP see.
    def after(module: nn.Module, args: Any, out: Any) -> None:
        if not torch.is_grad_enabled():  # generation comes by once for every token
            return
        hidden = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
        if hidden is not None:
            hidden.register_hook(begins)

    block.register_forward_hook(after)


def location_now() -> Location:
    """The location of the main thread. Any thread may call it."""
    main = threading.main_thread().ident or 0
    waits = waits_of(main)
    frame = sys._current_frames().get(main)
    frames: list[Frame] = []
    while frame is not None:
        frames.append((frame, frame.f_lineno or frame.f_code.co_firstlineno))  # between two lines it is in none
        frame = frame.f_back
    if waits is None and any(frame.f_code.co_name == _BACKWARD for frame, _ in frames):
        waits = _wait_of_backward()
    return _location_at(frames[::-1], waits)


def _wait_of_backward() -> str | None:
    """What autograd's own threads wait for, if anything."""
    # The main thread runs backward of CPU tensors itself, and sleeps in C++ while autograd's thread of each CUDA device runs
    # the rest. Python did not start those threads. All other threads (one writes checkpoints) wait for reasons of their own.
    started = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    autograd_waits = [waits_of(thread) for thread in sys._current_frames() if thread not in started]
    return next((waits for waits in autograd_waits if waits is not None), None)


def location_of(error: BaseException) -> Location:
    """The location at which an error was raised."""
    return _location_at(list(_frames_of(error.__traceback__)), None)


def _frames_of(trace: TracebackType | None) -> Iterator[Frame]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _location_at(frames: list[Frame], waits: str | None) -> Location:
    """The location of a stack. frames: the outermost first. waits: what the thread marked that it waits for."""
    module = room = line = ""
    backward = in_torch = False
    for frame, number in frames:
        owner = str(frame.f_globals.get("__name__", ""))
        if owner in _RECORDS:
            continue
        code = frame.f_code
        if code.co_name == "_call_impl":  # only here: f_locals keeps the locals it copies alive
            module_of_frame = frame.f_locals.get("self")
            module = _module_names.get(module_of_frame, module) if isinstance(module_of_frame, nn.Module) else module
        if code.co_name == _BACKWARD:
            backward, module = True, _now.backward
        room = _room_of(owner, room)
        if not owner.startswith("torch.") and not _is_library(code.co_filename):
            line = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
        # Waits inside of torch.distributed (FSDP, synchronous collectives, stores) have no mark of ours. A thread waits there
        # if its innermost frame, apart from other parts of torch, is of torch.distributed.
        if not owner.startswith("torch.") or owner.startswith("torch.distributed."):
            in_torch = owner.startswith("torch.distributed.")
    step = "before the first step" if _now.step is None else f"step {_now.step}"
    direction = "backward" if backward else "forward" if module else ""
    fields = [
        step,
        f"{direction} of {module}" if module else direction,
        room,
        f"waits for {waits}" if waits else "",
        line,
    ]
    return Location(text=", ".join(text for text in fields if text), waits=in_torch or waits is not None)


def _room_of(owner: str, before: str) -> str:
    """The room of meshkit that a frame of this module belongs to. Code that all rooms call leaves the room before."""
    if owner.startswith("torch.distributed.fsdp"):
        return "parallel.data"
    if not owner.startswith("meshkit.") or owner.startswith(("meshkit.faults", "meshkit.models")):
        return before
    name = owner.removeprefix("meshkit.")
    if name.split(".")[0] in _CALLED_FROM_EVERYWHERE:
        return before or name
    return ".".join(word for word in name.split(".") if not word.startswith("_"))


def _is_library(file: str) -> bool:
    return "site-packages" in file or file.startswith((_STANDARD_LIBRARY, "<"))
