"""Other people's models on meshes: a part of the zoo, and that the zoo would tell. All of it is `make zoo`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.plan import match_names, match_table
from tests.zoo import all as zoo
from tests.zoo import causal, judge
from tests.zoo.case import Cell
from tests.zoo.exact import exact
from tests.zoo.judge import Said
from tests.zoo.page import generation, page
from tests.zoo.part import EQUAL, REFUSED
from tests.zoo.sweep import Row, is_current, tree, verdict

PLAIN = Cell.of("odd.Plain", "dp_shard=2")


@pytest.mark.gate
@pytest.mark.parametrize(("model", "column"), [pytest.param(*each, id=" on ".join(each)) for each in EQUAL])
def test_a_model_equals_one_device(model: str, column: str) -> None:
    row = verdict(Cell.of(model, column))
    assert row.outcome == "equal", f"{row.text}\n{row.traceback}"


@pytest.mark.gate
@pytest.mark.parametrize(("model", "column"), [pytest.param(*each, id=" on ".join(each)) for each in REFUSED])
def test_a_model_that_would_be_wrong_is_refused(model: str, column: str) -> None:
    row = verdict(Cell.of(model, column))
    assert row.outcome == "refused", f"{row.text}\n{row.traceback}"
    assert REFUSED[model, column] in row.text


def test_every_causal_language_model_has_a_tiny_config_or_a_reason() -> None:
    assert len(causal.names()) >= 170
    assert len(zoo.odd_modules()) >= 60
    assert set(causal.SKIPPED) <= set(causal.types())
    assert set(causal.CHANGED) <= set(causal.names())


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2", "jamba"])
def test_a_tiny_model_is_made_by_the_names_of_its_fields(name: str) -> None:
    with judge.quiet(), exact():
        model = causal.build(name)
        assert model(torch.arange(16)[None]).logits.isfinite().all()
    assert sum(param.numel() for param in model.parameters()) < 100_000


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "jamba", "olmo_hybrid", "phi4_multimodal"])
def test_blocks_and_experts_are_those_that_the_model_declares(name: str) -> None:
    with judge.quiet():
        model = causal.build(name)
    plan, config, names = mk.plan.auto_plan(model), model.config, [name for name, _ in model.named_modules()]
    # A model that declares no stages, as jamba does, has its one list of layers.
    layers = [key for key in config.base_model_pp_plan or {} if key.endswith("layers")] or ["layers"]
    assert match_names(plan.blocks, names, what="module") == [
        name for key in layers for name in _below(names, f"{key}.*")
    ]
    stacks = [key for key, word in (config.base_model_ep_plan or {}).items() if word == "ep_dispatch_experts"]
    found = [name for name, style in match_table(plan.tensor, names, what="module").items() if style.kind == "experts"]
    assert sorted(found) == sorted(name for key in stacks for name in _below(names, key))


def _below(names: list[str], pattern: str) -> list[str]:
    return match_names([f"model.{pattern}"], names, what="module")


def test_a_refused_cell_leaves_the_ranks_usable() -> None:
    refused = verdict(Cell.of("odd.SoftmaxOfTokens", "cp=2"))
    assert refused.outcome == "refused"
    assert "softmax" in refused.text
    assert verdict(PLAIN).outcome == "equal"


# --------------------------------------------------------------------------------------------------- faults that are planted


def same_rows_on_every_rank(cell: Cell, folder: str) -> Said:
    def rows(batch: dict[str, Any], mesh: mk.Mesh) -> dict[str, Any]:
        return {name: tensor.tensor_split(mesh.data_ranks)[0] for name, tensor in batch.items()}

    with mock.patch.object(judge, "own_rows", rows):
        return judge.judge(cell, folder)


def another_optimizer(cell: Cell, folder: str) -> Said:
    def adamw(run: mk.Run, *, lr: float, eps: float) -> torch.optim.Optimizer:
        return _ADAMW(run, lr=lr * (1 + 1e-6), eps=eps)

    with mock.patch.object(mk, "adamw", adamw):
        return judge.judge(cell, folder)


_ADAMW = mk.adamw


def a_gradient_scaled(cell: Cell, folder: str) -> Said:
    def errors(run: mk.Run, expected: Any) -> dict[str, float]:
        if dist.get_rank() == 1:
            next(run.parameters()).grad.mul_(1 + 1e-7)
        return _ERRORS(run, expected)

    with mock.patch.object(judge, "_gradient_errors", errors):
        return judge.judge(cell, folder)


_ERRORS = judge._gradient_errors


def one_rank_crashes(cell: Cell, folder: str) -> Said:
    with mock.patch.object(judge, "split_share", _crash if dist.get_rank() == 1 else judge.split_share):
        return judge.judge(cell, folder)


def one_rank_hangs(cell: Cell, folder: str) -> Said:
    with mock.patch.object(judge, "split_share", _hang if dist.get_rank() == 1 else judge.split_share):
        return judge.judge(cell, folder)


def one_rank_refuses(cell: Cell, folder: str) -> Said:
    with mock.patch.object(judge, "split_share", _refuse if dist.get_rank() == 1 else judge.split_share):
        return judge.judge(cell, folder)


def _crash(run: mk.Run) -> float:
    raise KeyError("planted")


def _refuse(run: mk.Run) -> float:
    raise mk.errors.PlanError("planted")


def _hang(run: mk.Run) -> float:
    dist.recv(torch.zeros(1), src=0)
    return 0.0


@pytest.mark.parametrize(
    ("fault", "outcome", "text"),
    [
        (same_rows_on_every_rank, "wrong", "loss of step 1|gradient of"),
        (another_optimizer, "wrong", "off after two optimizer steps|loss of step 2"),
        (a_gradient_scaled, "wrong", "gradient of embed_tokens.weight"),
        (one_rank_crashes, "crash", "KeyError: 'planted'"),
        (one_rank_hangs, "hang", "no answer"),
        (one_rank_refuses, "refused", "planted"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_named(fault: Any, outcome: str, text: str) -> None:
    row = verdict(PLAIN, fault)
    assert row.outcome == outcome, row
    assert any(each in row.text for each in text.split("|")), row


def test_a_row_is_of_this_code_for_as_long_as_nothing_of_it_changes() -> None:
    commit, of_torch, of_transformers = tree()
    row = Row(
        model="llama", column="tp=2", outcome="equal", commit=commit, torch=of_torch, transformers=of_transformers
    )
    assert is_current(row) or commit.endswith("+changes")
    assert not is_current(replace(row, torch="2.0.0"))
    assert not is_current(replace(row, commit="0" * 40))
    assert not is_current(replace(row, commit=f"{commit}+changes"))


def test_the_page_counts_who_generates_over_a_cache() -> None:
    said = {
        "llama": "cache; as transformers' generate",
        "mamba": "cache, rows of one length; as transformers' generate",
        "roberta": "cache, rows of one length; transformers' generate is not its own forward",
        "zamba2": "whole rows: it is off by 0.02; as transformers' generate",
    }
    rows = [Row(model=name, column="dp_shard=1, generate", outcome="equal", text=text) for name, text in said.items()]
    rows.append(Row(model="xlm", column="dp_shard=1, generate", outcome="refused", text="generate: it is not causal"))
    rows.append(
        Row(model="llama", column="pp=2, generate", outcome="equal", text="whole rows: is used on dp, tp and ep alone")
    )
    lines = generation(rows)
    assert "| one device | 1 | 2 | 1 | 1 | 0 |" in lines
    assert "| pp=2 | 0 | 0 | 1 | 0 | 0 |" in lines
    told = [line.split(" | ")[0] for line in lines[lines.index("| | mesh | |") :] if line.startswith("| ")]
    assert told[1:] == ["| roberta", "| zamba2", "| xlm"]
    assert "the tokens of 3 of 4 are those" in lines[1]
    assert "## Generation" in page(rows)
    assert "## Generation" not in page([Row(model="llama", column="tp=2", outcome="equal")])
