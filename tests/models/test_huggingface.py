"""Hugging Face folders in both directions, on one process."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshkit.errors import CheckpointError, PlanError
from meshkit.models import (
    Llama,
    YarnScaling,
    build_model,
    check_pretrained,
    config_from_pretrained,
    load_pretrained,
    save_config,
    save_pretrained,
)

from .families import (
    FAMILIES,
    LLAMA3_SCALING,
    MOE_FAMILIES,
    PACKED,
    SIZES,
    YARN_FULL,
    logits_of,
    randomise,
    token_ids,
    transformers_model,
)

SHARD_BYTES = 9000  # several files for models of 60 kB, and smaller than their largest tensor


def ours(family: str, folder: Path, seed: int = 1) -> Any:
    transformers_model(family).config.save_pretrained(folder)
    model = build_model(config_from_pretrained(folder))
    randomise(model, seed)
    return model


# -------------------------------------------------------------------------------------------------- both directions


@pytest.mark.parametrize("max_shard_bytes", [5e9, SHARD_BYTES])
@pytest.mark.parametrize("family", FAMILIES | MOE_FAMILIES)
def test_transformers_loads_what_we_save(family: str, max_shard_bytes: float, tmp_path: Path) -> None:
    model = ours(family, tmp_path)
    save_pretrained(model, model.config, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report.values()), report
    assert type(loaded) is type(transformers_model(family))
    for positions in (None, PACKED):
        expected, found = logits_of(loaded, token_ids(), positions), logits_of(model, token_ids(), positions)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert config_from_pretrained(tmp_path / "out") == model.config


@pytest.mark.parametrize("family", ["llama2", "tied", "qwen2", *MOE_FAMILIES])
def test_we_load_what_transformers_saved_in_several_files(family: str, tmp_path: Path) -> None:
    oracle = transformers_model(family)
    oracle.save_pretrained(tmp_path, max_shard_size=SHARD_BYTES)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = build_model(config_from_pretrained(tmp_path))
    assert load_pretrained(model, tmp_path) is model
    torch.testing.assert_close(model(token_ids()), logits_of(oracle, token_ids(), None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama3", "tied"])
def test_a_transformers_model_is_loaded_and_saved_under_its_own_names(family: str, tmp_path: Path) -> None:
    source, target = transformers_model(family, seed=1), transformers_model(family, seed=2)
    save_pretrained(source, source.config.to_dict(), tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    load_pretrained(target, tmp_path / "out")
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(again, token_ids(), None), logits_of(source, token_ids(), None))


def test_values_are_converted_to_the_dtype_of_the_parameter(tmp_path: Path) -> None:
    model = ours("llama3", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=SHARD_BYTES)
    target = Llama(model.config).double()
    load_pretrained(target, tmp_path / "out")
    for (name, found), value in zip(target.named_parameters(), model.parameters(), strict=True):
        assert found.dtype == torch.float64
        assert torch.equal(found, value.bfloat16().double()), name
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_files_are_filled_up_to_the_limit_and_the_index_counts_their_bytes(tmp_path: Path) -> None:
    model = ours("llama2", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert [file.name for file in files] == names
    contents = [load_file(file) for file in files]
    sizes = [sum(value.nbytes for value in content.values()) for content in contents]
    keys = [name if name == "lm_head.weight" else f"model.{name}" for name, _ in model.named_parameters()]
    firsts = [content[next(key for key in keys if key in content)].nbytes for content in contents]
    assert all(size <= SHARD_BYTES or len(content) == 1 for size, content in zip(sizes, contents, strict=True))
    # Greedy: no file's first tensor would have fitted into the file before.
    assert all(size + after > SHARD_BYTES for size, after in zip(sizes, firsts[1:], strict=False))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(param.nbytes for param in model.parameters()) == sum(sizes)
    assert index["weight_map"] == {
        key: file.name for file, content in zip(files, contents, strict=True) for key in content
    }
    # Whoever may read the folder may read the weights.
    assert {file.stat().st_mode for file in files} == {(tmp_path / "out" / "config.json").stat().st_mode}


def test_a_tied_head_is_saved_once_and_loaded_from_either_name(tmp_path: Path) -> None:
    model = ours("tied", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out")
    (tmp_path / "out" / "meshkit_digests.json").unlink()  # as of a folder that another program wrote
    content = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in content
    embedding = content.pop("model.embed_tokens.weight")
    for copies in (
        {"lm_head.weight": embedding},
        {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding.clone()},
    ):
        save_file({**content, **copies}, tmp_path / "out" / "model.safetensors")
        target = Llama(model.config)
        load_pretrained(target, tmp_path / "out")
        assert torch.equal(target.embed_tokens.weight, model.embed_tokens.weight)
        assert target.lm_head.weight is target.embed_tokens.weight


def test_rotary_frequencies_of_old_files_are_passed_over(tmp_path: Path) -> None:
    model = ours("llama2", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out")
    (tmp_path / "out" / "meshkit_digests.json").unlink()  # as of a folder that another program wrote
    file = tmp_path / "out" / "model.safetensors"
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    save_file({**load_file(file), **old}, file)
    read = load_pretrained(Llama(model.config), tmp_path / "out")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in read.state_dict().items())


def test_a_persistent_buffer_is_saved_and_loaded(tmp_path: Path) -> None:
    source, target = transformers_model("llama2", seed=1), transformers_model("llama2", seed=2)
    for value, model in enumerate((source, target), 1):
        model.model.register_buffer("steps", torch.tensor(value))
    save_pretrained(source, source.config.to_dict(), tmp_path / "out")
    load_pretrained(target, tmp_path / "out")
    assert target.model.steps == 1


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama2", tmp_path)
    folder = tmp_path / "out"

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save_pretrained(model, model.config, folder)
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [".out.partial"]
    save_pretrained(model, model.config, folder, max_shard_bytes=SHARD_BYTES)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    assert not (folder / "model.safetensors").exists()  # of the first attempt
    load_pretrained(Llama(model.config), folder)


def test_extra_fields_reach_config_json(tmp_path: Path) -> None:
    model = ours("llama2", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out", extra={"eos_token_id": 7})
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id) == (None, 7)


# ------------------------------------------------------------------------------------------------------ config.json


@pytest.mark.parametrize("family", FAMILIES | MOE_FAMILIES)
def test_a_config_survives_our_file_and_transformers_file(family: str, tmp_path: Path) -> None:
    transformers_model(family).config.save_pretrained(tmp_path)
    config = config_from_pretrained(tmp_path)
    save_config(config, tmp_path)
    assert config_from_pretrained(tmp_path) == config
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert config_from_pretrained(tmp_path) == config


def write_config(folder: Path, **fields: Any) -> Path:
    raw = {"model_type": "llama", **{name: value for name, value in SIZES.items() if name != "pad_token_id"}, **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value != "absent"}))
    return folder


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling (its type as `type` at first), 5 writes rope_parameters."""
    old = config_from_pretrained(write_config(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}))
    new = config_from_pretrained(
        write_config(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    )
    assert old == new


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_fields_of_experts_that_a_file_leaves_out_mean_what_they_mean_to_transformers(
    model_type: str, tmp_path: Path
) -> None:
    absent = {"max_position_embeddings": "absent", "num_key_value_heads": "absent", "model_type": model_type}
    expected = transformers.AutoConfig.from_pretrained(write_config(tmp_path, **absent))
    config = config_from_pretrained(tmp_path)
    compared = [field.name for field in dataclasses.fields(config) if hasattr(expected, field.name)]
    assert {"rms_norm_eps", "num_experts_per_tok", "max_position_embeddings"} <= set(compared)
    for name in compared:
        found, value = getattr(config, name), getattr(expected, name)
        if name not in ("num_key_value_heads", "head_dim", "rope"):
            assert (list(found) if isinstance(found, tuple) else found) == value, name
    assert config.rope.theta == expected.rope_parameters["rope_theta"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_fields_that_a_file_leaves_out_mean_what_they_mean_to_transformers(model_type: str, tmp_path: Path) -> None:
    write_config(tmp_path, model_type=model_type, max_position_embeddings="absent")
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    config = config_from_pretrained(tmp_path)
    for name in ("head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "sliding_window"):
        if hasattr(expected, name):
            assert getattr(config, name) == getattr(expected, name), name
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.attention_bias == (model_type == "qwen2")


def test_yarn_fields_that_only_imply_others_are_resolved(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", **YARN_FULL, "factor": None, "truncate": True}
    config = config_from_pretrained(write_config(tmp_path, rope_scaling=scaling))
    assert isinstance(config.rope.scaling, YarnScaling)
    assert config.rope.scaling.factor == 4.0  # 64 / 16 positions
    expected = (0.12 * math.log(4) + 1) / (0.07 * math.log(4) + 1)  # 0.1 mscale ln(factor) + 1, of the two mscales
    assert config.rope.scaling.attention_factor == pytest.approx(expected, rel=1e-12)


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "gpt2"},
        "config.json: model_type='gpt2' is not supported. Llama covers llama, qwen2, qwen3, mistral",
    ),
    ({"model_type": "absent"}, "model_type=None is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported. Llama has hidden_act='silu' only"),
    ({"mlp_bias": True}, "mlp_bias=True is not supported"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
    ({"vocab_size": "absent"}, "has no vocab_size, which a llama model needs"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' is not supported. Llama has default, linear",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs the field 'factor'"),
    (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "low_freq_factor": None}},
        "rope type 'llama3' needs the field 'low_freq_factor'",
    ),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1]}},
        "the field 'short_factor' of rope type 'linear' is not supported. Llama's has factor",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "the field 'full_attention' of rope type 'default' is not supported. Llama's has no fields",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "the field 'partial_rotary_factor' of rope type 'default'"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "1 of 2 layers have a sliding window, the others not",
    ),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config={'quant_method': 'gptq'} is not supported",
    ),
    (
        {"model_type": "mixtral", "router_jitter_noise": 0.1},
        "router_jitter_noise=0.1 is not supported. Mixtral has router_jitter_noise=0.0 only",
    ),
    (
        {"model_type": "deepseek_v3", "topk_method": "greedy"},
        "topk_method='greedy' is not supported. DeepseekV3 has topk_method='noaux_tc' only",
    ),
    (
        {"model_type": "deepseek_v3", "num_key_value_heads": 2},
        "num_key_value_heads=2 is not supported. DeepseekV3 has one for each of the 4 heads",
    ),
    (
        {"model_type": "qwen3_moe", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' is not supported. Qwen3Moe has default, linear",
    ),
    (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "1 of 2 layers have a sliding window",
    ),
]


