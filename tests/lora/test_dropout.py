"""Dropout on adapters: one mask for each step on every mesh, for packed and unpacked rows, in a forward that runs again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.model_state import copies_of
from meshkit.core.rng import stream_of, token_keys, using_keys
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.lora._adapter import drop
from tests.laws.parity.cases import Cell, batches, build, memory_of, mesh_for, own_rows, plan_of
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs
DROPOUT, SEED, STEP = 0.3, 4, 7
WORD = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A cell of the parity suite, whose adapters have dropout."""

    cell: Cell
    base: Any = None

    def attach(self, model: nn.Module) -> mk.Plan:
        base = {"base": self.base, "base_block": 4}
        plan = mk.lora.attach(model, plan_of(self.cell), rank=3, dropout=DROPOUT, seed=SEED, **base)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.copy_(torch.linspace(-0.3, 0.4, param.numel()).view(param.shape).sin())
        return plan


def bits(counter: int, stream: int, count: int = 63) -> int:
    """SplitMix64's finaliser (Steele et al. 2014), in whole numbers."""
    z = (counter * 0x9E3779B97F4A7C15 + stream) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return (z ^ (z >> 31)) >> (64 - count)


def mask(document: list[int], layer: str, features: int, step: int) -> Tensor:
    """[tokens, features] of factors, feature by feature: the definition."""
    threshold = round(DROPOUT * 2**15)
    total, rows = 0, []
    for position, token in enumerate(document):
        total += bits(token, bits(position, stream_of("position")))
        key = bits(total & WORD, stream_of("lora_dropout", SEED, step))
        stream = bits(key, stream_of(layer))
        draws = [bits(feature // 4, stream) >> 16 * (feature % 4) & 0x7FFF for feature in range(features)]
        rows.append([0.0 if draw < threshold else 1 / (1 - threshold / 2**15) for draw in draws])
    return torch.tensor(rows, dtype=torch.float64)


def reference(case: Dropped, *, step: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one device whose adapters' inputs a hook multiplies by masks made number by number."""
    model = build(case.cell)
    case.attach(model)
    model.eval()  # so that the library draws nothing
    batch = batches(case.cell)[0]
    positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]))

    def hook(name: str) -> Any:
        def multiply(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            (x,) = args
            made = torch.empty_like(x)
            for row, (ids, places) in enumerate(zip(batch["input_ids"], positions, strict=True)):
                starts = [t for t in range(len(ids)) if t == 0 or places[t] != places[t - 1] + 1]
                for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                    made[row, start:end] = mask(ids[start:end].tolist(), name, x.shape[-1], step)
            return (x * made,)

        return multiply

    for name, child in model.named_modules():
        if name.endswith("lora_A"):
            child.register_forward_pre_hook(hook(name.removesuffix(".lora_A")))
    logits = model(batch["input_ids"], batch.get("position_ids"))
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(case: Dropped, step: int) -> tuple[float, dict[str, Tensor], float]:
    """On every rank: loss and gradients of a step on the mesh, and how far an evaluation is from one without dropout."""
    cell, mesh = case.cell, mesh_for(case.cell.mesh)
    model = build(cell)
    plan = case.attach(model)
    run = mk.parallelize(
        model,
        mesh,
        plan=plan,
        memory=memory_of(cell),
        sequence=cell.sequence,
        pipeline=mk.strategy.PipelinePolicy(schedule=cell.schedule),
    )
    batch = own_rows(batches(cell)[0], mesh)
    loss = float(run.forward_backward(batch, microbatches=cell.microbatches, step=step))
    copies = copies_of(run.model)
    found = {
        copies.get(name, name): full_tensor(p.grad).clone() for name, p in run.named_parameters() if p.grad is not None
    }
    total, tokens = run.evaluate(batch)
    run.model.eval()
    eval_loss = run.forward_backward(batch, microbatches=cell.microbatches, step=step)
    return loss, found, abs(float(total / tokens - eval_loss))


CASES = {
    "dp_shard": (2, Dropped(cell=Cell(mesh="dp_shard=2", microbatches=3, recompute="full"))),
    "documents": (2, Dropped(cell=Cell(mesh="dp_shard=2", documents=True, recompute="selective"))),
    "tp_uneven_heads": (4, Dropped(cell=Cell(mesh="tp=4", heads=(9, 3), hidden_mlp=45))),
    "tp_sequence_cp": (4, Dropped(cell=Cell(mesh="cp=2 tp=2", sequence=True), base="nf4")),
    "regather": (2, Dropped(cell=Cell(mesh="tp=2", sequence=True, memory=mk.MemoryPolicy(regather=True)))),
    "pp": (2, Dropped(cell=Cell(mesh="pp=2", microbatches=3, schedule="zbv", layers=4, recompute="full"))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_dropout_equals_one_device_with_the_masks_of_the_definition(name: str) -> None:
    ranks, case = CASES[name]
    expected_loss, expected = reference(case, step=STEP)
    seen: set[str] = set()
    for loss, found, eval_distance in pool(ranks).run(gradients, case, STEP):
        assert abs(loss - expected_loss) <= TOL_FP64
        assert eval_distance <= TOL_FP64  # neither an evaluation nor a step in eval mode drops anything
        seen |= found.keys()
        for key, gradient in found.items():
            assert float((gradient - expected[key]).abs().max()) <= TOL_FP64, key
    assert seen == expected.keys()


def test_masks_have_their_rate_and_differ_between_steps_layers_and_tokens() -> None:
    ids = torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(0))

    def kept(step: int, layer: str) -> Tensor:
        with using_keys(token_keys(ids, None, "lora_dropout", 0, step)):
            x = torch.ones(4, 64, 129, dtype=torch.float64)
            return drop(x, probability=0.25, stream=stream_of(layer), own_columns=None)

    first = kept(0, "a")
    factor = 1 / (1 - round(0.25 * 2**15) / 2**15)
    assert set(first.unique().tolist()) == {0.0, factor}
    assert torch.equal(first, kept(0, "a"))
    for other in (kept(1, "a"), kept(0, "b"), first.roll(1, 1), first.roll(1, 2), first.roll(1, 0)):
        same = float(((first > 0) == (other > 0)).double().mean())
        assert abs(same - (0.25**2 + 0.75**2)) < 0.015  # independent: 5 standard deviations of 33024 draws
    assert abs(float((first == 0).double().mean()) - 0.25) < 0.012


def test_packed_tokens_have_the_keys_of_unpacked_ones() -> None:
    first, second = torch.tensor([[5, 3, 5, 5]]), torch.tensor([[5, 3, 9]])
    packed = torch.cat([first, second], 1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    found = token_keys(packed, positions, 1)
    assert torch.equal(found, torch.cat([token_keys(first, None, 1), token_keys(second, None, 1)], 1))
    assert torch.equal(found[0, :2], found[0, 4:6])  # the same text so far
    assert len(set(found[0].tolist())) == 5
    assert not bool((found == token_keys(packed, positions, 2)).any())


def refusals() -> int:
    batch, case = batches(Cell(mesh=""))[0], Dropped(cell=Cell(mesh=""))

    def fresh(**options: Any) -> mk.Run:
        model = build(case.cell)
        return mk.parallelize(model, mesh_for(""), plan=case.attach(model), **options)

    run = fresh()
    with pytest.raises(PlanError, match="the adapters have dropout, whose masks depend on the number of the step"):
        run.forward_backward(batch)
    with pytest.raises(PlanError, match="a forward in training mode outside of Run.forward_backward"):
        run.model(batch["input_ids"])
    with pytest.raises(PlanError, match=r"called on tokens \(5, 8\), but the batch has \(5, 16\)"):
        run.forward_backward(batch, step=0, loss=lambda model, part: model(part["input_ids"][:, :8]).sum())
    with pytest.raises(PlanError, match=r"mlp_chunks=2 with lora\(dropout=0.3\)"):
        fresh(memory=mk.MemoryPolicy(mlp_chunks=2))
    with pytest.raises(PlanError, match=r"compile with lora\(dropout=0.3\)"):
        fresh(compile="aot_eager")
    with pytest.raises(PlanError, match="dropout=1.0 is the share of features"):
        mk.lora.attach(build(case.cell), plan_of(case.cell), dropout=1.0)
    return 1


def test_what_has_no_masks_is_refused() -> None:
    assert pool(1).run(refusals) == [1]


def test_an_estimate_knows_dropout() -> None:
    with torch.device("meta"):
        model = mk.models.Llama(build(Cell(mesh="")).config)
    plan = mk.lora.attach(model, mk.models.LLAMA_PLAN, rank=2, dropout=0.1)
    plain = mk.models.Llama(build(Cell(mesh="")).config).to("meta")
    bare = mk.lora.attach(plain, mk.models.LLAMA_PLAN, rank=2)
    with_it, without = (
        mk.estimate(each, "dp_shard=2", rows=2, seq_len=16, kernels="cpu", plan=given).most["activations"]
        for each, given in ((model, plan), (plain, bare))
    )
    assert with_it > without  # each adapter keeps its own input
