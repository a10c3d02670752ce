"""TR-DPO's reference: the mean it is said to be, on shards as on one device, and refused where models differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.algos.preference import update_reference
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from tests.laws.parity.cases import mesh_for
from tests.plan.test_plan import MLP
from tests.world import pool


def models(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return MLP().to(dtype), MLP().to(dtype)


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_the_reference_moves_by_alpha(alpha: float) -> None:
    reference, policy = models()
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    update_reference(reference, policy, alpha=alpha)
    for name, param in policy.named_parameters():
        expected = alpha * param + (1 - alpha) * before[name]
        assert (reference.get_parameter(name) - expected).abs().max() < 1e-15
        assert alpha < 1 or torch.equal(reference.get_parameter(name), param)
        assert reference.get_parameter(name) is not param


def test_a_bf16_reference_is_rounded_once() -> None:
    reference, policy = models(torch.float32)
    low = MLP().to(torch.bfloat16)
    low.load_state_dict(reference.state_dict())
    update_reference(low, policy, alpha=0.01)
    for name, param in policy.named_parameters():
        rounded = reference.get_parameter(name).bfloat16().float()
        assert torch.equal(low.get_parameter(name), torch.lerp(rounded, param, 0.01).bfloat16())


def sharded(axes: str) -> dict[str, torch.Tensor]:
    mesh = mesh_for(axes)
    runs = [mk.parallelize(model, mesh) for model in models()]
    update_reference(runs[0].model, runs[1].model, alpha=0.6)
    return {name: full_tensor(param) for name, param in runs[0].named_parameters()}


def test_shards_move_as_one_device_does() -> None:
    reference, policy = models()
    update_reference(reference, policy, alpha=0.6)
    for found in pool(4).run(sharded, "dp_replicate=2 dp_shard=2"):
        for name, param in reference.named_parameters():
            assert torch.equal(found[name], param)


def test_models_that_differ_are_refused_untouched() -> None:
    reference, policy = models()
    for alpha in (0.0, 1.5):
        with pytest.raises(PlanError, match=rf"alpha={alpha} is the policy's share. Use \(0, 1\]"):
            update_reference(reference, policy, alpha=alpha)
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    policy.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(PlanError, match="only one model has 'extra', of 1 such parameters"):
        update_reference(reference, policy)
    reference.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    with pytest.raises(PlanError, match=r"'extra' has shape \(2,\) in the reference and \(1,\) in the policy"):
        update_reference(reference, policy)
    assert all(torch.equal(reference.get_parameter(name), value) for name, value in before.items())
