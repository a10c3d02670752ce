"""A stream learns from every group once, from none older than its bound, whoever is slow, fails, or goes on elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import meshkit as mk
from meshkit.algos.dataflow import Call, Sample, StreamCall, StreamFlow, Sync
from meshkit.algos.dataflow._buffer import Buffer, Groups
from meshkit.errors import DataError, PlanError, StepError
from tests.world import pool

PROMPTS = (3, 5, 0, 4, 1)
"""of the iterations: uneven, one without any, one with fewer than ranks"""


def size(iteration: int) -> int:
    return PROMPTS[iteration % len(PROMPTS)]


def source(iteration: int) -> list[Sample]:
    return [{"prompt": 10 * iteration + index} for index in range(size(iteration))]


# ------------------------------------------------------------------------------------------------------- the rule


@given(seed=st.integers(0, 2**32), staleness=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_every_group_is_taken_once_and_none_too_late_whatever_becomes_ready_first(seed: int, staleness: int) -> None:
    """Groups begin and become ready in any order that is allowed; when all that may begin is ready, a step does not wait."""
    draw, total = random.Random(seed), 12
    buffer = Buffer(Groups(size, total), staleness)
    began: dict[int, int] = {}
    taken: list[int] = []
    for step in range(total):
        while (chosen := buffer.take(step)) is None:
            room = buffer.limit(step) - len(began)
            waiting = set(began) - set(taken) - buffer.ready
            assert room or waiting
            began |= dict.fromkeys(range(len(began), len(began) + draw.randint(0, room)), step)
            buffer.begun[step] = len(began)
            buffer.ready |= {group for group in waiting if draw.random() < 0.3}
        assert len(chosen) == size(step) and not set(chosen) & set(taken)
        assert all(step - began[group] <= staleness for group in chosen)
        taken += chosen
    assert sorted(taken) == list(range(sum(map(size, range(total)))))


def test_a_late_group_is_waited_for_only_when_it_would_be_too_old() -> None:
    buffer = Buffer(Groups(lambda iteration: 2, 10), 2, begun={0: 2, 1: 6}, ready={1, 2, 3, 4, 5})
    assert buffer.take(1) == [1, 2]  # not 0, which is not ready
    assert buffer.take(2) is None  # it was begun by weights of version 0
    buffer.ready.add(0)
    assert buffer.take(2) == [0, 3]


# -------------------------------------------------------------------------------------------------------- flows


class Writer:
    """Writes a token at each call; how many a group needs depends on its prompt. Each token is a version."""

    def __init__(self, groups: int, version: int = 0, pause_s: float = 0.0) -> None:
        self.groups, self.version, self.pause_s = groups, version, pause_s
        self.open: dict[int, tuple[Sample, list[int]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.open)

    @property
    def room(self) -> int:
        return self.groups - len(self.open)

    def begin(self, samples: Sequence[Sample]) -> None:
        self.open |= {sample["source"]: (sample, []) for sample in samples}

    def advance(self) -> list[list[Sample]]:
        time.sleep(self.pause_s)
        for _, tokens in self.open.values():
            tokens.append(self.version)
        whole = [group for group, (sample, tokens) in self.open.items() if len(tokens) > sample["prompt"] * 7 % 11]
        made = [self.open.pop(group) for group in whole]
        return [[{**sample, "answer": np.array(tokens), "nr": nr} for nr in range(2)] for sample, tokens in made]

    def take_weights(self, version: int) -> None:
        assert version == self.version  # the sync wrote it
        return None

    def state_dict(self) -> dict[str, Any]:
        parts = [{"source": group, "sample": sample, "tokens": tokens} for group, (sample, tokens) in self.open.items()]
        return {"parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open = {part["source"]: (part["sample"], list(part["tokens"])) for part in state["parts"]}


class Parts:
    """A stream over meshes, its writer, and what it has learnt."""

    def __init__(self, places: dict[str, tuple[str, range]], total: int, staleness: int, version: int = 0) -> None:
        meshes = {name: mk.init_mesh(spec, ranks=ranks) for name, (spec, ranks) in places.items()}
        self.mesh, self.version, self.trained = meshes["actor"], version, list[list[Any]]()
        # Each data rank has other room, and writes at another pace.
        here = meshes["sampler"].here
        self.writer = (
            Writer(2 + meshes["sampler"].data_rank, version, 0.004 + 0.001 * dist.get_rank()) if here else None
        )
        group = dist.new_group(sorted({*meshes["sampler"].ranks, *meshes["actor"].ranks}))

        def hand_over() -> None:
            number = torch.tensor(self.version)
            dist.broadcast(number, src=meshes["actor"].ranks[0], group=group)
            if self.writer is not None:
                self.writer.version = int(number)

        calls = [
            Call(name="score", on="sampler", function=self.score, needs=["answer"], gives=["score"]),
            Call(name="train", on="actor", function=self.train, needs=["prompt", "answer", "score"], stage="train"),
        ]
        self.flow = StreamFlow(
            meshes,
            StreamCall(name="write", on="sampler", writer=self.writer, needs=["prompt"], gives=["answer", "nr"]),
            calls,
            source=source,
            fields=["prompt"],
            total=total,
            syncs=[Sync(name="weights", source="actor", destination="sampler", function=hand_over)],
            staleness=staleness,
            timeout=timedelta(seconds=20),
        )

    def score(self, samples: list[Sample]) -> list[Sample]:
        return [{**sample, "score": float(len(sample["answer"]))} for sample in samples]

    def train(self, samples: list[Sample]) -> None:
        time.sleep(0.01)
        self.trained.append([(s["prompt"], s["nr"], tuple(s["answer"].tolist()), s["score"]) for s in samples])
        self.version += 1


PLACES = {
    "one and one": {"sampler": ("", range(1)), "actor": ("", range(1, 2))},
    "two and two": {"sampler": ("dp_shard=2", range(2)), "actor": ("dp_shard=2", range(2, 4))},
    "split": {"sampler": ("tp=2", range(2)), "actor": ("tp=2", range(2, 4))},
    "fewer": {"sampler": ("dp_shard=3", range(1, 4)), "actor": ("", range(1))},
}


def learnt(places: dict[str, tuple[str, range]], total: int, staleness: int) -> Any:
    parts = Parts(places, total, staleness)
    for _ in range(total):
        parts.flow.step()
    return (parts.mesh.data_rank, parts.trained) if parts.mesh.here else None


def steps_of(results: Sequence[Any]) -> list[list[Any]]:
    """What each step learnt, of all data ranks; those of one data rank are the same."""
    by_rank: dict[int, Any] = {}
    for data_rank, trained in filter(None, results):
        assert by_rank.setdefault(data_rank, trained) == trained
    return [[row for rank in sorted(by_rank) for row in by_rank[rank][i]] for i in range(len(by_rank[0]))]


def assert_streamed(steps: list[list[Any]], total: int, staleness: int, first: int = 0) -> None:
    """Every answer once, whole, scored, as many in a step as it has, and no token too old."""
    rows = [row[:2] for step in steps for row in step]
    assert sorted(rows) == [(each["prompt"], nr) for i in range(total) for each in source(i) for nr in range(2)]
    for step, learnt_rows in enumerate(steps, first):
        assert len(learnt_rows) == 2 * size(step)
        for prompt, _, versions, score in learnt_rows:
            assert len(versions) == prompt * 7 % 11 + 1 == score
            assert list(versions) == sorted(versions) and step - versions[0] <= staleness and versions[-1] <= step


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_stream_learns_from_every_answer_once_and_from_no_token_that_is_too_old(
    places: dict[str, tuple[str, range]], staleness: int
) -> None:
    world = 1 + max(max(ranks) for _, ranks in places.values())
    steps = steps_of(pool(world).run(learnt, places, 9, staleness))
    assert_streamed(steps, 9, staleness)
    if staleness == 3:
        assert any(
            len(set(versions)) > 1 for step in steps for _, _, versions, _ in step
        )  # weights came between tokens


def stopped(first: dict[str, tuple[str, range]], then: dict[str, tuple[str, range]], at: int, total: int) -> Any:
    parts = Parts(first, total, 3)
    for _ in range(at):
        parts.flow.step()
    state = parts.flow.state_dict()
    early = parts.trained
    again = Parts(then, total, 3, version=at)
    again.flow.load_state_dict(state)
    while again.flow.iteration < total:
        again.flow.step()
    unfinished = sum(len(samples) for samples in state["ready"].values()) + len(state["parts"])
    return (
        (parts.mesh.data_rank, early) if parts.mesh.here else None,
        (again.mesh.data_rank, again.trained) if again.mesh.here else None,
        unfinished,
    )


def test_a_stream_goes_on_on_other_meshes_without_losing_a_rollout() -> None:
    results = pool(4).run(stopped, PLACES["two and two"], PLACES["fewer"], 4, 9)
    steps = steps_of([early for early, _, _ in results]) + steps_of([late for _, late, _ in results])
    assert len(steps) == 9 and all(unfinished > 0 for _, _, unfinished in results)
    assert_streamed(steps, 9, 3)


def fails(who: str) -> str:
    parts = Parts(PLACES["two and two"], 5, 2)
    if who == "writer" and parts.writer is not None and parts.writer.groups == 3:

        def fail() -> list[list[Sample]]:
            raise ValueError("no such token")

        parts.writer.advance = fail  # type: ignore[method-assign]
    if who == "trainer" and parts.mesh.here and parts.mesh.data_rank == 1:
        parts.train([])

        def broken(samples: list[Sample]) -> None:
            raise ValueError("no such loss")

        train = parts.flow._trains[0]
        object.__setattr__(train, "function", broken)
    began = time.monotonic()
    try:
        for _ in range(5):
            parts.flow.step()
    except (StepError, ValueError) as error:
        assert time.monotonic() - began < 15
        return str(error)
    return "came through"


@pytest.mark.parametrize("who", ["writer", "trainer"])
def test_a_rank_that_fails_is_named_to_all_others(who: str) -> None:
    errors = pool(4).run(fails, who)
    failed, text = (1, "rank 1 left iteration 0, call write: ValueError: no such token")
    if who == "trainer":
        failed, text = 3, "rank 3 left iteration 0, call train: ValueError: no such loss"
    assert errors.pop(failed).startswith("no such")
    assert errors == [text] * 3


def refused() -> list[str]:
    meshes = {
        "a": mk.init_mesh("", ranks=range(1)),
        "b": mk.init_mesh("", ranks=range(1, 2)),
        "both": mk.init_mesh("dp_shard=2"),
    }
    texts = []
    for write, learn, staleness in (("a", "both", 1), ("a", "a", 1), ("a", "b", 0), ("c", "b", 1)):
        with pytest.raises(PlanError) as error:
            StreamFlow(
                meshes,
                StreamCall(name="write", on=write, writer=None, needs=["prompt"], gives=["answer"]),
                [Call(name="train", on=learn, function=list, needs=["answer"], stage="train")],
                source=source,
                fields=["prompt"],
                total=2,
                syncs=[],
                staleness=staleness,
            )
        texts.append(str(error.value))
    parts = Parts(PLACES["one and one"], 2, 1)
    with pytest.raises(DataError) as larger:
        parts.flow.load_state_dict({"staleness": 2})
    return [*texts, str(larger.value)]


def test_meshes_and_ages_that_do_not_fit_are_refused() -> None:
    for texts in pool(2).run(refused):
        for text, start in zip(
            texts,
            (
                "ranks [0] both write and learn",
                "a stream has a mesh that writes and one that learns",
                "staleness=0: a stream writes while it learns",
                "a call is on mesh 'c', which is not there",
                "the saved flow had tokens of at most 2 updates ago, this one has 1",
            ),
            strict=True,
        ):
            assert text.startswith(start)
