"""Ranks that must have the same and have not: each difference is named on every rank, with the field, the ranks and their
values, and none is trained on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.checkpoint import Checkpointer
from meshkit.mesh._differences import Scope, Told, sentence
from meshkit.mesh.agreement import Agreement, _scope
from meshkit.step import Batch, count_labels, grad_norm, next_token_loss
from tests.laws.parity.cases import mesh_for
from tests.tiny import TINY
from tests.world import pool

MESHES = ("dp_shard=2", "dp_replicate=2", "tp=2", "pp=2", "cp=2", "dp_shard=2 tp=2", "pp=2 tp=2", "dp_shard=2 cp=2")
SECONDS = 20.0  # of a machine with other work; alone each is named within one
MODEL = replace(TINY, num_hidden_layers=2)
DOCUMENTS = [5, 3]


@dataclass
class Job:
    """run: on a rank. other: whether this rank is the one that differs."""

    run: mk.Run
    optimizer: torch.optim.Optimizer
    batch: Batch
    other: bool
    folder: Path
    checkpoints: Checkpointer

    def step(self, **choices: Any) -> None:
        self.run.forward_backward(self.batch, **{"microbatches": 2, **choices})
        mk.clip_grad_norm(self.run, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def another_loss(model: nn.Module, part: Batch) -> Tensor:
    return next_token_loss(model, part) * 2


def another_count(batch: Batch) -> Tensor:
    return count_labels(batch) * 2


def made(spec: str, folder: str, **options: Any) -> Job:
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = mk.models.Llama(MODEL)
    run = mk.parallelize(model, mesh)
    mk.init_weights(run.model, seed=0)
    options = {"lr": 1e-3, **options}
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(mesh.data_rank))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    other = dist.get_rank() == dist.get_world_size() - 1
    optimizer = options.pop("optimizer", mk.adamw)(run, **options)
    return Job(run, optimizer, batch, other, Path(folder), Checkpointer(Path(folder) / "checkpoints"))


# ------------------------------------------------------------------------------------- what one rank does otherwise

Fault = Callable[[Job], object]


def with_batch(change: Callable[[Batch], Batch]) -> Fault:
    def fault(job: Job) -> object:
        return job.run.forward_backward(change(job.batch) if job.other else job.batch)

    return fault


def with_option(name: str, value: object) -> Fault:
    """In one step, told with the next call."""

    def fault(job: Job) -> object:
        before = [group[name] for group in job.optimizer.param_groups]
        for group in job.optimizer.param_groups if job.other else []:
            group[name] = value
        try:
            job.step()
            return job.run.forward_backward(job.batch)
        finally:
            for group, each in zip(job.optimizer.param_groups, before, strict=True):
                group[name] = each

    return fault


def with_choice(**choices: Any) -> Fault:
    return lambda job: job.run.forward_backward(job.batch, **(choices if job.other else {}))


def skipped(job: Job) -> object:
    job.run.forward_backward(job.batch)
    if not job.other:
        mk.clip_grad_norm(job.run, 1.0)
    job.optimizer.step()
    return job.run.forward_backward(job.batch)


def not_stepped(job: Job) -> object:
    job.run.forward_backward(job.batch)
    if not job.other:
        job.optimizer.step()
    return job.run.forward_backward(job.batch)


def stepped_twice(job: Job) -> object:
    job.run.forward_backward(job.batch)
    job.optimizer.step()
    if job.other:
        job.optimizer.step()
    return grad_norm(job.run)


def in_eval(job: Job) -> object:
    job.run.model.train(not job.other)
    try:
        return job.run.forward_backward(job.batch)
    finally:
        job.run.model.train()


def generated(**choices: Any) -> Fault:
    def fault(job: Job) -> object:
        given: dict[str, Any] = {
            "sampling": Sampling(max_new_tokens=2),
            "seed": 0,
            "prompts": [Prompt(ids=np.array([1, 2, 3]), key=0)],
        }
        given |= choices if job.other else {}
        return generate(job.run, **given)

    return fault


def noted(job: Job) -> object:
    job.run.mesh.agreement.note("my corpus", {"epoch": int(job.other)})
    return job.run.forward_backward(job.batch)


MESH_FAULTS: dict[str, tuple[Fault, str]] = {
    "microbatches": (
        with_choice(microbatches=2),
        r"microbatches of forward_backward .*: 1 on ranks? \S+, 2 on rank \d",
    ),
    "loss": (
        with_choice(loss=another_loss),
        r"loss of forward_backward .*: next_token_loss.*another_loss of line \d+ on",
    ),
    "count": (
        with_choice(count=another_count),
        r"count of forward_backward .*: count_labels.*another_count of line \d+ on",
    ),
    "step": (with_choice(step=3), r"step of forward_backward .*: None on ranks? \S+, 3 on"),
    "training": (in_eval, r"training of forward_backward .*: True on ranks? \S+, False on"),
    "evaluate instead": (
        lambda job: (job.run.evaluate if job.other else job.run.forward_backward)(job.batch),
        r"different calls: forward_backward \(.*\) on .*, evaluate \(.*\) on rank",
    ),
    "evaluate alone": (
        lambda job: (job.other and job.run.evaluate(job.batch), job.step()),
        r"different calls: forward_backward \(.*\) on .*, evaluate \(.*\) on rank",
    ),
    "norm alone": (
        lambda job: (job.other and grad_norm(job.run), job.step()),
        r"different calls: forward_backward \(.*\) on .*, grad_norm \(.*\) on rank",
    ),
    "no step of the model": (
        lambda job: (job.other or job.run.forward_backward(job.batch), mk.clip_grad_norm(job.run, 1.0)),
        r"different calls: forward_backward \(.*\) on .*, clip_grad_norm \(.*\) on rank",
    ),
    "no clip": (skipped, r"different calls: clip_grad_norm \(.*\) on .*, ShardedAdamW.step \(.*\) on rank"),
    "clip": (
        lambda job: mk.clip_grad_norm(job.run, 2.0 if job.other else 1.0),
        r"max_norm of clip_grad_norm .*: 1.0 on .*, 2.0 on",
    ),
    "not stepped": (not_stepped, r"different calls: ShardedAdamW.step \(.*\) on .*, forward_backward \(.*\) on rank"),
    "stepped twice": (stepped_twice, r"different calls: grad_norm \(.*\) on .*, ShardedAdamW.step \(.*\) on rank"),
    "lr": (with_option("lr", 2e-3), r"lr of ShardedAdamW.step .*: 0.001 on .*, 0.002 on rank"),
    "betas": (with_option("betas", (0.5, 0.9)), r"betas of ShardedAdamW.step .*: .* on .*, \(0.5, 0.9\) on rank"),
    "eps": (with_option("eps", 1e-3), r"eps of ShardedAdamW.step .*: 1e-08 on .*, 0.001 on rank"),
    "weight decay": (with_option("weight_decay", 0.7), r"of ShardedAdamW.step .*0.7"),
    "save alone": (
        lambda job: (job.other and job.checkpoints.save(9, job.run, None), job.step()),
        r"different calls: forward_backward \(.*\) on .*, save \(.*\) on rank",
    ),
    "save's step": (
        lambda job: job.checkpoints.save(8 if job.other else 9, job.run, None),
        r"step of save .*: 9 on .*, 8 on rank",
    ),
    "save's folder": (
        lambda job: (Checkpointer(job.folder / "else") if job.other else job.checkpoints).save(9, job.run, None),
        r"folder of save .*: checkpoints on .*, else on rank",
    ),
    "load alone": (
        lambda job: (job.other and job.checkpoints.load(job.run, None), job.step()),
        r"different calls: forward_backward \(.*\) on .*, load \(.*\) on rank",
    ),
    "seed": (
        lambda job: (mk.init_weights(job.run.model, seed=int(job.other)), job.step()),
        r"seed of init_weights .*: 0 on .*, 1 on rank",
    ),
    "seed of answers": (generated(seed=5), r"seed of generate .*: 0 on .*, 5 on rank"),
    "sampling": (
        generated(sampling=Sampling(max_new_tokens=3)),
        r"sampling of generate .*max_new_tokens=2.*max_new_tokens=3",
    ),
    "noted": (noted, r"epoch of my corpus .*: 0 on .*, 1 on rank"),
}
ROW_FAULTS: dict[str, tuple[Fault, str]] = {
    "ids": (
        with_batch(lambda batch: {**batch, "input_ids": batch["input_ids"].flip(1)}),
        r"input_ids of forward_backward",
    ),
    "rows in another order": (
        with_batch(lambda batch: {name: value.flip(0) for name, value in batch.items()}),
        r"input_ids of forward_backward .*and in labels",
    ),
    "labels": (with_batch(lambda batch: {**batch, "labels": batch["labels"] * 0}), r"labels of forward_backward"),
    "tokens": (
        with_batch(lambda batch: {name: value[:, :4] for name, value in batch.items()}),
        r"input_ids of forward_backward .*int64\[2, 8\].*int64\[2, 4\]",
    ),
    "rows": (
        with_batch(lambda batch: {name: value[:1] for name, value in batch.items()}),
        r"input_ids of forward_backward .*int64\[2, 8\].*int64\[1, 8\]",
    ),
    "dtype": (
        with_batch(lambda batch: {**batch, "input_ids": batch["input_ids"].int()}),
        r"input_ids of forward_backward .*int64\[2, 8\].*int32\[2, 8\]",
    ),
    "another tensor": (
        with_batch(lambda batch: {**batch, "position_ids": torch.arange(8).expand(2, 8)}),
        r"position_ids of forward_backward .*: nothing on .*, int64\[2, 8\]",
    ),
    "mask": (with_choice(mask=mk.Mask.documents(DOCUMENTS)), r"mask of forward_backward .*: none on .*, 1 of 8 tokens"),
    "prompts": (generated(prompts=[Prompt(ids=np.array([3, 2, 1]), key=0)]), r"prompts of generate"),
}


def told(job: Job, fault: Fault) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        fault(job)
    except mk.errors.AgreementError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def all_faults(spec: str, folder: str) -> dict[str, tuple[str, float]]:
    """On every rank: each fault of a run that has made two steps, which goes on after each."""
    job = made(spec, folder)
    job.step()
    job.step()
    faults = MESH_FAULTS | (ROW_FAULTS if job.run.mesh.data_ranks < job.run.mesh.spec.world_size else {})
    found = {name: told(job, fault) for name, (fault, _) in faults.items()}
    job.step()
    return found


@pytest.mark.parametrize("spec", MESHES)
def test_each_difference_is_named_on_every_rank_and_the_run_goes_on(spec: str, tmp_path: Path) -> None:
    ranks = mk.MeshSpec.parse(spec).world_size
    by_rank = pool(ranks).run(all_faults, spec, str(tmp_path), timeout_s=300)
    for name, (_, expected) in (MESH_FAULTS | ROW_FAULTS).items():
        if name not in by_rank[0]:
            assert name in ROW_FAULTS and "dp" in spec
            continue
        texts = {found[name][0] for found in by_rank}
        assert len(texts) == 1, (name, texts)  # the same text on every rank
        assert re.search(f"^ranks (differ in|make) .*{expected}", *texts), (name, texts)
        assert max(found[name][1] for found in by_rank) < SECONDS, name


def first_steps(spec: str, folder: str) -> list[str]:
    """Faults of the first step of an optimizer: before it changes anything."""
    texts = []
    for change in ({"lr": 5e-3}, {"weight_decay": 0.5}, {"betas": (0.1, 0.2)}, {"optimizer": sgd}):
        job = made(spec, folder, **(change if dist.get_rank() == dist.get_world_size() - 1 else {}))
        before = [param.detach().clone() for param in job.run.parameters()]
        texts.append(told(job, Job.step)[0])
        assert all(map(torch.equal, before, job.run.parameters()))
    return texts


def sgd(run: mk.Run, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(run.parameters(), lr=lr)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_an_optimizer_that_differs_changes_nothing(spec: str, tmp_path: Path) -> None:
    by_rank = pool(2).run(first_steps, spec, str(tmp_path), timeout_s=200)
    assert by_rank[0] == by_rank[1]
    lr, decay, betas, kind = by_rank[0]
    assert "ranks differ in lr of ShardedAdamW.step" in lr and "0.001 on rank 0, 0.005 on rank 1" in lr
    assert "0.5" in decay and "(0.1, 0.2) on rank 1" in betas
    assert "ranks make different calls: ShardedAdamW.step" in kind and "SGD.step" in kind


def layers_of_their_own_rate() -> str:
    """A rate for each layer: stages have other groups, and agree with their own ranks alone."""
    mesh = mesh_for("pp=2 tp=2")
    torch.manual_seed(0)
    run = mk.parallelize(mk.models.Llama(MODEL), mesh)
    groups = [
        {"params": [param], "lr": 1e-3 * 0.9**depth}
        for depth, param in enumerate(run.parameters())
        if param.requires_grad
    ]
    job = Job(run, torch.optim.SGD(groups), {}, dist.get_rank() == 3, Path(), Checkpointer("unused"))
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    job.batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    job.step()
    job.step()
    return told(job, with_option("lr", 0.5))[0]


def test_stages_may_have_rates_of_their_own_and_their_ranks_may_not() -> None:
    (text, *others) = pool(4).run(layers_of_their_own_rate)
    assert {text} == {*others}
    assert re.search(r"ranks differ in options of groups of SGD.step .* on rank 2.* on rank 3", text)
    assert "The ranks of a pipeline stage need the same." in text


# --------------------------------------------------------------------------------------------------- the one number


class Alone:
    """One rank out of many, whose number is added here."""

    def __init__(self, spec: str, rank: int) -> None:
        resolved = mk.MeshSpec.parse(spec)
        group = SimpleNamespace(group_name="of many")
        self.agreement = Agreement.__new__(Agreement)
        bits = 48 - (resolved.world_size - 1).bit_length()
        names: tuple[Scope, ...] = ("mesh", "stage", "rows")
        scopes = {scope: _scope(scope, resolved, rank, bits) for scope in names}
        mesh = SimpleNamespace(spec=resolved, rank=rank, group=group)
        self.agreement.__dict__ |= {"_mesh": mesh, "_bits": bits, "alone": False, "_calls": [], "_scopes": scopes}

    def number(self, **values: Any) -> float:
        self.agreement._calls.clear()
        self.agreement.note(
            "call", {"mesh": values.get("mesh", 0)}, stage={"s": values.get("stage")}, rows=values.get("rows")
        )
        return float(self.agreement._tail(self.agreement._calls, 0)[0])


@pytest.mark.parametrize(
    "spec", ["tp=2", "dp_shard=3", "pp=2 dp_shard=2 cp=3 tp=2", "pp=4 dp_replicate=4 dp_shard=16 tp=8"]
)
def test_the_sum_over_ranks_is_zero_exactly_where_all_that_must_agree_do(spec: str) -> None:
    size = mk.MeshSpec.parse(spec).world_size
    ranks = [Alone(spec, rank) for rank in range(size)]
    modulus = 1 << ranks[0].agreement._bits
    # Each stage its own, each data rank its own rows, and the mesh one: nothing differs that must not.
    groups = {
        scope: {r: min(group) for group in ranks[0].agreement._scopes[scope].groups for r in group}
        for scope in ("stage", "rows")
    }
    alike = [
        each.number(mesh="x", stage=groups["stage"][rank], rows={"ids": torch.tensor([groups["rows"][rank]])})
        for rank, each in enumerate(ranks)
    ]
    assert sum(alike) % modulus == 0 and sum(alike) < 1 << 53
    for scope, value in (("mesh", "y"), ("stage", "y"), ("rows", {"ids": torch.tensor([-1])})):
        if scope in groups and len({*groups[scope].values()}) == size:
            continue  # each rank is alone in it
        for rank in {0, size // 2, size - 1}:
            values = {
                "mesh": "x",
                "stage": groups["stage"][rank],
                "rows": {"ids": torch.tensor([groups["rows"][rank]])},
            }
            other = ranks[rank].number(**{**values, scope: value})
            assert (sum(alike) - alike[rank] + other) % modulus, (scope, rank)


def test_tensors_of_a_device_are_compared_there() -> None:
    from meshkit.mesh.agreement import _digest_on_device

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (4, 64), generator=generator)
    kinds = [ids, ids.int(), ids.double(), ids.float(), ids.bfloat16(), ids.half(), ids > 500, ids.to(torch.complex64)]
    for tensor in kinds:
        flat = tensor.reshape(-1)
        digest = int(_digest_on_device(flat))
        assert digest == int(_digest_on_device(flat.clone()))
        swapped = flat.clone()
        swapped[[0, 1]] = flat[[1, 0]]
        changed = flat.clone()
        changed[7] = 0 if flat[7] != 0 else 1
        assert bool((swapped == flat).all()) or int(_digest_on_device(swapped)) != digest
        assert int(_digest_on_device(changed)) != digest
    assert int(_digest_on_device(ids[:0].reshape(-1))) == 0


def test_a_message_that_was_changed_on_its_way_is_not_called_a_difference() -> None:
    same = [Told(rank=rank, host="a", calls=[]) for rank in range(2)]
    groups: Any = {"mesh": [[0, 1]], "stage": [[0, 1]], "rows": [[0], [1]]}
    assert "a message arrived other than it was sent" in sentence(same, groups)


def test_hosts_are_named_where_there_are_several() -> None:
    call = {"what": "step", "at": "train.py:3", "facts": {"mesh": {"lr": "1"}}}
    other = {**call, "facts": {"mesh": {"lr": "2"}}}
    everyone = [Told(rank=rank, host=f"node{rank // 2}", calls=[other if rank == 3 else call]) for rank in range(4)]
    groups: Any = {"mesh": [[0, 1, 2, 3]], "stage": [[0, 1, 2, 3]], "rows": [[0, 1, 2, 3]]}
    assert sentence(everyone, groups) == (
        "ranks differ in lr of step (train.py:3): 1 on ranks 0-2 (node0, node1), 2 on rank 3 (node1). "
        "Every rank of the mesh needs the same."
    )
