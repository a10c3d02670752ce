"""Meshes on parts of one world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.sharding import full_tensor
from meshkit.models import LLAMA_PLAN, Llama, load_pretrained, save_pretrained
from tests.tiny import tiny_config
from tests.world import pool, run_ranks

STEPS = 3
TOL_FP64_SUM = 1e-10  # only summation order differs
PARTS = (("pp=2", range(0, 2), 3), ("dp_shard=2", range(2, 4), 5))
CONFIG = tiny_config(vocab_size=31, intermediate_size=20)


def build(seed: int) -> Llama:
    torch.manual_seed(seed)
    return Llama(CONFIG).double()


def batches(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab_size, (STEPS, 4, 9), generator=generator)
    return [{"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in ids]


def one_device(seed: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = build(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(seed):
        optimizer.zero_grad()
        loss = mk.cross_entropy(model(batch["input_ids"]), batch["labels"]) / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def train_on_own_part(folder: str) -> tuple[int, list[float], dict[str, Tensor], dict[str, Tensor], bool, str]:
    """Two models at the same time; each rank has one. Then all that speaks for a whole mesh."""
    meshes = [mk.init_mesh(text, ranks=ranks) for text, ranks, _ in PARTS]
    own = next(index for index, mesh in enumerate(meshes) if mesh.here)
    mesh, seed = meshes[own], PARTS[own][2]
    assert mesh.rank == dist.get_rank() - 2 * own
    assert [other.here for other in meshes] == [index == own for index in range(2)]
    run = mk.parallelize(build(seed), mesh, plan=LLAMA_PLAN)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
    losses = []
    with mk.checkpoint.SaveOnSignal() as signals, Checkpointer(f"{folder}/{own}", asynchronous=False) as checkpointer:
        for step in batches(seed):
            rows = {key: value.tensor_split(mesh.data_ranks)[mesh.data_rank] for key, value in step.items()}
            optimizer.zero_grad()
            losses.append(float(run.forward_backward(rows, microbatches=2)))
            mk.clip_grad_norm(run, 0.5)
            optimizer.step()
        stopped = signals.should_stop(mesh)
        checkpointer.save(STEPS, run, optimizer)
        whole = {name: full_tensor(param).clone() for name, param in run.named_parameters()}
        mk.init_weights(run.model, seed=9)
        assert checkpointer.load(run, optimizer) == STEPS
    loaded = {name: full_tensor(param).clone() for name, param in run.named_parameters()}
    save_pretrained(run.model, CONFIG, f"{folder}/hf{own}")
    guard = mk.faults.NonFiniteGuard()
    run.local_loss = torch.tensor(torch.nan if mesh.rank == 1 else 1.0)
    with pytest.raises(mk.errors.StepError) as stop:
        guard.allows(run, torch.tensor(torch.nan), step=3)
    return own, losses, whole, loaded, stopped, str(stop.value)


def test_two_models_train_save_and_fail_each_on_its_part_of_the_world(tmp_path: Path) -> None:
    results = run_ranks(4, train_on_own_part, str(tmp_path))
    for own, losses, whole, loaded, stopped, refusal in results:
        expected, params = one_device(PARTS[own][2])
        assert losses == pytest.approx(expected, abs=TOL_FP64_SUM)
        for name, param in whole.items():
            torch.testing.assert_close(param, params[name], rtol=0, atol=TOL_FP64_SUM)
            assert torch.equal(loaded[name], param)
        assert not stopped
        assert f"the loss of rank {PARTS[own][1][1]} is not finite" in refusal  # of the world
    for own, (_, _, seed) in enumerate(PARTS):
        read = build(0)
        load_pretrained(read, tmp_path / f"hf{own}")
        for name, param in one_device(seed)[1].items():
            torch.testing.assert_close(dict(read.named_parameters())[name].detach(), param, rtol=0, atol=TOL_FP64_SUM)


def look_at_a_part(text: str, ranks: list[int]) -> dict[str, list[int]] | list[str]:
    mesh = mk.init_mesh(text, ranks=ranks)
    if mesh.here:
        axes = {axis: mesh[axis] for axis in ("pp", "dp_shard", "cp", "tp", "edp", "ep", "etp")}
        axes |= {"tokens": mesh.tokens, "experts": mesh.expert_ranks}
        found = {axis: dist.get_process_group_ranks(part.get_group()) for axis, part in axes.items()}
        assert str(found["dp_shard"]) in mesh.describe()
        return {**found, "all": dist.get_process_group_ranks(mesh.group), "rank": [mesh.rank]}
    assert (mesh.spec.edp, mesh.ranks) == (1, (0, 2, 3, 4))
    refusals = []
    for ask in (lambda: mesh["tp"], lambda: mesh.rank, lambda: mk.parallelize(torch.nn.Linear(2, 2), mesh)):
        with pytest.raises(mk.errors.MeshError) as error:
            ask()
        refusals.append(str(error.value))
    return refusals


def test_a_part_need_not_be_a_range_and_outside_of_it_only_its_spec_is_known() -> None:
    inside = [0, 2, 3, 4]
    first, outside, *others = pool(5).run(look_at_a_part, "dp_shard=-1 cp=2 ep=2 etp=2", inside)
    for rank, found in zip(inside, [first, *others], strict=True):
        pair = [0, 2] if rank in (0, 2) else [3, 4]
        assert found["cp"] == found["etp"] == pair
        assert found["dp_shard"] == found["ep"] == ([0, 3] if rank in (0, 3) else [2, 4])
        assert found["tokens"] == found["experts"] == found["all"] == inside
        assert found["pp"] == found["tp"] == found["edp"] == [rank]
        assert found["rank"] == [inside.index(rank)]
    for asked, text in zip(("mesh['tp']", "mesh.group", "parallelize"), outside, strict=True):
        assert text.startswith(
            f"{asked}: this is rank 1 of the world, and the mesh is on ranks 0, 2-4. Ask on those only"
        )


def refusals() -> list[str]:
    asked = [
        lambda: mk.init_mesh("tp=1", ranks=[dist.get_rank()]),
        lambda: mk.init_mesh("tp=1", ranks=[2]),
        lambda: mk.init_mesh("tp=2", ranks=[1, 0]),
        lambda: mk.init_mesh("tp=2", ranks=[1]),
        lambda: mk.init_mesh("tp=1", ranks=[0, 1]),
        lambda: mk.init_mesh("tp=1"),
    ]
    texts = []
    for ask in asked:
        with pytest.raises(mk.errors.MeshError) as error:
            ask()
        texts.append(str(error.value))
    return texts


def test_impossible_parts_are_refused_on_every_rank() -> None:
    first, second = pool(2).run(refusals)
    assert first == second
    for text, match in zip(
        first,
        [
            "init_mesh: rank 0 asks for tp=1 on rank 0, rank 1 for tp=1 on rank 1. Every rank of the world makes",
            "init_mesh(ranks=[2]): ranks are an increasing part of 0 to 1, and at least one",
            "init_mesh(ranks=[1, 0]): ranks are an increasing part of 0 to 1",
            "mesh tp=2 needs a multiple of 2 ranks, but the part has 1. Change ranks=,",
            "mesh tp=1 uses 1 of the 2 ranks of the part. Start 1 ranks, put it on a part of them",
            "mesh tp=1 uses 1 of the 2 ranks. Start 1 ranks, put it on a part of them by init_mesh(ranks=...)",
        ],
        strict=True,
    ):
        assert text.startswith(match), text


def other_meshes(odd: str) -> str:
    try:
        mk.init_mesh(odd if dist.get_rank() else "dp_shard=2")
    except mk.errors.MeshError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("odd", ["tp=2", "pp=2"])
def test_ranks_that_ask_for_other_axes_are_told_so(odd: str) -> None:
    texts = pool(2).run(other_meshes, odd)
    assert {*texts} == {
        f"init_mesh: rank 0 asks for dp_shard=2 on all ranks, rank 1 for {odd} on all ranks. Every rank of the world makes "
        "every mesh, in the same order, those it is not on too."
    }
