"""Who asks: the lines of meshkit, or of the user, in which an operator or a collective is called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_ROOT, TORCH = f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/"
_PASS_ON = ("core/_torch/", "core/custom_op.py", "core/to_device.py", "mesh/host.py", "preflight/")
_NOT_A_PLACE = tuple(f"{_ROOT}{path}" for path in _PASS_ON)
_LINES = 3  # who asks, and for whom


def where() -> str:
    """The innermost lines of meshkit's own, after that of another's code which these call; else one of the user's."""
    frame: FrameType | None = sys._getframe(1)
    own, of_user, innermost = list[str](), "", False
    while frame is not None and len(own) < _LINES:
        path, line = frame.f_code.co_filename, frame.f_lineno
        passes_on = frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__")
        if not passes_on and path.startswith(_ROOT) and not path.startswith(_NOT_A_PLACE):
            own.append(f"{path.removeprefix(_ROOT)}:{line}")
        if not of_user and not path.startswith((_ROOT, TORCH)) and "contextlib" not in path:
            of_user, innermost = f"{path.rpartition('/')[2]}:{line}", not own
        frame = frame.f_back
    return " < ".join(([of_user] if innermost else []) + own) or of_user
