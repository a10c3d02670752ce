import io

import pytest
from rich.console import Console

from meshkit.metrics import Progress

SCALARS = {
    "loss": 3.4125,
    "tokens_per_s": 12_345.6,
    "grad_norm": 1.25,
    "peak_allocated_bytes": 3 * 2**30,
    "peak_reserved_bytes": 3.5 * 2**30,
    "lr": 3e-4,
    "mfu_full": 0.452,
    "left_s": 754.0,
}
WHOLE = "loss 3.413   12.3k tok/s   grad 1.250   3.50 GiB   lr 3.00e-04   MFU 45.2%"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drawn(progress: Progress, width: int) -> list[str]:
    """The frame the display draws at this width, without colours."""
    page = Console(file=io.StringIO(), width=width)
    progress._console = page
    page.print(progress._draw())
    return page.file.getvalue().splitlines()


def lines_of(**options) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(console=Console(file=out), **options), out


@pytest.mark.parametrize(
    "width, numbers",
    [
        (140, WHOLE),
        (100, WHOLE),
        (80, WHOLE),
        (70, WHOLE.removesuffix("   MFU 45.2%")),
        (40, "loss 3.413   12.3k tok/s   grad 1.250"),
        (10, "loss 3.413"),
    ],
)
def test_the_frame_is_two_lines_at_every_width_and_drops_whole_numbers(width, numbers):
    progress = Progress(total_steps=2000, enabled=False)
    progress._step, progress._scalars = 120, SCALARS
    frame = drawn(progress, width)
    assert len(frame) == 2
    assert all(len(line) <= width for line in frame)
    assert frame[1].rstrip() == numbers
    if width >= 40:
        assert frame[0].startswith("step  120/2000  ") and frame[0].rstrip().endswith("12:34 left")


def test_a_terminal_shows_the_last_step_and_what_was_printed_meanwhile():
    out = io.StringIO()
    console = Console(file=out, width=80, height=20, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    with Progress(total_steps=50, console=console, clock=Clock()) as progress:
        for step in range(1, 51):
            progress.update(step, {**SCALARS, "loss": float(step)})
        console.print("validated")
    text = out.getvalue()
    assert "validated" in text
    assert "step 50/50" in text and "loss 50.000" in text
    assert "step 25/50" not in text  # the clock stands still, and frames are limited in time


def test_a_log_file_gets_the_first_step_the_last_and_every_nth_between():
    progress, out = lines_of(total_steps=10, every_steps=4)
    with progress:
        for step in range(1, 11):
            progress.update(step, {"loss": float(step)})
        assert "step 10/10" in out.getvalue()  # at once, not when the block ends
    assert out.getvalue().splitlines() == [
        "step 1/10  loss 1.000",
        "step 5/10  loss 5.000",
        "step 9/10  loss 9.000",
        "step 10/10  loss 10.000",
    ]


def test_a_log_file_gets_a_line_every_so_many_seconds():
    clock = Clock()
    progress, out = lines_of(total_steps=100, every_s=10, clock=clock)
    with progress:
        for step in range(1, 8):
            progress.update(step, {"loss": float(step)})
            clock.now_s += 4
    # At 0, 12 and 24 s, and the last that was seen although the run stopped early.
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/100", "4/100", "7/100"]


def test_a_run_that_stops_early_still_prints_its_last_step_once():
    progress, out = lines_of(total_steps=100, every_steps=10)
    with progress:
        for step in range(1, 14):
            progress.update(step, {})
    assert out.getvalue().split() == ["step", "1/100", "step", "11/100", "step", "13/100"]


def test_a_log_line_is_whole_however_narrow_the_console():
    out = io.StringIO()
    with Progress(total_steps=2000, console=Console(file=out, width=20)) as progress:
        progress.update(120, SCALARS)
    assert out.getvalue() == (
        "step 120/2000  loss 3.413  12.3k tok/s  grad 1.250  3.50 GiB  lr 3.00e-04  MFU 45.2%  12:34 left\n"
    )


def test_ranks_that_are_not_enabled_show_nothing():
    progress, out = lines_of(total_steps=10, enabled=False)
    with progress:
        progress.update(1, SCALARS)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    "scalars, shown",
    [
        ({"loss": float("nan")}, "loss nan"),
        ({"loss": 123456.0}, "loss 1.23e+05"),
        ({"tokens_per_s": 870.4}, "870 tok/s"),
        ({"tokens_per_s": 999.7}, "1.00k tok/s"),
        ({"tokens_per_s": 99_960.0}, "100k tok/s"),
        ({"tokens_per_s": 1.234e6}, "1.23M tok/s"),
        ({"tokens_per_s": 5e13}, "50000G tok/s"),
        ({"peak_rss_bytes": 2**29}, "0.50 GiB"),
        ({"left_s": 59.6}, "1:00 left"),
        ({"left_s": 3 * 3600 + 62}, "3:01:02 left"),
        ({"left_s": 2 * 86400 + 3 * 3600 + 25 * 60}, "2d 03:25 left"),
    ],
)
def test_a_number_is_shown_in_few_characters(scalars, shown):
    progress, out = lines_of(total_steps=10)
    with progress:
        progress.update(1, scalars)
    assert out.getvalue() == f"step 1/10  {shown}\n"
