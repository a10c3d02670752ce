"""Progress bar of a run: a bar and a line of numbers on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_SECONDS_BETWEEN_FRAMES = 0.1


class Progress:
    """Shows step, time left, loss, tokens/s, gradient norm, memory and learning rate, as far as they are known.

    On a terminal it redraws two lines in place, cut to the window; prints meanwhile appear above them. Anywhere else it
    prints a plain line for the first step, the last, and every `every_steps` steps or, without it, `every_s` seconds.
    `update` is a sink for `Logger(also=[progress.update])`; the names it knows are those of `Reading.scalars()`, loss,
    grad_norm and lr. Use it as a context manager. enabled: False shows nothing.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int = 0,
        enabled: bool = True,
        every_steps: int | None = None,
        every_s: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._step = start_step
        self._enabled = enabled
        self._every_steps = every_steps
        self._every_s = every_s
        self._console = console
        self._clock = clock
        self._scalars: dict[str, float] = {}
        self._live: Live | None = None
        self._shown: tuple[int, float] | None = None  # step and time of the last frame or line

    def __enter__(self) -> Self:
        if self._enabled:
            from rich.console import Console
            from rich.live import Live

            self._console = self._console or Console()
            if self._console.is_terminal and not self._console.is_dumb_terminal:
                # No refresh thread: it would compete with training, and only update() has news.
                self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()  # draws the last frame
            self._live = None
        elif self._shown is not None and self._shown[0] != self._step:
            self._print()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the step. Names that are missing keep the value they had."""
        if not self._enabled:
            return
        self._step = step
        self._scalars.update(scalars)
        if not self._due(step):
            return
        self._shown = step, self._clock()
        if self._live is not None:
            self._live.refresh()
        else:
            self._print()

    def _due(self, step: int) -> bool:
        if self._shown is None or step >= self._total_steps:
            return True
        shown_step, shown_s = self._shown
        if self._live is None and self._every_steps is not None:
            return step - shown_step >= self._every_steps
        # By time, since a redraw of the terminal costs more than a fast step.
        return self._clock() - shown_s >= (self._every_s if self._live is None else _SECONDS_BETWEEN_FRAMES)

    def _print(self) -> None:
        cells = [f"step {self._step}/{self._total_steps}", *("".join(cell).strip() for cell in _cells(self._scalars))]
        if "left_s" in self._scalars:
            cells.append(f"{_clock_time(self._scalars['left_s'])} left")
        # Not Console.print, which wraps: a log has no width.
        print(*cells, sep="  ", file=self._console.file if self._console else None, flush=True)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        assert self._console is not None
        width = self._console.width
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        left = f"{_clock_time(self._scalars['left_s'])} left" if "left_s" in self._scalars else ""
        bar.add_row(
            Text(f"step {self._step:>{len(str(self._total_steps))}}/{self._total_steps}"),
            ProgressBar(total=self._total_steps, completed=self._step),
            Text(left, style="cyan"),
        )
        numbers = Text(no_wrap=True, overflow="ellipsis")
        for before, value, after in _cells(self._scalars):
            cell = Text.assemble((before, "dim"), (value, "bold"), (after, "dim"))
            if numbers and len(numbers) + 3 + len(cell) > width:
                break  # cells come in order of importance; those that do not fit are left out whole
            numbers.append("   " if numbers else "").append_text(cell)
        return Group(bar, numbers)


def _cells(scalars: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(label, value, unit) of each number that is known, the most important first, in widths that rarely change."""
    memory = scalars.get("peak_reserved_bytes", scalars.get("peak_rss_bytes"))
    cells = (
        ("loss ", "loss", _number, ""),
        ("", "tokens_per_s", _count, " tok/s"),
        ("grad ", "grad_norm", _number, ""),
        ("lr ", "lr", "{:.2e}".format, ""),
        ("MFU ", "mfu_full", "{:.1%}".format, ""),
    )
    shown_cells = [(before, show(scalars[name]), after) for before, name, show, after in cells if name in scalars]
    if memory is not None:
        shown_cells.insert(min(3, len(shown_cells)), ("", f"{memory / 2**30:.2f}", " GiB"))
    return shown_cells


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.2e}"


def _count(value: float) -> str:
    """Three digits and a unit, so that the numbers after it stay in place: 870, 12.3k, 1.23M."""
    units = ["", "k", "M", "G"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    decimals = 0 if units[0] == "" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}{units[0]}".rjust(5)


def _clock_time(seconds: float) -> str:
    """1:02, 12:34, 3:25:45, 2d 03:25."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
