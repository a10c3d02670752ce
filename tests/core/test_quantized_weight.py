"""Weights in few bits: the published codes, the same on every mesh, and as many bytes as an estimate says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.quantized_weight import NF4_LEVELS, BlockCodes, codes_of
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.errors import CheckpointError, PlanError
from tests.laws.parity.cases import Cell, batches, build, mesh_for, own_rows, plan_of
from tests.world import pool

# bitsandbytes' table, which was computed in fp32.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
TOL_TABLE = 2e-7  # one is computed in fp32, the other in fp64
CELL = Cell(mesh="", dtype="float32")


def nearest(values: Tensor, codes: str, block: int) -> Tensor:
    """The definition, number by number: the nearest level of the block, times the block's largest absolute value."""
    levels = list(NF4) if codes == "nf4" else [code / 127 for code in range(-127, 128)]
    rows = []
    for row in values.tolist():
        out: list[float] = []
        for start in range(0, len(row), block):
            part = row[start : start + block]
            scale = max(abs(value) for value in part)
            out += [scale * min(levels, key=lambda level: abs(level * scale - value)) for value in part]
        rows.append(out)
    return torch.tensor(rows)


def test_nf4_levels_are_the_published_ones() -> None:
    assert max(abs(ours - theirs) for ours, theirs in zip(NF4_LEVELS, NF4, strict=True)) <= TOL_TABLE


@pytest.mark.parametrize("codes", ["nf4", "int8"])
@pytest.mark.parametrize(("columns", "block"), [(64, 16), (45, 8), (7, 64)])
def test_each_weight_becomes_the_nearest_level_of_its_block(codes: Any, columns: int, block: int) -> None:
    values = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns))
    values[2] = 0
    how = BlockCodes(codes=codes, block=block)
    packed = how.encode(values)
    assert packed.shape == (6, how.row_bytes(columns)) and packed.dtype == torch.uint8
    found = how.decode(packed, columns, torch.float32)
    expected = nearest(values, codes, block)
    assert float((found - expected).abs().max()) <= 1e-6
    assert not found[2].any()
    assert torch.equal(how.encode(found), packed)  # what is written twice is written the same


def test_nf4_is_what_torchao_makes_of_the_same_blocks() -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    theirs = nf4.to_nf4(values, 64, 256).quantized_data.view(64, 4, 32)
    ours = BlockCodes(codes="nf4", block=64).encode(values).view(64, 4, 36)[..., :32]
    # Their table has four digits, so a value between two levels may fall to the other side.
    assert float((ours == theirs).float().mean()) > 0.998


# ------------------------------------------------------------------------------------------------------------ meshes


def attach(model: nn.Module, codes: Any = "nf4", block: int = 4) -> mk.Plan:
    return mk.lora.attach(
        model, plan_of(CELL), rank=2, base=codes, base_block=block, targets=("layers.*.self_attn.q_proj",)
    )


def load_on_mesh(folder: str, mesh: str) -> dict[str, Tensor]:
    with mk.models.meta_parameters():
        model = mk.models.build_model(mk.models.config_from_pretrained(folder))
    run = mk.parallelize(model, mesh_for(mesh), plan=attach(model))
    with pytest.raises(PlanError, match="holds the codes of a frozen weight in few bits. Read them by load_pretrained"):
        mk.init_weights(run.model, seed=0)
    assert not bool(torch.isfinite(float_of(run.model)).all())  # nothing was read yet
    mk.models.load_pretrained(run.model, folder)
    mk.lora.init(run.model, seed=0)
    return {name: full_tensor(param) for name, param in run.named_parameters()}


def float_of(model: nn.Module) -> Tensor:
    child = next(child for child in model.modules() if codes_of(child) is not None)
    codes, packed = codes_of(child), full_tensor(child.weight)
    assert codes is not None and isinstance(child, nn.Linear)
    return codes.decode(packed, child.in_features, torch.float32)


@pytest.mark.parametrize("mesh", ["dp_shard=2 tp=2", "pp=2 tp=2"])
def test_a_folder_read_into_few_bits_has_the_same_codes_on_every_mesh(tmp_path: Any, mesh: str) -> None:
    model = build(CELL)
    mk.models.save_pretrained(model, model.config, tmp_path / "base")
    attach(model)
    expected = dict(model.named_parameters())
    held: set[str] = set()
    for tensors in pool(4).run(load_on_mesh, str(tmp_path / "base"), mesh):
        held |= tensors.keys()
        for name, tensor in tensors.items():
            assert "lora_" in name or torch.equal(tensor, expected[name])
    assert held == expected.keys()


