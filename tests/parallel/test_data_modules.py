"""Ordinary modules on data axes: equal to one device on uneven and empty ranks, or refused in a line."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

import meshkit as mk
from meshkit.core.sharding import full_tensor
from tests.depth import thin
from tests.world import RankError, pool
from tests.zoo.odd import WIDTH, Batch, Layers, Residual, features, row_count, squares

TOL_FP64 = 1e-10  # only the order of summation differs
# The mesh, and the rows of each of its data ranks.
SPLITS = [
    ("dp_shard=3", (4, 3, 1)),
    ("dp_shard=2", (8, 0)),
    ("dp_replicate=2 dp_shard=2", (3, 2, 1, 2)),
    ("dp_replicate=2", (5, 3)),
    ("dp_shard=2 tp=2", (5, 3)),
]
BLOCKS = mk.Plan(blocks=["blocks.*"])


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def batch(step: int) -> Batch:
    return {name: tensor.double() for name, tensor in features(step).items()}


def own(rows: Batch, sizes: tuple[int, ...], rank: int) -> Batch:
    return {name: tensor.split(sizes)[rank] for name, tensor in rows.items()}


def one_device(make: Callable[[], nn.Module], steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first step's gradients, and the parameters and buffers after the last."""
    model = built(make)
    optimizer, losses, grads = mk.adamw(model, lr=1e-2), [], dict[str, Tensor]()
    for step in range(steps):
        rows = batch(step)
        loss = squares(model, rows) / row_count(rows)
        loss.backward()
        losses.append(float(loss.detach()))
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def on_ranks(
    make: Callable[[], nn.Module], spec: str, sizes: tuple[int, ...], microbatches: int, steps: int, zero: int
) -> bool:
    losses, grads, state = one_device(make, steps)
    mesh = mk.init_mesh(spec)
    # With stages the order of the modules must be known: without an example those before the blocks are taken for the first.
    example = mk.Example((batch(0)["x"],)) if mesh.spec.pp > 1 else None
    plan = BLOCKS if mesh.spec.tp == 1 else None
    run = mk.parallelize(built(make), mesh, plan=plan, zero=zero, example=example)
    optimizer = mk.adamw(run, lr=1e-2)
    for step in range(steps):
        rows = own(batch(step), sizes, mesh.data_rank)
        loss = run.forward_backward(rows, microbatches=microbatches, loss=squares, count=row_count)
        assert abs(float(loss) - losses[step]) < TOL_FP64
        for name, param in run.named_parameters() if step == 0 else ():
            if name not in grads:
                assert param.grad is None, f"{name} has a gradient"
                continue
            assert param.grad is not None, name
            torch.testing.assert_close(full_tensor(param.grad), grads[name], rtol=0, atol=TOL_FP64)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(full_tensor(tensor), state[name], rtol=0, atol=TOL_FP64)
    return True


# ------------------------------------------------------------------------------------------------------------ right


class Scalars(Layers):
    """One that is used, one in a block, a frozen one, one times zero, one that is never used, and an empty matrix."""

    class Gained(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(2.0))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.never = nn.Parameter(torch.tensor(3.0))
        self.none = nn.Parameter(torch.zeros(0, WIDTH))
        self.blocks[1] = self.Gained()

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale * self.fixed + self.none.sum() + 0 * self.unused


