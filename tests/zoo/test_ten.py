"""Adapters, compile, checkpoints and folders on ten architectures of transformers that `meshkit.models` has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.sharding import full_tensor
from meshkit.errors import CheckpointError, PlanError
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool
from tests.zoo import causal
from tests.zoo.case import Cell, tokens
from tests.zoo.exact import exact
from tests.zoo.judge import TOL_FP64, quiet, split_share

# Soft-caps, windows, scaled residuals, parallel residuals, q/k norms full-width and per head, joined projections, rotary
# halves, biases everywhere, learned positions, stacked experts.
TEN = ["gemma2", "gemma3_text", "granite", "cohere2", "olmo2", "phi3", "glm4", "gpt_neox", "starcoder2", "olmoe"]
RANK, ALPHA, LR, EPS, STEPS = 3, 5.0, 1e-2, 1e-5, 2


@contextmanager
def other_code() -> Iterator[None]:
    with quiet(), exact():
        yield


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)


def started(model: nn.Module, mesh: str, **choices: Any) -> mk.Run:
    many = mk.MeshSpec.parse(mesh).pp > 1
    return mk.parallelize(model, mesh_for(mesh), microbatches=2 if many else None, **choices)


def steps(run: mk.Run, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        losses.append(float(run.forward_backward(own_rows(tokens(step), run.mesh))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ------------------------------------------------------------------------------------------------------------- adapters


def plain_linears(model: nn.Module) -> list[str]:
    """Last names of the linear layers inside of blocks."""
    inside = [name for name, child in model.named_modules() if type(child) is nn.Linear and ".layers." in name]
    return sorted({name.rpartition(".")[2] for name in inside})


def of_peft(kind: str) -> Any:
    import peft

    model = causal.build(kind)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=plain_linears(model),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def peft_alone(wrapped: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle: PEFT on one device. (losses, first gradients by the names of the plain model)"""
    trained = {name: param for name, param in wrapped.named_parameters() if param.requires_grad}
    optimizer, losses, gradients = adamw(trained.values()), list[float](), dict[str, Tensor]()
    for step in range(STEPS):
        batch = tokens(step)
        logits = wrapped(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        gradients = gradients or {plain_name(name): param.grad.clone() for name, param in trained.items()}
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def wrong_gradients(run: mk.Run, wanted: dict[str, Tensor]) -> dict[str, float]:
    largest = {name: float(grad.abs().max()) + 1e-4 for name, grad in wanted.items()}
    trained = {plain_name(name): param for name, param in run.named_parameters() if param.requires_grad}
    assert trained
    errors = {name: difference(gradient_of(p), wanted[name]) / largest[name] for name, p in trained.items()}
    return {name: error for name, error in errors.items() if not error <= TOL_FP64}


def train_adapters(cell: Cell, folder: str) -> float:
    """From a folder of PEFT, trained, to a folder that PEFT reads; all of it against PEFT on one device."""
    import peft

    theirs, ours, back = (str(Path(folder, name)) for name in ("theirs", "ours", "back"))
    with other_code():
        wrapped = of_peft(cell.model)
        if dist.get_rank() == 0:
            wrapped.save_pretrained(theirs)
        dist.barrier()
        model = causal.build(cell.model)
        mk.lora.attach(model, None, **mk.models.lora_options(theirs, model))
        run = started(model, cell.mesh, sequence=cell.sequence)
        mk.models.load_lora(run.model, theirs)
        mk.models.save_lora(run.model, back)
        expected, gradients = peft_alone(wrapped)
        losses = [float(run.forward_backward(own_rows(tokens(0), run.mesh)))]
        assert not (wrong := wrong_gradients(run, gradients)), wrong
        optimizer = mk.adamw(run, lr=LR, eps=EPS)
        optimizer.step()
        optimizer.zero_grad()
        losses += steps(run, optimizer, range(1, STEPS))
        assert losses == pytest.approx(expected, rel=TOL_FP64)
        mk.models.save_lora(run.model, ours)
        dist.barrier()
        again = peft.PeftModel.from_pretrained(causal.build(cell.model), ours, autocast_adapter_dtype=False)
        ids = tokens(STEPS)["input_ids"]
        assert difference(again(ids).logits, wrapped(ids).logits.detach()) <= TOL_FP64
        as_read = {
            name: load_file(Path(each, "adapter_model.safetensors")) for name, each in (("a", theirs), ("b", back))
        }
        assert as_read["a"].keys() == as_read["b"].keys()
        assert all(torch.equal(value, as_read["b"][name]) for name, value in as_read["a"].items())
        return split_share(run)


ADAPTED = [
    *((kind, "tp=2") for kind in TEN),
    ("gemma2", "pp=2"),
    ("phi3", "pp=2"),
    ("glm4", "dp_shard=2 tp=2"),
    ("starcoder2", "tp=2, sequence"),
    ("olmo2", "tp=2, sequence"),
]


@pytest.mark.parametrize(("kind", "column"), ADAPTED)
def test_adapters_train_as_pefts_do_from_its_folder_to_its_folder(kind: str, column: str, tmp_path: Path) -> None:
    cell = Cell.of(kind, column)
    shares = pool(cell.ranks).run(train_adapters, cell, str(tmp_path))
    experts = kind == "olmoe"  # on ep, and not on tp
    assert "tp" not in cell.mesh or min(shares) >= (0.2 if experts else 0.9), shares


def train_wrapped(kind: str, mesh: str, folder: str) -> None:
    """A model that PEFT has wrapped goes through the same calls as any other."""
    with other_code():
        expected, gradients = peft_alone(of_peft(kind))
        run = started(of_peft(kind), mesh)
        losses = [float(run.forward_backward(own_rows(tokens(0), run.mesh)))]
        assert not (wrong := wrong_gradients(run, gradients)), wrong
        optimizer = mk.adamw(run, lr=LR, eps=EPS)
        optimizer.step()
        optimizer.zero_grad()
        with mk.Checkpointer(folder) as checkpoints:
            checkpoints.save(1, run, optimizer)
        again = started(of_peft(kind), mesh)
        optimizer = mk.adamw(again, lr=LR, eps=EPS)
        mk.Checkpointer(folder).load(again, optimizer)
        losses += steps(again, optimizer, range(1, STEPS))
        assert losses == pytest.approx(expected, rel=TOL_FP64)


@pytest.mark.parametrize(("kind", "mesh"), [("phi3", "tp=2"), ("olmo2", "pp=2"), ("gemma2", "dp_shard=2")])
def test_a_model_that_peft_has_wrapped_trains_as_on_one_device(kind: str, mesh: str, tmp_path: Path) -> None:
    pool(2).run(train_wrapped, kind, mesh, str(tmp_path / "ck"))


def test_a_model_that_peft_has_wrapped_is_not_wrapped_again_nor_written(tmp_path: Path) -> None:
    with other_code():
        wrapped = of_peft("granite")
    config = wrapped.config.to_dict()
    for call in (
        lambda: mk.lora.attach(wrapped, None),
        lambda: mk.models.save_lora(wrapped, tmp_path / "a"),
        lambda: mk.models.save_pretrained(wrapped, config, tmp_path / "b"),
        lambda: mk.models.load_pretrained(wrapped, tmp_path),
    ):
        with pytest.raises(PlanError, match=r"the PeftModelForCausalLM has adapters of PEFT, .* use mk.lora.attach"):
            call()


def test_adapters_of_another_model_are_refused_by_their_modules(tmp_path: Path) -> None:
    with other_code():
        of_peft("phi3").save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match="the GraniteForCausalLM has no module '(qkv_proj|gate_up_proj)'"):
            mk.models.lora_options(tmp_path, causal.build("granite"))


