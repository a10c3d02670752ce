"""A block given something else than it takes says so in one line, on one rank as on many, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshkit as mk
from meshkit.models import Llama
from tests.tiny import tiny_config
from tests.world import pool

BLOCKS = (
    "fully_shard",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "recompute",
    "offload_activations",
)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


STYLES = {"up": mk.plan.column(), "down": mk.plan.row()}
NEEDED: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"plan": STYLES},
    "expert_parallel": {"plan": STYLES},
    "pipeline_parallel": {"blocks": ["up"]},
    "recompute": {"blocks": ["up"]},
    "offload_activations": {"blocks": ["up"]},
}
LISTS = [
    ("fully_shard", "units"),
    ("fully_shard", "keep_gathered"),
    ("fully_shard", "ignored"),
    ("context_parallel", "attention"),
    ("pipeline_parallel", "blocks"),
    ("recompute", "blocks"),
    ("offload_activations", "blocks"),
    ("offload_activations", "keep"),
]


def called(verb: str, module: Any, mesh: Any, **asked: Any) -> Any:
    return getattr(mk, verb)(module, mesh, **{**NEEDED.get(verb, {}), **asked})


def given(verb: str, argument: str, value: Any, error: str) -> tuple[Callable[[DeviceMesh], Any], str]:
    return lambda mesh: called(verb, Mlp(), mesh, **{argument: value}), error


def twice(verb: str, **asked: Any) -> Callable[[DeviceMesh], Any]:
    return lambda mesh: called(verb, called(verb, Mlp(), mesh, **asked), mesh, **asked)


CALLS: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    **{
        f"{verb}, no module": (lambda mesh, verb=verb: called(verb, None, mesh), rf"{verb}\(module=None\): give Module")
        for verb in BLOCKS
    },
    **{
        f"{verb}, a text for a mesh": (
            lambda mesh, verb=verb: called(verb, Mlp(), "tp=2"),
            rf"{verb}\(mesh='tp=2'\): give DeviceMesh",
        )
        for verb in BLOCKS
    },
    **{
        f"{verb}, a text for the list {argument}": given(
            verb, argument, "layers.*", rf"{verb}\({argument}='layers.\*'\): a list of patterns, not one text"
        )
        for verb, argument in LISTS
    },
    **{
        f"{verb}, a number in the list {argument}": given(verb, argument, [3], rf"{verb}\({argument}=\[3\]\): 3 is no")
        for verb, argument in LISTS
    },
    **{
        f"{verb}, another plan than a table: {kind}": given(verb, "plan", plan, error)
        for verb in ("tensor_parallel", "expert_parallel")
        for kind, plan, error in (
            ("none", None, rf"{verb}\(plan=None\): give a table"),
            ("a Plan", mk.Plan(tensor=STYLES), rf"{verb}\(plan=Plan\(...\)\): .* Give plan.tensor"),
            ("texts", {"up": "column"}, rf"{verb}\(plan=...\): 'up' is 'column', which is no Style"),
        )
    },
    "keep_gathered of no submodule": given("fully_shard", "keep_gathered", ["nope"], "no submodule 'nope'"),
    "ignored of no submodule": given("fully_shard", "ignored", ["nope"], "no submodule 'nope'"),
    "keep_gathered of no unit": given("fully_shard", "keep_gathered", ["up"], "'up' is no unit"),
    "keep of no block": given("offload_activations", "keep", ["down"], "'down' is none of its blocks"),
    "fully_shard, a text for a precision": given("fully_shard", "precision", "bf16", "give Precision or None"),
    "context_parallel, a text for a policy": given("context_parallel", "policy", "ring", "give ContextPolicy or None"),
    "expert_parallel, a text for a policy": given("expert_parallel", "policy", "x", "give ExpertPolicy or None"),
    "pipeline_parallel, a text for a policy": given(
        "pipeline_parallel", "policy", "zbv", "give PipelinePolicy or None"
    ),
    "offload_activations, a text for a policy": given(
        "offload_activations", "policy", "host", "give ActivationOffload or None"
    ),
}
ON_TWO: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "an empty plan": given("tensor_parallel", "plan", {}, "but no pattern of the tensor plan covers it"),
    "fully_shard twice": (twice("fully_shard"), "fully_shard: the module is sharded already"),
    "fully_shard of a unit twice": (twice("fully_shard", units=["up"]), "is sharded already"),
    "tensor_parallel twice": (twice("tensor_parallel"), "tensor_parallel: 'up.weight' is split over a mesh already"),
    "tensor_parallel after fully_shard": (
        lambda mesh: called("tensor_parallel", called("fully_shard", Mlp(), mesh), mesh),
        "Split over tp first, then fully_shard",
    ),
    "context_parallel twice": (
        lambda mesh: mk.context_parallel(mk.context_parallel(llama(), mesh), mesh),
        "context_parallel: this Llama went through it already",
    ),
    "a scalar parameter": (
        lambda mesh: mk.fully_shard(nn.ParameterDict({"s": torch.tensor(1.0)}), mesh),
        "parameter 's' is a scalar",
    ),
}


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(tiny_config())


def texts(ranks: int) -> dict[str, str]:
    """What each call says: a MeshkitError's text, and of anything else its kind."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    said = {}
    for name, (call, _) in (CALLS if ranks == 1 else {**CALLS, **ON_TWO}).items():
        try:
            call(mesh)
            said[name] = "nothing"
        except mk.MeshkitError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = f"raw {type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_argument_is_told(ranks: int) -> None:
    wanted = {name: match for name, (_, match) in (CALLS if ranks == 1 else {**CALLS, **ON_TWO}).items()}
    said = pool(ranks).run(texts, ranks)[0]
    odd = {name: text for name, text in said.items() if not re.search(wanted[name], text)}
    assert not odd, "\n".join(f"{name}: {text[:200]}" for name, text in odd.items())


def test_duplicate_units_are_one() -> None:
    assert pool(2).run(sharded_units) == [2, 2]


def sharded_units() -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = mk.fully_shard(Mlp(), mesh, units=["up", "up"])
    return sum(isinstance(child, torch.distributed.fsdp.FSDPModule) for child in model.modules())
