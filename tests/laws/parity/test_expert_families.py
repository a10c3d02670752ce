"""The published shapes with experts on meshes: their own plans, latent attention over tp, predictions further ahead."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.model_state import copies_of
from meshkit.models import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig, build_model, moe_plan
from meshkit.models.deepseek import look_ahead, mtp_loss
from meshkit.moe.aux_loss import AuxiliaryLosses, collect
from meshkit.step import count_labels, next_token_loss
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.tiny import draw_parameters
from tests.world import pool

TOL = 1e-10
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "router_losses": AuxiliaryLosses(balance=0.1, per="global", z=0.01),
}
DENSE = {"num_key_value_heads": 2, "head_dim": 6}
LATENT = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, **DENSE, num_local_experts=5),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, **DENSE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=10, mlp_only_layers=(1,)
    ),
    "deepseek": DeepseekV3Config(**SHAPE, **LATENT, q_lora_rank=7, num_nextn_predict_layers=2),
    "deepseek_plain": DeepseekV3Config(**SHAPE, **LATENT, q_lora_rank=None),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = build_model(CONFIGS[name]).double()
    draw_parameters(model, std=0.3)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return model


def batch_of(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 61, (5, 17), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    starts = torch.rand(5, 16, generator=generator) < 0.15
    starts[:, 0] = True
    index = torch.arange(16).expand(5, 16)
    positions = index - torch.where(starts, index, 0).cummax(-1).values
    batch = {"input_ids": ids[:, :-1], "labels": labels, "position_ids": positions}
    ahead = getattr(CONFIGS[name], "num_nextn_predict_layers", 0)
    return look_ahead(batch, depth=ahead) if ahead else batch


def loss_of(name: str):  # type: ignore[no-untyped-def]
    return partial(mtp_loss, weight=0.3) if name == "deepseek" else next_token_loss


def differences(name: str, mesh: str, sequence: bool, recompute: str) -> dict[str, float]:
    """Largest differences of two steps from one device; the second knows the counts of the first."""
    alone = build(name)
    run = mk.parallelize(
        build(name),
        mesh_for(mesh),
        plan=moe_plan(CONFIGS[name]),
        sequence=sequence,
        memory=mk.MemoryPolicy(recompute=recompute),  # type: ignore[arg-type]
    )
    found: dict[str, float] = {}
    batch = batch_of(name)
    own = {key: tensor.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for key, tensor in batch.items()}
    for step in range(2):
        alone.zero_grad()
        with collect() as auxiliary:
            loss = loss_of(name)(alone, batch)
        tokens = count_labels(batch)
        ((loss + auxiliary.total()) / tokens).backward()
        for router, counts in auxiliary.counts.items():
            router.last_counts.copy_(counts)
        for param in run.parameters():
            param.grad = None
        mean = run.forward_backward(own, microbatches=2, loss=loss_of(name))
        found[f"loss {step}"] = abs(float(mean) - float(loss.detach() / tokens))
        for kind, value in run.auxiliary.items():
            if run.pipeline is None:
                found[f"{kind} {step}"] = abs(float(value) - float(auxiliary.losses[kind].detach() / tokens))
        expected = {key: param.grad for key, param in alone.named_parameters()}
        copies = copies_of(run.model)
        for key, param in run.named_parameters():
            assert param.grad is not None, key
            found[f"{key} {step}"] = difference(param.grad, expected[copies.get(key, key)])
        for router_name, counts in auxiliary.named_counts(alone).items():
            if router_name in run.expert_counts:
                assert torch.equal(run.expert_counts[router_name], counts), router_name
    return found


RUNS = [
    (2, "dp_shard=2 ep=2", False, "full"),
    (2, "tp=2 ep=2", True, "none"),
    (2, "tp=2 ep=2", False, "selective"),
    (2, "cp=2 ep=2", False, "none"),
    (4, "dp_shard=2 tp=2 ep=2 etp=2", True, "full"),
    (4, "pp=2 tp=2", True, "none"),
]


@pytest.mark.parametrize(
    ("name", "ranks", "mesh", "sequence", "recompute"),
    thin([(name, *run) for run in RUNS for name in CONFIGS], 7),
)
def test_families_equal_one_device(name: str, ranks: int, mesh: str, sequence: bool, recompute: str) -> None:
    for found in pool(ranks).run(differences, name, mesh, sequence, recompute):
        worst = max(found, key=found.__getitem__)
        assert found[worst] <= TOL, (worst, found[worst])


def test_predictions_further_ahead_equal_one_device_on_stages() -> None:
    for found in pool(2).run(differences, "deepseek", "pp=2", False, "none"):
        worst = max(found, key=found.__getitem__)
        assert found[worst] <= TOL, (worst, found[worst])


def refused(mesh: str) -> str:
    config = replace(CONFIGS["deepseek_plain"], num_attention_heads=3)
    try:
        mk.parallelize(build_model(config), mesh_for(mesh), plan=moe_plan(config))
    except mk.errors.PlanError as error:
        return str(error)
    return "accepted"


def test_heads_that_tp_does_not_divide_are_refused_for_latent_attention() -> None:
    for text in pool(2).run(refused, "tp=2"):
        assert (
            "'layers.0.self_attn.q_proj' has 24 features in groups of 8, and tp=2 does not divide the 3 groups" in text
        )


def refused_experts(mesh: str) -> str:
    try:
        mk.parallelize(build("mixtral"), mesh_for(mesh), plan=moe_plan(CONFIGS["mixtral"]))
    except mk.errors.PlanError as error:
        return str(error)
    return "accepted"


def test_a_rank_without_experts_is_refused() -> None:
    for text in pool(4).run(refused_experts, "dp_shard=4 ep=4"):
        assert "'layers.0.mlp.experts' has 5 experts, and ep=4 ranks with up to 2 each leave one without" in text
        assert "Choose ep of 1, 2, 3, 5" in text


def test_a_rank_without_hidden_features_is_refused() -> None:
    """torch's FSDP2 cannot reduce its gradients in bf16."""
    config = replace(CONFIGS["mixtral"], intermediate_size=5)
    with pytest.raises(
        mk.errors.PlanError, match="have 5 hidden features, and etp=4 ranks with up to 2 each leave one without"
    ):
        mk.explain(build_model(config), mk.MeshSpec(tp=4, etp=4), plan=moe_plan(config), rows=1, seq_len=8)
