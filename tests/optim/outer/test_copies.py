"""Copies of one parameter on several ranks of a replica keep the same bits, wherever they lie in what a rank sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.sharding import local_tensor
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.optim.outer import DiLoCo, OuterOptimizer
from meshkit.optim.outer._exchange import Exchange, Layout
from tests.optim.outer.test_local_updates import adamw
from tests.optim.outer.test_resume import STEPS, digest, train
from tests.tiny import tiny_config
from tests.world import pool

SIZE = 700  # of the tensor of which there are copies: six blocks, the last with few elements
BESIDE = ([300, 5], [2000, 129])  # before and after it, on two ranks of a replica


def meetings_of_copies(wire: str) -> list[bool]:
    """For each meeting, whether both ranks of the replica have the same mean of the copy, and the same error."""
    group, replica = dist.group.WORLD, dist.get_rank()
    assert group is not None
    draw = torch.Generator().manual_seed(replica)
    errors = [[torch.zeros(size) for size in (before, SIZE, after)] for before, after in BESIDE]
    alike = []
    for step in range(4):
        copy = torch.randn(SIZE, generator=draw)
        found = []
        for (before, after), kept in zip(BESIDE, errors, strict=True):
            layout = Layout((before, SIZE, after), dist.get_world_size(), wire, torch.float32)  # type: ignore[arg-type]
            values = [torch.randn(before, generator=draw), copy, torch.randn(after, generator=draw)]
            weight = torch.tensor(float(replica + 1))
            found.append(Exchange(group, layout, values, weight=weight, step=step, errors=kept).finish()[1])
        alike.append(torch.equal(*found) and torch.equal(errors[0][1], errors[1][1]) and bool(errors[0][1].any()))
    return alike


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_copies_get_the_same_means_and_errors_wherever_they_lie(wire: str) -> None:
    for ranks in (2, 3):
        assert all(all(found) for found in pool(ranks).run(meetings_of_copies, wire))


def stopped_with_tied_weights(folder: str, policy: DiLoCo) -> bool:
    """Whether a run on pp with tied embeddings, which two stages hold, goes on from a checkpoint bit for bit."""
    mesh = mk.init_mesh("pp=2 dp_replicate=2")

    def build(seed: int) -> tuple[mk.Run, OuterOptimizer]:
        torch.manual_seed(seed)
        config = tiny_config(vocab_size=31, intermediate_size=20, num_hidden_layers=2, tie_word_embeddings=True)
        run = mk.parallelize(Llama(config).double(), replica_mesh(mesh), plan=LLAMA_PLAN, microbatches=2)
        return run, OuterOptimizer(run, adamw(run.model), mesh, policy)

    with Checkpointer(f"{folder}/{mesh['dp_replicate'].get_local_rank()}") as checkpoints:
        run, outer = build(1)
        train(run, outer, range(0, 5))
        checkpoints.save(5, run, outer)
        train(run, outer, range(5, STEPS))
        wanted = digest(outer)
        run, outer = build(2)
        checkpoints.load(run, outer)
        train(run, outer, range(5, STEPS))
    tied = next(local_tensor(param) for name, param in run.named_parameters() if param.shape[0] == 31)
    held = [torch.empty_like(tied) for _ in range(2)]
    dist.all_gather(held, tied.detach(), group=mesh["pp"].get_group())
    assert torch.equal(*held)
    return digest(outer) == wanted


def test_tied_weights_of_two_stages_resume_bit_for_bit_with_error_feedback(tmp_path: Path) -> None:
    assert all(pool(4).run(stopped_with_tied_weights, str(tmp_path), DiLoCo(every=2, wire="int8")))
