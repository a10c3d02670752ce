"""Laws 3 and 6 for one step, and the blocks in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate, label_log_probs, token_values
from meshkit.core.sharding import local_tensor
from meshkit.models import LLAMA_PLAN
from meshkit.step import split_rows
from tests.compare_shards import difference
from tests.laws.parity.cases import Cell, batches, build, mesh_for
from tests.plan.test_plan import MLP, Stack
from tests.world import RankError, pool, run_ranks

TOL_FP64 = 1e-10


def own_loss() -> tuple[float, float]:
    """A loss of the user's own, on a rank count that leaves one rank without rows."""
    torch.manual_seed(0)
    mesh = mesh_for("dp_shard=4")
    one, model = MLP().double(), MLP().double()
    model.load_state_dict(one.state_dict())
    x, y = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    expected = F.mse_loss(one(x), y, reduction="sum") / 3
    expected.backward()
    run = mk.parallelize(model, mesh)
    part = slice(mesh.data_rank, mesh.data_rank + 1)
    loss = run.forward_backward(
        {"x": x[part], "y": y[part]},
        microbatches=2,
        loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"),
        count=lambda batch: torch.tensor(len(batch["x"])),
    )
    gradients = dict(one.named_parameters())
    worst = max(difference(p.grad, gradients[name].grad) for name, p in run.named_parameters())
    return abs(loss.item() - expected.item()), worst


def test_a_users_loss_is_normalised_over_the_whole_step_with_a_rank_that_has_no_rows() -> None:
    for errors in pool(4).run(own_loss):
        assert max(errors) <= TOL_FP64


class Directions(nn.Module):
    """NaN for a row of zeros, of which there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x / x.norm(dim=-1, keepdim=True))


def directions(rows: int) -> tuple[float, float]:
    """Of three rows on two ranks one runs out of rows in the second microbatch, of one row it has none at all."""
    torch.manual_seed(0)
    one, model = Directions().double(), Directions().double()
    model.load_state_dict(one.state_dict())
    x = torch.randn(rows, 8, dtype=torch.float64)
    expected = one(x).square().sum() / rows
    expected.backward()
    run = mk.parallelize(model, mesh := mesh_for("dp_shard=2"))
    loss = run.forward_backward(
        {"x": x.tensor_split(2)[mesh.data_rank]},
        microbatches=2,
        loss=lambda model, batch: model(batch["x"]).square().sum(),
        count=lambda batch: torch.tensor(len(batch["x"])),
    )
    gradients = dict(one.named_parameters())
    worst = max(difference(p.grad, gradients[name].grad) for name, p in run.named_parameters())
    return abs(loss.item() - expected.item()), worst


@pytest.mark.parametrize("rows", [3, 1])
def test_a_microbatch_without_rows_is_harmless_where_the_model_makes_nan_of_zeros(rows: int) -> None:
    for errors in pool(2).run(directions, rows):
        assert max(errors) <= TOL_FP64


def users_loop() -> float:
    """fully_shard and recompute by themselves, with torch's own backward and optimizer."""
    torch.manual_seed(0)
    mesh = mesh_for("dp_shard=2")
    one, model = Stack().double(), Stack().double()
    model.load_state_dict(one.state_dict())

    def forward(stack: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return stack.norm(stack.layers[2](stack.layers[1](stack.layers[0](x))))

    Stack.forward = forward  # type: ignore[method-assign]
    units = [f"layers.{index}" for index in range(3)]
    mk.recompute(model, blocks=units, mode="full")
    mk.fully_shard(model, mesh.data, units=units, zero=2)
    x = torch.randn(4, 8, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, model)]
    for _ in range(2):
        one(x).square().sum().backward()
        model(x[mesh.data_rank * 2 :][:2]).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return max(difference(mine, its) for mine, its in pairs)


def test_blocks_work_alone_in_a_loop_of_the_users_own() -> None:
    assert max(pool(2).run(users_loop)) <= TOL_FP64


def poisoned(max_skips: int) -> list[bool]:
    """Rank 1's loss is not a number in steps 1 and 2."""
    mesh = mk.init_mesh("dp_shard=2")
    torch.manual_seed(0)
    run = mk.parallelize(MLP(), mesh)
    guard = mk.faults.NonFiniteGuard(max_skips=max_skips)
    taken = []
    for step in range(4):
        factor = torch.nan if mesh.rank == 1 and step in (1, 2) else 1.0
        run.forward_backward(
            {"x": torch.ones(1, 8)},
            loss=lambda model, batch, factor=factor: model(batch["x"]).sum() * factor,
            count=lambda batch: torch.tensor(1),
        )
        taken.append(guard.allows(run, mk.clip_grad_norm(run, 1.0), step=step))
        run.model.zero_grad()
    assert guard.skipped == 2
    return taken


