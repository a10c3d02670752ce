"""A schedule comes back from a file as it went in, and torch's tables can be read."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import OPS, Row, Schedule, check, read_csv, write_csv
from meshkit.parallel.pipeline.schedules import NAMES, dualpipe_v, interleaved, named, one_f_one_b

torch_schedules: Any = torch.distributed.pipelining.schedules
draws = settings(max_examples=50, deadline=None)  # a busy machine
NUMBER = st.integers(0, 99)


@st.composite
def any_table(draw: st.DrawFn) -> Schedule:
    """Also tables that no checker would pass: a file is read before it is checked."""
    world = draw(st.integers(1, 4))

    def row(rank: int) -> Row:
        op = draw(st.sampled_from(OPS))
        backward = (draw(NUMBER), draw(NUMBER)) if op == "FB" else ()
        return Row(rank, draw(NUMBER), op, draw(NUMBER), *backward)

    ranks = tuple(tuple(row(rank) for _ in range(draw(st.integers(0, 4)))) for rank in range(world))
    placement = tuple(draw(st.lists(NUMBER, min_size=1, max_size=5)))
    name = draw(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8))
    return Schedule(name, draw(st.integers(1, 99)), placement, ranks)


def there_and_back(schedule: Schedule) -> Schedule:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write_csv(schedule, path)
        return read_csv(path)


@draws
@given(schedule=any_table())
@example(schedule=Schedule("\r", 1, (0,), ((),)))
def test_any_table_comes_back_equal(schedule: Schedule) -> None:
    assert there_and_back(schedule) == schedule


@pytest.mark.parametrize("name", NAMES)
def test_generated_tables_come_back_equal(name: str) -> None:
    schedule = named(name)(3, 5)
    assert there_and_back(schedule) == schedule


def test_the_file(tmp_path: Path) -> None:
    write_csv(dualpipe_v(1, 2), tmp_path / "schedule.csv")
    assert (tmp_path / "schedule.csv").read_text() == (
        "meshkit schedule,dualpipe-v\n"
        "microbatches,2\n"
        "placement,0,0\n"
        "ranks,1\n"
        "rank,stage,op,microbatch,backward_stage,backward_microbatch\n"
        "0,0,F,0,,\n"
        "0,1,F,0,,\n"
        "0,0,F,1,,\n"
        "0,1,B,0,,\n"
        "0,1,FB,1,0,0\n"
        "0,1,B,1,,\n"
        "0,0,I,1,,\n"
        "0,0,W,1,,\n"
    )


# -------------------------------------------------------------------------------------------------------------- torch


def test_a_file_that_torch_wrote(tmp_path: Path) -> None:
    """Interleaved 1F1B, with the empty cells torch's tables have."""
    self = SimpleNamespace(n_local_stages=2, microbatches_per_round=2, pp_group_size=2, _n_microbatches=4)
    order = {
        rank: torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(self, rank) for rank in range(2)
    }
    path = tmp_path / "torch.csv"
    torch_schedules.PipelineScheduleMulti._dump_csv(SimpleNamespace(pipeline_order=order), path)
    schedule = read_csv(path)
    assert (schedule.name, schedule.placement, schedule.microbatches) == ("torch", (0, 1, 0, 1), 4)
    assert schedule.ranks == interleaved(2, 4).ranks
    assert check(schedule).schedule == schedule


def test_overlapped_actions_of_torch(tmp_path: Path) -> None:
    self = SimpleNamespace(pp_group_size=2, _n_microbatches=6, num_stages=4)
    path = tmp_path / "dualpipe.csv"
    with path.open("w", newline="") as file:
        for rank in range(2):
            csv.writer(file).writerow(torch_schedules.ScheduleDualPipeV._calculate_single_rank_operations(self, rank))
    schedule = read_csv(path)
    assert any(row.op == "FB" for row in schedule.rows())
    assert (schedule.placement, schedule.ranks) == ((0, 1, 1, 0), dualpipe_v(2, 6).ranks)


def test_actions_that_follow_from_the_table_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "comms.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0, 1F0 ,1B0,1SEND_B0,1WAIT_SEND_B0,1WAIT_REDUCE_GRAD\n\n"
    )
    assert read_csv(path).ranks == one_f_one_b(2, 1).ranks


# ------------------------------------------------------------------------------------------------------------- errors

HEAD = "meshkit schedule,x\nmicrobatches,1\nplacement,0\nranks,1\n"
COLUMNS = "rank,stage,op,microbatch,backward_stage,backward_microbatch\n"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (HEAD + COLUMNS + "0,0,F,0,,\n0,0,X,0,,\n", 7, "op 'X'. The ops are F, B, I, W, FB."),
        (HEAD + COLUMNS + "0,0,F,-1,,\n", 6, "'-1' is not a whole number from 0 up. Correct it."),
        (HEAD + COLUMNS + "0,0,FB,1,,0\n", 6, "'' is not a whole number from 0 up. Correct it."),
        (HEAD + COLUMNS + "0,0,F\n", 6, "3 cells, but there are 6 columns. The columns are rank,stage,op,microbatch,"),
        (HEAD + COLUMNS + "0,0,F,0,1,1\n", 6, "F has a backward_stage or backward_microbatch. Only FB has."),
        (HEAD + COLUMNS + "2,0,F,0,,\n", 6, "rank 2, but ranks says 1. Change one of them."),
        (HEAD, 4, "there is no line rank,stage,op,microbatch,backward_stage,backward_microbatch. Put it before"),
        (
            HEAD.replace("ranks,1\n", "") + COLUMNS,
            1,
            "there is no line that starts with ranks. Put it before the rows.",
        ),
        (HEAD.replace("placement,0", "placement") + COLUMNS, 3, "there is no number. Add it."),
        ("0F0,0B0\n0F1,0B1\n", 2, "0F1 is of stage 0, which line 1 puts on rank 0. Keep all actions of a stage on one"),
        ("0F0,0Q0\n", 1, "'0Q0' is no action. Write stage, op and microbatch: 0F0, 1I2, 1W2 or 1B2."),
        ("0F0,0B0\n2F0,2B0\n", 2, "there is no action of stage 1, but of 2. Add its line."),
        ("", 1, "there is no action in the file. It starts with meshkit schedule, or has actions such as 0F0,1B2."),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(PlanError) as refused:
        read_csv(path)
    assert str(refused.value).startswith(f"{path}:{line}: {problem}")


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"0F0,\xff\n")
    with pytest.raises(PlanError, match=r"bad\.csv:1: this is not CSV: .*\. Save it as CSV in UTF-8\."):
        read_csv(path)
