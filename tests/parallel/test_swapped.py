"""torch.func.functional_call on a mesh: as on one device, or refused, inside of a model's forward and from outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.step import count_labels, next_token_loss
from tests.world import pool
from tests.zoo import swapped
from tests.zoo.decoders import Plain
from tests.zoo.nasty import FunctionalCall
from tests.zoo.odd import WIDTH, Layers

TOL_FP64 = 1e-12  # only the order of summation differs
GATHERED = [MeshSpec(dp_shard=2), MeshSpec(dp_replicate=2), MeshSpec(cp=2), MeshSpec(dp_shard=2, tp=2)]
OF_UNITS = [
    (swapped.BlockHalved, "layers.0.norm1.weight"),
    (swapped.BlockDetached, "layers.3.norm1.weight"),
    (swapped.BlockOfAnother, "layers.0.norm1.weight"),
    (swapped.BlockPartly, "layers.0.mlp.up.bias"),
    (swapped.HeadHalved, "lm_head.weight"),
]
OF_PARTS = [swapped.MlpHalved, swapped.LinearOwn, swapped.NormHalved, swapped.BuffersSwapped]


def resolved(model: nn.Module, spec: MeshSpec) -> None:
    resolve(read_program(model), mk.Strategy(), spec)


@pytest.mark.parametrize("spec", GATHERED, ids=str)
@pytest.mark.parametrize(("model", "name"), OF_UNITS)
def test_a_unit_with_other_tensors_in_place_of_parameters_is_refused(
    model: type[nn.Module], name: str, spec: MeshSpec
) -> None:
    with pytest.raises(PlanError, match=f"another tensor in place of its parameter '{name}'"):
        resolved(model(), spec)


@pytest.mark.parametrize("spec", GATHERED, ids=str)
@pytest.mark.parametrize("model", OF_PARTS)
def test_a_part_of_a_unit_with_other_tensors_is_not(model: type[nn.Module], spec: MeshSpec) -> None:
    resolved(model(), spec)


@pytest.mark.parametrize("model", [model for model, _ in OF_UNITS])
def test_nor_is_a_unit_that_nobody_gathers(model: type[nn.Module]) -> None:
    resolved(model(), MeshSpec(tp=2))


# ------------------------------------------------------------------------------------------------------ from outside


def halved(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: param / 2 for name, param in params.items()}


def as_parameters(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: nn.Parameter(param.detach() / 2) for name, param in params.items()}


def of_a_block(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: param / 2 for name, param in params.items() if name.startswith("layers.2.")}


def own(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return params


def called(make: Callable[[dict[str, Tensor]], dict[str, Tensor]], spec: str, full: bool, trained: bool) -> str:
    """How a call of the run's model went that is given tensors made of its parameters. full: of all ranks' together.

    Raises: AssertionError where the model is not as before after it.
    """
    torch.manual_seed(0)
    model = Plain().double()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    ids = torch.arange(16).reshape(2, 8)
    wanted, plain = functional_call(model, make(before), (ids,)).detach(), model(ids).detach()
    run = mk.parallelize(model, mk.init_mesh(spec))
    if trained:
        run.forward_backward({"input_ids": ids, "labels": ids})
    try:
        logits = functional_call(run.model, make(before if full else dict(run.model.named_parameters())), (ids,))
        said = "right" if (full_tensor(logits.detach()) - wanted).abs().max() < TOL_FP64 else "wrong"
    except PlanError as error:
        said = str(error)
    for name, param in run.model.named_parameters():
        assert torch.equal(full_tensor(param.detach()), before[name]), name
    assert (full_tensor(run.model(ids).detach()) - plain).abs().max() < TOL_FP64
    return said


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("make", [halved, as_parameters, of_a_block])
def test_a_run_under_fsdp_refuses_other_tensors_and_goes_on(
    make: Callable[[dict[str, Tensor]], dict[str, Tensor]], full: bool, trained: bool
) -> None:
    for said in pool(2).run(called, make, "dp_shard=2", full, trained):
        assert "another tensor in place of its parameter" in said


@pytest.mark.parametrize("make", [halved, as_parameters, of_a_block])
def test_a_run_on_tp_takes_what_is_made_of_its_own_parameters(
    make: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    assert set(pool(2).run(called, make, "tp=2", False, False)) == {"right"}
    for said in pool(2).run(called, make, "tp=2", True, False):
        assert "is placed as (Shard(dim=0),) over tp, and its module is called with a plain tensor" in said


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_a_run_takes_its_own_parameters(spec: str) -> None:
    assert set(pool(2).run(called, own, spec, False, True)) == {"right"}


def own_blocks() -> tuple[float, float]:
    """The loss of two microbatches between which parameters stay gathered, and that of one device."""
    torch.manual_seed(0)
    model = FunctionalCall().double()
    ids = torch.arange(32).reshape(4, 8)
    batch = {"input_ids": ids, "labels": ids}
    wanted = float(next_token_loss(model, batch).detach() / count_labels(batch))
    mesh = mk.init_mesh("dp_shard=2")
    run = mk.parallelize(model, mesh, zero=2)
    rows = {name: tensor.chunk(2)[mesh.rank] for name, tensor in batch.items()}
    return float(run.forward_backward(rows, microbatches=2)), wanted


def test_blocks_that_stay_gathered_take_their_own_parameters() -> None:
    for loss, wanted in pool(2).run(own_blocks):
        assert abs(loss - wanted) < TOL_FP64


# ------------------------------------------------------------------------------- of a model that nothing can be read of


class Halved(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return functional_call(self.blocks[0], swapped.halved(self.blocks[0]), (x,))


def run_unread() -> str:
    run = mk.parallelize(Halved().double(), mk.init_mesh("dp_shard=2"), plan=mk.Plan(blocks=["blocks.*"]))
    with pytest.raises(PlanError) as refused:
        run.model(torch.ones(2, WIDTH, dtype=torch.float64))
    return str(refused.value)


def test_a_unit_looks_for_itself_before_it_gathers() -> None:
    for said in pool(2).run(run_unread):
        assert "Halved is called with another tensor in place of its parameter 'blocks.0.norm.weight'" in said
