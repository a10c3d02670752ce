"""The accountant against closed forms, and what it refuses. One process, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshkit as mk
from meshkit.core.host_accounting import on_host
from meshkit.errors import MeshError, PlanError
from meshkit.mesh.world import fake_world
from meshkit.models import (
    LLAMA3_8B,
    LLAMA_PLAN,
    DeepseekV3Config,
    Llama,
    LlamaConfig,
    Qwen3MoeConfig,
    build_model,
    meta_parameters,
    moe_plan,
)
from meshkit.preflight.estimate import svg
from meshkit.preflight.estimate._drawing import thin
from meshkit.preflight.estimate._shapes import Shapes
from tests.tiny import tiny_config

SMALL = tiny_config(vocab_size=512, hidden_size=128, intermediate_size=448, num_key_value_heads=1, head_dim=32)
BF16 = mk.MemoryPolicy(precision=mk.strategy.Precision())


def on_meta(config: LlamaConfig = SMALL) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def small(mesh: str, **changes: object) -> mk.preflight.estimate.Estimate:
    chosen: dict = {"plan": LLAMA_PLAN, "rows": 4, "seq_len": 64, "memory": BF16, **changes}
    return mk.estimate(on_meta(), mesh, **chosen)


def test_a_fake_world_leaves_nothing_behind_and_does_not_hide_a_real_one() -> None:
    for rank in (0, 5):
        with fake_world(64, rank):
            mesh = mk.init_mesh("dp_shard=8 tp=8", device_type="cpu")
            assert (mesh.rank, mesh["tp"].get_local_rank(), mesh["dp_shard"].get_local_rank()) == (rank, rank % 8, 0)
            with pytest.raises(MeshError, match="in a world of 64 ranks already"), fake_world(2):
                pass
        assert not dist.is_initialized()
    with pytest.raises(MeshError, match="there is no rank 4"), fake_world(4, 4):
        pass
    assert not dist.is_initialized()


def test_parameters_and_adam_of_llama_3_8b_are_those_of_the_closed_form() -> None:
    """4 and 8 bytes for each parameter over 64 ranks, of two of its 32 layers; the other 30 are as the second."""
    config = replace(LLAMA3_8B, num_hidden_layers=2)
    found = mk.estimate(
        on_meta(config), "dp_shard=8 tp=8", plan=LLAMA_PLAN, rows=1, seq_len=8192, sequence=True, memory=BF16
    )
    matrices = 8_030_261_248 - 30 * 218_112_000  # parameters of Llama-3-8B, and of each layer
    norms = 5 * 4096  # whole on every rank of tp
    expected = 4 * ((matrices - norms) / 64 + norms / 8)
    assert found.parameter_bytes == pytest.approx(expected, rel=1e-4)
    assert found.optimizer_bytes == pytest.approx(2 * expected, rel=1e-3)  # and a step counter of each
    assert found.gradient_bytes == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("zero", "ranks"), [(1, 4), (2, 4), (3, 8)])
def test_states_follow_16_bytes_of_each_parameter_over_the_ranks(zero: int, ranks: int) -> None:
    """fp32 masters 4, gradients 4, moments 8, each over the ranks that shard; ZeRO-1 holds whole gradients in between."""
    found = small(f"dp_shard={ranks}", zero=zero, microbatches=2)
    whole = sum(param.numel() for param in on_meta().parameters())
    states = found.parameter_bytes + found.optimizer_bytes
    assert states == pytest.approx(12 * whole / ranks, rel=0.03)  # sizes are rounded up to 512
    shards = 4 * whole / ranks
    assert found.gradient_bytes == pytest.approx(shards if zero >= 2 else 4 * whole, rel=0.02)


@pytest.mark.parametrize(("kernels", "norms"), [("cuda", 0), ("cpu", 12)])
def test_a_block_keeps_12_4g_8f_times_sbh(kernels: str, norms: int) -> None:
    """Source: what autograd saves of a Llama block in 16 bits; the norms of a CPU keep fp32 copies besides."""
    found = small("dp_shard=1", kernels=kernels)
    g, f, d = 1 / 4, 448 / 128, 32
    sbh = 4 * 64 * 128
    exact = (12 + 4 * g + 8 * f + 4 / d + norms) * sbh
    small_ones = 2 * 4 * 64 * 4 + 4096  # a number a row of each norm, and seeds of attention
    for block in ("layers.0", "layers.1"):
        assert exact <= found.activations[block] <= exact + small_ones


@pytest.mark.parametrize("tp", [2, 4])
def test_with_tp_and_sequence_parallelism_the_gathered_inputs_are_whole(tp: int) -> None:
    config = replace(SMALL, num_key_value_heads=4)
    found = mk.estimate(on_meta(config), f"tp={tp}", plan=LLAMA_PLAN, rows=1, seq_len=256, memory=BF16, sequence=True)
    g, f, d = 1, 448 / 128, 32
    sbh = 256 * 128
    exact = (4 + (8 + 4 * g + 8 * f + 4 / d) / tp) * sbh
    assert found.activations["layers.1"] == pytest.approx(exact, rel=0.01)


def test_full_recompute_keeps_two_bytes_of_each_hidden_value_and_one_live_block() -> None:
    found = small("dp_shard=1", memory=mk.MemoryPolicy(recompute="full", precision=mk.strategy.Precision()))
    assert found.activations["layers.0"] == 2 * 4 * 64 * 128
    assert found.most["recomputed activations"] > 30 * 4 * 64 * 128
    assert small("dp_shard=1").most["recomputed activations"] == 0


def test_logits_are_14_bytes_of_each_token_and_word() -> None:
    """bf16 logits 2, fp32 copy 4, log-softmax 4; backward makes the gradient of the last 4, which is work of backward."""
    found = small("dp_shard=1", rows=16)
    values = 16 * 64 * 512
    assert found.logits_bytes == pytest.approx(10 * values, rel=0.01)
    assert found.most["work of backward"] >= 4 * values


def test_the_peak_is_the_most_of_its_points_and_says_where() -> None:
    found = small("dp_shard=1", rows=16)
    assert found.peak_bytes == max(point.device_bytes for point in found.points) == sum(found.at_peak.values())
    assert "loss" in found.where
    deep = small(
        "dp_shard=1", memory=mk.MemoryPolicy(recompute="full", precision=mk.strategy.Precision()), rows=4, seq_len=512
    )
    assert deep.peak_bytes < small("dp_shard=1", rows=4, seq_len=512).peak_bytes
    assert found.fits(found.peak_bytes) and not found.fits(found.peak_bytes - 1)
    assert max(thin(found.points, 100), key=lambda point: point.device_bytes) == found.peak


def test_stages_of_a_pipeline_hold_what_their_schedule_keeps_alive() -> None:
    """1F1B: the first of 4 ranks has 4 microbatches in flight, the last one 1."""
    config = replace(SMALL, num_hidden_layers=4)
    model = on_meta(config)
    block = small("dp_shard=1", rows=1).activations["layers.0"]
    kept = []
    for stage in range(4):
        found = mk.estimate(
            model, "pp=4", plan=LLAMA_PLAN, rows=4, seq_len=64, microbatches=4, memory=BF16, coordinate={"pp": stage}
        )
        kept.append(found.most["activations"] / block)
    assert [round(share) for share in kept[:3]] == [4, 3, 2]
    assert 1 <= kept[3] < 2  # and the norm before the head


def test_context_ranks_share_the_tokens() -> None:
    whole, shared = small("cp=1", seq_len=256), small("cp=4", seq_len=256)
    assert shared.activations["layers.0"] == pytest.approx(whole.activations["layers.0"] / 4, rel=0.15)


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=4 ep=4", "dp_shard=2 tp=2 ep=2 etp=2"])
def test_experts_are_counted_as_if_tokens_chose_them_alike(mesh: str) -> None:
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    with meta_parameters():
        model = build_model(config)
    found = mk.estimate(model, mesh, plan=moe_plan(config), rows=4, seq_len=64, sequence=True)
    experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    assert found.parameter_bytes >= 4 * experts / 8
    assert found.activations["layers.0"] > 0
    assert ("chose all alike" in str(found)) == ("ep" in mesh)


def test_what_is_allocated_for_the_host_is_not_on_the_device() -> None:
    """The seam for offloading: a state allocated under `on_host` counts apart."""

    class OnHost(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                if "m" not in self.state[param]:
                    with on_host():
                        self.state[param]["m"] = torch.zeros_like(param)

    found = small("dp_shard=2", optimizer=lambda run: OnHost(run.parameters(), lr=0.1))
    assert found.host_bytes == found.parameter_bytes
    assert found.optimizer_bytes == 0
    assert "on the host" in str(found)


def test_the_table_names_every_group_and_what_it_leaves_out() -> None:
    text = str(small("dp_shard=2").beside(10**7))
    for word in ("parameters", "optimizer state", "activations", "layers.0 to layers.1", "measured", "fragmentation"):
        assert word in text


def test_the_picture_is_svg_with_a_panel_for_each() -> None:
    picture = svg({"one": small("dp_shard=1"), "two": small("dp_shard=2")})
    assert picture.startswith("<svg") and picture.count("<circle") == 2


def test_a_model_whose_step_depends_on_values_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 4)
            self.head = nn.Linear(4, 16)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(input_ids)
            return self.head(hidden * hidden.sum().item())

    with torch.device("meta"):
        model = Reads()
    with pytest.raises(PlanError, match="reads a value of a torch.float32 tensor"):
        mk.estimate(model, "dp_shard=1", plan=mk.Plan(tensor={}), rows=1, seq_len=4)
    assert not dist.is_initialized()


class Normalised(nn.Module):
    """With buffers of floats, of whole numbers that it reads, and one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 32)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("again", self.scale)
        self.register_buffer("order", torch.arange(8).flip(0))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(input_ids)) * self.scale + self.again
        return self.head(hidden[..., self.order])


