"""Hugging Face folders in both directions, from and into sharded models on 4 ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import meshkit as mk
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.errors import CheckpointError
from meshkit.models import (
    LLAMA_PLAN,
    DeepseekV3Config,
    Llama,
    build_model,
    config_from_pretrained,
    load_pretrained,
    meta_parameters,
    model_plan,
    moe_plan,
    save_pretrained,
    stream_pretrained,
)
from tests.laws.parity.cases import mesh_for
from tests.models.test_moe import deepseek
from tests.tiny import tiny_config
from tests.world import pool, run_ranks

RANKS = 4

# 13 tokens, 30 hidden and 22 features: no size is a multiple of 4, and biases of 2 kv heads of 2 leave ranks empty.
UNEVEN = tiny_config(
    vocab_size=13,
    hidden_size=30,
    intermediate_size=22,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=2,
    attention_bias=True,
    attention_output_bias=True,
    tie_word_embeddings=True,
)
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")


def whole_model(seed: int) -> Llama:
    torch.manual_seed(seed)
    return Llama(UNEVEN)


def shard(model: nn.Module, layout: str) -> nn.Module:
    """fsdp: over 4 ranks; fsdp_tp: over 2 x 2, the same dim over both axes for columns; hsdp: over 2, twice."""
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    elif layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        made: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            for name, param in list(module.named_parameters(recurse=False)):
                kind = path.rpartition(".")[2]
                row = kind in ("o_proj", "down_proj") and name == "weight"
                placement = Shard(0) if kind in COLUMNS else Shard(1) if row else Replicate()
                value = distribute_tensor(param.detach(), mesh["tp"], [placement])
                module._parameters[name] = made.setdefault(id(param), nn.Parameter(value))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def round_trip(folder: str, layout: str) -> None:
    """Sharded model -> folder -> another sharded model: every value arrives, each rank reading only its own."""
    source, target = shard(whole_model(seed=1), layout), shard(whole_model(seed=2), layout)
    save_pretrained(source, UNEVEN, folder, max_shard_bytes=2000)
    assert not os.path.exists(Path(folder).with_name(".out.partial"))
    read = count_reads(lambda: load_pretrained(target, folder))
    assert read == sum(local_tensor(param).numel() for param in target.parameters())
    assert target.lm_head.weight is target.embed_tokens.weight
    expected = dict(whole_model(seed=1).named_parameters())
    for name, param in target.named_parameters():
        assert torch.equal(full_tensor(param), expected[name]), name


# 6 experts on 4 ranks, two of which hold one; 22 features and 30 hidden.
EXPERTS = DeepseekV3Config(
    vocab_size=13,
    hidden_size=30,
    intermediate_size=26,
    moe_intermediate_size=22,
    num_hidden_layers=2,
    num_attention_heads=3,
    n_routed_experts=6,
    num_experts_per_tok=2,
    kv_lora_rank=10,
    q_lora_rank=None,
    qk_nope_head_dim=6,
    qk_rope_head_dim=2,
    v_head_dim=4,
    n_group=3,
    topk_group=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)


def shard_experts(model: nn.Module, layout: str) -> nn.Module:
    """fsdp: experts over 4 ranks. features: every expert's over 4. ep: experts over 2, and each one's features over 2."""
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        return model
    shape, placements = ((RANKS,), [Shard(1)]) if layout == "features" else ((2, 2), [Shard(1), Shard(0)])
    mesh = init_device_mesh("cpu", shape)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.ndim == 3:
                module._parameters[name] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
    return model


def round_trip_of_experts(folder: str, layout: str) -> None:
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(shard_experts(build_model(EXPERTS), layout))
    source, target = models
    save_pretrained(source, EXPERTS, folder, max_shard_bytes=20_000)
    held = [local_tensor(param).numel() for param in target.parameters()]
    held += [buffer.numel() for buffer in target.buffers()]
    assert count_reads(lambda: load_pretrained(target, folder)) == sum(held)
    expected = dict(source.named_parameters())
    for name, param in target.named_parameters():
        assert torch.equal(full_tensor(param), full_tensor(expected[name])), name


def count_reads(load: Any) -> int:
    """How many elements `load` reads from files."""
    from meshkit.models.huggingface import folder as huggingface

    count = 0

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, region: Any) -> torch.Tensor:
            nonlocal count
            part: torch.Tensor = self.inner[region]
            count += part.numel()
            return part

    class Reader:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = huggingface_safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            self.reader = self.inner.__enter__()
            return self

        def __exit__(self, *args: Any) -> Any:
            return self.inner.__exit__(*args)

        def get_slice(self, key: str) -> Slice:
            return Slice(self.reader.get_slice(key))

        def keys(self) -> Any:
            return self.reader.keys()

    huggingface_safe_open = huggingface.safe_open
    huggingface.safe_open = Reader  # type: ignore[assignment, misc]
    try:
        load()
    finally:
        huggingface.safe_open = huggingface_safe_open  # type: ignore[misc]
    return count


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp_tp"])
def test_a_folder_carries_a_sharded_model_to_other_ranks(layout: str, tmp_path: Path) -> None:
    run_ranks(RANKS, round_trip, str(tmp_path / "out"), layout)
    # And to one process, which the ranks know nothing of.
    alone = whole_model(seed=3)
    load_pretrained(alone, tmp_path / "out")
    for (name, param), expected in zip(alone.named_parameters(), whole_model(seed=1).parameters(), strict=True):
        assert torch.equal(param, expected), name


@pytest.mark.parametrize("layout", ["fsdp", "features", "ep"])
def test_each_rank_reads_only_the_experts_it_holds(layout: str, tmp_path: Path) -> None:
    run_ranks(RANKS, round_trip_of_experts, str(tmp_path / "out"), layout)
    torch.manual_seed(1)
    source = build_model(EXPERTS)
    alone = build_model(EXPERTS)
    load_pretrained(alone, tmp_path / "out")
    for (name, param), expected in zip(alone.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(param, expected), name


def refuse_together(folder: str) -> str:
    model = shard(whole_model(seed=1), "fsdp")
    with pytest.raises(CheckpointError) as error:
        save_pretrained(model, UNEVEN, folder)
    dist.barrier()  # nobody hangs in a collective that the others left
    return str(error.value)


def test_every_rank_raises_when_the_first_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("keep me")
    texts = run_ranks(RANKS, refuse_together, str(tmp_path / "out"))
    assert len(set(texts)) == 1
    assert "exists and is not empty" in texts[0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def streamed(folder: str, mesh: str) -> None:
    """What every rank gets, against the folder that rank 0 writes."""
    with meta_parameters():
        model = build_model(EXPERTS if "ep" in mesh else UNEVEN)
    config = model.config
    plan = LLAMA_PLAN if config is UNEVEN else moe_plan(config)
    run = mk.parallelize(model, mk.init_mesh(mesh), plan=plan)
    mk.init_weights(run.model, seed=3, plan=run.plan)
    found = {name: tensor.clone() for name, tensor in stream_pretrained(run.model)}
    save_pretrained(run.model, config, folder)
    dist.barrier()
    expected = load_file(Path(folder) / "model.safetensors")
    missing = found.keys() - expected.keys()
    assert config is not UNEVEN or missing == {"lm_head.weight"}  # a tied one is under each of its names
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    if config is UNEVEN:
        assert torch.equal(found["lm_head.weight"], expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("mesh", ["dp_shard=2 tp=2", "pp=2 dp_shard=2", "dp_shard=4 ep=2"])
def test_every_rank_gets_every_whole_tensor_as_a_folder_has_it(mesh: str, tmp_path: Path) -> None:
    run_ranks(RANKS, streamed, str(tmp_path / "out"), mesh)


def load_with_modules_ahead(folder: str, expected: dict[str, Tensor] | None) -> str:
    """On pp=2: the text that refuses the folder, or "" where every parameter of this rank has its value."""
    config = config_from_pretrained(Path(folder))
    run = mk.parallelize(build_model(config), mesh_for("pp=2"), plan=model_plan(config))
    try:
        load_pretrained(run.model, folder)
    except CheckpointError as error:
        return str(error)
    assert expected is not None
    wrong = [
        name for name, param in run.named_parameters() if not torch.equal(full_tensor(param).cpu(), expected[name])
    ]
    return ", ".join(wrong)


def test_modules_ahead_are_loaded_on_stages_or_refused_on_each(tmp_path: Path) -> None:
    model = deepseek(num_nextn_predict_layers=1)
    save_pretrained(model, model.config, tmp_path / "with")
    expected = {name: param.detach() for name, param in model.named_parameters()}
    assert any(name.startswith("mtp.") for name in expected)
    assert pool(2).run(load_with_modules_ahead, str(tmp_path / "with"), expected) == ["", ""]
    # As transformers writes it: the config says one module, and the files have none of it.
    without = deepseek(num_nextn_predict_layers=0)
    save_pretrained(without, without.config, tmp_path / "without")
    shutil.copy(tmp_path / "with" / "config.json", tmp_path / "without" / "config.json")
    (tmp_path / "without" / "meshkit_digests.json").unlink()
    for text in pool(2).run(load_with_modules_ahead, str(tmp_path / "without"), None):
        assert "of a module that predicts further ahead" in text and "num_nextn_predict_layers=0" in text
