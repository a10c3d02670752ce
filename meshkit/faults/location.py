"""Where a process is in its training, read from a stack when somebody asks: next to nothing is written down on the way.

What no stack says is: the number of the step, the block whose backward runs, which has no Python frame of its own, and that
a thread waits for other ranks, which it says by `meshkit.core.waiting`.
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

from torch import Tensor, nn

from meshkit.core._torch import tree_leaves
from meshkit.core.waiting import waits_of

Frame = tuple[FrameType, int]  # and the line it is at
_EVERYWHERE = ("core", "step")  # parts that others call
_BACKWARD = "_engine_run_backward"  # torch's function around a backward pass
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass
class _Now:
    step: int | None = None  # under way: one more than those that are done
    backward: str = ""  # the block whose backward began last


_now = _Now()


@dataclass(frozen=True, kw_only=True)
class Location:
    """text: step, direction, module, part of meshkit, what is waited for, line. waits: for other ranks."""

    text: str
    waits: bool


def begin_step(step: int) -> None:
    """This process is in that step from now on. `Meter` calls it."""
    _now.step, _now.backward = step, ""


def register_modules(model: nn.Module, blocks: Iterable[str]) -> None:
    """Let places name the modules of the model, and the blocks in backward. `parallelize` calls it."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        _names[module] = name or "the model"
    for name in blocks:
        _follow_backward(modules[name], name)


def _follow_backward(block: nn.Module, name: str) -> None:
    def begins(grad: Tensor) -> None:
        _now.backward = name

    # On the output's tensor and not a module hook: those of backward wrap inputs and outputs in nodes of their own.
    def after(module: nn.Module, args: Any, out: Any) -> None:
        hidden = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
        if hidden is not None:
            hidden.register_hook(begins)

    block.register_forward_hook(after)


def location_now() -> Location:
    """Of this process's main thread. From any thread."""
    main = threading.main_thread().ident or 0
    waits = waits_of(main)
    frame = sys._current_frames().get(main)
    frames: list[Frame] = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    if waits is None and any(frame.f_code.co_name == _BACKWARD for frame, _ in frames):
        waits = _wait_of_backward()
    return _place(frames[::-1], waits)


def _wait_of_backward() -> str | None:
    """What a thread of autograd's own waits for.

    The main thread runs backward of CPU tensors itself, and sleeps in C++ while autograd's thread of each CUDA device runs
    theirs. Those were not started by Python: all others, as the one that writes checkpoints, wait for things of their own.
    """
    started = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    others = [waits_of(thread) for thread in sys._current_frames() if thread not in started]
    return next((waits for waits in others if waits is not None), None)


def location_of(error: BaseException) -> Location:
    """Where it was raised."""
    return _place(list(_frames_of(error.__traceback__)), None)


def _frames_of(trace: TracebackType | None) -> Iterator[Frame]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _place(frames: list[Frame], waits: str | None) -> Location:
    """frames: the outermost first. waits: what for, by its mark."""
    module = part = line = ""
    backward = in_torch = False
    for frame, number in frames:
        owner = str(frame.f_globals.get("__name__", ""))
        if owner == waits_of.__module__:
            continue
        code = frame.f_code
        if code.co_name == "_call_impl":  # locals of this frame alone: reading them keeps them alive
            found = frame.f_locals.get("self")
            module = _names.get(found, module) if isinstance(found, nn.Module) else module
        if code.co_name == _BACKWARD:
            backward, module = True, _now.backward
        part = _part(owner, part)
        if not owner.startswith("torch.") and not _is_library(code.co_filename):
            line = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
        # Not our code to mark: FSDP's own waits, synchronous collectives and stores. The innermost frame that is not of
        # another part of torch tells.
        if not owner.startswith("torch.") or owner.startswith("torch.distributed."):
            in_torch = owner.startswith("torch.distributed.")
    step = "before the first step" if _now.step is None else f"step {_now.step}"
    way = "backward" if backward else "forward" if module else ""
    what = [step, f"{way} of {module}" if module else way, part, f"waits for {waits}" if waits else "", line]
    return Location(text=", ".join(text for text in what if text), waits=in_torch or waits is not None)


def _part(owner: str, before: str) -> str:
    """The part of meshkit that a frame of this module belongs to; what is called from everywhere leaves the one before."""
    if owner.startswith("torch.distributed.fsdp"):
        return "parallel.data"
    if not owner.startswith("meshkit.") or owner.startswith(("meshkit.faults", "meshkit.models")):
        return before
    name = owner.removeprefix("meshkit.")
    if name.split(".")[0] in _EVERYWHERE:
        return before or name
    return ".".join(word for word in name.split(".") if not word.startswith("_"))


def _is_library(file: str) -> bool:
    return "site-packages" in file or file.startswith((_STANDARD_LIBRARY, "<"))
