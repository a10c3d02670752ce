"""What is changed after parallelize: right on data ranks, or refused in the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.errors import MeshkitError, PlanError
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool
from tests.zoo import decoders
from tests.zoo.decoders import Plain
from tests.zoo.odd import OUT, ROWS, WIDTH, Layers, features, row_count, squares
from tests.zoo.shrink import VOCABULARY

TOL_FP64 = 1e-12


def replaced(model: Any) -> None:
    torch.manual_seed(1)
    model.leave = nn.Linear(WIDTH, OUT).double()


def added(model: Any) -> None:
    model.blocks[0].late = nn.Parameter(torch.ones(WIDTH).double())


def hooked(model: Any) -> None:
    for name, param in model.named_parameters():
        if name == "leave.weight":
            param.register_hook(lambda grad: grad * 0.5)


def frozen(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def scaled_in_place(model: Any) -> None:
    with torch.no_grad():
        model.leave.weight.mul_(0.5)


def halved(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 0.5


def halved_in_place(module: nn.Module, args: Any, out: Tensor) -> None:
    out.mul_(0.5)


def hooked_module(model: Any) -> None:
    model.blocks[0].register_forward_hook(halved)


def hooked_in_place(model: Any) -> None:
    model.blocks[0].register_forward_hook(halved_in_place)


def hooked_before_call(model: Any) -> None:
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def hooked_backward(model: Any) -> None:
    model.blocks[0].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))


def other_forward(model: Any) -> None:
    model.blocks[0].forward = lambda x: x * 0.5


def watched_module(model: Any) -> None:
    """As those who log activations do."""
    block, seen = model.blocks[0], list[float]()
    block.register_forward_hook(lambda module, args, out: seen.append(float(out.detach().norm())))
    block.register_forward_hook(lambda module, args, out: out)
    block.register_forward_hook(lambda module, args, kwargs, out: None, with_kwargs=True)
    block.register_forward_pre_hook(lambda module, args: None)
    block.register_forward_pre_hook(lambda module, args: args)
    block.register_full_backward_hook(lambda module, given, out: None)
    block.register_full_backward_pre_hook(lambda module, out: None)
    block.register_forward_hook(halved).remove()


def frozen_added(model: Any) -> None:
    model.late = nn.Parameter(torch.ones(WIDTH).double(), requires_grad=False)


def hooked_after(model: Any) -> None:
    def halve(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad *= 0.5

    for name, param in model.named_parameters():
        if name == "leave.weight":
            param.register_post_accumulate_grad_hook(halve)


def one_replaced(model: Any) -> None:
    model.leave.weight = nn.Parameter(torch.ones(OUT, WIDTH).double())


def assigned(model: Any) -> None:
    for name, param in model.named_parameters():
        if ".fc1." in name:
            param.data = param.data * 0.5


def moved(model: Any) -> None:
    """As scripts do that move a model which is there already."""
    model.to("cpu")


def converted(model: Any) -> None:
    model.float().double()


def changed(change: Callable[[Any], None], mesh: str, microbatches: int = 1) -> float | str:
    """How far the gradients of a step after the change are off one device; or what it raises."""
    torch.manual_seed(0)
    alone = Layers().double()
    torch.manual_seed(0)
    batches = [{name: value.double() for name, value in features(seed).items()} for seed in range(2)]
    example = mk.Example((batches[0]["x"],))
    run = mk.parallelize(Layers().double(), mesh_for(mesh), example=example, microbatches=microbatches)
    run.forward_backward(own_rows(batches[0], run.mesh), loss=squares, count=row_count)
    for model in (run.model, alone):
        change(model)
        for param in model.parameters():
            param.grad = None
    (squares(alone, batches[1]) / ROWS).backward()
    try:
        run.forward_backward(own_rows(batches[1], run.mesh), loss=squares, count=row_count)
    except MeshkitError as error:
        return str(error)
    wanted = dict(alone.named_parameters())
    for name, param in run.named_parameters():
        assert (gradient_of(param) is None) == (wanted[name].grad is None)
    given = [(param.grad, wanted[name].grad) for name, param in run.named_parameters() if param.grad is not None]
    return max(difference(found, want) for found, want in given if want is not None)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize("change", [frozen, scaled_in_place, watched_module, frozen_added, moved, hooked_after])
def test_these_changes_are_right(change: Callable[[Any], None], mesh: str) -> None:
    assert all(float(off) < TOL_FP64 for off in pool(2).run(changed, change, mesh))


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2"])
@pytest.mark.parametrize("change", [replaced, added, hooked, hooked_after, watched_module, moved, converted])
def test_these_are_right_where_ranks_have_the_same_rows(change: Callable[[Any], None], mesh: str) -> None:
    ranks = pool(mk.MeshSpec.parse(mesh).world_size)
    assert all(float(off) < TOL_FP64 for off in ranks.run(changed, change, mesh))


def test_values_are_assigned_where_parameters_are_no_shards() -> None:
    assert all(float(off) < TOL_FP64 for off in pool(1).run(changed, assigned, "dp_shard=1"))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced, "parameter 'leave.weight' was made after parallelize: no data rank sums its gradient"),
        (added, "parameter 'blocks.0.late' was made after parallelize: no data rank sums its gradient"),
        (hooked, "parameter 'leave.weight' has got a hook on its gradient after parallelize: there it is a shard"),
        (assigned, "parameter 'blocks.0.fc1.weight' was given other values by assignment"),
        (converted, "parameter 'enter.weight' was given other values by assignment"),
    ],
)
def test_these_would_be_lost_and_are_refused(change: Callable[[Any], None], said: str, mesh: str) -> None:
    for text in pool(2).run(changed, change, mesh):
        assert said in str(text)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hooked_module, "a forward hook of 'blocks.0', put there after parallelize, changes what it sees"),
        (hooked_in_place, "a forward hook of 'blocks.0', put there after parallelize, changes what it sees"),
        (hooked_before_call, "a forward pre-hook of 'blocks.0', put there after parallelize, changes what it sees"),
        (hooked_backward, "a backward hook of 'blocks.0', put there after parallelize, changes what it sees"),
        (other_forward, "module 'blocks.0' has got another forward after parallelize"),
    ],
)
def test_what_was_never_read_is_refused(change: Callable[[Any], None], said: str, mesh: str) -> None:
    for text in pool(2).run(changed, change, mesh):
        assert said in str(text)


@pytest.mark.parametrize("change", [assigned, one_replaced])
def test_what_takes_the_place_of_a_shard_of_tp_is_refused(change: Callable[[Any], None]) -> None:
    said = (
        "given other values by assignment" if change is assigned else "made after parallelize: a shard was in its place"
    )
    for text in pool(2).run(changed, change, "tp=2"):
        assert said in str(text)


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2", "pp=2"])
@pytest.mark.parametrize("change", [hooked, hooked_after])
def test_a_hook_that_each_microbatch_would_run_is_refused(change: Callable[[Any], None], mesh: str) -> None:
    said = "has got a hook on its gradient after parallelize: backward would run it in each microbatch"
    for text in pool(mk.MeshSpec.parse(mesh).world_size).run(changed, change, mesh, 2):
        assert said in str(text)  # on pp one stage has the parameter, and all ranks say so


def compiled(model: Any) -> None:
    model.compile(backend="eager")


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_whole_model_that_is_compiled_is_refused_where_ranks_do_more_around_its_forward(mesh: str) -> None:
    for text in pool(2).run(changed, compiled, mesh):
        assert "the model was compiled as a whole after parallelize, but on" in str(text)
        assert "compile=True, which compiles its blocks" in str(text)


def norm_replaced(model: Any) -> None:
    model.layers[0].norm1 = nn.LayerNorm(decoders.WIDTH).double()


def norm_added(model: Any) -> None:
    model.layers[0].late = nn.Parameter(torch.ones(()).double())


def changed_sequence(change: Callable[[Any], None]) -> str:
    run = mk.parallelize(Plain().double(), mesh_for("tp=2"), sequence=True)
    ids = torch.arange(32).reshape(2, 16) % VOCABULARY
    run.forward_backward({"input_ids": ids, "labels": ids})
    change(run.model)
    with pytest.raises(PlanError) as error:
        run.forward_backward({"input_ids": ids, "labels": ids})
    return str(error.value)


@pytest.mark.parametrize("change", [norm_replaced, norm_added])
def test_a_parameter_that_sequence_parallelism_would_not_sum_is_refused(change: Callable[[Any], None]) -> None:
    for text in pool(2).run(changed_sequence, change):
        assert "was made after parallelize: with sequence parallelism no rank of tp sums its gradient" in text


# ------------------------------------------------------------------------------ what a loss holds beside the model


def holding(held: str, mesh: str) -> str:
    """What a step says whose loss adds a square of something that it holds."""
    torch.manual_seed(0)
    model = Layers().double()
    kept: dict[str, Tensor] = {
        "old": model.leave.weight,
        "old bias": model.blocks[0].fc2.bias,
        "frozen": torch.ones(3).double(),
        "scale": nn.Parameter(torch.ones(()).double()),
        "plain scale": torch.ones((), dtype=torch.float64, requires_grad=True),
    }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        own = torch.zeros_like(batch["y"], requires_grad=True)  # of this call alone
        tensor = own if held == "own" else kept[held]
        return squares(model, batch) + (own * batch["y"]).sum() + batch["y"].shape[0] * tensor.square().sum()

    batch = {name: value.double() for name, value in features(0).items()}
    run = mk.parallelize(model, mesh_for(mesh), example=mk.Example((batch["x"],)))
    try:
        run.forward_backward(own_rows(batch, run.mesh), loss=loss, count=row_count)
    except MeshkitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2", "tp=2"])
def test_a_loss_that_reads_a_parameter_of_before_is_refused(mesh: str) -> None:
    for text in pool(2).run(holding, "old", mesh):
        assert "parameter 'leave.weight' is read as it was before parallelize, where a shard is in its place" in text


def test_on_pp_every_rank_hears_of_a_parameter_of_another_stage() -> None:
    for text in pool(2).run(holding, "old bias", "pp=2"):
        assert "parameter 'blocks.0.fc2.bias' is read as it was before parallelize" in text


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize("held", ["scale", "plain scale"])
def test_a_tensor_that_a_loss_trains_beside_the_model_is_refused(held: str, mesh: str) -> None:
    for text in pool(2).run(holding, held, mesh):
        assert "the loss 'loss' trains a tensor of shape [] beside the model: no data rank sums its gradient" in text


@pytest.mark.parametrize(("held", "mesh"), [("own", "dp_shard=2"), ("frozen", "dp_shard=2"), ("scale", "tp=2")])
def test_other_tensors_of_a_loss_are_nobodys_business(held: str, mesh: str) -> None:
    assert pool(2).run(holding, held, mesh) == ["", ""]
