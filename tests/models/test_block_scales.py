"""fp8 in blocks of 128 x 128 (DeepSeek-V3's `weight_scale_inv`): a folder of it is loaded as its dequantised copy is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import CheckpointError
from meshkit.models import (
    build_model,
    config_from_pretrained,
    load_pretrained,
    meta_parameters,
    moe_plan,
    save_pretrained,
)
from tests.laws.parity.cases import mesh_for
from tests.models.families import LATENT, SIZES, randomise
from tests.models.test_huggingface_ranks import count_reads
from tests.world import pool
from tests.zoo.judge import quiet

BLOCK = 128
INDEX = "model.safetensors.index.json"
# 136 hidden and 200 features: shards of them begin at 68 and 100, within blocks, and the last block of each dim is not full.
SHAPES: dict[str, Any] = {**SIZES, "hidden_size": 136, "intermediate_size": 200}
EXPERTS: dict[str, Any] = {**SHAPES, **LATENT, "moe_intermediate_size": 200, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPES),
    "phi3": ("phi3", SHAPES),  # its files have q, k and v joined, and gate and up
    "mixtral": ("mixtral", {**SHAPES, "num_local_experts": 4}),
    "deepseek_v3": ("deepseek_v3", EXPERTS),
}


def transformers_model(name: str) -> Any:
    model_type, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(fp8, scales, what they stand for), one block after the other: each block's largest number becomes 448."""
    rows, columns = weight.shape
    codes, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = scale = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scale
    return codes, scales, values


def write(folder: Path, name: str) -> None:
    """`fp8`, published-like in two files with scales apart from some weights, and `plain`, all of it dequantised whole."""
    model = transformers_model(name)
    randomise(model, 1)
    model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / "model.safetensors")
    codes: dict[str, Tensor] = {}
    for key, weight in list(plain.items()):
        if key.endswith("weight") and weight.ndim == 2 and not any(part in key for part in ("embed", "head", "gate.")):
            # Scales of all sizes: a wrong one shows.
            codes[key], codes[f"{key}_scale_inv"], plain[key] = quantised(weight * torch.rand(weight.shape[1]))
        else:
            codes[key] = weight
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(folder / "plain", folder / "fp8", ignore=shutil.ignore_patterns("*.safetensors"))
    halves: list[dict[str, Tensor]] = [{}, {}]
    for index, (key, value) in enumerate(codes.items()):
        halves[index % 2][key] = value
    for index, half in enumerate(halves):
        save_file(half, folder / "fp8" / f"{index}.safetensors", metadata={"format": "pt"})
    where = {key: f"{index}.safetensors" for index, half in enumerate(halves) for key in half}
    (folder / "fp8" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    configure(folder / "fp8", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]})


def configure(folder: Path, quantization: dict[str, Any] | None) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))


def empty(name: str, kind: str, folder: Path, dtype: torch.dtype) -> Any:
    """kind: meshkit's own model of the folder's config, or transformers'."""
    with meta_parameters():
        if kind == "own":
            return build_model(config_from_pretrained(folder)).to(dtype)
        return transformers_model(name).to(dtype)


