"""Models with experts compute what transformers computes, and predict further ahead as the paper says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import MtpModel

from meshkit import models
from meshkit.errors import PlanError
from meshkit.models import (
    DeepseekV3,
    DeepseekV3Config,
    Mixtral,
    MixtralConfig,
    Qwen3MoeConfig,
    build_model,
    config_from_pretrained,
    load_pretrained,
    look_ahead,
    mtp_loss,
    save_pretrained,
)
from meshkit.models.layers import rope_tables
from meshkit.moe.aux_loss import AuxiliaryLosses, collect
from meshkit.step import next_token_loss

from .families import MOE_FAMILIES, PACKED, TOKENS, logits_of, randomise, token_ids, transformers_model
from .test_llama import TINY, TOL_FP32, loss_of, relative_error

TOL_FP64 = 1e-11  # only the order of sums may differ, in losses of about 100

DEEPSEEK = DeepseekV3Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=44,
    moe_intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    kv_lora_rank=16,
    q_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=2,
)


def deepseek(**changes: Any) -> DeepseekV3:
    model = DeepseekV3(dataclasses.replace(DEEPSEEK, **changes))
    randomise(model, seed=1)
    return model


# ----------------------------------------------------------------------------------------- equal to transformers


def unfused(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' tensors under our names: it has the gate and up projections of experts in one."""
    out = {}
    for name, value in named.items():
        name = name.removeprefix("model.")
        if name.endswith(".gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            out |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            out[name] = value
    return out


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_logits_and_every_gradient_equal_transformers(family: str, positions: Tensor | None, tmp_path: Path) -> None:
    oracle = transformers_model(family)
    oracle.save_pretrained(tmp_path)
    model = build_model(config_from_pretrained(tmp_path))
    load_pretrained(model, tmp_path)
    ids = token_ids()
    expected, found = logits_of(oracle, ids, positions), logits_of(model, ids, positions)
    assert relative_error(found, expected) <= TOL_FP32
    loss_of(expected, ids).backward()
    loss_of(found, ids).backward()
    expected_grads = unfused({name: param.grad for name, param in oracle.named_parameters()})
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert grad is not None
        assert relative_error(grad, expected_grads[name]) <= TOL_FP32, name


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_names_are_those_of_transformers_but_for_the_projections_of_experts(family: str, tmp_path: Path) -> None:
    oracle = transformers_model(family)
    oracle.config.save_pretrained(tmp_path)
    model = build_model(config_from_pretrained(tmp_path))
    expected = {name: tuple(value.shape) for name, value in unfused(oracle.state_dict()).items()}
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek"])
def test_a_packed_row_gives_each_document_the_logits_it_has_alone(family: str, tmp_path: Path) -> None:
    transformers_model(family).config.save_pretrained(tmp_path)
    model = build_model(config_from_pretrained(tmp_path)).double()
    randomise(model, seed=1)
    ids = token_ids(rows=1)
    alone = [model(part) for part in ids.split([10, 5, 9], dim=1)]
    torch.testing.assert_close(model(ids, PACKED[:1]), torch.cat(alone, dim=1), rtol=0, atol=TOL_FP64)


def test_an_empty_batch_gives_zero_gradients() -> None:
    model = deepseek(router_losses=AuxiliaryLosses(balance=1.0, z=1.0))
    ids = token_ids()[:0]
    with collect() as auxiliary:
        loss = mtp_loss(model, {"input_ids": ids, "labels": ids}) + auxiliary.total()
    assert loss == 0
    loss.backward()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_layer_reports_the_same_and_has_the_same_gradients(recompute: bool) -> None:
    """With a graph break where a router reports."""
    model = Mixtral(MixtralConfig(**vars(TINY), router_losses=AuxiliaryLosses(balance=1.0, z=0.1)))
    randomise(model, seed=1)
    layer = model.layers[0]
    rotation = rope_tables(TINY.rope, torch.arange(TOKENS)[None], TINY.head_dim, dtype=torch.float32)
    x = torch.randn(2, TOKENS, TINY.hidden_size)

    def run(x: Tensor) -> Tensor:
        return checkpoint(layer, x, *rotation, None, use_reentrant=False) if recompute else layer(x, *rotation, None)

    results = []
    for call in (run, torch.compile(run, backend="aot_eager")):
        layer.zero_grad()
        with collect() as auxiliary:
            loss = call(x).square().mean()
        (loss + auxiliary.total()).backward()
        (counts,) = auxiliary.counts.values()
        assert counts.sum() == 2 * TOKENS * 2
        results.append([loss, *auxiliary.losses.values(), *(param.grad.clone() for param in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) <= TOL_FP32


# --------------------------------------------------------------------------------------- tokens further ahead


def shifted(batch: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch[:, :-1], "labels": batch[:, 1:].clone()}


def test_predictions_further_ahead_equal_transformers(tmp_path: Path) -> None:
    oracle = transformers_model("deepseek")
    mtp = MtpModel(oracle, 2)
    randomise(mtp.layers, seed=3)
    oracle.config.save_pretrained(tmp_path)
    config: Any = config_from_pretrained(tmp_path)
    model = DeepseekV3(dataclasses.replace(config, num_nextn_predict_layers=2))
    weights = unfused(oracle.state_dict())
    for name, value in unfused(mtp.layers.state_dict()).items():
        weights[f"mtp.{name.replace('.mtp_block.', '.layer.').replace('.post_norm.', '.norm.')}"] = value
    model.load_state_dict(weights)
    ids = token_ids()
    whole = oracle.model(input_ids=ids, use_cache=False).last_hidden_state
    _, *found = model(ids, ids_ahead=look_ahead({"input_ids": ids, "labels": ids}, depth=2)["ids_ahead"])
    for ahead, logits in enumerate(found, 1):
        # Transformers leaves out the tokens that the row does not have; attention never looks at them from before.
        inputs, places = ids[:, ahead:], torch.arange(ahead, TOKENS).expand(len(ids), -1)
        whole = mtp.forward_layer(ahead - 1, whole[:, : TOKENS - ahead], places, None, input_ids=inputs)
        assert relative_error(logits[:, : TOKENS - ahead], mtp._project_to_logits(whole)) <= TOL_FP32, ahead


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
def test_mtp_loss_is_the_sum_over_documents_of_what_each_has_alone(positions: Tensor | None) -> None:
    """The oracle runs every document by itself, and looks up each label by its distance in it."""
    model = deepseek(num_nextn_predict_layers=2).double()
    tokens = torch.randint(0, 97, (3, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    batch = shifted(tokens)
    lengths = [[TOKENS]] * 3 if positions is None else [[10, 5, 9], [TOKENS], [1, 1, 6, 1, 15]]
    if positions is not None:
        batch["position_ids"] = positions
        batch["labels"][:, :-1][positions.diff(dim=1) != 1] = -100  # as packing has it
    next_token, further = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for row, documents in enumerate(lengths):
        start = 0
        for index, length in enumerate(documents):
            last = index == len(documents) - 1  # its last label is the token after the row
            text = tokens[row, start : start + length + last]
            ids = text[:length].unsqueeze(0)
            ahead = torch.stack([F.pad(ids[:, n:], (0, min(n, length))) for n in (1, 2)], dim=-1)
            for depth, logits in enumerate(model(ids, ids_ahead=ahead)):
                count = max(len(text) - 1 - depth, 0)
                loss = F.cross_entropy(logits[0, :count], text[1 + depth :], reduction="sum")
                (further if depth else next_token)[max(depth - 1, 0)] += loss.detach()
            start += length
    expected = next_token[0] + 0.4 / 2 * further.sum()
    assert abs(mtp_loss(model, batch, weight=0.4) - expected) <= TOL_FP64 * expected
    assert abs(next_token_loss(model, batch) - next_token[0]) <= TOL_FP64 * expected
    assert further.min() > 0


def test_labels_ahead_stay_in_their_document_even_where_the_next_tokens_label_does_not() -> None:
    ids = torch.arange(6).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids + 1, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}
    ahead = look_ahead(batch, depth=2)
    assert ahead["ids_ahead"][0].T.tolist() == [[1, 2, 3, 4, 5, 0], [2, 3, 4, 5, 0, 0]]
    # Token 4 begins a document: tokens 0 to 3 see no label of it. Label 6 is the token after the row.
    assert ahead["labels_ahead"][0].T.tolist() == [[2, 3, -100, -100, 6, -100], [3, -100, -100, -100, -100, -100]]
    assert "labels_ahead" not in batch
    longer = look_ahead(batch, depth=8)
    assert (longer["labels_ahead"][..., 5:] == -100).all()


def test_mtp_loss_needs_modules_that_predict_ahead() -> None:
    batch = shifted(token_ids())
    with pytest.raises(PlanError, match="no `mtp` modules. Build it with num_nextn_predict_layers of at least 1"):
        mtp_loss(deepseek(num_nextn_predict_layers=0), batch)


# --------------------------------------------------------------------------------------------------------- folders


def test_modules_ahead_are_saved_as_more_layers_and_loaded_again(tmp_path: Path) -> None:
    model = deepseek()
    save_pretrained(model, model.config, tmp_path / "out", max_shard_bytes=20_000)
    again = DeepseekV3(config_from_pretrained(tmp_path / "out"))
    load_pretrained(again, tmp_path / "out")
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_modules_ahead_are_found_in_deepseeks_layout(tmp_path: Path) -> None:
    """Of one more layer 2: its parts, copies of the embedding and the head, and `shared_head.norm`."""
    model = deepseek(num_nextn_predict_layers=1)
    save_pretrained(model, model.config, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = load_file(file)
    more = {name.removeprefix("model.layers.2.") for name in content if name.startswith("model.layers.2.")}
    beside = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    assert more >= beside
    assert more - beside == {
        name.removeprefix("model.layers.1.") for name in content if name.startswith("model.layers.1.")
    }
    content["model.layers.2.embed_tokens.weight"] = content["model.embed_tokens.weight"].clone()
    content["model.layers.2.shared_head.head.weight"] = content["lm_head.weight"].clone()
    save_file(content, file)
    (tmp_path / "out" / "meshkit_digests.json").unlink()  # as of a folder that another program wrote
    again = deepseek(num_nextn_predict_layers=1)
    load_pretrained(again, tmp_path / "out")
    without = deepseek(num_nextn_predict_layers=0)
    load_pretrained(without, tmp_path / "out")  # which passes them over
    assert torch.equal(again(token_ids()), model(token_ids()))
    assert torch.equal(without(token_ids()), model(token_ids()))


def test_the_state_of_a_global_balance_loss_is_not_part_of_a_folder(tmp_path: Path) -> None:
    losses = AuxiliaryLosses(balance=0.1, per="global")
    model = Mixtral(MixtralConfig(**vars(TINY), router_losses=losses))
    assert "layers.0.mlp.gate.last_counts" in model.state_dict()
    save_pretrained(model, model.config, tmp_path / "out")
    assert not any("last_counts" in name for name in models.huggingface.folder._weight_files(tmp_path / "out"))
    load_pretrained(model, tmp_path / "out")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_bias_starts_at_zero_over_a_folder_and_is_not_written_into_one(model_type: str, tmp_path: Path) -> None:
    oracle = transformers_model(model_type)
    oracle.save_pretrained(tmp_path / "in")
    config = dataclasses.replace(config_from_pretrained(tmp_path / "in"), router_bias=True)
    model = build_model(config)
    load_pretrained(model, tmp_path / "in")
    assert relative_error(model(token_ids()), logits_of(oracle, token_ids(), None)) <= TOL_FP32
    with pytest.raises(PlanError, match=f"transformers' {model_type} has router_bias=False, but the config has True"):
        save_pretrained(model, config, tmp_path / "out")


# --------------------------------------------------------------------------------------------------------- presets


# Published: Mixtral's and Qwen's safetensors metadata; DeepSeek's technical report, 671B without the module ahead.
PUBLISHED = {
    "MIXTRAL_8X7B": (46_702_792_704, "46.7B"),
    "QWEN3_30B_A3B": (30_532_122_624, "30.5B"),
    "DEEPSEEK_V3": (671_026_404_352, "671.0B"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = build_model(getattr(models, name))
    count = sum(param.numel() for key, param in model.named_parameters() if not key.startswith("mtp."))
    assert (count, f"{count / 1e9:.1f}B") == PUBLISHED[name]


PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    "MIXTRAL_8X7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000, "hidden_act": "silu",
    },
    "QWEN3_30B_A3B": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "DEEPSEEK_V3": {  # without its quantization_config
        "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_presets_are_what_the_published_config_json_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIGS[name]))
    assert config_from_pretrained(tmp_path) == getattr(models, name)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MixtralConfig(**vars(TINY), num_experts_per_tok=9), "a token cannot choose 9 of 8 experts"),
        (lambda: Qwen3MoeConfig(**vars(TINY), mlp_only_layers=(2,)), "mlp_only_layers has 2, but layers are 0 to 1"),
        (lambda: deepseek(n_group=3), "8 experts are not 3 equal groups of which 2 can be chosen"),
        (lambda: deepseek(num_experts_per_tok=5), "cannot choose 5 of 4 experts .2 of 4 groups of 2"),
        (lambda: deepseek(n_group=8), "groups=8 have one expert each, but count their two best"),
        (lambda: deepseek(v_head_dim=13), "v_head_dim=13 is more than the 12 of q and k"),
        (lambda: deepseek(qk_rope_head_dim=5), "qk_rope_head_dim=5 is odd"),
        (lambda: deepseek(first_k_dense_replace=-1), "first_k_dense_replace must be a whole number of at least 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()
