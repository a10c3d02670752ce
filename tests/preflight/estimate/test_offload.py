"""Estimates of what leaves the device, or is kept in fewer bits, against closed forms and real optimizers. One process."""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.core.host_accounting import lies_on_host
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.optim import LowBitAdamW, OffloadedAdamW
from tests.tiny import tiny_config

SHAPE = tiny_config(
    vocab_size=512, hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_key_value_heads=1, head_dim=32
)
BF16 = mk.MemoryPolicy(precision=mk.strategy.Precision())
SHORT = dataclasses.replace(SHAPE, num_hidden_layers=1)  # for what holds of each parameter
OFFLOADED = mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload())


def on_meta(shape: LlamaConfig = SHAPE) -> Llama:
    with torch.device("meta"):
        return Llama(shape)


@functools.cache
def estimated(
    mesh: str = "dp_shard=1", *, shape: LlamaConfig = SHAPE, kernels: str = "cuda", **memory: object
) -> mk.preflight.estimate.Estimate:
    policy = dataclasses.replace(BF16, **memory)  # type: ignore[arg-type]
    return mk.estimate(on_meta(shape), mesh, plan=LLAMA_PLAN, rows=4, seq_len=64, memory=policy, kernels=kernels)  # type: ignore[arg-type]


def test_the_device_keeps_the_last_block_and_those_on_their_way_out() -> None:
    """At the end of the forward: of four alike, the last stays and at most two are leaving; on a CPU copies are over."""
    whole, gone = estimated(), estimated(offload=mk.strategy.ActivationOffload())
    block = whole.activations["layers.1"]
    around = whole.after_forward["activations"] - 4 * block
    small_ones = 4 * 4 * 4096  # storages below min_bytes stay
    assert abs(gone.after_forward["activations"] - around - 2 * block) <= small_ones  # the last, and one that leaves
    assert gone.most["activations"] <= around + 3 * block + small_ones
    on_cpu = estimated(offload=mk.strategy.ActivationOffload(), kernels="cpu")
    cpu_block = estimated(kernels="cpu").activations["layers.1"]
    assert on_cpu.after_forward["activations"] < around + 2 * cpu_block
    assert gone.host_bytes >= block


def test_full_recompute_and_offload_keep_three_inputs_of_blocks() -> None:
    hidden = 2 * 4 * 64 * 128
    found = estimated(recompute="full", offload=mk.strategy.ActivationOffload())
    assert [found.activations.get(f"layers.{index}", 0) for index in range(4)] == [0, hidden, hidden, hidden]


def test_an_estimate_writes_no_file_and_begins_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    found = estimated(offload=mk.strategy.ActivationOffload(to="disk", folder=tmp_path))
    assert found.peak_bytes == estimated(offload=mk.strategy.ActivationOffload()).peak_bytes
    assert not list(tmp_path.iterdir())
    delayed = mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload(delayed=True))
    assert estimated(shape=SHORT, optimizer=delayed).optimizer_bytes == 0
    assert threading.active_count() == before


def test_reserved_bytes_count_before_the_first_step() -> None:
    assert estimated(offload=mk.strategy.ActivationOffload(reserve=1 << 30)).host_bytes == 1 << 30


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_offloaded_optimizer_has_16_bytes_of_each_parameter_on_the_host_and_none_on_the_device(ranks: int) -> None:
    found = estimated(f"dp_shard={ranks}", shape=SHORT, optimizer=OFFLOADED)
    model = on_meta(SHORT)
    real = 16 * sum(param.numel() for param in model.parameters()) / ranks
    assert real <= found.host_bytes <= 2 * real  # in one slab, a power of two
    assert found.optimizer_bytes == 0
    assert found.gradient_bytes == 0


def test_the_hosts_bytes_are_those_of_the_real_optimizer() -> None:
    model = on_meta(SHORT).to_empty(device="cpu")
    optimizer = OffloadedAdamW(model.parameters())
    slabs = {
        state["exp_avg"].untyped_storage()._cdata: state["exp_avg"].untyped_storage()
        for state in optimizer.state.values()
    }
    assert all(lies_on_host(slab) for slab in slabs.values())
    steps = 512 * len(optimizer.state)
    found = estimated(shape=SHORT, optimizer=OFFLOADED)
    assert found.host_bytes == sum(slab.nbytes() for slab in slabs.values()) + steps


def test_a_share_that_stays_is_state_of_the_device() -> None:
    half = estimated(
        shape=SHORT, optimizer=mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload(resident=0.5))
    )
    whole = estimated(shape=SHORT)
    assert half.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 2, rel=0.1)
    assert half.host_bytes < estimated(shape=SHORT, optimizer=OFFLOADED).host_bytes


@pytest.mark.parametrize(("states", "each"), [("8bit", 2 + 8 / 256), ("fp8", 2 + 8 / 256), ("4bit", 1 + 8 / 128)])
def test_moments_in_few_bits_are_what_the_real_optimizer_holds(states: str, each: float) -> None:
    found = estimated(shape=SHORT, optimizer=mk.strategy.OptimizerPolicy(states=states))  # type: ignore[arg-type]
    model = on_meta(SHORT).to_empty(device="cpu")
    optimizer = LowBitAdamW(model.parameters(), states=states)  # type: ignore[arg-type]
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    numbers = sum(param.numel() for param in model.parameters())
    after_forward = found.after_forward["optimizer state"]
    assert after_forward == pytest.approx(held, rel=0.1)  # sizes are rounded up to 512
    assert each * numbers <= after_forward <= 1.2 * each * numbers  # rows of 128 are less than a block


def test_stochastic_rounding_needs_no_values() -> None:
    model = on_meta(SHORT).to(torch.bfloat16)
    policy = mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(stochastic_rounding=True))
    found = mk.estimate(model, "dp_shard=2", plan=LLAMA_PLAN, rows=4, seq_len=64, memory=policy)
    numbers = sum(param.numel() for param in model.parameters())
    assert found.parameter_bytes == pytest.approx(2 * numbers / 2, rel=0.05)
    assert found.after_forward["optimizer state"] == pytest.approx(8 * numbers / 2, rel=0.05)


def test_all_of_it_together_leaves_less_on_the_device() -> None:
    found = estimated(
        "dp_shard=2",
        recompute="full",
        offload=mk.strategy.ActivationOffload(),
        loss=mk.strategy.ChunkedLoss(tokens=32),
        optimizer=OFFLOADED,
    )
    assert found.peak_bytes < estimated("dp_shard=2").peak_bytes / 2
    assert found.optimizer_bytes == 0
