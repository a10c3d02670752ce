"""`check` names module, parameter and axis of every planted mistake, and is silent about what is right."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshkit as mk
from meshkit.core._torch import FakeTensorMode
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.program import read_program
from meshkit.resolve import resolve
from tests.depth import deep
from tests.laws.parity.cases import mesh_for
from tests.preflight.check import good, planted
from tests.preflight.check.good import GOOD, examples, mlp, points, run_without_seed, squared_error
from tests.preflight.check.planted import PLANTED, Planted
from tests.tiny import tiny_config
from tests.world import CONTEXT, RankError, fork, pool, run_ranks

PAGE = Path(__file__).parents[3] / "docs" / "check.md"
# Relatives of what is looked at by default.
RIGHT_DEEP = {
    "chunked_bf16",
    "experts_tensor",
    "fp32",
    "instance",
    "meta",
    "mlp_few_rows",
    "offload",
    "own_bf16",
    "pipeline",
}
RIGHT_DEEP |= {"replicas"}
PLANTED_DEEP = {
    "added later",
    "averaged",
    "drawn by each",
    "made before",
    "one summed twice",
    "other order",
    "other size",
}
PLANTED_DEEP |= {"rate of rank", "seed of rank", "times the world"}
MLP = {"batch": points(5), "loss": squared_error, "count": examples}
TOL_FP64 = 1e-10


@pytest.mark.parametrize("name", [pytest.param(name, marks=deep if name in RIGHT_DEEP else ()) for name in GOOD])
def test_what_is_right_is_not_said_to_be_wrong(name: str) -> None:
    for report in pool(4).run(good.run, name):
        assert report.ok, str(report)
        assert report.parameters and report.collectives
        if name not in ("fp32", "own_bf16"):
            assert max(report.gradient_error, report.loss_error) <= TOL_FP64


def test_a_model_with_its_own_communication_is_not_said_to_be_wrong() -> None:
    for report in pool(4).run(planted.check_hand, ""):
        assert report.ok, str(report)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=deep if bug.bug in PLANTED_DEEP else (), id=str(bug)) for bug in PLANTED]
)
def test_a_planted_mistake_is_found_and_named(bug: Planted) -> None:
    reports = pool(4).run(planted.run, bug.bug)
    assert all(report == reports[0] for report in reports)
    (finding,) = reports[0].findings  # one mistake, one finding
    assert finding.kind == bug.kind
    assert finding.module == bug.module
    assert bug.parameter is None or bug.parameter in finding.parameters
    assert bug.axes is None or finding.axes == bug.axes
    assert bug.words in str(finding)


def test_the_page_lists_every_planted_mistake() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {bug: (kind, where) for bug, _, kind, where in rows}
    for bug in PLANTED:
        kind, where = listed[bug.bug]
        assert kind == bug.kind
        assert (bug.parameter or bug.module or "the model") in where
        assert all(axis in where for axis in bug.axes or ())


# ------------------------------------------------------------------------------------------- ranks of its own


def test_a_plain_script_gets_ranks_of_its_own() -> None:
    x = torch.randn(3, 6)
    mlp()(x).sum().backward()  # autograd was used before the fork
    report = mk.check(lambda: mlp(), "dp_shard=2", **MLP)
    assert report.ok, str(report)
    assert not dist.is_initialized()


def test_ranks_of_its_own_find_what_others_find() -> None:
    report = mk.check(mlp(), "dp_shard=2", **{**MLP, "loss": planted.mean_error})
    assert [finding.kind for finding in report.findings] == ["wrong loss scale"]
    with pytest.raises(
        mk.errors.CheckError,
        match=r"1\. wrong loss scale · module \(the model\) · axis dp_shard\n  seen    the loss of",
    ):
        report.raise_if_found()


def alone(answer: Any, function: Callable[[], str]) -> None:
    answer.send(function())


def in_a_process(function: Callable[[], str]) -> str:
    """Of its own: what starts threads, or makes torch start some, would stay."""
    here, there = CONTEXT.Pipe()
    process = fork(alone, there, function)
    there.close()
    try:
        assert here.poll(60.0), "no answer within 60 s"
        said: str = here.recv()
        return said
    finally:
        process.kill()
        process.join()


def explained_and_trained() -> str:
    """A reading of the model, as by `explain`, a backward and a check, of one model in one process."""
    model = Scaled()
    rows = points(5)
    resolve(read_program(model, mk.Example((rows["x"],))), mk.Strategy(), mk.MeshSpec(dp_shard=2))
    squared_error(model, rows).backward()
    before = [param.grad.clone() for param in model.parameters()]
    report = str(mk.check(model, "dp_shard=2", **MLP))
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))
    return report


def estimated_and_trained() -> str:
    """An estimate, a backward and a check in one process."""
    tokens = {"rows": 2, "seq_len": 8}
    mk.estimate(Llama(tiny_config()), "dp_shard=2", plan=LLAMA_PLAN, **tokens)
    squared_error(mlp(), points(5)).backward()
    return str(mk.check(mlp(), "dp_shard=2", **MLP))


def with_threads() -> str:
    with FakeTensorMode():  # as a GPU would, it lets the next backward start a thread
        torch.ones(1)
    squared_error(mlp(), points(5)).backward()
    with pytest.raises(mk.errors.CheckError) as refused:
        mk.check(mlp(), "dp_shard=2", **MLP)
    return str(refused.value)


class Scaled(nn.Sequential):
    """With a parameter that every rank keeps whole."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale


