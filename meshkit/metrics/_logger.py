"""Logger: scalars of a run to TensorBoard, a JSONL file and sinks of the user (Weights & Biases, a progress bar)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from einops import rearrange, repeat
from torch import Tensor

from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.errors import MeshkitError, StepError
from meshkit.moe.aux_loss import balance

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LogSink = Callable[[int, dict[str, float]], None]


class Logger:
    """Writes scalars of a step to `folder/metrics.jsonl`, to TensorBoard under `folder/tensorboard`, and to `also`.

    start_step: the step the run continues after. Lines and TensorBoard points of later steps, which an interrupted run
    left behind, are dropped, so that no step appears twice. A JSONL line survives a kill once `log` has returned; a
    value that is not finite is null there. enabled: False on all ranks but one; then nothing is opened or called.

    Raises: MeshkitError when tensorboard is asked for and not installed, and for a JSONL file with other content.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        start_step: int = 0,
        enabled: bool = True,
        jsonl: bool = True,
        tensorboard: bool = True,
        also: Sequence[LogSink] = (),
    ) -> None:
        self._enabled = enabled
        self._also = tuple(also)
        self._file = self._board = None
        if not enabled:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if jsonl:
            # Before the file is opened to append: it is replaced by another inode.
            _drop_lines_after(path, start_step)
        if tensorboard:
            self._board = _open_tensorboard(folder / "tensorboard", start_step)
        if jsonl:
            self._file = path.open("a", encoding="utf-8", buffering=1)  # line buffered: a killed run keeps its lines

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one line for this step. Values are numbers or tensors of one element."""
        if not self._enabled:
            return
        values = {name: float(value) for name, value in scalars.items()}
        if "step" in values:
            raise MeshkitError("A scalar cannot be named 'step': that is the number of the line. Choose another name.")
        if self._file is not None:
            # JSON has no NaN: Python would write one that other readers refuse.
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            with telling_of_a_full_disk(StepError, f"writing {self._file.name}", Path(self._file.name).parent):
                self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        for sink in self._also:
            sink(step, values)

    def go_back(self, step: int) -> None:
        """The run goes on from an earlier step: lines and points of later ones are dropped, as when it resumes there."""
        if self._file is not None:
            path = Path(self._file.name)
            self._file.close()
            _drop_lines_after(path, step)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        if self._board is not None:
            folder = Path(self._board.log_dir)
            self._board.close()
            self._board = _open_tensorboard(folder, step)

    def image(self, step: int, name: str, image_CHW: Tensor) -> None:
        """Add a picture to TensorBoard, uint8 [3, H, W]; the other places of scalars have none for it."""
        if self._board is not None:
            self._board.add_image(name, image_CHW, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text to TensorBoard, which reads it as Markdown; the other places of scalars have none for it."""
        if self._board is not None:
            self._board.add_text(name, text, step)

    def close(self) -> None:
        """Flush and close the files. Leaving the `with` block calls it."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_tensorboard(folder: Path, start_step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MeshkitError(
            f"tensorboard=True needs the package tensorboard, which cannot be imported ({error}). "
            "Install it with: pip install 'meshkit[recipes]', or pass tensorboard=False."
        ) from error
    # purge_step hides, for the reader, what earlier event files hold from that step on.
    return SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=10)


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`. The last line may be torn by a kill in the middle of a write, and then goes too."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept_lines = []
    for number, line in enumerate(lines, start=1):
        try:
            row: Any = json.loads(line)
            if row["step"] <= step and line.endswith("\n"):
                kept_lines.append(line)
        except (ValueError, TypeError, KeyError):
            if number < len(lines) or line.endswith("\n"):
                raise MeshkitError(
                    f"{path}, line {number}: {line.strip()[:80]!r} is not a JSON object with a step. "
                    "Move the file away, or log into another folder."
                ) from None
    # A new file takes the old one's place in one move, so that a kill here loses no line.
    partial = path.with_suffix(".part")
    partial.write_text("".join(kept_lines), encoding="utf-8")
    partial.replace(path)


# Samples of what a model wrote, on the screen and in TensorBoard.


def show_samples(
    step: int, names: Sequence[str], rows: Sequence[Sequence[str]], logger: Logger, *, most: int = 8
) -> None:
    """Print a table of at most `most` of the rows, evenly chosen. Call it on the main rank."""
    from rich.console import Console  # here, so that importing the package stays light
    from rich.table import Table
    from rich.text import Text

    shown = rows[:: max(1, len(rows) // most)][:most]
    table = Table(*names, title=f"step {step}", title_justify="left")
    for row in shown:
        table.add_row(*map(Text, row))
    Console().print(table)
    # Markdown, which is what TensorBoard renders; backticks keep signs of the samples from being read as marks.
    lines = [names, ["---"] * len(names), *([f"`{cell}`" for cell in row] for row in shown)]
    logger.text(step, "samples", "\n".join("|".join(("", *line, "")) for line in lines))


# Load balancing of experts: how evenly they are used in a step, as numbers and as a picture.
#
# Dims: L routers (layers), E experts.

CELL_PX = 12
WHITE, RED, BLUE = (1.0, 1.0, 1.0), (0.80, 0.15, 0.10), (0.10, 0.30, 0.70)


def load_scalars(counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars of the tokens per expert, by router; see `meshkit.moe.aux_loss.balance`.

    The load of the fullest expert over the mean, and the entropy, are means over the layers; `_worst_layer` is the layer
    with the fullest, and `load_by_layer` has each. Unused experts are those of all layers together.
    """
    if not counts:
        return {}
    rows = torch.stack(
        [torch.stack([value.float() for value in balance(tokens_per_expert)]) for tokens_per_expert in counts.values()]
    )
    fullest, entropy, unused = rows.unbind(1)
    summary = torch.stack([fullest.mean(), fullest.max(), entropy.mean(), unused.sum()])
    # Statistics stay on the device up to here: two transfers in all and not one for each layer.
    *values, by_layer = *summary.tolist(), fullest.tolist()
    names = ("max_over_mean", "max_over_mean_worst_layer", "entropy", "unused_experts")
    out = {f"load/{name}": value for name, value in zip(names, values, strict=True)}
    return out | {f"load_by_layer/{name}": value for name, value in zip(counts, by_layer, strict=True)}


def load_picture(counts: Mapping[str, Tensor]) -> Tensor:
    """Layers from top to bottom, experts from left to right: uint8 [3, H, W].

    White is the mean of the layer, blue less down to nothing, red more up to twice the mean and beyond.
    """
    counts_LE = torch.stack(list(counts.values())).float().cpu()
    away_LE1 = rearrange((counts_LE / counts_LE.mean(1, keepdim=True) - 1).clamp(-1, 1), "l e -> l e 1")
    white, red, blue = (torch.tensor(colour) for colour in (WHITE, RED, BLUE))
    pixels_LE3 = white + away_LE1.clamp(min=0) * (red - white) + away_LE1.clamp(max=0) * (white - blue)
    bytes_LE3 = (255 * pixels_LE3).round().to(torch.uint8)
    return repeat(bytes_LE3, "l e rgb -> rgb (l height) (e width)", height=CELL_PX, width=CELL_PX)
