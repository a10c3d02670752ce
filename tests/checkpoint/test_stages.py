"""Checkpoints of stages: ranks of pp hold different layers, and another mesh may hold them all, or cut them elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshkit.checkpoint import Checkpointer
from tests.checkpoint.training import build, refusal
from tests.depth import DEEP, thin
from tests.world import pool

LAYERS = 4
MESHES = [
    (2, "pp=2", "1f1b"),
    (4, "pp=2 dp_shard=2", "interleaved"),
    (4, "pp=2 tp=2", "zbv"),
    (4, "pp=4", "1f1b"),
    (2, "dp_shard=2", "1f1b"),
]
Found = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]


def save(folder: str, spec: str, schedule: str, tied: bool) -> Found:
    """(the state this rank saves, loss of the next step, the state after it)."""
    training = build(spec, schedule=schedule, tie_word_embeddings=tied, num_hidden_layers=LAYERS)
    training.train(2)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, training.run, training.optimizer, **training.holders)
    return training.whole_state(), training.train(1), training.whole_state()


def load(folder: str, spec: str, schedule: str, tied: bool) -> Found:
    training = build(spec, schedule=schedule, tie_word_embeddings=tied, num_hidden_layers=LAYERS, seed=1, lr=0.5)
    Checkpointer(folder).load(training.run, training.optimizer, **training.holders)
    return training.whole_state(), training.train(1), training.whole_state()


def merged(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert torch.equal(whole.setdefault(name, value), value)
    return whole


def others_of(at: int) -> list[tuple[int, str, str]]:
    """The meshes that load what mesh `at` saved; by default two of the five, so that each loads what two saved."""
    return MESHES if DEEP else [MESHES[(at + step) % len(MESHES)] for step in (1, 3)]


@pytest.mark.parametrize(
    ("at", "tied"), thin([(at, at % 2 == flip) for flip in (0, 1) for at in range(len(MESHES))], 5)
)
def test_any_stages_continue_what_any_mesh_saved(tmp_path: Path, at: int, tied: bool) -> None:
    ranks, spec, schedule = MESHES[at]
    saved = pool(ranks).run(save, str(tmp_path), spec, schedule, tied)
    before, losses, after = merged([rank[0] for rank in saved]), saved[0][1], merged([rank[2] for rank in saved])
    assert len(before) == 4 * (LAYERS * 9 + (2 if tied else 3))  # a value, two moments and a count of each
    for other_ranks, other_spec, other_schedule in others_of(at):
        loaded = pool(other_ranks).run(load, str(tmp_path), other_spec, other_schedule, tied)
        found = merged([rank[0] for rank in loaded])
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], value) for name, value in before.items())
        assert loaded[0][1] == pytest.approx(losses, rel=1e-9)
        for name, value in merged([rank[2] for rank in loaded]).items():
            torch.testing.assert_close(value, after[name], rtol=0, atol=1e-9)


def go_on(folder: str, resumed: bool) -> tuple[list[float], str]:
    """Losses of steps 3 and 4 and a digest of the end, straight on or from the checkpoint of step 2."""
    training = build("pp=2 dp_shard=2", schedule="zb-h1", num_hidden_layers=LAYERS, seed=1 if resumed else 0)
    with Checkpointer(folder) as checkpointer:
        if resumed:
            assert checkpointer.resume(training.run, training.optimizer, **training.holders) == 2
        else:
            training.train(2)
            checkpointer.save(2, training.run, training.optimizer, **training.holders)
    return training.train(2), training.local_state()


def test_resuming_on_the_same_stages_is_bit_for_bit_going_on(tmp_path: Path) -> None:
    straight = pool(4).run(go_on, str(tmp_path), False)
    assert pool(4).run(go_on, str(tmp_path), True) == straight


def load_other(folder: str, **shape: Any) -> str:
    training = build("pp=2", **shape)
    before = training.local_state()
    text = refusal(lambda: Checkpointer(folder).load(training.run, training.optimizer, **training.holders))
    assert training.local_state() == before
    return text


def test_another_model_is_refused_on_every_stage(tmp_path: Path) -> None:
    pool(2).run(save, str(tmp_path), "pp=2", "1f1b", True)
    for text in pool(2).run(load_more_layers, str(tmp_path)):
        assert "it has no 'layers.4.self_attn.q_proj.weight', which this model has with shape (24, 24)" in text
    for text in pool(2).run(load_fewer_layers, str(tmp_path)):
        assert "it has 'layers.3.self_attn.q_proj.weight' with shape (24, 24), which this model has not" in text


def load_more_layers(folder: str) -> str:
    return load_other(folder, num_hidden_layers=LAYERS + 1)


def load_fewer_layers(folder: str) -> str:
    return load_other(folder, num_hidden_layers=LAYERS - 1)
