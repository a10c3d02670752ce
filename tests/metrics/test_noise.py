"""Gradient noise against distributions whose noise scale is known: all outcomes counted, and gradients of a run on a mesh."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.data import MeasuredBatch
from meshkit.errors import MeshkitError
from meshkit.metrics import GradientNoise
from meshkit.step import grad_norm
from tests.world import pool


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (1, 3), (1, 1, 2), (1, 1, 1, 1)])
def test_over_all_outcomes_the_scale_is_exact(sizes: tuple[int, ...]) -> None:
    """Each token's gradient is (3, 1) + (±2, ±1): |G|² is 10, the noise 5, so the scale 0.5 tokens. No chance is left."""
    noise = GradientNoise(kept=10**6)
    for signs in itertools.product((-1, 1), repeat=8):
        grads = np.array([3.0, 1.0]) + np.array(signs).reshape(4, 2) * [2.0, 1.0]
        starts = np.cumsum([0, *sizes])[:-1]
        parts = [np.linalg.norm(grads[s : s + n].mean(0)) for s, n in zip(starts, sizes, strict=True)]
        noise.add(parts, sizes, float(np.linalg.norm(grads.mean(0))), 4)
    told = noise.scale()
    assert told.tokens == pytest.approx(0.5)
    assert told.steps == 256


def test_the_bounds_hold_the_scale_in_most_runs() -> None:
    random = np.random.default_rng(0)
    signal = np.full(50, 0.1)  # |G|² is 0.5, the noise 50: the scale 100 tokens
    held = 0
    for _ in range(200):
        noise = GradientNoise()
        for _ in range(60):
            grads = signal + random.standard_normal((2, 50)) / np.sqrt(64)
            noise.add([np.linalg.norm(grads[0])], [64], float(np.linalg.norm(grads.mean(0))), 128)
        told = noise.scale()
        held += told.low <= 100 <= told.high
    assert held >= 180  # two standard errors are 95 %


def test_only_the_last_steps_are_kept() -> None:
    noise = GradientNoise(kept=2)
    for norm in (100.0, 2.0, 2.0):
        noise.add([norm], [1], 1.5, 2)
    # |G|² = 2 * 2.25 - 4 and S = (4 - 2.25) / (1 - 1/2)
    assert noise.scale().tokens == pytest.approx(3.5 / 0.5)


def test_a_gradient_that_noise_hides_has_no_scale() -> None:
    noise = GradientNoise()
    noise.add([2.0], [1], 1.0, 4)
    assert noise.scale().tokens == float("inf")
    assert "above what 1 steps can tell" in str(noise.scale())
    still = GradientNoise()
    still.add([1.0], [1], 1.0, 4)
    assert still.scale().tokens == 0


class Mean(nn.Module):
    """Its gradient of a row x is w - x."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 6, bias=False)

    def forward(self, one: Tensor) -> Tensor:
        return self.inner(one)


def _loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return 0.5 * (model(part["one"]) - part["x"]).square().sum()


def _count(batch: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(batch["x"]))


def noise_of_a_run(rows: Tensor) -> float:
    """Two halves a step, of which each rank has its rows. rows: [steps, ranks, rows of a rank, 6]"""
    mesh = mk.init_mesh("dp_shard=2")
    model = Mean().double()
    nn.init.zeros_(model.inner.weight)
    run = mk.parallelize(model, mesh)
    noise = GradientNoise()
    for of_step in rows:
        half, rest = of_step[mesh.data_rank].split([3, 5])
        batches = [{"x": part, "one": torch.ones(len(part), 1, dtype=part.dtype)} for part in (half, rest)]
        run.forward_backward(batches[0], loss=_loss, count=_count)
        part_norm = grad_norm(run).item()
        for param in run.parameters():
            param.grad *= 3 / 5  # means are added by their rows
        run.forward_backward(batches[1], loss=_loss, count=_count)
        noise.add([part_norm], [2 * 3], mk.clip_grad_norm(run, 1e9).item() * 5 / 8, 2 * 8)
        run.model.zero_grad()
    return noise.scale().tokens


def test_two_parts_of_a_step_on_a_mesh_tell_the_scale_of_their_rows() -> None:
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 2, 8, 6)) + 0.5)
    noise = GradientNoise()
    for of_step in rows.numpy():
        norms = [np.linalg.norm(part.mean((0, 1))) for part in (of_step[:, :3], of_step)]
        noise.add([float(norms[0])], [6], float(norms[1]), 16)
    assert pool(2).run(noise_of_a_run, rows) == pytest.approx([noise.scale().tokens] * 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([1.0], [4], 1.0, 4), "parts of 4 tokens, and a whole of 4: a part is smaller"),
        (([], [], 1.0, 4), "give a norm and the tokens of each part"),
        (([1.0, 1.0], [2], 1.0, 4), "give a norm and the tokens of each part"),
        (([float("nan")], [2], 1.0, 4), "leave steps out that are not finite"),
    ],
)
def test_odd_steps_are_refused(arguments: tuple, match: str) -> None:
    with pytest.raises(MeshkitError, match=match):
        GradientNoise().add(*arguments)
    with pytest.raises(MeshkitError, match="before a step"):
        GradientNoise().scale()


def test_a_measured_batch_resumed_from_a_checkpoint_is_that_of_a_run_that_was_not_stopped() -> None:
    def grown(noise: GradientNoise, batch: MeasuredBatch, steps: range) -> list[int]:
        sizes = []
        for step in steps:
            noise.add([1.0 + 0.01 * step], [64], 0.9, 128)
            sizes.append(batch.measured(noise.scale().tokens, seq_len=8))
        return sizes

    noise, batch = GradientNoise(kept=5), MeasuredBatch(first=1, last=1000)
    whole = grown(noise, batch, range(12))
    noise, batch = GradientNoise(kept=5), MeasuredBatch(first=1, last=1000)
    before = grown(noise, batch, range(7))
    saved = json.loads(
        json.dumps([noise.state_dict(), batch.state_dict()])
    )  # as `extra` of a checkpoint, and the loader's
    noise, batch = GradientNoise(kept=5), MeasuredBatch(first=1, last=1000)
    noise.load_state_dict(saved[0])
    batch.load_state_dict(saved[1])
    assert before + grown(noise, batch, range(7, 12)) == whole and len({*whole[7:]}) > 2
    with pytest.raises(MeshkitError, match="a state of 1 and 0 steps"):
        noise.load_state_dict({"noise": [1.0], "signal": []})
