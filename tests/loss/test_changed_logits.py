"""A model or a hook that changes its logits is told, by its line, that a chunked loss makes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshkit.errors import MeshkitError, PlanError
from meshkit.loss.linear_logits import Head, LinearLogits, plan_head
from meshkit.plan import Plan
from meshkit.strategy import ChunkedLoss


def logits() -> LinearLogits:
    weight = torch.randn(5, 4)
    return LinearLogits(torch.randn(2, 3, 4), Head(weight, None, loss=ChunkedLoss(), vocabulary=5))


WAYS: dict[str, Any] = {
    "scaled": lambda x: x * 0.5,
    "divided": lambda x: x / 0.5,
    "from the left": lambda x: 2.0 - x,
    "capped": lambda x: torch.tanh(x / 30),
    "softmax": lambda x: F.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "in float": lambda x: x.float(),
    "negative": lambda x: -x,
    "with a tensor": lambda x: torch.ones(5) * x,
    "torch's loss": lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_computes_with_logits_is_named(way: str) -> None:
    with pytest.raises(MeshkitError, match="ChunkedLoss.*loss=None") as error:
        WAYS[way](logits())
    if way not in ("method", "in float"):
        assert "test_changed_logits.py:" in str(error.value)
    assert not hasattr(logits(), "softmax")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 5)


def test_a_hook_on_the_head_is_refused_in_the_plan() -> None:
    model = Model()
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    with pytest.raises(PlanError, match=r"the hook .*lambda.* sees what 'lm_head'.*use loss=None"):
        plan_head(model, Plan(), ChunkedLoss(), tp=1, sequence=False, device_type="cpu")
