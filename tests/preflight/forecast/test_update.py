"""What the optimizer's step is priced at: closed forms, and the passes that the low-bit update really makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.rng import CHUNK
from meshkit.optim import LowBitAdamW
from meshkit.preflight.forecast._update import PASSES, Update
from meshkit.strategy import (
    DataPolicy,
    Fp8,
    MemoryPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    Precision,
    States,
    Strategy,
)
from tests.preflight.forecast.test_price import MACHINE

ELEMENTS = 10**9
SIZES = mk.models.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


class Passes(TorchDispatchMode):
    """Bytes that operators read and write, and how many there are."""

    size = count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
            self.size += sum(tensor.nbytes for tensor in tensors)
            self.count += 1
        return out


@pytest.mark.parametrize(("states", "rounds"), PASSES)
def test_the_low_bit_update_makes_the_passes_that_are_priced(states: States, rounds: bool) -> None:
    param = nn.Parameter(torch.randn(2048, 2048, dtype=torch.bfloat16 if rounds else torch.float32))
    assert param.numel() == CHUNK
    optimizer = LowBitAdamW([param], states=states, stochastic_rounding=rounds)
    param.grad = torch.randn_like(param)
    optimizer.step()  # the first makes tables
    with Passes() as passes:
        optimizer.step()
    size, operators = PASSES[states, rounds]
    assert passes.size / param.numel() == pytest.approx(size, rel=0.01)
    assert passes.count == operators


def seconds(policy: OptimizerPolicy, *, stages: bool = False, backward_s: float = 0.0, step_s: float = 0.0) -> float:
    update = Update.of(policy, stages=stages)
    return update.seconds(ELEMENTS, MACHINE, backward_s=backward_s, step_s=step_s)


def test_a_fused_update_is_its_bytes() -> None:
    assert seconds(OptimizerPolicy()) == pytest.approx(ELEMENTS * (28 + 12) / 1e9)


def test_an_update_of_few_bits_is_its_passes() -> None:
    assert seconds(OptimizerPolicy(states="8bit")) == pytest.approx(ELEMENTS * (PASSES["8bit", False][0] + 12) / 1e9)


def test_the_host_updates_after_backward_and_gradients_leave_beside_it() -> None:
    clip_s, crossing_s, host_s = 12.0, 4 / 50, 1.0  # of a billion elements, by the host's own rates
    on_host = OptimizerPolicy(offload=OptimizerOffload())
    assert seconds(on_host) == pytest.approx(clip_s + crossing_s + host_s)
    assert seconds(on_host, backward_s=0.05) == pytest.approx(clip_s + crossing_s - 0.05 + host_s)
    assert seconds(on_host, backward_s=10.0) == pytest.approx(clip_s + host_s)
    assert seconds(on_host, stages=True, backward_s=10.0) == pytest.approx(clip_s + crossing_s + host_s)


def test_what_stays_on_the_device_is_updated_there_and_a_delayed_update_runs_beside_the_step() -> None:
    half = OptimizerPolicy(offload=OptimizerOffload(resident=0.5))
    assert seconds(half, backward_s=10.0) == pytest.approx(12 + 28 / 2 + 0.5)
    late = OptimizerPolicy(offload=OptimizerOffload(delayed=True))
    assert seconds(late, backward_s=10.0, step_s=0.25) == pytest.approx(12 + 0.75)
    assert seconds(late, backward_s=10.0, step_s=30.0) == pytest.approx(12)


def forecast_with(data: DataPolicy | None = None, **memory: object) -> mk.preflight.forecast.Forecast:
    with torch.device("meta"):
        model = mk.models.Llama(SIZES)
    strategy = Strategy(
        plan=mk.models.LLAMA_PLAN,
        memory=MemoryPolicy(**memory),  # type: ignore[arg-type]
        data=data or DataPolicy(),
    )
    return mk.forecast(model, strategy, "h100", mk.Batch(sequences=4, seq_len=64), spec="dp_shard=2")


def test_a_forecast_prices_the_optimizer_of_its_strategy_and_says_what_it_does_not_price() -> None:
    fused, few = (
        forecast_with(optimizer=OptimizerPolicy(states=states)).ledger["optimizer"] for states in ("fp32", "8bit")
    )
    assert few > 4 * fused
    assert "not priced: quantizing of what travels" in str(forecast_with(DataPolicy(reduce="int8")))
    assert "not priced" not in str(forecast_with())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_is_forecast_and_estimated_where_there_is_no_gpu(recipe: str) -> None:
    precision = Precision(fp8=Fp8(recipe=recipe))  # type: ignore[arg-type]
    parts = forecast_with(precision=precision).profile.stages[0]
    block = next(part.profile for part in parts if part.name == "layers.0")
    products = {op.dtype for op, _ in block.ops if op.kind == "matmul"}
    assert products == {"float8_e4m3fn"}
    with torch.device("meta"):
        model = mk.models.Llama(SIZES)
    strategy = Strategy(plan=mk.models.LLAMA_PLAN, memory=MemoryPolicy(precision=precision))
    assert mk.estimate(model, "dp_shard=2", strategy, rows=2, seq_len=64).peak_bytes > 0
