"""Losses of the user's own on cp: a sum over tokens equals one device, and one that mixes the tokens of a row is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.parallel.rows_tried import Laid
from meshkit.parallel.tokens_tried import loss_of_tokens, misread_by
from tests.laws.parity.cases import mesh_for, own_rows
from tests.parallel.context.test_modules import PLAN, ROWS, TOKENS, OwnModel, model_and_batch
from tests.world import pool
from tests.zoo import causal
from tests.zoo.exact import exact
from tests.zoo.shrink import DATA_IDS

TOL = 1e-10
Part = dict[str, Tensor]


def logits_of(model: nn.Module, part: Part) -> Tensor:
    given = {name: part[name] for name in ("position_ids", "mask") if name in part}
    out = model(part["input_ids"], **given)
    logits: Tensor = getattr(out, "logits", out)
    return logits


def of_each(model: nn.Module, part: Part) -> Tensor:
    return F.cross_entropy(logits_of(model, part).transpose(1, 2), part["labels"], reduction="none")


# Sums over tokens.


def smoothed(model: nn.Module, part: Part) -> Tensor:
    logits = logits_of(model, part).flatten(0, 1)
    return F.cross_entropy(logits, part["labels"].flatten(), reduction="sum", label_smoothing=0.1)


def mean_times_count(model: nn.Module, part: Part) -> Tensor:
    mean = F.cross_entropy(logits_of(model, part).flatten(0, 1).float(), part["labels"].flatten())
    return mean * (part["labels"] != -100).sum()


def with_z_loss(model: nn.Module, part: Part) -> Tensor:
    logits, valid = logits_of(model, part), part["labels"] != -100
    return (of_each(model, part) * valid).sum() + 0.1 * (logits.logsumexp(-1).square() * valid).sum()


# What mixes the tokens of a row.


def shifted(model: nn.Module, part: Part) -> Tensor:
    logits, next_ids = logits_of(model, part)[:, :-1], part["input_ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), next_ids.flatten(), reduction="sum")


def of_sequences(model: nn.Module, part: Part) -> Tensor:
    return -F.logsigmoid(-0.1 * of_each(model, part).sum(1)).sum()


def mean_of_rows(model: nn.Module, part: Part) -> Tensor:
    return of_each(model, part).mean(1).sum()


def of_the_last(model: nn.Module, part: Part) -> Tensor:
    return of_each(model, part)[:, -1].sum()


def by_place(model: nn.Module, part: Part) -> Tensor:
    losses = of_each(model, part)
    return (losses * torch.arange(losses.shape[1])).sum()


def without_positions(model: nn.Module, part: Part) -> Tensor:
    """Right on one device, which counts the tokens by itself."""
    given = {"mask": part["mask"]} if "mask" in part else {}
    return F.cross_entropy(model(part["input_ids"], **given).flatten(0, 1), part["labels"].flatten(), reduction="sum")


# Sums over the tokens of rows, but not over all that a rank of cp may get.


def of_targets(model: nn.Module, part: Part) -> Tensor:
    """Also of what fills a rank up, which has 0 there."""
    return F.cross_entropy(logits_of(model, part).flatten(0, 1), part["targets"].flatten(), reduction="sum")


def by_rows(model: nn.Module, part: Part) -> Tensor:
    return (of_each(model, part) * (part["labels"] != -100)).sum() / len(part["input_ids"])


# Of which a trial shows nothing.


@mk.step.additive
def over_ranks(model: nn.Module, part: Part) -> Tensor:
    """A row's sum is summed over the ranks, so each has the whole loss."""
    sums = of_each(model, part).sum(1)
    total = sums.detach().clone()
    dist.all_reduce(total)
    return -F.logsigmoid(-0.1 * (total + sums - sums.detach())).sum() / dist.get_world_size()


def mean(model: nn.Module, part: Part) -> Tensor:
    return F.cross_entropy(logits_of(model, part).flatten(0, 1), part["labels"].flatten())


def valid(batch: Part) -> Tensor:
    return (batch["labels"] != -100).sum()


def rows(batch: Part) -> Tensor:
    return torch.tensor(len(batch["labels"]))


