"""What somebody did to a model, or keeps in an optimizer, and a move would lose: it is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from tests.checkpoint.training import refusal
from tests.world import pool


class Block(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(8), persistent=persistent)
        self.register_buffer("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class Net(nn.Module):
    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block(persistent) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def started(spec: str, model: nn.Module | None = None) -> mk.Run:
    torch.manual_seed(0)
    model = model or Net()
    return mk.parallelize(model.double(), mk.init_mesh(spec))


def loss_of(run: mk.Run) -> float:
    ids = torch.arange(4 * 7).view(4, 7) % 16
    rows = ids.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank]
    batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
    return float(run.forward_backward(batch, microbatches=2 if run.mesh.spec.pp > 1 else 1))


def stepped(run: mk.Run, optimizer: torch.optim.Optimizer) -> float:
    loss = loss_of(run)
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Mine(mk.optim.ShardedAdamW):
    """Somebody's own."""


class Around(torch.optim.SGD):
    """Keeps another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)


def _hook(run: mk.Run) -> None:
    run.model.get_submodule("head").register_forward_hook(lambda module, args, out: None)


def _parameter_hook(run: mk.Run) -> None:
    run.model.get_parameter("embed.weight").register_post_accumulate_grad_hook(lambda param: None)


def _late(run: mk.Run) -> None:
    run.model.get_submodule("layers.0").empty = torch.ones(1)


def _listed(run: mk.Run) -> None:
    block = run.model.get_submodule("layers.0")
    block.every = [block.scale]


CHANGES: dict[str, tuple[Callable[[mk.Run], None], str]] = {
    "hook": (_hook, "module 'head' was given a hook after parallelize"),
    "parameter's hook": (_parameter_hook, "parameter 'embed.weight' was given a hook after parallelize"),
    "late buffer": (_late, "buffer 'layers.0.empty' was made after parallelize"),
    "listed buffer": (_listed, "module 'layers.0' holds a buffer in its attribute 'every'"),
}
OPTIMIZERS: dict[str, tuple[Callable[[mk.Run], Any], str]] = {
    "subclass": (lambda run: Mine([{"params": list(run.parameters())}], lr=0.1), "a Mine is a subclass of one of"),
    "around": (lambda run: Around(run.parameters()), "keeps tensors or an optimizer in its attribute 'base'"),
    "name": (lambda run: "adam", "optimizer is a str"),
    "opaque": (
        lambda run: torch.optim.SGD([{"params": list(run.parameters()), "fn": lambda x: x}], lr=0.1),
        "PlanError: move: ",
    ),
}


def changed(name: str) -> tuple[str, bool]:
    run = started("tp=2")
    CHANGES[name][0](run)
    said = refusal(lambda: run.move(mesh="dp_shard=2"))
    return said, loss_of(run) > 0


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_refused_and_goes_on(name: str) -> None:
    for said, goes_on in pool(2).run(changed, name):
        assert CHANGES[name][1] in said and goes_on


def other_optimizer(name: str) -> tuple[str, bool]:
    run = started("dp_shard=2")
    optimizer = OPTIMIZERS[name][0](run)
    said = refusal(lambda: run.move(mesh="tp=2", optimizer=optimizer))
    return said, loss_of(run) > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_a_move_does_not_know_is_refused_on_every_rank(name: str) -> None:
    for said, goes_on in pool(2).run(other_optimizer, name, timeout_s=60):
        assert OPTIMIZERS[name][1] in said and goes_on


def with_shared_buffer() -> tuple[str, bool]:
    model = Net().double()
    model.layers[1].scale = model.layers[0].scale
    run = started("dp_shard=2", model)
    return refusal(lambda: run.move(mesh="tp=2")), loss_of(run) > 0


def test_a_buffer_of_two_modules_is_refused() -> None:
    for said, goes_on in pool(2).run(with_shared_buffer):
        assert "'layers.0.scale' and 'layers.1.scale' are one buffer" in said and goes_on


def stages_apart() -> tuple[str, bool]:
    run = started("pp=2", Net(persistent=False))
    for index in range(2):
        if f"layers.{index}.up.weight" in dict(run.named_parameters()):
            run.model.get_submodule(f"layers.{index}").scale.fill_(2.0 + index)
    said = refusal(lambda: run.move(mesh="dp_shard=2"))
    return said, loss_of(run) > 0


def test_buffers_that_only_a_stage_knows_are_refused() -> None:
    for said, goes_on in pool(2).run(stages_apart):
        assert "is not persistent, and the stages have other values of it" in said and goes_on


def merged() -> tuple[str, bool]:
    config = mk.models.LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4},
    )
    model = mk.models.Llama(config).double()
    plan = mk.lora.attach(model, mk.models.LLAMA_PLAN, rank=2, alpha=4.0)
    run = mk.parallelize(model, mk.init_mesh("dp_shard=2"), plan=plan)
    mk.lora.merge(run.model)
    return refusal(lambda: run.move(mesh="tp=2")), True


def test_a_model_whose_adapters_were_merged_is_refused() -> None:
    for said, _ in pool(2).run(merged):
        assert "PlanError: move: the model has changed since parallelize" in said