def test_non_finite_steps_are_skipped_up_to_the_limit() -> None:
    assert run_ranks(2, poisoned, 2) == [[True, False, False, True]] * 2


def test_a_non_finite_step_stops_every_rank_naming_step_and_rank() -> None:
    with pytest.raises(
        RankError, match=r"StepError: step 2: the gradient norm is nan; the loss of rank 1 is not finite"
    ):
        run_ranks(2, poisoned, 1)


class Between(nn.Module):
    """What it makes between its modules is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.before(x) / torch.zeros(8))


def made_between_modules() -> str:
    run = mk.parallelize(Between(), mesh_for("tp=1"))
    run.forward_backward(
        {"x": torch.ones(2, 8)},
        loss=lambda model, batch: model(batch["x"]).sum(),
        count=lambda batch: torch.tensor(2),
    )
    with pytest.raises(mk.errors.StepError) as stop:
        mk.faults.NonFiniteGuard().allows(run, mk.step.grad_norm(run), step=0)
    return str(stop.value)


def test_what_is_made_between_modules_is_laid_to_the_one_around_them() -> None:
    (text,) = pool(1).run(made_between_modules)
    assert "the first value that is not finite is returned by the model on rank 0." in text


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_microbatches_differ_by_at_most_one_row_and_lose_none(rows: int) -> None:
    parts = list(split_rows({"x": torch.arange(rows)}, 3))
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(rows))
    assert max(len(part["x"]) for part in parts) - min(len(part["x"]) for part in parts) <= 1


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: list(split_rows({"x": torch.ones(2)}, 0)),
            mk.errors.DataError,
            "microbatches=0: a step has a whole number",
        ),
        (
            lambda: mk.fully_shard(MLP(), None, zero=4),  # type: ignore[arg-type]
            mk.errors.PlanError,
            r"zero=4: the stages are 1 \(optimizer state\), 2 \(and gradients\), 3",
        ),
        (lambda: mk.recompute(MLP(), blocks=["uq"]), mk.errors.PlanError, "recompute: there is no block 'uq'"),
    ],
)
def test_bad_arguments_are_refused(make, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("kinds", list(permutations((torch.float32, torch.float64, torch.bfloat16))))
def test_gradients_of_several_dtypes_have_one_norm_and_are_clipped_alike(kinds: tuple[torch.dtype, ...]) -> None:
    params = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in kinds]
    for index, param in enumerate(params):
        param.grad = torch.linspace(1, 2 + index, 5, dtype=torch.float64).to(param.dtype)
    before = [param.grad.double().clone() for param in params]  # type: ignore[union-attr]
    norm = mk.clip_grad_norm(params, 1.0)
    assert norm.item() == pytest.approx(torch.cat(before).norm().item(), rel=1e-7)  # fp32 holds no more
    for param, grad in zip(params, before, strict=True):
        wanted = (grad / (torch.cat(before).norm() + 1e-6)).to(param.dtype)
        eps = torch.finfo(param.dtype).eps if param.dtype != torch.float64 else 1e-7  # of the norm, in fp32 of others
        torch.testing.assert_close(param.grad, wanted, rtol=2 * eps, atol=0)


@pytest.mark.parametrize(("max_norm", "writes"), [(1e3, 0), (1.0, 1)])
def test_gradients_are_written_only_where_their_norm_is_above_the_largest(max_norm: float, writes: int) -> None:
    param = nn.Parameter(torch.zeros(5))
    param.grad = torch.linspace(1, 2, 5)
    before, version = param.grad.clone(), param.grad._version
    mk.clip_grad_norm([param], max_norm)
    assert param.grad._version - version == writes
    assert torch.equal(param.grad, before) != bool(writes)


def uneven_batch() -> None:
    run = mk.parallelize(MLP(), mk.init_mesh("tp=1"))
    run.forward_backward({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(3, 3)})


def test_a_batch_whose_tensors_disagree_is_refused() -> None:
    with pytest.raises(RankError, match="different numbers of rows: {'input_ids': 2, 'labels': 3}"):
        run_ranks(1, uneven_batch)


class Returns(nn.Module):
    """A model whose output is in something else than `.logits`."""

    def __init__(self, made: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.table, self.made = nn.Embedding(5, 5), made

    def forward(self, ids: torch.Tensor) -> object:
        return self.made(self.table(ids))


def refusals_of_a_step() -> list[str]:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    cases: list[tuple[Callable[[torch.Tensor], object], object]] = [
        (lambda x: (x, x), {"input_ids": ids, "labels": ids}),
        (lambda x: {"scores": x}, {"input_ids": ids, "labels": ids}),
        (lambda x: None, {"input_ids": ids, "labels": ids}),
        (lambda x: x, {"input_ids": ids}),
        (lambda x: x, {"labels": ids}),
        (lambda x: x, ids),
    ]
    said = []
    for made, batch in cases:
        with pytest.raises(mk.MeshkitError) as error:
            mk.parallelize(Returns(made), mesh_for("dp_shard=2")).forward_backward(batch)  # type: ignore[arg-type]
        said.append(str(error.value))
    run = mk.parallelize(Returns(lambda x: x), mesh_for("dp_shard=2"))
    with pytest.raises(mk.MeshkitError, match=r"evaluate\(batch=a list\): give a dict of tensors"):
        run.evaluate([{"input_ids": ids, "labels": ids}])  # type: ignore[arg-type]
    return said


def test_a_step_says_what_its_loss_and_its_batch_lack() -> None:
    for said in pool(2).run(refusals_of_a_step):
        for text, kind in zip(said[:3], ("tuple", "dict", "NoneType"), strict=True):
            assert text.startswith(
                f"next_token_loss: Returns returns a {kind}, and the loss of forward_backward takes logits"
            )
            assert "forward_backward(batch, loss=, count=)" in text
        assert said[3].startswith(
            "forward_backward: the batch has input_ids, and no 'labels'. Give input_ids and labels"
        )
        assert said[4].startswith("forward_backward: the batch has labels, and no 'input_ids'.")
        assert said[5].startswith("forward_backward(batch=a Tensor): give a dict of tensors")


def sampled(text: str) -> tuple[list[int], list[int], float]:
    cell = Cell(mesh=text, sequence=True)
    run = mk.parallelize(build(cell), mesh_for(text), plan=LLAMA_PLAN, sequence=True)
    prompt = Prompt(ids=np.array([1, 2, 3]), key=0)
    (greedy,) = generate(run, [prompt], sampling=Sampling(max_new_tokens=6, temperature=0))
    (drawn,) = generate(run, [prompt], sampling=Sampling(max_new_tokens=20, temperature=0.8), seed=4)
    batch = batches(cell)[0]
    loss, tokens = run.evaluate(batch)
    numel = sum(local_tensor(param).numel() for param in run.parameters())
    assert numel * run.mesh.spec.world_size < 1.5 * sum(p.numel() for p in run.parameters()), "left gathered"
    return [1, 2, 3, *greedy.ids.tolist()], drawn.ids.tolist(), (loss / tokens).item()


def modes_after(spec: str) -> list[list[bool]]:
    """Of the modules, after an evaluation, one that raises, values of tokens and answers, of a model of which a part is
    frozen."""
    cell = Cell(mesh=spec)
    run = mk.parallelize(build(cell), mesh_for(spec), plan=LLAMA_PLAN)
    batch = batches(cell)[0]
    next(module for name, module in run.model.named_modules() if name.endswith("mlp")).eval()
    modes = [[module.training for module in run.model.modules()]]

    def refuse(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        model(batch["input_ids"])
        raise RuntimeError

    run.evaluate(batch)
    modes.append([module.training for module in run.model.modules()])
    token_values(run, batch, label_log_probs)
    modes.append([module.training for module in run.model.modules()])
    generate(run, [Prompt(ids=np.array([1, 2, 3]), key=0)], sampling=Sampling(max_new_tokens=2))
    modes.append([module.training for module in run.model.modules()])
    with suppress(RuntimeError):
        run.evaluate(batch, loss=mk.step.additive(refuse))
    modes.append([module.training for module in run.model.modules()])
    return modes


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_after_an_evaluation_each_module_is_in_the_mode_that_it_had(spec: str) -> None:
    for before, *after in pool(2).run(modes_after, spec):
        assert True in before and False in before
        assert all(each == before for each in after)


def test_generation_and_evaluation_are_the_same_on_every_mesh_and_rank() -> None:
    greedy, drawn, loss = pool(1).run(sampled, "tp=1")[0]
    model = build(Cell(mesh=""))
    ids = [1, 2, 3]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert greedy == ids
    for found in [*pool(4).run(sampled, "tp=4"), *pool(4).run(sampled, "dp_shard=2 tp=2")]:
        assert found[:2] == (greedy, drawn)
        assert abs(found[2] - loss) <= TOL_FP64


def torch_loss_on_tp() -> None:
    cell = Cell(mesh="tp=2")
    run = mk.parallelize(build(cell), mesh_for(cell.mesh), plan=LLAMA_PLAN)

    def torchs_own(model: nn.Module, batch: mk.step.Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    run.forward_backward(batches(cell)[0], loss=torchs_own)


def test_a_loss_that_does_not_take_split_logits_is_told_what_does() -> None:
    with pytest.raises(RankError, match=r"the loss meets logits .* on tp=2, or a parameter.*Use mk\.cross_entropy"):
        pool(2).run(torch_loss_on_tp)