# -------------------------------------------------------------------------------------------------------------- compile


def compiled_and_not(kind: str, mesh: str) -> tuple[float, float]:
    """The largest difference of loss and gradients."""
    with other_code():
        plain, fast = (started(causal.build(kind), mesh, compile=compile) for compile in (False, "aot_eager"))
        losses = [float(run.forward_backward(own_rows(tokens(0), run.mesh))) for run in (plain, fast)]
        pairs = zip(plain.parameters(), fast.parameters(), strict=True)
        grads = [(gradient_of(one), gradient_of(other)) for one, other in pairs]
        errors = [difference(one, full_tensor(other)) for one, other in grads if one is not None and other is not None]
        assert errors
        return abs(losses[0] - losses[1]), max(errors)


@pytest.mark.parametrize(
    ("kind", "mesh"), thin([(kind, "tp=2" if kind in ("phi3", "gpt_neox") else "pp=2") for kind in TEN], 2)
)
def test_compiled_blocks_compute_what_they_do_uncompiled(kind: str, mesh: str) -> None:
    for errors in pool(2).run(compiled_and_not, kind, mesh):
        assert max(errors) <= TOL_FP64


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saved_and_loaded(kind: str, first: str, second: str, folder: str) -> tuple[list[float], list[float]]:
    with other_code():
        run = started(causal.build(kind), first)
        optimizer = mk.adamw(run, lr=LR, eps=EPS)
        steps(run, optimizer, range(1))
        with mk.Checkpointer(folder) as checkpoints:
            checkpoints.save(1, run, optimizer)
        expected = steps(run, optimizer, range(1, 3))
        other = started(causal.build(kind), second)
        optimizer = mk.adamw(other, lr=LR, eps=EPS)
        assert mk.Checkpointer(folder).load(other, optimizer) == 1
        return steps(other, optimizer, range(1, 3)), expected


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        *thin([(kind, *(("dp_shard=2", "tp=2") if i % 2 else ("tp=2", "pp=2"))) for i, kind in enumerate(TEN)], 3),
        ("gpt2", "dp_shard=2", "tp=2"),
    ],
)
def test_training_goes_on_from_a_checkpoint_of_another_mesh(kind: str, first: str, second: str, tmp_path: Path) -> None:
    for losses, expected in pool(2).run(saved_and_loaded, kind, first, second, str(tmp_path / "ck")):
        assert losses == pytest.approx(expected, rel=TOL_FP64)