REFUSED_THETAS = [
    ({"model_type": "llama", "rope_theta": theta}, f"rope_theta is {theta!r}, and must be a number above 0.")
    for theta in (0, -1.0, math.nan, math.inf, "1e4", True)
]


@pytest.mark.parametrize(
    ("fields", "text"), REFUSED_CONFIGS + REFUSED_THETAS, ids=lambda value: "" if isinstance(value, dict) else value
)
def test_what_llama_does_not_do_is_refused_by_field(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        config_from_pretrained(write_config(tmp_path, **fields))
    assert text in str(error.value)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json does not exist. Give the folder of a Hugging Face model"):
        config_from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        config_from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json holds a list, but must hold an object"):
        config_from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "text"),
    [
        (
            "mixtral",
            {"attention_bias": True},
            "transformers' mixtral has attention_bias=False, but the config has True",
        ),
        ("mixtral", {"qk_norm": True}, "transformers' mixtral has qk_norm=False"),
        ("qwen3_moe", {"qk_norm": False}, "transformers' qwen3_moe has qk_norm=True, but the config has False"),
        ("qwen3_moe", {"attention_bias": True}, "transformers' qwen3_moe has attention_output_bias=True"),
    ],
)
def test_a_config_with_experts_of_no_family_is_not_written(
    model_type: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    config = config_from_pretrained(write_config(tmp_path, model_type=model_type))
    with pytest.raises(PlanError, match=text):
        save_config(dataclasses.replace(config, **changes), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "attention_bias": True},
        {"attention_bias": True, "attention_output_bias": True, "sliding_window": 8},
    ],
)
def test_a_config_of_no_family_is_not_written(changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_from_pretrained(write_config(tmp_path))
    with pytest.raises(PlanError, match="save_config: no family of transformers has qk_norm="):
        save_config(dataclasses.replace(config, **changes), tmp_path)


# -------------------------------------------------------------------------------------------------- refused folders

Damage = Callable[[dict[str, Tensor], Path], None]


def truncate(tensors: dict[str, Tensor], file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def rewrite(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    return lambda tensors, file: save_file(change(tensors), file)


NORM = "model.norm.weight"
REFUSED_WEIGHTS: list[tuple[Damage, str]] = [
    (lambda tensors, file: file.unlink(), "out holds neither model.safetensors nor model.safetensors.index.json"),
    (truncate, "model.safetensors is damaged or incomplete"),
    (lambda tensors, file: file.write_bytes(b""), "model.safetensors is damaged or incomplete"),
    (
        rewrite(lambda tensors: {name: value for name, value in tensors.items() if "layers.1.mlp" not in name}),
        "out has no tensor 'model.layers.1.mlp.gate_proj.weight', which the model needs (3 of 21 are missing, 0 are u",
    ),
    (
        rewrite(lambda tensors: {**tensors, "model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
        "model.safetensors holds 'model.layers.2.mlp.up_proj.weight', which the model does not have (1 are unexpected)",
    ),
    (
        rewrite(lambda tensors: {**tensors, NORM: torch.ones(31)}),
        "model.safetensors: 'model.norm.weight' has the shape (31,), but the model's has (32,)",
    ),
    (
        rewrite(lambda tensors: {**tensors, NORM: torch.ones(32, dtype=torch.int8)}),
        "model.safetensors: 'model.norm.weight' has the dtype I8, which cannot be converted to torch.float32",
    ),
]


@pytest.mark.parametrize(("damage", "text"), REFUSED_WEIGHTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_folder_that_does_not_fit_is_refused_and_changes_nothing(damage: Damage, text: str, tmp_path: Path) -> None:
    model = ours("llama2", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out")
    (tmp_path / "out" / "meshkit_digests.json").unlink()  # as of a folder that another program wrote
    file = tmp_path / "out" / "model.safetensors"
    damage(load_file(file), file)
    target = Llama(model.config)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_pretrained(target, tmp_path / "out")
    assert text in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    model = ours("llama2", tmp_path)
    folder = tmp_path / "out"
    save_pretrained(model, model.config, folder, max_shard_bytes=SHARD_BYTES)
    (tmp_path / "out" / "meshkit_digests.json").unlink()  # as of a folder that another program wrote
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, *_, last = content["weight_map"]
    content["weight_map"][first] = content["weight_map"][last]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"damaged or incomplete: .*{first}"):
        load_pretrained(Llama(model.config), folder)
    for elsewhere in ("../model.safetensors", "/etc/passwd", "sub/model.safetensors", "", 7):
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], first: elsewhere}}))
        with pytest.raises(CheckpointError, match=rf"{first!r} is in {elsewhere!r}, which is no file of this folder"):
            load_pretrained(Llama(model.config), folder)
    index.write_text(json.dumps(content))
    (folder / content["weight_map"][last]).unlink()
    with pytest.raises(CheckpointError, match=r"of-\d+.safetensors does not exist, but model.safetensors.index.json"):
        load_pretrained(Llama(model.config), folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index.json is damaged: it has no weight_map"):
        load_pretrained(Llama(model.config), folder)


def test_two_values_for_one_tied_parameter_are_refused(tmp_path: Path) -> None:
    untied = ours("llama2", tmp_path)
    tied = dataclasses.replace(untied.config, tie_word_embeddings=True)
    save_pretrained(untied, untied.config, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"differ, but are one tied parameter in the model. Build it with tie_word"
    ):
        load_pretrained(Llama(tied), tmp_path / "out")


def test_a_model_on_meta_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = ours("llama2", tmp_path)
    for call in (
        lambda: load_pretrained(model, tmp_path),
        lambda: save_pretrained(model, model.config, tmp_path / "x"),
    ):
        with pytest.raises(PlanError, match=r"_pretrained: 'embed_tokens.weight' is still on meta. Call parallelize"):
            call()


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    model = ours("llama2", tmp_path)
    with pytest.raises(CheckpointError, match=r"exists and is not empty. Choose another folder or remove it"):
        save_pretrained(model, model.config, tmp_path)
    with pytest.raises(CheckpointError, match=r"exists and is not empty"):
        save_pretrained(model, model.config, tmp_path / "config.json")
    (tmp_path / "empty").mkdir()
    save_pretrained(model, model.config, tmp_path / "empty")


def test_what_a_folder_lacks_for_experts_and_modules_ahead_is_said(tmp_path: Path) -> None:
    model = ours("deepseek", tmp_path)
    save_pretrained(model, model.config, tmp_path / "out")
    ahead = build_model(dataclasses.replace(model.config, num_nextn_predict_layers=1))
    with pytest.raises(
        CheckpointError, match="transformers writes none. Build the model with num_nextn_predict_layers=0"
    ):
        load_pretrained(ahead, tmp_path / "out")
    fewer = build_model(dataclasses.replace(model.config, n_routed_experts=12))
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.1.mlp.experts.8.gate_proj.weight'"):
        load_pretrained(fewer, tmp_path / "out")


def test_a_folder_that_is_not_there_is_told_from_one_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such folder. .*; nothing is downloaded"):
        check_pretrained(tmp_path / "nowhere")
