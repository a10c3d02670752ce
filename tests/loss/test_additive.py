"""A loss with effects is tried and all is put back; one that cannot be tried is refused on parts, or vouched for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.reach import reach_of
from meshkit.core.sharding import full_tensor
from meshkit.parallel.rows_tried import Trial, loss_of_rows
from meshkit.parallel.tokens_tried import loss_of_rows_alone
from meshkit.step import additive
from meshkit.step._loss import is_vouched
from tests.laws.parity.cases import mesh_for
from tests.loss.test_mean import TOL_FP64, items, module, per_item, raised, rows_of, run_of, whole
from tests.tiny import tiny_config
from tests.world import pool

UNTRIED = "gets a part of the rows or tokens here, and it cannot be tried"
LOG: list[float] = []
TABLE: dict[str, Any] = {"last": deque([0.0], maxlen=2)}


def with_mean(out: Tensor) -> Tensor:
    return (out - out.mean(0)).square().sum()


def logged(model: nn.Module, part: Any) -> Tensor:
    loss = with_mean(model(part["x"]))
    LOG.append(float(loss))
    TABLE["last"].append(float(loss))
    TABLE["new"] = 1
    return loss


def printed(model: nn.Module, part: Any) -> Tensor:
    print(end="")
    return model(part["x"]).square().sum()


@torch.compile(backend="eager")
def compiled(out: Tensor) -> Tensor:
    return with_mean(out)


def by_compiled(model: nn.Module, part: Any) -> Tensor:
    return compiled(model(part["x"]))


TEACHER = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))  # in training: it mixes rows
STILL = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval()


def distilled(model: nn.Module, part: Any, teacher: nn.Module = TEACHER) -> Tensor:
    with torch.no_grad():
        said = teacher(part["x"].to(next(teacher.parameters()).dtype))
    return (model(part["x"]) - said).square().sum()


class Running:
    """Divides by a running mean of itself."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, model: nn.Module, part: Any) -> Tensor:
        loss = per_item(model(part["x"]), part["y"]).sum()
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        return loss / self.mean


class Warm(Running):
    """Weighs by the number of its calls."""

    def __call__(self, model: nn.Module, part: Any) -> Tensor:
        self.mean += 1
        return per_item(model(part["x"]), part["y"]).sum() * self.mean


def test_a_loss_that_mixes_rows_is_seen_whatever_it_notes() -> None:
    for loss in (logged, by_compiled, distilled, Running()):
        assert loss_of_rows(module(), loss, whole(6)) == "neither", loss
    assert loss_of_rows(module(), partial(distilled, teacher=STILL), whole(6)) == "sum"
    assert LOG == []
    assert dict(TABLE) == {"last": deque([0.0])}
    assert int(TEACHER[1].num_batches_tracked) == 0  # type: ignore[arg-type]  # a buffer


def test_what_the_next_call_reads_is_told() -> None:
    for loss, carries in ((logged, False), (Warm(), True)):
        trial = Trial(loss)
        loss_of_rows(module(), loss, whole(6), trial)
        assert trial.carries is carries


def test_random_outputs_stand_for_a_model_that_is_not_run() -> None:
    double: Callable[..., Tensor] = lambda m, p: m(p["x"]).square().sum()  # noqa: E731
    assert loss_of_rows_alone(module().float(), double, whole(6)) == "sum"
    assert loss_of_rows_alone(module().float(), logged, whole(6)) == "neither"


def refusals(mesh: str, microbatches: int) -> list[str]:
    run = run_of(mesh)
    step = partial(run.forward_backward, rows_of(run, 8), microbatches=microbatches, count=items)
    losses = (printed, additive(lambda m, p: printed(m, p)), logged, Warm())
    return [
        *(raised(partial(step, loss=loss)) for loss in losses),
        raised(lambda: run.evaluate(rows_of(run, 8), loss=printed, count=items)),
    ]


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp_shard=2", 1), ("tp=2", 2)])
def test_what_cannot_be_tried_is_refused_on_all_ranks_where_it_sees_a_part(mesh: str, microbatches: int) -> None:
    for untried, vouched, mixes, warm, evaluated in pool(2).run(refusals, mesh, microbatches):
        assert UNTRIED in untried
        assert "it calls `print` (test_additive.py:" in untried
        assert "say so by loss=mk.step.additive(loss)" in untried
        assert vouched == ""
        assert "mixes the rows" in mixes
        assert ("each microbatch is a call" in warm) == (microbatches > 1)
        assert (UNTRIED in evaluated) == (mesh != "tp=2")


