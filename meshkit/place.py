"""Where a process is in its training, read from a stack when somebody asks: nothing is written down on the way.

The two exceptions are the number of the step, and the block whose backward runs, which has no Python frame of its own.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Frame = tuple[FrameType, int]  # and the line it is at
_EVERYWHERE = ("_torch", "collectives", "step", "sharding", "whole", "swap", "operator")  # parts that others call
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass
class _Now:
    step: int | None = None  # under way: one more than those that are done
    backward: str = ""  # the block whose backward began last


_now = _Now()


@dataclass(frozen=True, kw_only=True)
class Place:
    """text: step, direction, module, part of meshkit, line. waits: for other ranks, as far as its last line tells."""

    text: str
    waits: bool


def begin_step(step: int) -> None:
    """This process is in that step from now on. `Meter` calls it."""
    _now.step, _now.backward = step, ""


def follow(model: nn.Module, blocks: Iterable[str]) -> None:
    """Let places name the modules of the model, and the blocks in backward. `parallelize` calls it."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        _names[module] = name or "the model"
    for name in blocks:
        _follow_backward(modules[name], name)


def _follow_backward(block: nn.Module, name: str) -> None:
    def begins(grad: Tensor) -> None:
        _now.backward = name

    def after(module: nn.Module, args: Any, out: Any) -> None:
        hidden = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
        if hidden is not None:
            hidden.register_hook(begins)

    block.register_forward_hook(after)


def place_now() -> Place:
    """Of this process's main thread. From any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _place(frames[::-1])


def place_of(error: BaseException) -> Place:
    """Where it was raised."""
    return _place(list(_frames_of(error.__traceback__)))


def _frames_of(trace: TracebackType | None) -> Iterator[Frame]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _place(frames: list[Frame]) -> Place:
    """frames: the outermost first."""
    module = part = line = ""
    backward = waits = False
    for frame, number in frames:
        owner = str(frame.f_globals.get("__name__", ""))
        code = frame.f_code
        if code.co_name == "_call_impl":  # locals of this frame alone: reading them keeps them alive
            found = frame.f_locals.get("self")
            module = _names.get(found, module) if isinstance(found, nn.Module) else module
        if code.co_name == "_engine_run_backward":
            backward, module = True, _now.backward
        part = _part(owner, part)
        if not owner.startswith("torch.") and not _is_library(code.co_filename):
            line = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
        if not owner.startswith("torch.") or owner.startswith("torch.distributed."):
            waits = _waits(owner, linecache.getline(code.co_filename, number))
    step = "before the first step" if _now.step is None else f"step {_now.step}"
    way = "backward" if backward else "forward" if module else ""
    what = [step, f"{way} of {module}" if module else way, part, line]
    return Place(text=", ".join(text for text in what if text), waits=waits)


def _waits(owner: str, line: str) -> bool:
    return owner.startswith(("torch.distributed.", "meshkit._torch")) or "wait(" in line


def _part(owner: str, before: str) -> str:
    """The part of meshkit that a frame of this module belongs to; what is called from everywhere leaves the one before."""
    if owner.startswith("torch.distributed.fsdp"):
        return "parallel.data"
    if not owner.startswith("meshkit.") or owner.startswith(("meshkit.launch", "meshkit.place", "meshkit.models")):
        return before
    name = owner.removeprefix("meshkit.")
    if name in _EVERYWHERE:
        return before or name
    return ".".join(word for word in name.split(".") if not word.startswith("_"))


def _is_library(file: str) -> bool:
    return "site-packages" in file or file.startswith((_STANDARD_LIBRARY, "<"))
