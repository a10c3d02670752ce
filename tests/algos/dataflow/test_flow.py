"""Flows over any meshes make the samples that one process makes which calls one function after the other."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.algos.dataflow import Call, Flow, Sample, Sync, program
from meshkit.errors import DataError, PlanError, StepError
from tests.world import RankError, pool

PROMPTS = (3, 0, 5, 1)
"""of the iterations: uneven, one without any, one with fewer than ranks"""


def source(iteration: int) -> list[Sample]:
    return [{"prompt": 10 * iteration + index} for index in range(PROMPTS[iteration % len(PROMPTS)])]


class Model:
    """A version in place of parameters: training adds 1, and what is generated shows it."""

    def __init__(self) -> None:
        self.version = 0
        self.trained: list[list[tuple[int, ...]]] = []

    def generate(self, samples: list[Sample]) -> list[Sample]:
        """None, one or two answers to each prompt."""
        return [
            {**sample, "answer": np.arange(sample["prompt"] % 3 + 1) + index, "version": self.version}
            for sample in samples
            for index in range(sample["prompt"] % 3)
        ]

    def score(self, samples: list[Sample]) -> list[Sample]:
        return [{**sample, "score": float(sample["answer"].sum()) / 2} for sample in samples]

    def train(self, samples: list[Sample]) -> None:
        self.trained.append(
            [(s["source"], s["prompt"], s["version"], *s["answer"].tolist(), s["score"]) for s in samples]
        )
        self.version += 1


def oracle(iterations: int, staleness: int) -> list[list[tuple[int, ...]]]:
    model = Model()
    for iteration in range(iterations):
        model.version = max(0, iteration - staleness)
        first = [{**sample, "source": index} for index, sample in enumerate(source(iteration))]
        model.train(model.score(model.generate(first)))
    return model.trained


def build(
    places: dict[str, tuple[str, range]], staleness: int, total: int
) -> tuple[Flow, dict[str, Mesh], Model, Model]:
    meshes = {name: mk.init_mesh(spec, ranks=ranks) for name, (spec, ranks) in places.items()}
    sampler, actor = Model(), Model()
    ends = sorted({*meshes["sampler"].ranks, *meshes["actor"].ranks})
    group = dist.new_group(ends)

    def hand_over() -> None:
        version = torch.tensor(actor.version)
        dist.broadcast(version, src=meshes["actor"].ranks[0], group=group)
        sampler.version = int(version)

    calls = [
        Call(name="generate", on="sampler", function=sampler.generate, needs=["prompt"], gives=["answer", "version"]),
        Call(name="score", on="judge", function=sampler.score, needs=["answer"], gives=["score"]),
        Call(
            name="train",
            on="actor",
            function=actor.train,
            needs=["prompt", "answer", "version", "score"],
            stage="train",
        ),
    ]
    flow = Flow(
        meshes,
        calls,
        source=source,
        fields=["prompt"],
        total=total,
        syncs=[Sync(name="weights", source="actor", destination="sampler", function=hand_over)],
        staleness=staleness,
        timeout=timedelta(seconds=20),
    )
    return flow, meshes, sampler, actor


Mesh = mk.Mesh
PLACES = {
    "together": {
        "sampler": ("dp_shard=4", range(4)),
        "judge": ("tp=4", range(4)),
        "actor": ("dp_shard=2 tp=2", range(4)),
    },
    "apart": {
        "sampler": ("dp_shard=2", range(2)),
        "judge": ("tp=1", range(2, 3)),
        "actor": ("dp_shard=1", range(3, 4)),
    },
    "overlapping": {
        "sampler": ("dp_shard=3", range(3)),
        "judge": ("dp_shard=2", range(1, 3)),
        "actor": ("pp=2", range(2, 4)),
    },
}


def run_flow(places: dict[str, tuple[str, range]], staleness: int, iterations: int) -> Any:
    flow, meshes, _, actor = build(places, staleness, iterations)
    for _ in range(iterations):
        flow.step()
    mesh = meshes["actor"]
    return (mesh.data_rank, actor.trained) if mesh.here else None


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_samples_are_those_of_one_process_with_parameters_of_bounded_age(
    places: dict[str, tuple[str, range]], staleness: int
) -> None:
    iterations = 5
    results = [found for found in pool(4).run(run_flow, places, staleness, iterations) if found is not None]
    by_rank: dict[int, Any] = {}
    for data_rank, trained in results:
        assert by_rank.setdefault(data_rank, trained) == trained  # ranks of one data rank have the same
    together = [[row for rank in sorted(by_rank) for row in by_rank[rank][i]] for i in range(iterations)]
    assert together == oracle(iterations, staleness)
    assert any(together)


def run_and_go_on(first: dict[str, tuple[str, range]], then: dict[str, tuple[str, range]]) -> Any:
    flow, meshes, sampler, actor = build(first, 2, 5)
    for _ in range(2):
        flow.step()
    state = flow.state_dict()
    versions = torch.tensor([sampler.version, actor.version])
    dist.all_reduce(versions, op=dist.ReduceOp.MAX)
    flow, meshes, sampler, actor = build(then, 2, 5)
    sampler.version, actor.version = versions.tolist()
    flow.load_state_dict(state)
    while flow.iteration < 5:
        flow.step()
    mesh = meshes["actor"]
    return (mesh.data_rank, actor.trained) if mesh.here else None


def test_a_flow_goes_on_on_other_meshes_with_the_samples_that_were_pending() -> None:
    results = pool(4).run(run_and_go_on, PLACES["apart"], PLACES["together"])
    by_rank = dict(found for found in results if found is not None)
    together = [[row for rank in sorted(by_rank) for row in by_rank[rank][i]] for i in range(3)]
    assert together == oracle(5, 2)[2:]


def leave(where: str) -> str:
    """Rank 1 fails, or does not come; the error of the others."""
    mesh = mk.init_mesh("dp_shard=-1")

    def score(samples: list[Sample]) -> list[Sample]:
        if where == "fails" and mesh.rank == 1:
            raise ValueError("no such reward")
        return [{**sample, "score": 0.0} for sample in samples]

    calls = [
        Call(name="score", on="all", function=score, gives=["score"]),
        Call(name="train", on="all", function=lambda samples: None, needs=["score"], stage="train"),
    ]
    timeout = timedelta(seconds=60 if where == "fails" else 3)
    flow = Flow({"all": mesh}, calls, source=source, fields=["prompt"], total=3, timeout=timeout)
    flow_began = time.monotonic()
    if where == "stays away" and mesh.rank == 1:
        time.sleep(5)
        return ""
    try:
        flow.step()
    except (StepError, ValueError) as error:
        assert time.monotonic() - flow_began < 20
        return str(error)
    return "came through"


def test_a_rank_that_fails_is_named_to_those_that_wait_for_it() -> None:
    errors = pool(3).run(leave, "fails")
    assert errors[1] == "no such reward"
    assert errors[0] == errors[2] == "rank 1 left iteration 0, call score: ValueError: no such reward"


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last() -> None:
    errors = pool(3).run(leave, "stays away")
    assert "iteration 0, call score: rank 1 (came last to nothing yet) had not come" in errors[0] == errors[2]


def test_rollouts_of_the_next_iterations_come_before_training_waits_for_them() -> None:
    """Rows of the ranks that train, and of those that generate, one ahead: neither waits inside the other's stage."""
    calls = [
        Call(name="generate", on="a", function=list, needs=["prompt"], gives=["answer"]),
        Call(name="train", on="b", function=list, needs=["answer"], stage="train"),
    ]
    syncs = [Sync(name="weights", source="b", destination="a", function=lambda: None)]
    rows = [
        (row.kind, row.iteration)
        for row in program(calls, syncs, ["prompt"], iterations=range(3), total=3, staleness=1)
    ]
    assert rows == [
        ("call", 0), ("send", 0),
        ("call", 1), ("call", 0), ("send", 1), ("sync", 0),
        ("call", 2), ("call", 1), ("send", 2),
        ("call", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            [Call(name="train", on="a", function=list, needs=["score"])],
            "'train' needs 'score', which nothing before it",
        ),
        ([Call(name="x", on="a", function=list), Call(name="x", on="a", function=list)], "two calls are named 'x'"),
        ([Call(name="x", on="a", function=list, gives=["prompt"])], "gives 'prompt', and so does 'the first samples'"),
        (
            [Call(name="x", on="a", function=list, stage="train"), Call(name="y", on="a", function=list)],
            "'y' of the rollout stage comes after 'x'",
        ),
    ],
)
def test_graphs_that_cannot_run_are_refused(calls: list[Call], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        list(program(calls, [], ["prompt"], iterations=range(1), total=1, staleness=0))


def give_nothing() -> None:
    mesh = mk.init_mesh("dp_shard=-1")
    calls = [Call(name="score", on="all", function=lambda samples: samples, gives=["score"])]
    Flow({"all": mesh}, calls, source=source, fields=["prompt"], total=1).step()


def test_a_call_that_does_not_give_what_it_says_is_refused() -> None:
    with pytest.raises(RankError, match="iteration 0, call score: returned a sample without score"):
        pool(1).run(give_nothing)


def test_source_is_a_name_of_the_flow() -> None:
    with pytest.raises(PlanError, match="gives 'source'"):
        Call(name="x", on="a", function=list, gives=["source"])


def go_past_the_end() -> None:
    flow = Flow({"all": mk.init_mesh("dp_shard=-1")}, [], source=source, fields=["prompt"], total=0)
    flow.step()


def test_a_flow_ends() -> None:
    with pytest.raises(RankError, match="has run its 0 iterations"):
        pool(1).run(go_past_the_end)
    assert DataError
