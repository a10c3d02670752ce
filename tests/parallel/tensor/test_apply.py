"""The tensor block alone, on modules meshkit has never seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from tests.laws.parity.cases import mesh_for
from tests.plan.test_plan import MLP
from tests.world import RankError, pool, run_ranks

TOL_FP64 = 1e-10


def mlp_errors(hidden: int, sequence: bool) -> tuple[float, ...]:
    torch.manual_seed(0)
    mesh = mesh_for("tp=4")["tp"]
    one, split = MLP(hidden=hidden).double(), MLP(hidden=hidden).double()
    split.load_state_dict(one.state_dict())
    mk.tensor_parallel(split, mesh, plan={"up": mk.plan.column(), "down": mk.plan.row()}, sequence=sequence)
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    x_one, x_split = x.clone().requires_grad_(), x.clone()
    rank = mesh.get_local_rank()
    if sequence:
        x_split = x_split[:, 2 * rank : 2 * rank + 2]
    x_split = x_split.requires_grad_()
    out_one, out_split = one(x_one), split(x_split)
    out_one.square().sum().backward()
    out_split.square().sum().backward()
    part = slice(2 * rank, 2 * rank + 2) if sequence else slice(None)
    gradients = [
        float((full_tensor(mine.grad) - its.grad).abs().max())
        for mine, its in zip(split.parameters(), one.parameters(), strict=True)
    ]
    return (
        float((out_split - out_one[:, part]).detach().abs().max()),
        float((x_split.grad - x_one.grad[:, part]).abs().max()),
        *gradients,
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("hidden", [12, 10, 3])  # 3 over 4 ranks: one rank holds nothing
def test_a_users_mlp_equals_itself_whole(hidden: int, sequence: bool) -> None:
    for errors in pool(4).run(mlp_errors, hidden, sequence):
        assert max(errors) <= TOL_FP64


def weight_is_the_parameter() -> bool:
    split = mk.tensor_parallel(MLP(), mesh_for("tp=2")["tp"], plan={"up": mk.plan.column(), "down": mk.plan.row()})
    split(torch.ones(1, 8))
    return (
        split.up.weight is dict(split.named_parameters())["up.weight"]
        and isinstance(split.up, nn.Linear)
        and split.up.weight.shape == (12, 8)
        and split.up.weight.to_local().shape == (6, 8)
    )


def test_outside_of_forward_a_weight_is_the_whole_parameter() -> None:
    assert all(pool(2).run(weight_is_the_parameter))


def odd_sequence() -> None:
    split = mk.tensor_parallel(
        nn.Sequential(nn.Embedding(7, 8)), mesh_for("tp=2")["tp"], plan={"0": mk.plan.vocab()}, sequence=True
    )
    split(torch.zeros(1, 5, dtype=torch.int64))


def test_a_sequence_that_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"splits dim 1 of a tensor \(1, 5, 8\) over tp=2, and 5 is not a multiple of 2"
    ):
        run_ranks(2, odd_sequence)


def different_values() -> None:
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    mk.parallelize(MLP(), mk.init_mesh("tp=2"))


def test_a_model_that_differs_between_ranks_is_refused() -> None:
    with pytest.raises(RankError, match="the values of 'up.weight' differ between ranks"):
        run_ranks(2, different_values)


def buffers_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mk.parallelize(model, mk.init_mesh("dp_shard=2"))


def test_buffers_on_meta_are_refused() -> None:
    with pytest.raises(RankError, match="buffer '1.running_mean' is on meta"):
        run_ranks(2, buffers_on_meta)


def cross_entropy_errors(vocabulary: int, tokens: int) -> tuple[float, float]:
    """Sharded over an uneven vocabulary, all labels ignored on some rows, huge logits."""
    import torch.nn.functional as F

    from meshkit.parallel.tensor.local import shard_parameter

    torch.manual_seed(1)
    logits = torch.randn(tokens, vocabulary, dtype=torch.float64) * 100
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[::3] = -100
    one = logits.clone().requires_grad_()
    expected = F.cross_entropy(one, labels, reduction="sum")
    expected.backward()
    from torch.distributed.tensor import Shard

    split = shard_parameter(logits, mesh_for("tp=4")["tp"], Shard(1)).requires_grad_()
    loss = mk.cross_entropy(split, labels)
    loss.backward()
    return abs(loss.item() - expected.item()), float((full_tensor(split.grad) - one.grad).abs().max())


@pytest.mark.parametrize("vocabulary", [16, 13, 3])
def test_vocabulary_parallel_cross_entropy_equals_torchs(vocabulary: int) -> None:
    for loss_error, gradient_error in pool(4).run(cross_entropy_errors, vocabulary, 9):
        assert loss_error <= TOL_FP64 * 100
        assert gradient_error <= TOL_FP64


@pytest.mark.parametrize(
    ("logits", "labels", "match"),
    [((2, 3, 5), (2, 4), r"logits \(2, 3, 5\) and labels \(2, 4\) do not fit")],
)
def test_labels_that_do_not_fit_are_refused(logits, labels, match: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=match):
        mk.cross_entropy(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))


def plan_without_tensor_styles() -> bool:
    torch.manual_seed(0)
    run = mk.parallelize(MLP(), mesh_for("dp_shard=2"), plan=mk.Plan())
    return len(list(run.parameters())) == 4


def test_without_a_tensor_axis_no_styles_are_needed() -> None:
    assert all(pool(2).run(plan_without_tensor_styles))


def lookups_of(ids: list[int]) -> list[str]:
    """The error of each id that is no word; "" where there is none."""
    mesh = mesh_for("tp=2")
    table = mk.tensor_parallel(nn.Sequential(nn.Embedding(7, 8)), mesh["tp"], plan={"0": mk.plan.vocab()})
    said = []
    for each in ids:
        try:
            table(torch.tensor([[each]]))
            said.append("")
        except IndexError as error:
            said.append(str(error))
    return said


def test_an_id_outside_of_the_vocabulary_raises_as_on_one_device() -> None:
    for ids in ([-1], [7], [11]):
        with pytest.raises(IndexError) as error:
            nn.Embedding(7, 8)(torch.tensor([ids]))
        assert pool(2).run(lookups_of, ids) == [[str(error.value)]] * 2
