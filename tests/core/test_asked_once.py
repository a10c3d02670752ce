"""A question that all ranks ask is answered once, by whoever comes first, and each rank gets that answer or its error."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshkit.core import asked_once
from meshkit.core.asked_once import AskedOnce, shapes
from meshkit.errors import PlanError
from tests.world import pool


class Unpicklable(PlanError):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def counted(kind: str) -> tuple[Any, int]:
    """(what this rank was told, how often it answered)"""
    rank, answers = dist.get_rank(), 0
    asked = AskedOnce(dist.group.WORLD)

    def answer() -> Any:
        nonlocal answers
        answers += 1
        time.sleep(0.2)
        if kind == "refused":
            raise PlanError(f"it mixes rows, says rank {rank}")
        if kind == "odd error":
            raise Unpicklable("one", "other")
        if kind == "broken":
            raise ValueError("a fault")
        return (lambda: rank) if kind == "a function" else f"of rank {rank}"

    question: Any = {"own": rank, "an object": object()}.get(kind, kind)
    try:
        told: Any = asked.ask(question, answer)
        assert kind == "a function" or asked.ask(question, answer) == told
    except ValueError as error:
        told = str(error)
    return told if isinstance(told, str) else "itself", answers


@pytest.mark.parametrize("kind", ["one", "refused", "odd error"])
def test_one_rank_answers_and_all_are_told(kind: str) -> None:
    found = pool(3).run(counted, kind)
    assert len({told for told, _ in found}) == 1
    assert sum(answers for _, answers in found) == 1


@pytest.mark.parametrize("kind", ["own", "an object", "a function"])
def test_what_ranks_do_not_share_each_answers(kind: str) -> None:
    assert all(answers for _, answers in pool(3).run(counted, kind))


def test_other_errors_are_raised_on_all_ranks() -> None:
    assert sorted(pool(3).run(counted, "broken")) == [
        ("a fault", 1),
        *[("another rank raised ValueError: a fault", 0)] * 2,
    ]


def later(first: int) -> str:
    """The rank that comes first is in no message when it answers: the others need not be there."""
    asked = AskedOnce(dist.group.WORLD)
    if dist.get_rank() != first:
        dist.barrier()
        return asked.ask("when", lambda: f"of rank {dist.get_rank()}")
    told = asked.ask("when", lambda: f"of rank {first}")
    dist.barrier()
    return told


@pytest.mark.parametrize("first", [0, 2])
def test_nobody_waits_for_one_that_has_not_asked(first: int) -> None:
    assert pool(3).run(later, first) == [f"of rank {first}"] * 3


def many(ranks_own: int) -> int:
    """How often this rank answers ten questions, of which only the first may be told; one rank has asked others before."""
    with mock.patch.object(asked_once, "MOST", 4):
        asked, answers = AskedOnce(dist.group.WORLD), list[int]()
        for number in range(ranks_own if dist.get_rank() == 1 else 0):
            asked.ask(("own", number), int)
        for number in range(10):
            asked.ask(number, lambda number=number: answers.append(number))  # type: ignore[misc]  # a default in a lambda
        return len(answers)


@pytest.mark.parametrize(("ranks_own", "expected"), [(0, 10 + 6), (2, 10 + 8)])
def test_beyond_a_number_of_questions_each_answers(ranks_own: int, expected: int) -> None:
    assert sum(pool(2).run(many, ranks_own)) == expected


def test_a_rank_alone_answers_for_itself() -> None:
    assert AskedOnce(None).ask("what", lambda: 7) == 7


def test_a_question_of_arguments_is_of_shapes_and_numbers() -> None:
    one, other = torch.zeros(2, 8), torch.ones(2, 8)
    assert repr(shapes(((one, 3), {"a": "x"}))) == repr(shapes(((other, 3), {"a": "x"})))
    for different in ((one.T, 3), (one, 4), (one.double(), 3), (one[:1], 3)):
        assert repr(shapes((different, {"a": "x"}))) != repr(shapes(((one, 3), {"a": "x"})))