# -------------------------------------------------------------------------------------------------------------- folders


def both_ways(kind: str, mesh: str, folder: str) -> None:
    """From a folder of transformers into a model on meta, and from its shards to transformers."""
    theirs, ours = str(Path(folder, "theirs")), str(Path(folder, "ours"))
    with quiet():
        source: Any = causal.build(kind)
        expected = source.state_dict()
        if dist.get_rank() == 0:
            source.save_pretrained(theirs)
        dist.barrier()
        with mk.models.meta_parameters():
            run = started(causal.build(kind), mesh)
        mk.models.load_pretrained(run.model, theirs)
        for name, value in run.model.state_dict().items():
            assert value.is_meta or torch.equal(full_tensor(value), expected[name]), name
        mk.models.save_pretrained(run.model, source.config.to_dict(), ours)
        dist.barrier()
        again, report = type(source).from_pretrained(ours, output_loading_info=True)
        assert not any(report.values()), report
        for name, value in again.state_dict().items():
            assert torch.equal(value, expected[name]), name


FOLDERS = [*((kind, "tp=2") for kind in TEN), ("gpt2", "tp=2"), ("gemma2", "pp=2"), ("olmoe", "dp_shard=2 ep=2")]


@pytest.mark.parametrize(("kind", "mesh"), thin(FOLDERS, 2))
def test_folders_go_both_ways_bit_by_bit(kind: str, mesh: str, tmp_path: Path) -> None:
    pool(2).run(both_ways, kind, mesh, str(tmp_path))
