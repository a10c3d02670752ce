"""forecast: the messages are explain's, the refusals parallelize's, and the command's forecast that of the function."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.cluster import Cluster
from meshkit.errors import ClusterError, DataError, PlanError
from meshkit.preflight.explain import Message, explain_resolved
from meshkit.preflight.forecast import Batch, Profiles, StepProfile, forecast, profile_step
from meshkit.program import read_program
from meshkit.resolve import resolve
from tests.tiny import tiny_config, tiny_deepseek

ROOT = Path(__file__).parents[3]
CONFIG = tiny_config(num_hidden_layers=4)


def on_meta(config: Any = CONFIG) -> nn.Module:
    with torch.device("meta"):
        return mk.models.Llama(config)


def profiled(mesh: str, **choices: Any) -> tuple[StepProfile, list[Counter[Message]]]:
    """The step's profile, and what `explain` says of each rank of pp."""
    strategy = mk.Strategy(mesh=mesh, **choices)
    spec = strategy.mesh_for()
    resolved = resolve(read_program(on_meta()), strategy, spec)
    batch = Batch(sequences=4 * spec.dp_replicate * spec.dp_shard, seq_len=16)
    count = strategy.microbatches or 1
    profile = profile_step(resolved, batch, microbatches=count, kernels="cpu", profiles=Profiles())
    said = [
        explain_resolved(resolved, rows=4, seq_len=16, microbatches=count, coordinate={"pp": rank}).messages
        for rank in range(spec.pp)
    ]
    return profile, said


def priced_messages(profile: StepProfile, stages: list[int]) -> Counter[Message]:
    """Of a rank with these stages, without what crosses stages and what a step sends once."""
    messages: Counter[Message] = Counter()
    for part in (part for stage in stages for part in profile.stages[stage]):
        for call in part.calls:
            messages[Message(call.axis, call.op, call.size)] += call.count * profile.microbatches
        for call in part.data:
            messages[Message(call.axis, call.op, call.size)] += call.count
    return messages


@pytest.mark.parametrize(
    ("mesh", "choices"),
    [
        ("dp_shard=4", {"microbatches": 2}),
        ("dp_replicate=2 dp_shard=2 tp=2", {"sequence": True, "zero": 2}),
        ("tp=4", {"memory": mk.MemoryPolicy(recompute="full"), "sequence": True}),
        ("cp=2 tp=2", {"microbatches": 2}),
        ("pp=2 dp_shard=2", {"microbatches": 4}),
        ("pp=2 tp=2", {"microbatches": 4, "pipeline": mk.strategy.PipelinePolicy(schedule="interleaved")}),
    ],
    ids=str,
)
def test_messages_of_a_profile_are_those_that_explain_says(mesh: str, choices: dict[str, Any]) -> None:
    profile, said = profiled(mesh, **choices)
    once: Counter[Message] = Counter()
    for call in profile.once:
        once[Message(call.axis, call.op, call.size)] += call.count
    for rank, expected in enumerate(said):
        stages = [0] if profile.schedule is None else list(profile.schedule.stages_of(rank))
        found = priced_messages(profile, stages)
        rest = expected - found
        assert found - expected == Counter(), "priced, and not sent"
        assert {message for message in rest if message.axis != "pp"} <= set(once), "sent, and not priced"
        crossing = [size for each in profile.crossing for size in each]
        assert all(message.size in crossing for message in rest if message.axis == "pp" and message not in once)