def test_what_is_vouched_for_is_known_in_partials_and_not_in_what_wraps_it() -> None:
    @additive
    def loss(model: nn.Module, part: Any) -> Tensor:
        return printed(model, part)

    @wraps(loss)
    def halved(model: nn.Module, part: Any) -> Tensor:
        return loss(model, part) / len(part["x"])

    method = additive(Running().__call__)
    assert all(is_vouched(each) for each in (loss, partial(loss), partial(partial(loss, part=None)), method))
    assert not any(is_vouched(each) for each in (halved, printed, Running()))


def test_what_is_no_value_of_python_stands_in_the_way() -> None:
    numbers = iter([1.0])
    assert "numbers" in reach_of(lambda m, p: m(p) * next(numbers)).obstacle
    assert mk.step.additive is additive


def of_a_dtensor() -> float:
    """The difference of the loss and of gradients to one device, of a loss that stays a DTensor."""
    one, run = tiny_llama(), mk.parallelize(tiny_llama(), mk.init_mesh("tp=2"), plan=mk.models.LLAMA_PLAN)
    batch = {"input_ids": torch.arange(24).view(2, 12)}
    found = run.forward_backward(batch, loss=of_last, count=lambda part: torch.tensor(1))
    expected = of_last(one, batch)
    expected.backward()
    grads = {name: param.grad for name, param in one.named_parameters()}
    errors = [
        float((full_tensor(p.grad) - grads[n]).abs().max()) for n, p in run.named_parameters() if p.grad is not None
    ]
    return max(abs(float(found) - float(expected.detach())), *errors)


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    return mk.models.Llama(tiny_config()).double()


def of_last(model: nn.Module, part: Any) -> Tensor:
    return model(part["input_ids"])[:, -1].logsumexp(-1).sum()


def test_a_loss_that_is_a_scalar_dtensor_is_its_whole_value() -> None:
    assert max(pool(2).run(of_a_dtensor)) <= TOL_FP64


def new_on_one_rank(what: str) -> str:
    """In the second step the loss of rank 1 is another one, and that of rank 0 is not looked at again."""
    run = run_of("dp_shard=2")

    def loss(model: nn.Module, part: Any, *, own: str = "") -> Tensor:
        if own == "raises":
            raise KeyError("not there")
        out = model(part["x"])
        return with_mean(out) if own == "mixes" else per_item(out, part["y"]).sum()

    step = partial(run.forward_backward, rows_of(run, 8), count=items)
    step(loss=partial(loss, own=""))
    try:
        step(loss=partial(loss, own=what if run.mesh.rank == 1 else ""))
    except mk.errors.PlanError as error:
        return f"{error} <- {error.__cause__!r}"
    return ""


def test_a_loss_that_is_new_on_one_rank_is_refused_on_all() -> None:
    for rank, said in enumerate(pool(2).run(new_on_one_rank, "mixes")):
        assert "mixes the rows" in said, rank
    other, own = pool(2).run(new_on_one_rank, "raises")
    assert UNTRIED in own
    assert "on random values it raises KeyError" in own
    assert own.endswith("<- KeyError('not there')")
    assert "another rank could not" in other


def noted_sums() -> tuple[str | None, str, bool, dict[str, float]]:
    sums = mk.metrics.MetricSums(mesh_for("tp=1"), ("loss",))

    def noted(model: nn.Module, part: Any) -> Tensor:
        loss = per_item(model(part["x"]), part["y"]).sum()
        sums.add(loss=loss)
        return loss

    trial = Trial(noted)
    return loss_of_rows(module(), noted, whole(6), trial), trial.why, trial.carries, sums.means(1)


def test_sums_of_metrics_are_no_obstacle_and_stay_as_they_are() -> None:
    assert pool(1).run(noted_sums) == [("sum", "", False, {"loss": 0.0})]
