"""ZeRO stages that do not exist are refused before anything is changed; 0 is none of them, and does not mean the default."""

from __future__ import annotations

import pytest

import meshkit as mk
from meshkit.mesh import fake_world
from tests.tiny import tiny_config


@pytest.mark.parametrize("zero", [0, 4, -1])
def test_a_stage_that_does_not_exist_is_refused_and_the_model_stays_as_it_was(zero: int) -> None:
    model = mk.models.Llama(tiny_config())
    before = {name: (type(module), type(module).forward) for name, module in model.named_modules()}
    with fake_world(4):
        mesh = mk.init_mesh("dp_shard=2 tp=2", device_type="cpu")
        with pytest.raises(mk.errors.PlanError, match=rf"zero={zero}: the stages are 1 \(optimizer state\)"):
            mk.parallelize(model, mesh, zero=zero)
    assert {name: (type(module), type(module).forward) for name, module in model.named_modules()} == before