def loaded(name: str, kind: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    model = empty(name, kind, folder, dtype).to_empty(device="cpu")
    return load_pretrained(model, folder)


CASES = [("llama", "own"), ("phi3", "theirs"), ("mixtral", "own"), ("deepseek_v3", "own"), ("deepseek_v3", "theirs")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_values_are_those_of_the_folder_dequantised_whole(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write(tmp_path, name)
    found, expected = (loaded(name, kind, tmp_path / each, dtype).state_dict() for each in ("fp8", "plain"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def on_a_mesh(folder: str, name: str, kind: str, mesh: str) -> int:
    """The elements that this rank reads, having compared every value of the model."""
    with quiet():
        model = empty(name, kind, Path(folder, "fp8"), torch.float32)
        plan = moe_plan(model.config) if kind == "own" and name != "llama" else None
        run = mk.parallelize(model, mesh_for(mesh), plan=plan)
        read = count_reads(lambda: load_pretrained(run.model, Path(folder, "fp8")))
        expected = loaded(name, kind, Path(folder, "plain"), torch.float32).state_dict()
    names = 0
    for key, param in run.model.state_dict().items():
        if not param.is_meta:
            assert torch.equal(full_tensor(param), expected[key]), key
            names += 1
    assert names
    return read


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "pp=2"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_rank_multiplies_its_own_shard_by_the_scales_it_lies_in(
    name: str, kind: str, mesh: str, tmp_path: Path
) -> None:
    write(tmp_path, name)
    files = [load_file(file) for file in (tmp_path / "fp8").glob("*.safetensors")]
    stored = sum(value.numel() for file in files for value in file.values())
    read = pool(2).run(on_a_mesh, str(tmp_path), name, kind, mesh)
    assert all(each < 0.9 * stored for each in read), (read, stored)


@pytest.mark.parametrize("mesh", ["dp_shard=2 ep=2", "dp_shard=2 etp=2"])
@pytest.mark.parametrize(("name", "kind"), CASES[2:])
def test_experts_are_multiplied_where_they_are(name: str, kind: str, mesh: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    pool(2).run(on_a_mesh, str(tmp_path), name, kind, mesh)


def test_a_model_read_from_fp8_is_written_without_the_word(tmp_path: Path) -> None:
    write(tmp_path, "phi3")
    model = loaded("phi3", "theirs", tmp_path / "fp8", torch.float32)
    raw = json.loads((tmp_path / "fp8" / "config.json").read_text())
    save_pretrained(model, raw, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


# ------------------------------------------------------------------------------------------------------------- refusals

Q = "model.layers.0.self_attn.q_proj.weight"
S = f"{Q}_scale_inv"


def edit(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = {key: value for file in folder.glob("?.safetensors") for key, value in load_file(file).items()}
        for file in [*folder.glob("?.safetensors"), folder / INDEX]:
            file.unlink()
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def quantization(fields: dict[str, Any] | None) -> Callable[[Path], None]:
    return lambda folder: configure(folder, fields)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scale": (
        edit(lambda tensors: {key: value for key, value in tensors.items() if key != S}),
        f"{Q!r} is fp8, but the folder has no {S!r}, its scale",
    ),
    "a scale of no fp8": (
        edit(lambda tensors: {**tensors, Q: tensors[Q].bfloat16()}),
        f"{Q!r} has a scale, {S!r}, but the dtype BF16 and not F8_E4M3",
    ),
    "another fp8": (
        edit(lambda tensors: {**tensors, Q: tensors[Q].float().to(torch.float8_e5m2)}),
        f"{Q!r} has a scale, {S!r}, but the dtype F8_E5M2 and not F8_E4M3",
    ),
    "one scale": (
        edit(lambda tensors: {**tensors, S: torch.ones(())}),
        f"{S!r} has the shape () and the dtype F32, but {Q!r} of shape (136, 136) in blocks of 128 x 128 needs (2, 2)",
    ),
    "scales in bytes": (
        edit(lambda tensors: {**tensors, S: torch.ones(2, 2, dtype=torch.uint8)}),
        f"{S!r} has the shape (2, 2) and the dtype U8",
    ),
    "a scale of nothing": (
        edit(lambda tensors: {**tensors, "model.other.weight_scale_inv": torch.ones(2, 2)}),
        "holds 'model.other.weight_scale_inv', which the model does not have",
    ),
    "other blocks": (
        quantization({"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "of shape (68, 136) in blocks of 64 x 64 needs (2, 3)",
    ),
    "no blocks": (
        quantization({"quant_method": "fp8", "weight_block_size": None}),
        "quantization_config has weight_block_size=None, not the rows and columns of a block",
    ),
    "unsaid": (quantization(None), "quantization_config has weight_block_size=None"),
    "another method": (
        quantization({"quant_method": "gptq", "weight_block_size": [128, 128]}),
        "quantization_config has quant_method='gptq', and only 'fp8' in blocks is read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_a_line_and_changes_nothing(case: str, tmp_path: Path) -> None:
    damage, text = REFUSED[case]
    write(tmp_path, "llama")
    model = build_model(config_from_pretrained(tmp_path / "fp8"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    damage(tmp_path / "fp8")
    with pytest.raises(CheckpointError) as error:
        load_pretrained(model, tmp_path / "fp8")
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
