"""A loss that is a mean already is refused where count divides again; sums, and means that are right, are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshkit as mk
from meshkit.errors import PlanError
from tests.laws.parity.cases import Cell, batches, build, mesh_for
from tests.world import pool

TOL_FP64 = 1e-10
CLASSES = 5
REFUSED = r"is a mean already, and would be divided again by count, which is"


def per_item(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def items(part: dict[str, Tensor]) -> Tensor:
    return (part["y"] != -100).sum()


def own_mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum") / (y != -100).sum()


one_hot = partial(F.one_hot, num_classes=CLASSES)
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "as images": lambda out, y: F.cross_entropy(out[None].mT, y[None]),
    "label smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "probabilities": lambda out, y: F.cross_entropy(out, one_hot(y).to(out)),
    "mse": lambda out, y: F.mse_loss(out, one_hot(y).to(out)),
    "l1": lambda out, y: F.l1_loss(out, one_hot(y).to(out)),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out, one_hot(y).to(out)),
    "kl": lambda out, y: F.kl_div(out.log_softmax(-1), one_hot(y).to(out), reduction="batchmean"),
    "mean": lambda out, y: per_item(out, y).mean(),
    "mean over all dims": lambda out, y: out.square().mean((0, 1)),
    "mean of rows' sums": lambda out, y: out.square().sum(-1).mean(),
    "negative, half, in fp32": lambda out, y: (-0.5 * (out.log_softmax(-1) * one_hot(y)).mean()).float(),
    "for accumulation": lambda out, y: F.cross_entropy(out, y) / 4,
    "with an auxiliary mean": lambda out, y: F.cross_entropy(out, y) + 0.01 * out.logsumexp(-1).square().mean(),
    "divided by the mask's sum": own_mean,
    "by its float": lambda out, y: (per_item(out, y)).sum() / (y != -100).double().sum().clamp(min=1),
    "by a length": lambda out, y: per_item(out, y).sum() / len(y),
    "recomputed": lambda out, y: checkpoint(own_mean, out, y, use_reentrant=False),
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": partial(F.cross_entropy, reduction="sum"),
    "mk.cross_entropy": mk.cross_entropy,
    "label smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1, reduction="sum"),
    "divided by a constant": lambda out, y: per_item(out, y).sum() / 8,
    "by a tensor": lambda out, y: per_item(out, y).sum() / torch.tensor(8.0),
    "times a constant": lambda out, y: 0.1 * per_item(out, y).sum(),
    "mean over features": lambda out, y: out.square().mean(-1).sum(),
    "features' sums averaged": lambda out, y: out.square().sum(0).mean(),
    "heads averaged": lambda out, y: torch.stack([out.sum(), per_item(out, y).sum()]).mean(),
    "with a z-loss": lambda out, y: per_item(out, y).sum() + 1e-2 * out.logsumexp(-1).square().sum(),
    "a mean times its number": lambda out, y: F.cross_entropy(out, y) * (y != -100).sum(),
    "a mean times a length": lambda out, y: len(y) * F.mse_loss(out, one_hot(y).to(out)),
    "rows' means added": lambda out, y: sum((row.square().mean() for row in out), torch.zeros(())),
    "a thousand terms": lambda out, y: sum((out[index % len(y)].mean() for index in range(1200)), torch.zeros(())),
    "added to itself": lambda out, y: (lambda twice: twice(twice(out.sum())))(lambda v: v + v),
}


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, CLASSES)).double()


def run_of(mesh: str = "tp=1") -> mk.Run:
    return mk.parallelize(module(), mesh_for(mesh))


def whole(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(CLASSES, (rows,), generator=generator)}


def rows_of(run: mk.Run, rows: int) -> dict[str, Tensor]:
    ranks, rank = run.mesh.data_ranks, run.mesh.data_rank
    return {name: value.tensor_split(ranks)[rank] for name, value in whole(rows).items()}


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except PlanError as error:
        return str(error)
    return ""


def steps(cases: str, mesh: str, rows: int, microbatches: int) -> dict[str, str]:
    """What is raised by each."""
    run, found = run_of(mesh), {}
    for name, reduce in (MEANS if cases == "means" else SUMS).items():

        def loss(model: nn.Module, part: dict[str, Tensor], reduce: Any = reduce) -> Tensor:
            return reduce(model(part["x"]), part["y"])

        run._losses.known.clear()  # these losses have one code
        step = partial(run.forward_backward, rows_of(run, rows), microbatches=microbatches, loss=loss, count=items)
        found[name] = raised(step)
    return found


@pytest.mark.parametrize(("mesh", "ranks"), [("tp=1", 1), ("dp_shard=2", 2), ("dp_replicate=2", 2)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_means_are_refused_on_every_rank_where_more_is_counted(mesh: str, ranks: int, microbatches: int) -> None:
    for found in pool(ranks).run(steps, "means", mesh, 9, microbatches):
        assert not [name for name, text in found.items() if "a mean already" not in text]


@pytest.mark.parametrize(("mesh", "ranks"), [("tp=1", 1), ("dp_shard=2", 2)])
@pytest.mark.parametrize(("rows", "microbatches"), [(9, 1), (9, 2), (1, 2)])
def test_sums_are_taken(mesh: str, ranks: int, rows: int, microbatches: int) -> None:
    for found in pool(ranks).run(steps, "sums", mesh, rows, microbatches):
        assert not {name: text for name, text in found.items() if text}


def mean_of(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["y"])


def counted_as_one(mesh: str, microbatches: int) -> float:
    run, batch = run_of(mesh), whole(8)
    expected = F.cross_entropy(module()(batch["x"]), batch["y"])
    loss = run.forward_backward(
        rows_of(run, 8), microbatches=microbatches, loss=mean_of, count=lambda batch: torch.tensor(microbatches)
    )
    return (loss - expected).abs().item()


@pytest.mark.parametrize(("mesh", "ranks"), [("tp=1", 1), ("dp_shard=2", 2)])
def test_a_mean_of_equal_parts_that_are_counted_as_one_is_the_mean(mesh: str, ranks: int) -> None:
    for microbatches in (1, 2):
        assert max(pool(ranks).run(counted_as_one, mesh, microbatches)) <= TOL_FP64


def refused_twice() -> list[str]:
    run = run_of()
    step = partial(run.forward_backward, rows_of(run, 9), microbatches=3, loss=mean_of, count=items)
    return [raised(step), raised(step)]


def test_a_refused_loss_is_refused_again_and_the_text_says_what_to_count() -> None:
    ((first, again),) = pool(1).run(refused_twice)
    assert first == again
    assert re.search(r"the loss 'mean_of' is a mean .* which is 9 for 3 parts .*torch\.tensor\(3\)", first)


def looked_at() -> list[int]:
    """How often, after each step."""
    run, looks = run_of(), []
    plain = mk.loss.LossWatch.__call__

    def counting(self: Any, *args: Any) -> Tensor:
        looks.append(1)
        return plain(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mk.loss.LossWatch, "__call__", counting)
        found = []
        for _ in range(3):
            loss = lambda model, part: F.cross_entropy(model(part["x"]), part["y"], reduction="sum")  # noqa: E731
            run.forward_backward(rows_of(run, 9), microbatches=2, loss=loss, count=items)
            found.append(len(looks))
    return found


def test_only_the_first_step_of_a_loss_is_looked_at() -> None:
    assert pool(1).run(looked_at) == [[2, 2, 2]]


def on_one_rank_only(mesh: str) -> list[str]:
    """What is raised where only the first rank's result is a mean."""
    run = run_of(mesh)
    reduction = "mean" if run.mesh.data_rank == 0 else "sum"
    loss = lambda model, part: F.cross_entropy(model(part["x"]), part["y"], reduction=reduction)  # noqa: E731
    return [raised(lambda: run.forward_backward(rows_of(run, 9), loss=loss, count=items))]


