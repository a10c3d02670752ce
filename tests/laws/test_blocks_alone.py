"""Each block alone, on a module that meshkit has never seen, in at most 15 lines: equal to one device."""

from __future__ import annotations

import ast
import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.moe.routing import Routing
from meshkit.parallel.pipeline import pipeline_of
from tests.world import pool

TOL_FP64_SUM = 1e-12  # only the order of summation differs
B, T, C, V = 4, 8, 16, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, C // 2)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 3 * C), nn.Linear(3 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Foreign(nn.Module):
    """Somebody's decoder, with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h, self.score = nn.Embedding(V, C), nn.ModuleList(Block() for _ in range(4)), nn.Linear(C, V)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.score(x)


class Experts(nn.Module):
    """Somebody's experts: stacked parameters, and `compute` on rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 6, C)), nn.Parameter(torch.randn(4, C, 6))

    def forward(self, x_NC: Tensor, routing: Routing, meanwhile: object = None) -> Tensor:
        return sum(
            routing.weights_NK[:, k, None]
            * torch.einsum("nch,nh->nc", self.w2[e], torch.einsum("nhc,nc->nh", self.w1[e], x_NC).relu())
            for k, e in enumerate(routing.experts_NK.unbind(1))
        )

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([(part @ self.w1[e].T).relu() @ self.w2[e].T for e, part in enumerate(parts)])


def foreign() -> Foreign:
    torch.manual_seed(0)
    return Foreign().double()


def tokens() -> Tensor:
    return torch.arange(B * T).reshape(B, T) * 7 % V


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")


def assert_equal(model: nn.Module, plain: nn.Module) -> bool:
    """Every gradient that this rank holds, of one device."""
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        assert param.grad is not None and name in wanted, name
        grad = full_tensor(param.grad) if isinstance(param.grad, DTensor) else param.grad
        torch.testing.assert_close(grad, wanted[name], rtol=0, atol=TOL_FP64_SUM)
    return True


def one_device(rows: slice = slice(None)) -> nn.Module:
    plain = foreign()
    loss_of(plain(tokens()[rows]), tokens()[rows]).backward()
    return plain


# ------------------------------------------------------------------------------------------------------ the seven


def tensor() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "wte": mk.plan.vocab(),
        "h.*.attn.*": mk.plan.replicate(),
        "h.*.mlp.up": mk.plan.column(),
        "h.*.mlp.down": mk.plan.row(),
    }
    model = mk.tensor_parallel(foreign(), mesh, plan={**plan, "score": mk.plan.replicate()})
    loss_of(model(tokens()), tokens()).backward()
    return assert_equal(model, one_device())


def shard() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = mk.fully_shard(foreign(), mesh, units=[f"h.{i}" for i in range(4)])
    own = tokens().chunk(2)[mesh.get_local_rank()]
    loss_of(model(own), own).backward()
    return assert_equal(model, one_device())


def context() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = mk.context_parallel(foreign(), mesh, attention=["h.*.attn"])
    part = mk.split_batch(model, {"input_ids": tokens(), "labels": tokens()})
    logits = model(part["input_ids"], mask=part["mask"])
    F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum").backward()
    for param in model.parameters():
        torch.distributed.all_reduce(param.grad)
    return assert_equal(model, one_device())


def expert() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    plain, x, scores = Experts().double(), torch.randn(6, C).double(), torch.randn(6, 4).double()
    model = mk.expert_parallel(copy.deepcopy(plain), mesh, plan={"": mk.plan.experts(columns=("w1",), rows=("w2",))})
    own = slice(0, 2) if mesh.get_local_rank() == 0 else slice(2, 6)
    model(x[own], route_of(scores[own])).square().sum().backward()
    plain(x, route_of(scores)).square().sum().backward()
    return assert_equal(model, plain)


def pipeline() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = mk.pipeline_parallel(foreign(), mesh, blocks=["h.*"])
    parts = [({"input_ids": ids}, 1.0) for ids in tokens().chunk(2)]
    pipeline_of(model).forward_backward(
        parts, lambda model, part: loss_of(model(part["input_ids"]), part["input_ids"]), torch.tensor(1.0)
    )
    return assert_equal(model, one_device())


def again() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = mk.recompute(foreign(), mesh, blocks=["h.0", "h.2"], mode="selective")
    loss_of(model(tokens()), tokens()).backward()
    return assert_equal(model, one_device())


def away() -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = mk.offload_activations(foreign(), mesh, blocks=[f"h.{i}" for i in range(4)])
    loss_of(model(tokens()), tokens()).backward()
    return assert_equal(model, one_device())


def route_of(scores: Tensor) -> Routing:
    weights, experts = scores.softmax(-1).topk(2)
    return Routing(experts, weights)


BLOCKS = {
    "tensor_parallel": tensor,
    "fully_shard": shard,
    "context_parallel": context,
    "expert_parallel": expert,
    "pipeline_parallel": pipeline,
    "recompute": again,
    "offload_activations": away,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_alone_equals_one_device(name: str) -> None:
    assert pool(2).run(BLOCKS[name]) == [True, True]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_one_shape_and_take_few_lines(name: str) -> None:
    verb = getattr(mk, name)
    first, second, *others = inspect.signature(verb).parameters.values()
    assert (first.name, second.name) == ("module", "mesh")
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in others)
    assert inspect.signature(verb).return_annotation == "nn.Module"
    body = ast.parse(inspect.getsource(BLOCKS[name])).body[0]
    assert body.end_lineno is not None and body.end_lineno - body.lineno < 15


def other_blocks() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        mk.recompute(foreign(), mesh, blocks=[f"h.{mesh.get_local_rank()}"])
    except mk.errors.PlanError as error:
        return str(error)
    return ""


def test_ranks_that_would_recompute_different_blocks_say_so() -> None:
    first, second = pool(2).run(other_blocks)
    assert "this rank recomputes ['h.0'] by full, but rank 1 of the axis ['h.1'] by full" in first
    assert "but rank 0 of the axis ['h.0']" in second


def refused() -> list[str]:
    plane = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    row = plane["tp"]
    cut = mk.pipeline_parallel(foreign(), row, blocks=["h.*"])
    split = mk.parallelize(foreign(), mk.init_mesh("dp_shard=2")).model
    texts = []
    for act in (
        lambda: mk.context_parallel(foreign(), plane),
        lambda: mk.pipeline_parallel(foreign(), plane, blocks=["h.*"]),
        lambda: mk.pipeline_parallel(cut, row, blocks=["h.*"]),
        lambda: mk.parallelize(split, mk.init_mesh("dp_shard=2")),
    ):
        with pytest.raises(mk.errors.PlanError) as error:
            act()
        texts.append(str(error.value))
    return texts


def test_a_mesh_of_two_axes_and_a_module_that_is_split_are_refused() -> None:
    for texts in pool(2).run(refused):
        for text, match in zip(
            texts, ["Pass mesh['cp']", "Pass mesh['pp']", "one rank already", "already"], strict=True
        ):
            assert match in text
