"""Where in the model's code something happens."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parent.parent
# Frames that are no model's code. Our own models are.
_OTHERS = (
    contextlib.__file__,
    str(Path(torch.__file__).parent),
    *(str(_PACKAGE / room) for room in ("program", "core", "parallel", "loss")),
)


def model_line(error: BaseException | None = None) -> str:
    """FILE:LINE of the model's code that is running, or that raised: the innermost line that is not torch's or ours."""
    if error is not None:
        frames, step = [], error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_name != "__torch_function__":
                frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
            step = step.tb_next
        for file, line in reversed(frames):
            if not file.startswith(_OTHERS):
                return f"{Path(file).name}:{line}"
        return "an unknown line"
    frame = sys._getframe(1)
    while frame is not None:
        # A mode that is around stands between the line and torch.
        if frame.f_code.co_name != "__torch_function__" and not frame.f_code.co_filename.startswith(_OTHERS):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"