def test_ranks_that_differ_end_alike() -> None:
    assert pool(2).run(on_one_rank_only, "dp_shard=2") == [[""], [""]]


def tokens_of(model: nn.Module, part: dict[str, Any], reduction: str) -> Tensor:
    logits = model(part["input_ids"], **{name: part[name] for name in ("position_ids", "mask") if name in part})
    return F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction=reduction)


def token_mean(model: nn.Module, part: dict[str, Any]) -> Tensor:
    return tokens_of(model, part, "mean")


def token_sum(model: nn.Module, part: dict[str, Any]) -> Tensor:
    return tokens_of(model, part, "sum")


def on_stages(mesh: str, microbatches: int) -> tuple[str, str, str]:
    cell = Cell(mesh=mesh)
    run = mk.parallelize(build(cell), mesh_for(mesh), plan=mk.models.LLAMA_PLAN)
    batch = batches(cell)[0]
    step = partial(run.forward_backward, batch, microbatches=microbatches)
    one = lambda batch: torch.tensor(microbatches)  # noqa: E731
    return (
        raised(lambda: step(loss=token_mean)),
        raised(lambda: step(loss=token_sum)),
        raised(lambda: step(loss=token_mean, count=one)),
    )


@pytest.mark.parametrize(("mesh", "ranks"), [("pp=2", 2), ("pp=2 dp_shard=2", 4), ("cp=2", 2)])
def test_means_are_refused_on_every_stage_and_sums_are_not(mesh: str, ranks: int) -> None:
    for mean, total, counted in pool(ranks).run(on_stages, mesh, 2):
        assert "the loss 'token_mean' is a mean already" in mean
        assert (total, counted) == ("", "")


def own_loss_of_transformers() -> str:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    run = mk.parallelize(transformers.LlamaForCausalLM(config), mesh_for("tp=1"))
    ids = torch.arange(20).view(2, 10)

    def own(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(input_ids=part["input_ids"], labels=part["labels"]).loss
        return loss

    return raised(lambda: run.forward_backward({"input_ids": ids, "labels": ids}, loss=own))


def test_a_transformers_models_own_loss_is_refused() -> None:
    assert re.search(REFUSED, pool(1).run(own_loss_of_transformers)[0])