SUMS = (smoothed, mean_times_count, with_z_loss)
MIXED = (shifted, of_sequences, mean_of_rows, of_the_last, by_place)


def error_of(loss: Callable[[nn.Module, Part], Tensor]) -> float:
    one, batch = model_and_batch()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :4] = -100
    batch["labels"][1] = -100
    expected = loss(one, batch) / valid(batch)
    expected.backward()
    gradients = {name: param.grad for name, param in one.named_parameters()}
    model, _ = model_and_batch()
    run = mk.parallelize(model, mesh_for("cp=2"), plan=PLAN)
    total, counted = run.evaluate(batch, loss=loss, count=valid)
    found = run.forward_backward(batch, loss=loss, count=valid, microbatches=2)
    assert abs(float(total / counted - found.detach())) <= TOL
    errors = [float((full_tensor(p.grad) - gradients[name]).abs().max()) for name, p in run.named_parameters()]
    return max(abs(float(found.detach()) - float(expected.detach())), *errors)


@pytest.mark.parametrize("loss", [smoothed, with_z_loss])
def test_a_sum_over_tokens_equals_one_device(loss: Callable[[nn.Module, Part], Tensor]) -> None:
    assert max(pool(2).run(error_of, loss)) <= TOL


def said_of(loss: Callable[[nn.Module, Part], Tensor], transformers: bool) -> str:
    model, batch = model_and_batch()
    plan = PLAN
    if transformers:
        ids = torch.randint(*DATA_IDS, (2, 12))
        model, batch, plan = causal.build("llama"), {"input_ids": ids, "labels": ids}, None  # type: ignore[assignment]
    run = mk.parallelize(model, mesh_for("cp=2"), plan=plan)
    with pytest.raises(PlanError) as error:
        run.forward_backward(batch, loss=loss, count=rows)
    with pytest.raises(PlanError) as evaluation:
        run.evaluate(batch, loss=loss, count=rows)
    assert str(evaluation.value) == str(error.value).replace("forward_backward", "evaluate")
    return str(error.value)


@pytest.mark.parametrize(("loss", "transformers"), [*((loss, False) for loss in MIXED), (shifted, True)])
def test_a_loss_that_mixes_the_tokens_of_a_row_is_refused(
    loss: Callable[[nn.Module, Part], Tensor], transformers: bool
) -> None:
    for text in pool(2).run(said_of, loss, transformers):
        assert f"the loss {loss.__name__!r} mixes the tokens of a row" in text
        assert "use cp=1" in text


def test_a_loss_that_keeps_the_positions_of_a_rank_s_tokens_is_told_to_hand_them_on() -> None:
    for text in pool(2).run(said_of, without_positions, False):
        assert "OwnModel cannot be split by its tokens" in text
        assert "let the loss hand on position_ids=part['position_ids'] to the model" in text


def trained(loss: Callable[[nn.Module, Part], Tensor], count: int) -> float:
    model, batch = model_and_batch()
    batch = {name: x[:, :12] for name, x in batch.items()}
    run = mk.parallelize(model, mesh_for("cp=2"), plan=PLAN)
    return float(run.forward_backward(batch, loss=loss, count=lambda _: torch.tensor(count)).detach())


def test_means_of_equal_parts_that_are_counted_as_one_are_right_and_so_is_a_loss_that_knows_the_ranks() -> None:
    one, batch = model_and_batch()
    batch = {name: x[:, :12] for name, x in batch.items()}
    expected = float(mean(one, batch).detach())
    assert pool(2).run(trained, mean, 2) == pytest.approx([expected] * 2, abs=TOL)
    of_rows = float(of_sequences(one, batch).detach()) / ROWS
    assert pool(2).run(trained, over_ranks, ROWS) == pytest.approx([of_rows] * 2, abs=TOL)