class GradientHooks(Layers):
    """Hooks that need the whole gradient: its norm, its first rows, and a clip of each element."""

    def __init__(self) -> None:
        super().__init__()

        def no_first_rows(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad[:3] = 0
            return grad

        self.enter.weight.register_hook(lambda grad: grad / grad.norm())
        self.enter.weight.register_hook(lambda grad: grad * 3)
        self.blocks[0].fc1.weight.register_hook(no_first_rows)
        self.blocks[1].fc2.bias.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        self.leave.weight.register_hook(lambda grad: None)


class AccumulatedHooks(Layers):
    def __init__(self) -> None:
        super().__init__()

        def decay(factor: float, param: Tensor) -> None:
            param.grad.add_(param.detach(), alpha=factor)
            param.grad /= param.grad.norm()

        self.enter.weight.register_post_accumulate_grad_hook(functools.partial(decay, 0.1))
        self.blocks[1].fc1.bias.register_post_accumulate_grad_hook(functools.partial(decay, -0.2))


class RemovedHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.enter.weight.register_hook(lambda grad: grad * 2).remove()


class SomeRowsAlone(Layers):
    """Rows take one of two linear layers: on most ranks a layer has no row. Another has none anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks[0].rare = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].register_forward_hook(lambda block, args, out: taken(out, block.rare, args[0][:, 0] > 0.6))

    def middle(self, x: Tensor) -> Tensor:
        return taken(x, self.rare, x[:, 1] > 0.6)


def taken(x: Tensor, layer: nn.Linear, rows: Tensor) -> Tensor:
    if not rows.any():
        return x
    return x.index_copy(0, rows.nonzero()[:, 0], layer(x[rows]))


class SharedCounter(Layers):
    """A buffer that every rank writes alike, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = torch.zeros(())

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return x * (1 + 0.1 * self.calls + 0.01 * self.seen)


class LogsWhatItSaw(Layers):
    """State that the forward leaves behind and does not read is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(1)

    def middle(self, x: Tensor) -> Tensor:
        self.last, self.kept = x.detach(), x
        return x


class Recurrent(Layers):
    """torch's recurrent layers keep their parameters in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH // 3, WIDTH // 3, num_layers=2, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.gru(x.unflatten(1, (3, WIDTH // 3)))[0].flatten(1)


RIGHT = [Recurrent, Scalars, GradientHooks, AccumulatedHooks, RemovedHook, SomeRowsAlone, SharedCounter, LogsWhatItSaw]


@pytest.mark.parametrize(
    ("make", "spec", "sizes"),
    thin([(make, *split) for make in RIGHT for split in SPLITS], 3),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_ordinary_module_equals_one_device(make: type[nn.Module], spec: str, sizes: tuple[int, ...]) -> None:
    if make is SomeRowsAlone and "tp" in spec:
        pytest.skip("which rows there are decides what runs, so it is refused on tp")
    if make is SharedCounter and "tp" in spec:
        pytest.skip("a call reads a tensor that the call before made, so it is refused on tp")
    assert all(pool(mk.MeshSpec.parse(spec).world_size).run(on_ranks, make, spec, sizes, 1, 3, 3))


@pytest.mark.parametrize(
    ("make", "zero"),
    thin([(make, zero) for make in (Scalars, GradientHooks, AccumulatedHooks, SomeRowsAlone) for zero in (1, 2, 3)], 2),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_microbatches_change_nothing(make: type[nn.Module], zero: int) -> None:
    assert all(pool(2).run(on_ranks, make, "dp_shard=2", (5, 3), 3, 2, zero))


@pytest.mark.parametrize("spec", ["dp_shard=1", "tp=2", "pp=2"])
@pytest.mark.parametrize("make", [GradientHooks, AccumulatedHooks], ids=lambda m: m.__name__)
def test_hooks_run_once_a_step_where_a_parameter_is_not_replaced_too(make: type[nn.Module], spec: str) -> None:
    assert all(pool(mk.MeshSpec.parse(spec).world_size).run(on_ranks, make, spec, (8,), 2, 2, 1))


# ---------------------------------------------------------------------------------------------------------- refused


class RunningMean(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class PlainMean(Layers):
    """As above, in an attribute that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def middle(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class LateMean(Layers):
    """As above, made by the first forward."""

    mean: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x - self.mean


class UnreadMean(PlainMean):
    """As above, of rows whose number depends on values: no reading follows it."""

    def middle(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach()[x[:, 0].detach().abs() >= 0].mean(0)
        return x - self.mean


class Grows(Layers):
    """Means of its inputs in a list of a record, each forward reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(means=deque[Tensor]())

    def middle(self, x: Tensor) -> Tensor:
        before = self.kept.means[-1] if self.kept.means else 0
        self.kept.means.append(x.detach().mean(0))
        return x - before


class GrowsForALog(Grows):
    """Nothing is read of it."""

    def middle(self, x: Tensor) -> Tensor:
        self.kept.means.append(x.detach().mean(0))
        return x


class LateParameter(Layers):
    def middle(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(x.new_ones(WIDTH))
        return x * self.late


class OtherBlocks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        return self.leave(self.blocks[0](hidden) if (x[0, :1] > 0).sum() else self.blocks[1](hidden))


class OneBlockMore(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](self.enter(x))
        return self.leave(self.blocks[1](hidden) if (x[0, :1] > 0).sum() else hidden)


class ReadsBlocks(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.blocks[0].fc1.weight)), self.blocks[0].fc2.weight)


class _Again(torch.autograd.Function):
    """Keeps the input of a block alone, and runs it again in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block.fc2(F.relu(ctx.block.fc1(x))), grad)
        return x.grad, None


class Reversible(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return _Again.apply(x, self.blocks[0])


class HookOfOptimizer(Layers):
    def __init__(self) -> None:
        super().__init__()
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.enter.weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())


class HookThatFails(Layers):
    def __init__(self) -> None:
        super().__init__()
        steps = {"of": 1}
        self.enter.weight.register_hook(lambda grad: steps[grad])


class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.LazyLinear(WIDTH)


class BatchNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


REFUSED = {
    RunningMean: "mixes the rows of a batch",
    PlainMean: "mixes the rows of a batch",
    LateMean: "mixes the rows of a batch",
    UnreadMean: "mixes the rows of a batch",
    Grows: "mixes the rows of a batch|the forward writes 'kept",
    LateParameter: "parameter 'late' was made in forward",
    OtherBlocks: "data ranks run different modules: after the root rank . of the data ranks comes to blocks",
    OneBlockMore: "data ranks run different modules: after blocks.0 rank . of the data ranks comes to",
    ReadsBlocks: "used outside of the forward of the module that holds it",
    Reversible: "a backward that the model writes itself runs modules again",
    HookOfOptimizer: "holds an optimizer",
    HookThatFails: "the hook on parameter 'enter.weight' raised",
    Lazy: "'late.weight' has no shape yet",
    BatchNorm: "'norm' is a BatchNorm1d in training mode",
}


def refused(make: Callable[[], nn.Module], text: str) -> bool:
    mesh = mk.init_mesh("dp_shard=2")
    with pytest.raises(mk.errors.PlanError, match=text):
        run = mk.parallelize(built(make) if make is not Lazy else make(), mesh, plan=BLOCKS)
        for step in range(2):
            rows = own(batch(step), (4, 4), mesh.data_rank)
            rows = {name: tensor.abs() * (1 - 2 * mesh.data_rank) for name, tensor in rows.items()}
            run.forward_backward(rows, loss=squares, count=row_count)
    return True


@pytest.mark.parametrize(("make", "text"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_right_is_refused_on_every_rank(make: type[nn.Module], text: str) -> None:
    world = pool(2)
    assert all(world.run(refused, make, text, timeout_s=30.0))
    world.kill()  # its ranks may have messages left


def reads_a_shard(model: Any, rows: Batch) -> Tensor:
    return squares(model, rows) + rows["x"].shape[0] * model.blocks[0].fc1.weight[torch.arange(2)].square().sum()


def refused_loss() -> str:
    mesh = mk.init_mesh("dp_shard=2")
    run = mk.parallelize(built(Layers), mesh, plan=BLOCKS)
    with pytest.raises(mk.errors.PlanError) as error:
        run.forward_backward(own(batch(0), (4, 4), mesh.data_rank), loss=reads_a_shard, count=row_count)
    return str(error.value)


def test_a_loss_that_meets_a_shard_is_told_of_the_parameter_and_not_of_logits() -> None:
    for text in pool(2).run(refused_loss):
        assert (
            "the loss meets a parameter, which outside of its module's forward is a shard" in text
            and "logits" not in text
        )


class UnusedLater(Layers):
    """In the first step all ranks run all blocks; in the second one rank leaves one out."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.enter(x)
        for block in self.blocks if self.calls == 1 or (x[0, :1] > 0).sum() else self.blocks[:1]:
            hidden = block(hidden)
        return self.leave(hidden)


def test_a_rank_that_leaves_the_path_later_says_so_within_30_seconds() -> None:
    with pytest.raises(
        RankError, match="data ranks run different modules: after blocks.0 rank . of the data ranks comes to"
    ):
        pool(2).run(refused, UnusedLater, "no such text", timeout_s=40.0)


def frozen_batch_norm() -> nn.Module:
    model = BatchNorm()
    model.norm.eval()
    return model


def test_a_frozen_batch_norm_equals_one_device() -> None:
    assert all(pool(2).run(on_ranks, frozen_batch_norm, "dp_shard=2", (5, 3), 1, 3, 3))


def back_in_training() -> bool:
    mesh = mk.init_mesh("dp_shard=2")
    run = mk.parallelize(built(frozen_batch_norm), mesh, plan=BLOCKS)
    run.model.train()
    with pytest.raises(mk.errors.PlanError, match="normalises by the rows of one rank"):
        run.forward_backward(own(batch(0), (4, 4), mesh.data_rank), loss=squares, count=row_count)
    return True


def test_a_batch_norm_put_back_into_training_is_refused() -> None:
    assert all(pool(2).run(back_in_training))


# ---------------------------------------------------------------------------------------------- remedies that errors name


class Encodes(Layers):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.enter(x)))


class Steps(Layers):
    class Block(Residual):
        def step(self, x: Tensor) -> Tensor:
            return self.forward(x) / 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block.step(x)
        return self.leave(x)


def encoded(model: Any, rows: Batch) -> Tensor:
    return (model.leave(model.encode(rows["x"])) - rows["y"]).square().sum()


def with_remedy(make: type[nn.Module], plan: mk.Plan, methods: dict[str, str], loss: Any) -> bool:
    model = built(make)
    (loss(model, batch(0)) / row_count(batch(0))).backward()
    mesh = mk.init_mesh("dp_shard=2")
    run = mk.parallelize(built(make), mesh, plan=plan)
    for name, method in methods.items():
        register_fsdp_forward_method(run.model.get_submodule(name), method)
    run.forward_backward(own(batch(0), (5, 3), mesh.data_rank), loss=loss, count=row_count)
    for name, param in run.named_parameters():
        wanted = model.get_parameter(name).grad
        assert param.grad is not None and wanted is not None
        torch.testing.assert_close(full_tensor(param.grad), wanted, rtol=0, atol=TOL_FP64)
    return True


@pytest.mark.parametrize(
    ("make", "plan", "methods", "loss"),
    [
        (ReadsBlocks, mk.Plan(blocks=["blocks.1"]), {}, squares),
        (Encodes, BLOCKS, {"": "encode"}, encoded),
        (Steps, BLOCKS, {"blocks.0": "step", "blocks.1": "step"}, squares),
    ],
    ids=["a parent's reads", "a method of the model", "a method of a unit"],
)
def test_the_remedy_for_parameters_used_outside_of_forward_works(
    make: type[nn.Module], plan: mk.Plan, methods: dict[str, str], loss: Any
) -> None:
    assert all(pool(2).run(with_remedy, make, plan, methods, loss))


def test_a_scalar_is_refused_by_fully_shard_alone_with_the_remedy() -> None:
    assert all(pool(2).run(scalar_alone))


def scalar_alone() -> bool:
    mesh = mk.init_mesh("dp_shard=2")
    with pytest.raises(mk.errors.PlanError, match="is a scalar"):
        mk.fully_shard(built(Scalars), mesh.data)
    mk.fully_shard(
        model := built(Scalars), mesh.data, whole=["scale", "unused", "fixed", "never", "none", "blocks.1.gain"]
    )
    assert isinstance(model.get_parameter("scale"), nn.Parameter)
    with pytest.raises(mk.errors.PlanError, match="no parameter 'scales'"):
        mk.fully_shard(built(Scalars), mesh.data, whole=["scales"])
    return True


class FewerRowsThanRanks(Layers):
    """Of its tables of one row, tp leaves the second rank nothing; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.never = nn.Embedding(1, WIDTH), nn.Embedding(1, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def middle(self, x: Tensor) -> Tensor:
        return (x + self.kind(torch.zeros(x.shape[0], dtype=torch.long))) * self.scale


def passes_add_up(spec: str) -> bool:
    """Two passes before a step, each of half the loss, on rows of their own."""
    model = built(FewerRowsThanRanks)
    mesh = mk.init_mesh(spec)
    run = mk.parallelize(built(FewerRowsThanRanks), mesh, plan=BLOCKS if mesh.spec.tp == 1 else None)
    for step in range(2):
        (squares(model, batch(step)) / row_count(batch(step))).backward()
        rows = batch(step) if mesh.tokens.size() == 1 else own(batch(step), (5, 3), mesh.data_rank)
        run.forward_backward(rows, loss=squares, count=row_count)
    for name, param in run.named_parameters():
        wanted = model.get_parameter(name).grad
        assert (param.grad is None) == (wanted is None), name
        if param.grad is not None and wanted is not None:
            torch.testing.assert_close(full_tensor(param.grad), wanted, rtol=0, atol=TOL_FP64)
    return True


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "dp_shard=2 tp=2"])
def test_gradients_of_whole_parameters_add_up_over_passes(spec: str) -> None:
    assert all(pool(mk.MeshSpec.parse(spec).world_size).run(passes_add_up, spec))


def grown() -> bool:
    mesh = mk.init_mesh("dp_shard=2")
    run = mk.parallelize(built(GrowsForALog), mesh, plan=BLOCKS)
    for step in range(3):
        run.forward_backward(own(batch(step), (4, 4), mesh.data_rank), loss=squares, count=row_count)
    return True


def test_a_list_that_grows_and_is_not_read_is_not_refused() -> None:
    assert all(pool(2).run(grown))
