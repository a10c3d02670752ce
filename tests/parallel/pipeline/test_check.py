"""Only tables that end pass, and every other one is refused with its bad cell under an arrow."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Row, Schedule, check, output_of, simulate
from meshkit.parallel.pipeline.schedules import NAMES, gpipe, named, one_f_one_b, zb_h1, zbv

draws = settings(max_examples=40, deadline=None)  # a busy machine
QUICK = st.sampled_from([name for name in NAMES if name != "auto"])
SMALL = st.integers(1, 4)


def table(*ranks: str, microbatches: int = 1, placement: tuple[int, ...] | None = None) -> Schedule:
    """Ranks as they are drawn: `table("0F0 0B0")`. Stage s is on rank s, if nothing else is said."""

    def row(rank: int, cell: str) -> Row:
        parts = [re.fullmatch(r"(\d+)(\D)(\d+)", part) for part in cell.split("+")]
        (stage, op, microbatch), *backward = [part.groups() for part in parts if part]
        if backward:
            return Row(rank, int(stage), "FB", int(microbatch), int(backward[0][0]), int(backward[0][2]))
        return Row(rank, int(stage), op, int(microbatch))  # type: ignore[arg-type]

    rows = tuple(tuple(row(rank, cell) for cell in cells.split()) for rank, cells in enumerate(ranks))
    return Schedule("mine", microbatches, placement or tuple(range(len(ranks))), rows)


def refusal(schedule: Schedule) -> str:
    with pytest.raises(PlanError) as refused:
        check(schedule)
    text = str(refused.value)
    assert re.search(r"^ *\^$", text, re.MULTILINE) or "\n" not in text or "placement puts" in text, (
        "an arrow at the cell"
    )
    return text


# ------------------------------------------------------------------------------------------------------ pinned texts


def test_a_refusal_draws_the_table_with_an_arrow_at_the_cell() -> None:
    lines = refusal(table("0F0 0W0 0I0", "1F0 1B0")).splitlines()
    assert lines[0] == "schedule 'mine': cell 1 of rank 0 has 0W0, but 0I0 is not in a cell before it."
    assert lines[-1] == "Put 0I0 before 0W0 on rank 0."
    arrow = next(index for index, line in enumerate(lines) if line.strip() == "^")
    assert lines[arrow - 1].startswith("rank 0")
    assert re.match(r"0?W0", lines[arrow - 1][lines[arrow].index("^") :])


@pytest.mark.parametrize(
    ("schedule", "problem", "change"),
    [
        (
            table("0F0 1F0 0B0", "1F0 1B0"),
            "cell 1 of rank 0, 1F0, is of stage 1, which is on rank 1.",
            "Move it to rank 1, or change placement[1].",
        ),
        (
            table("5F0 0B0", "1F0 1B0"),
            "cell 0 of rank 0, 5F0, is of stage 5, but there are 2.",
            "Stages count from 0 to 1.",
        ),
        (
            table("0F0 0B7", "1F0 1B0"),
            "cell 1 of rank 0, 0B7, is of microbatch 7, but there are 1.",
            "Microbatches count from 0 to 0.",
        ),
        (
            table("0F0 0X0", "1F0 1B0"),
            "cell 1 of rank 0, 0X0, has op 'X'.",
            "The ops are F, B, I, W, FB.",
        ),
        (
            replace(table("0F0 0B0"), ranks=((Row(0, 0, "F", 0), Row(1, 0, "B", 0)),)),
            "cell 1 of rank 0, 0B0, is of rank 1.",
            "Move it to the rows of rank 1.",
        ),
        (
            table("0F0 0F0 0B0", "1F0 1B0"),
            "0F0 is in cell 0 and again in cell 1 of rank 0.",
            "Keep one.",
        ),
        (
            table("0F0 0B0", "1F0 1B0 1B0"),
            "1B0 is in cell 1 and again in cell 2 of rank 1.",
            "Keep one.",
        ),
        (
            table("0F0 0I0 0W0 0B0", "1F0 1B0"),
            "cell 3 of rank 0 has 0B0, but cell 1 has 0I0: two kinds of backward for one microbatch.",
            "Use either B, or I and W.",
        ),
        (
            table("0F0 0B0 0W0", "1F0 1B0"),
            "cell 2 of rank 0 has 0W0, but cell 1 has 0B0: two kinds of backward for one microbatch.",
            "Use either B, or I and W.",
        ),
        (
            table("0F0 0B0", "1B0 1F0"),
            "cell 0 of rank 1 has 1B0, but 1F0 is not in a cell before it.",
            "Put 1F0 before 1B0 on rank 1.",
        ),
        (
            table("0F0+0B0"),
            "cell 0 of rank 0 has 0B0, but 0F0 is not in a cell before it.",
            "Put 0F0 before 0B0 on rank 0.",
        ),
        (
            table("0F0 0B0", ""),
            "rank 1 has no forward of microbatch 0 in stage 1.",
            "Add 1F0, and its backward.",
        ),
        (
            table("0F0 0B0", "1F0"),
            "rank 1 has no backward for 1F0 in cell 0.",
            "Add 1B0, or 1I0 and 1W0.",
        ),
        (
            table("0F0 0I0", "1F0 1B0"),
            "rank 0 has no weight gradient for 0I0 in cell 1.",
            "Add 0W0 after 0I0, or make that 0B0.",
        ),
        (
            table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2),
            "the ranks wait for one another and never end.\n"
            "  rank 0 stops in cell 1, 0B0: it needs 1B0, cell 3 of rank 1\n"
            "  rank 1 stops in cell 0, 1F1: it needs 0F1, cell 2 of rank 0",
            "Move one of the rows that are needed before the row its rank stops in.",
        ),
        (
            table("0F0 0F1+0B0 0B1", "1F0 1F1+1B0 1B1", microbatches=2),
            "the ranks wait for one another and never end.\n"
            "  rank 0 stops in cell 1, 0F1+0B0: it needs 1B0, cell 1 of rank 1\n"
            "  rank 1 stops in cell 1, 1F1+1B0: it needs 0F1, cell 1 of rank 0",
            "Move one of the rows that are needed before the row its rank stops in.",
        ),
        (
            table("1F0 0F0 1B0 0B0", placement=(0, 0)),
            "the ranks wait for one another and never end.\n"
            "  rank 0 stops in cell 0, 1F0: it needs 0F0, cell 1 of rank 0",
            "Move one of the rows that are needed before the row its rank stops in.",
        ),
    ],
)
def test_what_is_wrong_and_what_to_change(schedule: Schedule, problem: str, change: str) -> None:
    text = refusal(schedule)
    assert text.startswith(f"schedule 'mine': {problem}\ncell ")
    assert text.endswith(f"\n{change}")
    assert text.count("^") == 1


def test_shapes_without_a_table_to_draw() -> None:
    assert refusal(table("0F0 0B0", placement=(3,))) == (
        "schedule 'mine': placement puts stage 0 on rank 3, but the table has 1 ranks.\n"
        "Give the table a line for every rank of placement."
    )
    assert refusal(table("0F0 0B0", microbatches=0)) == (
        "schedule 'mine' has 1 stages and 0 microbatches; it needs at least one of each."
    )


# -------------------------------------------------------------------------------------------------------------- laws


@draws
@given(data=st.data(), name=QUICK, ranks=SMALL, microbatches=SMALL)
def test_a_table_without_any_one_of_its_rows_is_refused(
    data: st.DataObject, name: str, ranks: int, microbatches: int
) -> None:
    schedule = named(name)(ranks, microbatches)
    row = data.draw(st.sampled_from(list(schedule.rows())))
    without = replace(schedule, ranks=tuple(tuple(other for other in rank if other != row) for rank in schedule.ranks))
    assert refusal(without).startswith(f"schedule {schedule.name!r}: ")


@draws
@given(data=st.data(), name=QUICK, ranks=SMALL, microbatches=SMALL)
def test_a_table_with_any_row_twice_is_refused(data: st.DataObject, name: str, ranks: int, microbatches: int) -> None:
    schedule = named(name)(ranks, microbatches)
    row = data.draw(st.sampled_from(list(schedule.rows())))
    at = data.draw(st.integers(0, len(schedule.ranks[row.rank])))
    lines = [list(rank) for rank in schedule.ranks]
    lines[row.rank].insert(at, row)
    assert refusal(replace(schedule, ranks=tuple(map(tuple, lines)))).startswith(f"schedule {schedule.name!r}: ")


@settings(draws, max_examples=150)
@given(seed=st.integers(0, 2**32), name=QUICK, ranks=SMALL, microbatches=SMALL, exchanges=st.integers(1, 4))
def test_a_shuffled_table_passes_if_and_only_if_it_ends(
    seed: int, name: str, ranks: int, microbatches: int, exchanges: int
) -> None:
    """The oracle fires any row that has all it needs, from any rank, until none has: no order inside the search matters."""
    schedule = named(name)(ranks, microbatches)
    rng = random.Random(seed)
    lines = [list(rank) for rank in schedule.ranks]
    for _ in range(exchanges):
        line = rng.choice(lines)
        first, second = rng.randrange(len(line)), rng.randrange(len(line))
        line[first], line[second] = line[second], line[first]
    shuffled = replace(schedule, ranks=tuple(map(tuple, lines)))
    done: set[tuple[str, int, int]] = set()
    left = [list(line) for line in lines]

    def ready(row: Row) -> bool:
        for op, stage, microbatch in row.tasks:
            if op == "F" and stage and ("F", stage - 1, microbatch) not in done:
                return False
            if op in "BI":
                gradient = stage + 1 == schedule.stages or ("I", stage + 1, microbatch) in done
                if not gradient or ("F", stage, microbatch) not in done:
                    return False
            if op == "W" and ("I", stage, microbatch) not in done:
                return False
        return True

    while fired := [line for line in left if line and ready(line[0])]:
        for op, stage, microbatch in rng.choice(fired).pop(0).tasks:
            done.add(("I" if op == "B" else op, stage, microbatch))
    if any(left):
        refusal(shuffled)
    else:
        assert check(shuffled).schedule == shuffled
        assert simulate(shuffled).makespan_s > 0


@draws
@given(name=QUICK, ranks=SMALL, microbatches=SMALL)
def test_every_message_is_sent_and_received_once_by_neighbouring_stages(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = named(name)(ranks, microbatches)
    checked = check(schedule)
    hops = sum(first != second for first, second in zip(schedule.placement, schedule.placement[1:], strict=False))
    sends, receives = list(chain(*checked.sends)), list(chain(*checked.receives))
    assert len(sends) == len(set(sends)) == 2 * microbatches * hops
    assert sorted(sends) == sorted(receives)
    for message in sends:
        stage = message.output.stage + (1 if message.output.op == "F" else -1)
        assert message.output in map(output_of, schedule.ranks[message.source][message.sent_by].tasks)
        needing = schedule.ranks[message.target][message.needed_by].tasks
        assert any(task.stage == stage and task.microbatch == message.output.microbatch for task in needing)
        assert (message.source, message.target) == (schedule.placement[message.output.stage], schedule.placement[stage])
    for rank in range(ranks):
        assert [message.sent_by for message in checked.sends[rank]] == sorted(m.sent_by for m in checked.sends[rank])
        needs = [message.needed_by for message in checked.receives[rank]]
        assert needs == sorted(needs)


def test_sends_that_wait_for_the_receiver() -> None:
    assert check(gpipe(4, 8)).rendezvous
    assert check(one_f_one_b(1, 8)).rendezvous
    assert check(one_f_one_b(4, 1)).rendezvous
    # 0 sends F1, 1 sends the gradient of 0: both wait for the other to receive.
    assert not check(one_f_one_b(2, 3)).rendezvous
    assert not check(zb_h1(4, 8)).rendezvous


def test_the_order_in_which_messages_are_needed() -> None:
    assert check(one_f_one_b(4, 8)).in_order
    assert check(zb_h1(4, 8)).in_order
    assert not check(zbv(4, 8)).in_order


def test_an_fb_row_holds_what_it_makes_and_what_it_frees() -> None:
    assert check(table("0F0 0F1+0B0 0B1", microbatches=2)).peak_live == (2,)
    assert check(table("0F0 0B0 0F1 0B1", microbatches=2)).peak_live == (1,)
    assert check(table("0F0 0I0 0F1 0W0 0I1 0W1", microbatches=2)).peak_live == (2,)


PATHS = table("0F0 0B0", "", "2F0 2B0")


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (replace(PATHS, paths=((0, 1, 2),)), "rank 1 has no forward of microbatch 0 in stage 1."),
        (
            replace(table("0F0 0B0", "1F0 1B0", "2F0 2B0"), paths=((0, 2),)),
            r"cell 0 of rank 1, 1F0, is of stage 1, which is not on the path of microbatch 0, \(0, 2\).",
        ),
        (replace(PATHS, paths=((0, 2), (0, 2))), "has 2 paths for 1 microbatches. Give each one, or none"),
        (
            replace(PATHS, paths=((2, 0),)),
            "the path of microbatch 0 is .*, but it begins at stage 0, which has the embedding",
        ),
        (replace(PATHS, paths=((0,),)), "ends at stage 2, which has the loss. Change the path, and its rows."),
        (replace(PATHS, paths=((0, 3, 2),)), "but stages count from 0 to 2"),
        (replace(PATHS, paths=((0, 1, 1, 2),)), "but a microbatch passes a stage once"),
    ],
)
def test_paths_that_cannot_be(schedule: Schedule, problem: str) -> None:
    assert re.search(problem, refusal(schedule))


def test_a_microbatch_that_skips_a_stage_sends_to_the_next_on_its_path() -> None:
    checked = check(replace(PATHS, paths=((0, 2),)))
    assert [(str(each.output), each.source, each.target) for each in checked.messages] == [("0F0", 0, 2), ("2I0", 2, 0)]
    turned = table("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0")
    sent = [(str(each.output), each.target) for each in check(replace(turned, paths=((0, 2, 1, 3),))).messages]
    assert sent == [("0F0", 2), ("1F0", 3), ("1I0", 2), ("2F0", 1), ("2I0", 0), ("3I0", 1)]


def test_ranks_without_stages_and_stages_out_of_order_are_fine() -> None:
    assert check(table("", "0F0 1F0 1B0 0B0", placement=(1, 1))).peak_live == (0, 2)
    assert check(table("1F0 1B0", "0F0 0B0", placement=(1, 0))).peak_live == (1, 1)