def test_gradients_that_microbatches_add_up_are_those_of_a_ranks_own_experts() -> None:
    """Under ZeRO-1 a rank has whole gradients of what is dense, and of experts those of its part of ep."""
    config = tiny_deepseek(first_k_dense_replace=0, num_hidden_layers=2)
    with mk.models.meta_parameters():
        model = mk.models.DeepseekV3(config)
    strategy = mk.Strategy(mesh="dp_shard=4 ep=2", zero=1, microbatches=2, plan=mk.models.model_plan(config))
    batch = Batch(sequences=8, seq_len=16)
    told = forecast(model, strategy, "h100", batch)
    part = next(part for part in told.profile.stages[0] if part.name == "layers.0")
    sizes = {name: param.numel() for name, param in model.named_parameters() if name.startswith("layers.0.")}
    stacked = {name: size for name, size in sizes.items() if ".experts." in name}
    assert len(stacked) == 3
    assert part.grad_bytes == 4 * (sum(sizes.values()) - sum(stacked.values()) // 2)


def test_stages_that_microbatches_skip_compute_and_send_less() -> None:
    table = mk.schedules.skip_pipe(4, 4)
    skipping, said = profiled("pp=4 tp=2", microbatches=4, pipeline=mk.strategy.PipelinePolicy(schedule=table))
    full, _ = profiled("pp=4 tp=2", microbatches=4)
    assert skipping.passing == table.passing == (4, 2, 2, 4) and full.passing == (4,) * 4
    # A block's matrices have the same FLOPs in each stage; the head has more, and is never skipped.
    assert full.flops - skipping.flops == pytest.approx(4 * block_flops(full))
    sent = [sum(count for message, count in each.items() if message.axis == "tp") for each in said]
    assert sent[1] == sent[2] < sent[0]
    hops = [sum(count for message, count in each.items() if message.axis == "pp") for each in said]
    assert hops[1] == 2 * 2  # two microbatches, to the last stage and back to the first
    seconds = [
        forecast(
            on_meta(),
            cluster="h100",
            mesh="pp=4 tp=2",
            batch=Batch(sequences=4, seq_len=16),
            microbatches=4,
            pipeline=mk.strategy.PipelinePolicy(schedule=each),
        ).seconds
        for each in (table, "1f1b")
    ]
    assert seconds[0] < seconds[1]


def block_flops(profile: StepProfile) -> float:
    """Of one microbatch on all ranks of tp, by the second stage, which has one block."""
    return sum(part.profile.flops() for part in profile.stages[1]) * profile.spec.tp


def test_profiles_are_kept_for_strategies_that_compute_the_same() -> None:
    model, profiles = on_meta(), Profiles()
    told = [
        forecast(
            model,
            mk.Strategy(mesh=mesh, microbatches=4),
            "h100",
            Batch(sequences=rows, seq_len=16),
            profiles=profiles,
        )
        for mesh, rows in (("dp_shard=2", 8), ("pp=2 dp_shard=2", 8), ("pp=4", 4), ("dp_replicate=4", 16))
    ]
    assert len(profiles) == 1
    assert len({each.seconds for each in told}) == 4


def test_another_cluster_needs_no_other_trace() -> None:
    told = forecast(on_meta(), mesh="dp_shard=2", cluster="h100", batch=Batch(sequences=2, seq_len=16))
    slow = told.on(Cluster.read("cpu"))
    assert slow.seconds > told.seconds and slow.profile is told.profile
    assert slow.tokens_per_s == pytest.approx(32 / slow.seconds)


def test_the_printed_form_has_the_ledger_and_its_level() -> None:
    text = str(forecast(on_meta(), mesh="dp_shard=2 tp=2", batch=Batch(sequences=2, seq_len=16)).beside(1.0))
    for words in (
        "4 ranks, dp_shard=2 tp=2, 1 microbatch, on H100 SXM 80GB",
        "MFU",
        "matmul",
        "tp",
        "datasheet",
        "measured 1 s",
    ):
        assert words in text


def test_refusals_are_those_of_parallelize() -> None:
    with pytest.raises(PlanError, match="seq_len=15 with sequence=True: the 2 ranks of tp cannot share 15 tokens"):
        forecast(on_meta(), mesh="tp=2", sequence=True, batch=Batch(sequences=1, seq_len=15))
    with pytest.raises(PlanError, match="zero=3 with pp"):
        forecast(on_meta(), mesh="pp=2", zero=3)
    with pytest.raises(ClusterError, match="'h99': there is no such file or datasheet"):
        forecast(on_meta(), cluster="h99")
    with pytest.raises(DataError, match=r"Batch\(sequences=0\)"):
        Batch(sequences=0, seq_len=1)


def test_the_command_forecasts_a_recipe() -> None:
    args = ["--mesh", "pp=2 tp=2", "--microbatches", "4", "--cluster", "cpu", "--also", "h100"]
    script = [sys.executable, "-m", "meshkit", "forecast", "examples/llama_pretrain.py", *args]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "4 ranks, pp=2 tp=2, 4 microbatches, on CPU core" in done.stdout
    assert "bubble" in done.stdout and "on h100: " in done.stdout


def test_a_forecast_of_known_profiles_traces_and_checks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, profiles = on_meta(), Profiles()

    def told(mesh: str) -> float:
        strategy = mk.Strategy(mesh=mesh, microbatches=4)
        return forecast(model, strategy, "h100", Batch(sequences=16, seq_len=16), profiles=profiles).seconds

    first = [told(mesh) for mesh in ("pp=2 dp_shard=2", "dp_shard=4")]

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("once")

    monkeypatch.setattr("meshkit.parallel.pipeline._cut.check", never)
    monkeypatch.setattr("meshkit.parallel.pipeline._table._order", never)
    monkeypatch.setattr("meshkit.preflight.forecast._forecast.profile_model", never)
    monkeypatch.setattr("meshkit.preflight.explain._traffic._units", never)
    assert [told(mesh) for mesh in ("pp=2 dp_shard=2", "dp_shard=4")] == first
