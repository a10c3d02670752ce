"""A composed estimate of offloaded activations against the traced one, where blocks are what is held. One process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.models import LLAMA_PLAN, meta_parameters
from meshkit.preflight.estimate import MemoryProfiles, compose, estimate
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.strategy import ActivationOffload
from tests.depth import covering, thin
from tests.tiny import tiny_config

# A small vocabulary: the peak is in a block, where a window of what moves shows, and not in the loss.
SMALL = tiny_config(
    vocab_size=64, hidden_size=128, intermediate_size=448, num_hidden_layers=8, num_key_value_heads=1, head_dim=32
)
MOE = mk.models.MixtralConfig(**vars(SMALL), num_local_experts=4, num_experts_per_tok=2)
PLANS = {"llama": LLAMA_PLAN, "moe": mk.models.model_plan(MOE), "gpt": None}
POLICIES = {
    "default": ActivationOffload(),
    "all": ActivationOffload(keep_last=0),
    "late": ActivationOffload(ahead=0, keep_last=2),
    "early": ActivationOffload(ahead=3),
    "large": ActivationOffload(min_bytes=300_000, keep_last=0),
    "disk": ActivationOffload(to="disk"),
}
TABLE: dict[str, list[Any]] = {
    "model": ["llama", "gpt", "moe"],
    "mesh": [
        "dp_shard=1", "dp_shard=8", "dp_replicate=2 dp_shard=2", "tp=2 dp_shard=2", "cp=2", "pp=2", "pp=3 dp_shard=2",
        "pp=2 tp=2", "dp_shard=2 ep=2", "dp_shard=4 ep=2",
    ],
    "policy": list(POLICIES),
    "schedule": ["1f1b", "interleaved", "zb-h1", "zbv"],
    "recompute": ["none", "selective", "full"],
    "precision": [mk.strategy.Precision(), None],
    "zero": [3, 1],
    "microbatches": [1, 2, 5],
    "kernels": ["cuda", "cpu"],
}  # fmt: skip


@cache
def model_of(name: str) -> nn.Module:
    with meta_parameters():
        if name == "gpt":
            return GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=64, n_positions=256, n_embd=128, n_layer=6, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0, bos_token_id=0, eos_token_id=0, use_cache=False,
                )
            )  # fmt: skip
        return mk.models.Mixtral(MOE) if name == "moe" else mk.models.Llama(SMALL)


def legal(row: dict[str, Any]) -> bool:
    pipelined = "pp=" in row["mesh"]
    return ("ep=" not in row["mesh"] or row["model"] == "moe") and (row["schedule"] == "1f1b" or pipelined)


def strategy_of(row: dict[str, Any]) -> mk.Strategy:
    pipelined = "pp=" in row["mesh"]
    return mk.Strategy(
        mesh=row["mesh"],
        plan=PLANS[row["model"]],
        zero=None if pipelined else row["zero"],
        microbatches=row["microbatches"],
        memory=mk.MemoryPolicy(recompute=row["recompute"], precision=row["precision"], offload=POLICIES[row["policy"]]),
        pipeline=mk.strategy.PipelinePolicy(schedule=row["schedule"] if pipelined else "1f1b"),
    )


def resolved(model: nn.Module, strategy: mk.Strategy) -> Resolved:
    return resolve(read_program(model), strategy, strategy.mesh_for())


CELLS = [row for row in covering(TABLE) if legal(row)]


@pytest.mark.parametrize(
    "row", thin(CELLS, 12), ids=lambda row: f"{row['model']}, {row['mesh']}, {row['policy']}, {row['recompute']}"
)
def test_a_composed_peak_of_offloaded_activations_is_the_traced_one(row: dict[str, Any]) -> None:
    model, strategy = model_of(row["model"]), strategy_of(row)
    step: dict[str, Any] = {"rows": 2 * row["microbatches"], "seq_len": 256, "kernels": row["kernels"]}
    try:
        composed = compose(resolved(model, strategy), **step)
    except PlanError as error:
        pytest.skip(str(error).splitlines()[0])
    assert composed.source == "composed"
    for rank in composed.ranks:
        # All microbatches: of zbv the fewest that `estimate` runs have another peak.
        traced = estimate(model, strategy=strategy, coordinate={"pp": rank.pp_rank}, every_microbatch=True, **step)
        assert rank.peak_bytes == pytest.approx(traced.peak_bytes, rel=composed.within), (rank.where, traced.where)
        assert rank.offloaded_bytes == traced.offloaded_bytes > 0 or rank.pp_rank
        assert traced.host_bytes >= traced.offloaded_bytes


def test_what_is_offloaded_is_said() -> None:
    strategy = mk.Strategy(mesh="dp_shard=2", plan=LLAMA_PLAN, memory=mk.MemoryPolicy(offload=ActivationOffload()))
    step: dict[str, Any] = {"rows": 2, "seq_len": 64}
    composed = compose(resolved(model_of("llama"), strategy), **step)
    traced = estimate(model_of("llama"), strategy=strategy, **step)
    assert "offloaded" in str(composed) and "activations offloaded" in str(traced)
    assert composed.at_peak["on the host"] == composed.worst.host_bytes == composed.worst.offloaded_bytes
    staged = mk.MemoryPolicy(offload=ActivationOffload(to="disk", staging=4096))
    on_disk = compose(
        resolved(model_of("llama"), mk.Strategy(mesh="dp_shard=2", plan=LLAMA_PLAN, memory=staged)), **step
    )
    assert (on_disk.peak_bytes, on_disk.worst.offloaded_bytes) == (composed.peak_bytes, composed.worst.offloaded_bytes)
    assert on_disk.worst.host_bytes == 4096


def test_policies_that_move_the_same_trace_nothing_again() -> None:
    profiles, program = MemoryProfiles(), read_program(model_of("llama"))
    peaks = set()
    for mesh, policy in (("dp_shard=2", {}), ("dp_shard=8", {"ahead": 3}), ("pp=2", {"to": "disk"})):
        memory = mk.MemoryPolicy(offload=ActivationOffload(**policy))  # type: ignore[arg-type]
        strategy = mk.Strategy(mesh=mesh, plan=LLAMA_PLAN, memory=memory)
        found = compose(resolve(program, strategy, strategy.mesh_for()), rows=4, seq_len=64, profiles=profiles)
        peaks.add(found.peak_bytes)
    assert len(profiles) == 1 and len(peaks) == 3


class Scaled(nn.Module):
    """Saves the scale that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Any, scale: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x))) * scale


class SharedScale(nn.Module):
    """One scale for all blocks, which trains: the first block moves it, and all need it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(64, 64), nn.Embedding(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, input_ids: Any) -> Any:
        x, scale = self.embed(input_ids), self.place(input_ids).exp()
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)


def test_blocks_that_share_what_moves_are_traced_whole() -> None:
    with meta_parameters():
        model = SharedScale()
    strategy = mk.Strategy(mesh="dp_shard=1", memory=mk.MemoryPolicy(offload=ActivationOffload(min_bytes=1)))
    found = compose(resolved(model, strategy), rows=2, seq_len=32)
    assert found.source == "traced" and "what is offloaded of one block is another's too" in found.why
    assert found.peak_bytes == estimate(model, strategy=strategy, rows=2, seq_len=32).peak_bytes