def test_a_model_is_checked_after_it_was_explained_and_trained() -> None:
    assert "no finding" in in_a_process(explained_and_trained)


def test_an_estimate_leaves_a_process_that_can_be_checked_in() -> None:
    assert "no finding" in in_a_process(estimated_and_trained)


def test_ranks_of_a_process_with_threads_of_a_backward_are_refused() -> None:
    assert "started threads for a device" in in_a_process(with_threads)


@pytest.mark.parametrize(
    ("held", "match"),
    [
        (threading.Lock, "'1.held', a lock"),
        (lambda: (number for number in range(3)), "'1.held', a generator"),
        (lambda: sys.__stdout__, "'1.held', a TextIOWrapper"),
        (lambda: torch.ones(1, requires_grad=True) * 2, "'1.held', a tensor with the graph"),
        (lambda: {"last": [torch.ones(1, requires_grad=True) * 2]}, "'1.held', a dict"),
    ],
)
def test_what_a_module_holds_of_which_there_is_no_copy_is_named(held: Callable[[], Any], match: str) -> None:
    model = mlp()
    model[1].held = held()
    with pytest.raises(mk.errors.CheckError, match=re.escape(match)):
        mk.check(model, "dp_shard=2", **MLP)


@mk.step.additive  # what raises cannot be tried
def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if dist.get_rank() == 1:
        raise KeyError("no such loss")
    return squared_error(model, batch)


def test_an_error_of_one_rank_is_raised_and_waits_for_nobody() -> None:
    with pytest.raises(KeyError, match="no such loss") as raised:
        mk.check(mlp, "dp_shard=2", **{**MLP, "loss": failing})
    assert raised.value.__notes__[0].startswith("on rank 1 of 2 of a check:\nTraceback")


def test_in_a_world_the_other_ranks_hear_of_an_error_of_one() -> None:
    with pytest.raises(RankError, match="CheckError: check: rank 1 raised KeyError: 'no such loss'"):
        run_ranks(2, check_failing)


def check_failing() -> None:
    mk.check(mlp, mesh_for("dp_shard=2"), **{**MLP, "loss": failing})


# ---------------------------------------------------------------------------------------------------- refusals


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


def wide(mesh: mk.Mesh) -> nn.Module:
    return planted.Hand(mesh)


def without_dropout() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1))


def talks_to_the_world(mesh: mk.Mesh) -> mk.Run:
    model = without_dropout()
    model.register_forward_hook(lambda *_: dist.all_reduce(torch.zeros(())))
    return mk.parallelize(model, mesh)


def renamed(mesh: mk.Mesh) -> mk.Run:
    return mk.parallelize(without_dropout() if mesh.spec.world_size == 1 else nn.Sequential(without_dropout()), mesh)


def texts() -> list[str]:
    mesh = mesh_for("dp_replicate=2 tp=2")
    x = {name: value[:, : planted.WIDTH] for name, value in points().items()}
    found = []
    for model, choices in (
        (renamed, MLP),
        (wide, {"batch": x, "step": planted.hand_step, "optimizer": planted.sgd}),
        (wide, {"batch": x}),
        (wide, {"batch": x, "step": planted.hand_step, "optimizer": planted.sgd, "sharded": {"up.weigth": ("tp", 0)}}),
        (talks_to_the_world, {**MLP, "loss": mk.step.additive(partial(squared_error))}),
        (partial(Noisy, 6, 1), MLP),
        (renamed, {**MLP, "plan": mk.Plan()}),
        (mlp, {**MLP, "batch": {}}),
        (mlp, {**MLP, "step": planted.hand_step, "microbatches": 2}),
    ):
        try:
            # What draws random numbers is refused on tp before it is compared.
            mk.check(seeded(model), mesh_for("dp_shard=4") if isinstance(model, partial) else mesh, **choices)
        except mk.MeshkitError as error:
            found.append(str(error))
    return found


def seeded(model: object) -> object:
    if not isinstance(model, partial):
        return model

    def build() -> nn.Module:
        torch.manual_seed(0)
        return model()  # type: ignore[no-any-return]

    return build


def test_what_cannot_be_compared_is_refused() -> None:
    for found in pool(4).run(texts):
        expected = [
            "the mesh has parameters ['0.0.weight', '0.0.bias', '0.2.weight'] that one device does not have",
            "'up.weight' is (3, 4) on a rank, and (6, 4) on one device. If ranks hold parts of it, say over which axis",
            "the function returns a module, not a Run. Say how a step is made of it by step=.",
            "pattern 'up.weigth' matches no parameter. The nearest is 'up.weight'",
            "the model of one device calls c10d::allreduce_ over 4 ranks. Take groups from the mesh",
            "two steps on one device give the losses",
            "a function of the mesh makes its own choices, but got plan as well.",
            "batch is a dict of tensors with the same number of rows",
            "microbatches are what the default step makes; with step=, make them there.",
        ]
        assert len(found) == len(expected), found
        for text, words in zip(found, expected, strict=True):
            assert words in text


def test_a_builder_that_seeds_nothing_is_no_finding() -> None:
    for report in pool(2).run(run_without_seed):
        assert report.ok, str(report)