def test_what_a_loss_is_of_its_tokens_is_told_from_the_model_without_values() -> None:
    with torch.device("meta"):
        model = OwnModel()
    ids = torch.randint(0, 17, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    assert [loss_of_tokens(model, loss, batch) for loss in SUMS] == ["sum"] * 3
    assert [loss_of_tokens(model, loss, batch) for loss in MIXED if loss is not mean_of_rows] == ["neither"] * 4
    assert [loss_of_tokens(model, loss, batch) for loss in (mean, mean_of_rows)] == ["between"] * 2
    ignored = {**batch, "labels": ids.where(torch.arange(TOKENS) > 6, -100)}
    assert loss_of_tokens(model, of_sequences, ignored) == "neither"
    seen: list[Tensor] = []

    def keeps(model: nn.Module, part: Part) -> Tensor:
        seen.append(logits_of(model, part))
        return seen[-1][:, -1].sum()

    assert loss_of_tokens(model, keeps, batch) == "neither"
    assert not seen

    def sends(model: nn.Module, part: Part) -> Tensor:
        dist.all_reduce(total := logits_of(model, part).sum())
        return total

    assert loss_of_tokens(model, sends, batch) is None


def test_what_a_loss_reads_of_rows_as_one_and_of_tokens_that_are_none_is_told_too() -> None:
    with torch.device("meta"):
        model = OwnModel()
    ids = torch.randint(1, 17, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids, "targets": ids, "position_ids": torch.arange(TOKENS).expand(ROWS, TOKENS)}
    layouts: tuple[Laid, ...] = ("end to end", "filled up")
    assert [misread_by(model, loss, batch, layouts) for loss in SUMS] == [None] * 3
    assert misread_by(model, of_targets, batch, layouts) == "filled up"
    assert misread_by(model, of_targets, batch, layouts[:1]) is None
    one_row = {name: x[:1] for name, x in batch.items()}
    assert [misread_by(model, by_rows, each, layouts) for each in (batch, one_row)] == ["end to end"] * 2
    assert misread_by(model, by_rows, batch, layouts[1:]) is None


def refused_later(loss: Callable[[nn.Module, Part], Tensor]) -> tuple[float, str, str]:
    """The loss of rows that are split alike, and what is said of a batch that a rank gets in another way."""
    model, _ = model_and_batch()
    ids = torch.randint(1, 17, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "targets": ids}
    packed = {**batch, "position_ids": torch.tensor([0, 1, 2, 3] * 4)[:TOKENS] + torch.zeros_like(ids)}
    other = packed if loss is by_rows else {name: x[:, :1] for name, x in batch.items()}
    run = mk.parallelize(model, mesh_for("cp=2"), plan=PLAN)
    value = run.forward_backward(batch, loss=loss, count=lambda _: torch.tensor(1))
    with pytest.raises(PlanError) as error:
        run.forward_backward(other, loss=loss, count=lambda _: torch.tensor(1))
    with pytest.raises(PlanError) as evaluation:
        run.evaluate(other, loss=loss, count=lambda _: torch.tensor(1))
    return float(value.detach()), str(error.value), str(evaluation.value)


def test_a_loss_that_reads_the_number_of_rows_is_refused_where_they_are_laid_end_to_end() -> None:
    one, _ = model_and_batch()
    ids = torch.randint(1, 17, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = float(by_rows(one, {"input_ids": ids, "labels": ids}).detach())
    for value, text, evaluation in pool(2).run(refused_later, by_rows):
        assert value == pytest.approx(expected, abs=TOL)
        assert "forward_backward: the loss 'by_rows' reads how many rows there are" in text
        assert evaluation == text.replace("forward_backward", "evaluate")


def test_a_loss_of_so_few_tokens_that_ranks_are_filled_up_cannot_be_tried() -> None:
    one, _ = model_and_batch()
    ids = torch.randint(1, 17, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = float(of_targets(one, {"input_ids": ids, "targets": ids}).detach())
    for value, text, _ in pool(2).run(refused_later, of_targets):
        assert value == pytest.approx(expected, abs=TOL)
        assert "the loss 'of_targets' gets a part of the rows or tokens here, and it cannot be tried" in text


def filled_up() -> str:
    model, batch = causal.build("llama"), {"input_ids": torch.randint(*DATA_IDS, (2, 13))}
    run = mk.parallelize(model, mesh_for("tp=2 cp=2"), sequence=True)
    with pytest.raises(PlanError) as error:
        run.forward_backward(batch | {"targets": batch["input_ids"]}, loss=of_targets, count=lambda _: torch.tensor(1))
    return str(error.value)


def test_a_loss_that_adds_something_for_filling_is_refused_where_ranks_of_tp_need_it() -> None:
    for text in pool(4).run(filled_up):
        assert "the loss 'of_targets' adds something for tokens that fill a rank of cp up" in text


def padded_with_positions(groups: str) -> list[float]:
    """Of each batch the largest difference from one device, where transformers' model looks for no documents."""
    positions = torch.arange(12).repeat(3, 1)
    packed, shown = positions - positions.ge(torch.tensor([[5], [12], [9]])) * positions[:, :1].add(4), positions >= 0
    shown[1, 4:6] = False  # a hole, at which counted positions stand still
    ids = torch.randint(*DATA_IDS, (3, 12), generator=torch.Generator().manual_seed(1))
    worst = []
    for given in ({"position_ids": packed}, {"position_ids": shown.long().cumsum(1) - 1}):
        batch = {"input_ids": ids, "labels": ids.where(shown, -100), "attention_mask": shown.long(), **given}
        with exact():
            one = causal.build("llama")
            logits = one(ids, attention_mask=batch["attention_mask"], **given).logits
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            context = mk.strategy.ContextPolicy(groups=groups, tokens_per_rank=64 if groups == "by_length" else None)
            run = mk.parallelize(causal.build("llama"), mesh_for("cp=2"), context=context)
            run.forward_backward(batch)
        grads = {name: param.grad for name, param in one.named_parameters()}
        worst.append(max(float((full_tensor(p.grad) - grads[name]).abs().max()) for name, p in run.named_parameters()))
    return worst


@pytest.mark.parametrize("groups", ["fixed", "by_length"])
def test_positions_begin_no_documents_in_a_model_of_transformers_that_is_given_an_attention_mask(groups: str) -> None:
    assert max(map(max, pool(2).run(padded_with_positions, groups))) <= TOL


def by_hand(model, part):
    output = model(**mk.step.model_inputs(model, part))
    token_losses = F.cross_entropy(output.logits.flatten(0, 1), part["labels"].flatten(), reduction="none")
    return (token_losses * part["weights"].flatten()).sum()


def of_shown(model, part):
    return by_hand(model, part) + 0 * part["attention_mask"].sum()


def of_shown_if_any(model, part):
    shown = part.get("attention_mask")
    return by_hand(model, part) * 2 if shown is None else by_hand(model, part)


def own_losses_of_padded_rows(mesh: str) -> tuple[float, list[str]]:
    """(the largest difference from one device, what losses that read the attention_mask are told)"""
    generator = torch.Generator().manual_seed(2)
    ids, lengths = torch.randint(*DATA_IDS, (4, 12), generator=generator), torch.tensor([[12], [7], [9], [5]])
    shown = torch.arange(12) < lengths
    weights = torch.rand(4, 12, generator=generator, dtype=torch.float64)
    batch = {"input_ids": ids, "labels": ids.where(shown, -100), "attention_mask": shown.long(), "weights": weights}
    told = []
    with exact():
        one = causal.build("llama")
        (by_hand(one, batch) / shown.sum()).backward()
        run = mk.parallelize(causal.build("llama"), mesh_for(mesh))
        run.forward_backward(own_rows(batch, run.mesh), loss=by_hand)
        for loss in (of_shown, of_shown_if_any):
            try:
                run.forward_backward(own_rows(batch, run.mesh), loss=loss)
            except mk.MeshkitError as error:
                told.append(str(error))
    grads = {name: param.grad for name, param in one.named_parameters()}
    return max(float((full_tensor(p.grad) - grads[name]).abs().max()) for name, p in run.named_parameters()), told


@pytest.mark.parametrize("mesh", ["cp=2", "dp_shard=2 cp=2"])
def test_a_loss_of_ones_own_sees_padding_by_the_models_inputs_alone(mesh: str) -> None:
    for worst, told in pool(mk.mesh.MeshSpec.parse(mesh).world_size).run(own_losses_of_padded_rows, mesh):
        assert worst <= 1e-10
        assert len(told) == 2
        assert all("the loss reads attention_mask, and with cp a part of a batch has none" in text for text in told)
