"""Parity and law 7 for derived plans: layers by parts, joined layers, and containers that are computed whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.sharding import full_tensor
from meshkit.preflight.explain import Message
from tests.laws.parity.cases import Cell, batches, mesh_for, own_rows
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.parallel.tensor.parts import Attention, Gated, Model, Normed, Relative, Spread
from tests.world import pool

TOL_FP64_SUM = 1e-10  # only summation order differs


def build() -> Model:
    torch.manual_seed(5)
    return Model(Attention, Gated, Normed, Spread, Relative).double()


def observe_derived(sequence: bool) -> tuple[Counter[Message], Counter[Message]]:
    run = mk.parallelize(build(), mesh_for("tp=2"), sequence=sequence)
    return seen_and_said(run, own_rows(batches(Cell(mesh="tp=2"))[0], run.mesh), microbatches=2)


def gradient_errors(sequence: bool) -> dict[str, float]:
    model, run = build(), mk.parallelize(build(), mesh_for("tp=2"), sequence=sequence)
    batch = batches(Cell(mesh="tp=2"))[0]
    logits = model(batch["input_ids"])
    F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100).backward()
    run.forward_backward(own_rows(batch, run.mesh))
    expected = {name: param.grad for name, param in model.named_parameters()}
    errors = {}
    for name, param in run.named_parameters():
        gradient, wanted = gradient_of(param), expected[name]
        assert gradient is not None and wanted is not None
        errors[name] = float((full_tensor(gradient) - wanted).abs().max() / wanted.abs().max())
    return errors


@pytest.mark.parametrize("sequence", (False, True))
def test_every_gradient_of_a_derived_plan_equals_one_device(sequence: bool) -> None:
    for errors in pool(2).run(gradient_errors, sequence):
        assert max(errors.values()) < TOL_FP64_SUM, errors


@pytest.mark.parametrize("sequence", (False, True))
def test_a_derived_plan_sends_what_is_explained(sequence: bool) -> None:
    assert_alike(pool(2).run(observe_derived, sequence))
