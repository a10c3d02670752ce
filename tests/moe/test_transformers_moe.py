"""transformers' mixtures of experts, whole models: on every folding, in checkpoints and in Hugging Face folders."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.models import load_pretrained, save_pretrained
from meshkit.preflight.explain import Message
from meshkit.preflight.observe import observe
from tests.compare_shards import difference, same_bits
from tests.depth import thin
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool
from tests.zoo import causal
from tests.zoo.case import TOKENS, Cell, tokens
from tests.zoo.exact import exact
from tests.zoo.judge import EPS, LR, quiet
from tests.zoo.sweep import verdict

TOL_FP64 = 1e-9  # only the order of summation differs
FOLDINGS = [
    "dp_shard=2 ep=2",
    "dp_shard=2 etp=2",
    "tp=2 ep=2",
    "tp=2 etp=2, sequence",
    "tp=2, sequence",
    "dp_shard=2 tp=2 ep=4",
    "dp_shard=2 tp=2 ep=2 etp=2, sequence",
    "pp=2 dp_shard=2 ep=2",
    "pp=2 tp=2 etp=2",
    "cp=2 ep=2",
    "dp_shard=2 cp=2 ep=2 etp=2",
    "dp_replicate=2 dp_shard=2 ep=2",
]
# Experts of a shared one beside, transposed ones, and with tokens that choose none.
MODELS = ["mixtral", "qwen2_moe", "granitemoeshared", "aria_text"]
WITHOUT_TP = ["gpt_oss", "zaya", "jamba", "deepseek_v3"]


@pytest.mark.parametrize(
    ("model", "column"),
    thin([(model, column) for column in FOLDINGS for model in MODELS], 4)
    + thin([(model, column) for column in FOLDINGS[:2] for model in WITHOUT_TP], 4),
)
def test_a_mixture_of_transformers_equals_one_device(model: str, column: str) -> None:
    row = verdict(Cell.of(model, column))
    assert row.outcome == "equal", f"{row.outcome}: {row.text}\n{row.traceback}"


def test_a_model_whose_experts_nobody_declares_is_refused() -> None:
    row = verdict(Cell.of("odd.ExpertStack", "dp_shard=2 ep=2"))
    assert row.outcome == "refused"
    assert "the plan has no experts()" in row.text


# ------------------------------------------------------------------------------------------------------- checkpoints


def trained(run: mk.Run, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        run.forward_backward(own_rows(tokens(step), run.mesh))
        optimizer.step()
        optimizer.zero_grad()


def keep(kind: str, mesh_text: str, folder: str) -> None:
    """Two steps, and what there is then."""
    with quiet(), exact():
        run = mk.parallelize(causal.build(kind), mesh_for(mesh_text))
        optimizer = mk.adamw(run, lr=LR, eps=EPS)
        trained(run, optimizer, 0, 2)
        with mk.Checkpointer(folder) as checkpointer:
            checkpointer.save(2, run, optimizer)


def go_on(kind: str, mesh_text: str, folder: str) -> float:
    """Two more steps from the folder, against four on one device."""
    with quiet(), exact():
        model = causal.build(kind)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        run = mk.parallelize(model, mesh_for(mesh_text))
        optimizer = mk.adamw(run, lr=LR, eps=EPS)
        with mk.Checkpointer(folder) as checkpointer:
            assert checkpointer.resume(run, optimizer) == 2
        trained(run, optimizer, 2, 4)
        expected = parameters_of_one_device(kind, steps=4)
        return max(difference(param, expected[name]) for name, param in run.named_parameters())


def parameters_of_one_device(kind: str, *, steps: int) -> dict[str, Tensor]:
    model = causal.build(kind)
    named = dict(model.named_parameters())
    groups = [
        {"params": [param for param in named.values() if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in named.values() if param.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    for step in range(steps):
        batch = tokens(step)
        logits = model(batch["input_ids"]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in named.items()}


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("mixtral", "dp_shard=2 ep=2", "dp_shard=1"),
        ("mixtral", "dp_shard=1", "dp_shard=2 etp=2"),
        ("gpt_oss", "dp_shard=2 etp=2", "dp_shard=2 ep=2"),
        ("aria_text", "tp=2 etp=2", "dp_shard=1"),
    ],
)
def test_continuing_on_another_folding_equals_never_having_stopped(
    kind: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    pool(mk.MeshSpec.parse(saved).world_size).run(keep, kind, saved, folder)
    found = pool(mk.MeshSpec.parse(loaded).world_size).run(go_on, kind, loaded, folder)
    assert max(found) <= TOL_FP64, found


# ---------------------------------------------------------------------------------------------------- Hugging Face


def read_and_write(kind: str, mesh_text: str, folder: str) -> list[str]:
    """Names of tensors of a folder of transformers that this mesh reads otherwise, or writes otherwise."""
    with quiet(), exact():
        source, model = causal.build(kind), causal.build(kind)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        if dist.get_rank() == 0:
            source.save_pretrained(f"{folder}/theirs")
        dist.barrier()
        run = mk.parallelize(model, mesh_for(mesh_text))
        load_pretrained(run.model, f"{folder}/theirs")
        wanted = dict(source.named_parameters())
        wrong = [name for name, param in run.named_parameters() if not same_bits(param, wanted[name])]
        save_pretrained(run.model, source.config.to_dict(), f"{folder}/ours")
        again = type(source).from_pretrained(f"{folder}/ours", dtype=torch.float64)
        wrong += [name for name, param in again.named_parameters() if not torch.equal(param, wanted[name])]
        return wrong


@pytest.mark.parametrize("mesh", ["dp_shard=2 ep=2", "dp_shard=2 etp=2", "tp=2 ep=2", "pp=2"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "aria_text"])
def test_folders_of_transformers_are_read_and_written_expert_by_expert(kind: str, mesh: str, tmp_path: Path) -> None:
    for wrong in pool(2).run(read_and_write, kind, mesh, str(tmp_path)):
        assert not wrong


def test_a_folder_that_is_a_computation_away_is_refused(tmp_path: Path) -> None:
    with quiet(), exact():
        model = causal.build("inkling2_text")
        model.save_pretrained(tmp_path)
        with pytest.raises(PlanError, match="of a Inkling2ForCausalLM's files is no part of one tensor"):
            load_pretrained(model, tmp_path)


def test_a_model_that_transformers_cannot_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: Any) -> None:
        raise KeyError("planted")

    loading = importlib.import_module("transformers.core_model_loading")
    monkeypatch.setattr(loading, "revert_weight_conversion", nothing)
    with (
        quiet(),
        exact(),
        pytest.raises(PlanError, match="transformers does not say how it writes a MixtralForCausalLM"),
    ):
        load_pretrained(causal.build("mixtral"), tmp_path)


# --------------------------------------------------------------------------------------------------------------- bytes


def sent_over_etp(kind: str) -> tuple[Counter[Any], Counter[Any]]:
    """All-to-alls over etp of one step, as they were observed and as `explain` says."""
    with quiet(), exact():
        mesh = mesh_for("dp_shard=2 etp=2")
        run = mk.parallelize(causal.build(kind), mesh)
        run.forward_backward(own_rows(tokens(0), mesh))
        with observe(mesh) as seen:
            run.forward_backward(own_rows(tokens(0), mesh))
        place = {axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")}
        said = mk.explain(run, rows=2, seq_len=TOKENS, coordinate=place)
    return _all_to_alls(seen), _all_to_alls(said.messages)


def _all_to_alls(messages: Counter[Message]) -> Counter[Any]:
    # Without the axis: in the dense view the same ranks are those of dp_shard.
    return Counter({(each.op, each.size): times for each, times in messages.items() if each.op == "all_to_all"})


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_rows_of_gate_and_up_that_travel_over_etp_are_explained(kind: str) -> None:
    """Halves travel; pairs are where they are computed with."""
    for seen, said in pool(2).run(sent_over_etp, kind):
        assert seen == said
        assert bool(seen) == (kind == "mixtral")
