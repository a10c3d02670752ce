"""Outer optimizers in checkpoints: a run resumed within a period, or a flight, equals one that was not stopped."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, OuterOptimizer, Policy, QuadraticRule
from tests.optim.outer.test_local_updates import CONFIG, adamw, data
from tests.world import pool

STEPS = 9


def build(spec: str, policy: Policy, *, seed: int) -> tuple[mk.Run, OuterOptimizer]:
    mesh = mk.init_mesh(spec)
    with torch.device("meta"):
        model = Llama(CONFIG).double()
    run = mk.parallelize(model, replica_mesh(mesh), plan=LLAMA_PLAN)
    mk.init_weights(run.model, seed=seed)
    return run, OuterOptimizer(run, adamw(run.model), mesh, policy)


def train(run: mk.Run, outer: OuterOptimizer, steps: range) -> None:
    batches = data(STEPS, 3)
    replica, own = outer.mesh["dp_replicate"].get_local_rank(), run.mesh
    for step in steps:
        rows = {key: value.tensor_split(own.data_ranks)[own.data_rank] for key, value in batches[step][replica].items()}
        outer.inner.zero_grad()
        run.forward_backward(rows)
        mk.clip_grad_norm(run, 1.0)
        outer.inner.step()
        outer.step()


def digest(outer: OuterOptimizer) -> str:
    """Of all that later steps depend on, on this rank, bit for bit."""
    outer.finish()
    found = hashlib.sha256(repr((outer.steps, outer.next_meeting)).encode())
    for param, values in outer.state.items():
        for key, value in ("param", param), *sorted(values.items()):
            found.update(key.encode())
            if isinstance(value, str):
                found.update(value.encode())
                continue
            plain = local_tensor(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
            found.update(plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def stopped_and_not(folder: str, spec: str, policy: Policy, stops: list[int]) -> list[bool]:
    """For each stop: whether a run that was stopped there ends as one that was not."""
    replica = mk.init_mesh(spec)["dp_replicate"].get_local_rank()
    with Checkpointer(f"{folder}/{replica}", keep=None) as checkpoints:
        run, outer = build(spec, policy, seed=1)
        for begin, end in zip([0, *stops], [*stops, STEPS], strict=True):
            train(run, outer, range(begin, end))
            if end < STEPS:
                checkpoints.save(end, run, outer)
    expected = digest(outer)
    found = []
    for stop in stops:
        run, outer = build(spec, policy, seed=2)
        train(run, outer, range(0, 4))  # it has something in flight, of another run
        with Checkpointer(f"{folder}/{replica}") as checkpoints:
            assert checkpoints.load(run, outer, step=stop) == stop
        train(run, outer, range(stop, STEPS))
        found.append(digest(outer) == expected)
    return found


CASES = [
    (LocalSGD(every=QuadraticRule(alpha=0.02, base=3), start_step=1), "dp_replicate=2", 2, [2]),
    (DiLoCo(every=4), "dp_replicate=2 tp=2", 4, [2, 6]),
    (DiLoCo(every=6, fragments=3, delay=2, mixing=0.5, wire="int4"), "dp_replicate=3", 3, [2, 3, 4, 7]),
    (DiLoCo(every=6, fragments=3, delay=2, wire="int8"), "pp=2 dp_replicate=2", 4, [3, 7]),
    (CO2(every=3, penalty="gap", wire="int8"), "dp_replicate=2 dp_shard=2", 4, [4]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_run_that_was_stopped_anywhere_in_a_period_equals_one_that_was_not(case: int, tmp_path: Path) -> None:
    policy, spec, ranks, stops = CASES[case]
    for found in pool(ranks).run(stopped_and_not, str(tmp_path), spec, policy, stops):
        assert all(found), dict(zip(stops, found, strict=True))


def save_then_load(folder: str, before: str, after: str, policy: Policy) -> bool:
    """Whether what a replica saved is whole and the same, loaded on another mesh of its ranks."""
    whole = []
    for spec, seed in ((before, 1), (after, 2)):
        run, outer = build(spec, policy, seed=seed)
        replica = outer.mesh["dp_replicate"].get_local_rank()
        with Checkpointer(f"{folder}/{replica}") as checkpoints:
            if seed == 1:
                train(run, outer, range(0, 5))
                checkpoints.save(5, run, outer)
            else:
                checkpoints.load(run, outer)
        outer.finish()
        names = {param: entry.name for param, entry in outer.entries.items()}
        whole.append(
            {
                f"{names[param]}/{key}": full_tensor(value).cpu().clone() if isinstance(value, torch.Tensor) else value
                for param, values in outer.state.items()
                for key, value in values.items()
                if key != "outer_policy"
            }
        )
    assert whole[0].keys() == whole[1].keys() and any(key.endswith("outer_average") for key in whole[0])
    return all(torch.equal(torch.as_tensor(whole[0][key]), torch.as_tensor(whole[1][key])) for key in whole[0])


def test_outer_state_loads_onto_another_inner_mesh_bit_for_bit(tmp_path: Path) -> None:
    policy = DiLoCo(every=6, fragments=3, delay=2, wire="int8")
    meshes = ("dp_replicate=2 dp_shard=2", "dp_replicate=2 tp=2")
    assert all(pool(4).run(save_then_load, str(tmp_path), *meshes, policy))


def outer_after_plain(folder: str) -> tuple[int, bool]:
    """A checkpoint of a run without an outer optimizer: it begins from those values."""
    run, outer = build("dp_replicate=2", DiLoCo(every=4), seed=1)
    replica = outer.mesh["dp_replicate"].get_local_rank()
    with Checkpointer(f"{folder}/{replica}") as checkpoints:
        run.forward_backward(data(1, 2)[0][0])
        outer.inner.step()
        checkpoints.save(1, run, outer.inner)
        run, outer = build("dp_replicate=2", DiLoCo(every=4), seed=2)
    with Checkpointer(f"{folder}/{replica}") as checkpoints:
        checkpoints.load(run, outer)
    same = all(
        torch.equal(entry.param, entry.parameter) for entry in outer.entries.values() if entry.parameter is not None
    )
    return outer.next_meeting, same


def test_a_checkpoint_without_outer_state_begins_a_period(tmp_path: Path) -> None:
    assert pool(2).run(outer_after_plain, str(tmp_path)) == [(4, True)] * 2