def test_a_folder_of_other_shapes_is_refused(tmp_path: Any) -> None:
    model = build(CELL)
    mk.models.save_pretrained(model, model.config, tmp_path / "base")
    other = build(Cell(mesh="", dtype="float32", hidden_mlp=44))
    attach(other)
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight' has the shape \(32, 48\), but the model's has \(32, 44\)"
    ):
        mk.models.load_pretrained(other, tmp_path / "base")


def learn_in_bf16(recompute: Any) -> tuple[list[float], set[str]]:
    """Codes are frozen, and travel as bytes though everything else is cast."""
    model = build(Cell(mesh="", dtype="bfloat16"))
    plan = mk.lora.attach(model, plan_of(CELL), rank=3, dtype=torch.float32, base="nf4", base_block=16)
    memory = mk.MemoryPolicy(precision=mk.strategy.Precision(), recompute=recompute)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    run = mk.parallelize(model, mesh_for("dp_shard=2"), plan=plan, memory=memory)
    optimizer = mk.adamw(run, lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(float(run.forward_backward(own_rows(batches(CELL)[0], run.mesh))))
        optimizer.step()
        optimizer.zero_grad()
    after = dict(run.named_parameters())
    assert all(torch.equal(full_tensor(after[name]), codes) for name, codes in before.items())
    return losses, set(before)


def test_adapters_on_a_base_in_few_bits_learn_in_bf16() -> None:
    for losses, names in pool(2).run(learn_in_bf16, "full"):
        assert len(names) == 14
        assert losses[-1] < losses[0] - 0.2


def refuse_on_mesh() -> int:
    model = build(CELL)
    with pytest.raises(
        PlanError, match="'layers.0.mlp.down_proj', 48 features in few bits, are split over tp=2, but not"
    ):
        mk.parallelize(model, mesh_for("tp=2"), plan=attach(model, block=16))
    return 1


def test_what_cannot_be_in_few_bits_is_refused() -> None:
    assert pool(2).run(refuse_on_mesh) == [1, 1]
    with pytest.raises(PlanError, match="base='fp4' is not known. Choose one of nf4, int8, or None"):
        attach(build(CELL), codes="fp4")
    with pytest.raises(PlanError, match="base_block=7: a block is an even number"):
        attach(build(CELL), block=7)


def test_merging_gives_the_decoded_weights_and_the_same_logits() -> None:
    model = build(Cell(mesh="")).double()
    mk.lora.attach(model, plan_of(CELL), rank=2, base="nf4", base_block=16)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.3)
    ids = torch.arange(24).view(2, 12) * 5 % 64
    expected = model(ids).detach()
    mk.lora.merge(model)
    assert all(param.dtype == torch.float64 for param in model.parameters())
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in build(CELL).named_parameters()}
    assert float((model(ids).detach() - expected).abs().max()) <= 1e-10


# ------------------------------------------------------------------------------------------------------------- bytes


def held_bytes(codes: Any, mesh: str) -> int:
    model = build(CELL)
    run = mk.parallelize(model, mesh_for(mesh), plan=attach(model, codes, 16))
    return sum(local_tensor(param).numel() * param.element_size() for param in run.parameters())


@pytest.mark.parametrize(("codes", "share"), [("nf4", 4 / 8 + 4 / 16), ("int8", 1 + 4 / 16)])
def test_the_base_takes_the_bytes_that_an_estimate_says(codes: Any, share: float) -> None:
    measured = pool(2).run(held_bytes, codes, "dp_shard=2")[0]
    with torch.device("meta"):
        model = mk.models.Llama(build(CELL).config)
    plan = attach(model, codes, 16)
    said = mk.estimate(model, "dp_shard=2", rows=2, seq_len=16, kernels="cpu", plan=plan)
    assert said.most["parameters"] == measured
    numbers = sum(p.numel() for name, p in build(CELL).named_parameters() if "_proj" in name)
    packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    assert packed == numbers * share