def _of_transformers() -> nn.Module:
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(TheirConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def _with_experts() -> nn.Module:
    return build_model(
        Qwen3MoeConfig(
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
            **{"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        )
    )


def _latent() -> nn.Module:
    return build_model(
        DeepseekV3Config(
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 1},
            **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
        )
    )


@pytest.mark.parametrize(
    ("build", "mesh"),
    [(Normalised, "dp_shard=2"), (_of_transformers, "tp=2"), (_with_experts, "tp=2"), (_latent, "dp_shard=2")],
)
def test_a_model_with_values_is_that_on_meta_and_keeps_them(build: Callable[[], nn.Module], mesh: str) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mk.estimate(model, mesh, rows=2, seq_len=8)
    with meta_parameters():
        empty = build()
    expected = mk.estimate(empty, mesh, rows=2, seq_len=8)
    assert found.peak.totals == expected.peak.totals
    assert found.activations == expected.activations
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(MeshError, match="dp_shard=3 needs a multiple of 3 ranks"):
        small("dp_shard=3", world_size=8)
    with pytest.raises(PlanError, match="coordinate dp_shard=2, but dp_shard has the places 0 to 1"):
        small("dp_shard=2", coordinate={"dp_shard": 2})
    with pytest.raises(PlanError, match="makes its own choices, but got zero"):
        mk.estimate(lambda mesh: mk.parallelize(on_meta(), mesh), "dp_shard=2", rows=1, seq_len=8, zero=2)
    with pytest.raises(MeshError, match=r"estimate\(model, strategy=\.\.\.\), whose mesh is taken"):
        mk.estimate(on_meta(), mk.Strategy(mesh="dp_shard=2"), rows=1, seq_len=8)  # type: ignore[arg-type]  # see the text
    with pytest.raises(PlanError, match="kernels='tpu' are not known"):
        small("dp_shard=1", kernels="tpu")


def test_whole_numbers_are_real_and_floats_are_not() -> None:
    with Shapes():
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        floats = torch.zeros(4)
        assert not (floats > 1).any()
        with pytest.raises(PlanError, match="an estimate has no values"):
            floats.tolist()


def test_error_feedback_costs_two_bytes_for_each_element_of_the_whole_parameters() -> None:
    policies = [mk.strategy.DataPolicy(reduce="int4", feedback=feedback) for feedback in (False, True)]
    without, with_it = (small("dp_replicate=2 dp_shard=4", memory=mk.MemoryPolicy(), data=each) for each in policies)
    elements = sum(param.numel() for param in on_meta().parameters())
    assert with_it.peak_bytes - without.peak_bytes == pytest.approx(
        2 * elements, rel=0.01
    )  # allocations are rounded up
