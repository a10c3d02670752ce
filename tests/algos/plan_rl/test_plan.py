"""Costs against closed forms; the plan of a recipe says what its flow runs, and what a plan says can be run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.algos.dataflow import PROMPTED, Call, Sample, Sync, Work, program
from meshkit.algos.plan_rl import (
    Alternative,
    Costs,
    PlannedModel,
    PlannedRun,
    PlanSpace,
    plan_rl,
    problem_of,
    read_meshes,
)
from meshkit.algos.plan_rl._moves import Moves
from meshkit.algos.plan_rl.command import command
from meshkit.cluster import Cluster
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from tests.recipes.launch import run
from tests.tiny import tiny_config
from tests.world import pool

ROOT = Path(__file__).parents[3]
TOL_NORMS = 0.05  # relative: beside weights and cache, a decode step reads and writes activations and norms
H100 = Cluster.read("h100")
FREE = 1e30


def bound_by_memory() -> Cluster:
    """Of the device only the memory takes time, and no kernel is launched."""
    return H100.changed(
        **{
            "device.launch_s": 0.0,
            "device.efficiency.memory": 1.0,
            "device.efficiency.half_bytes": 0.0,
            "device.efficiency.half_features": 0.0,
            "device.efficiency.half_depth": 0.0,
            "device.efficiency.matmul": 1.0,
        }
    )


def planned(**changes: Any) -> PlannedModel:
    with torch.device("meta"):
        model = mk.models.Llama(tiny_config(**changes))
    return PlannedModel(module=model, plan=mk.models.LLAMA_PLAN)


def costs(model: PlannedModel, cluster: Cluster) -> Costs:
    fixed = mk.Strategy(memory=mk.MemoryPolicy(precision=mk.strategy.Precision()))
    return Costs({"actor": model}, cluster, fixed=fixed, tokens_per_microbatch=1024, device_bytes=None)


def test_a_decode_step_reads_the_weights_once_and_the_cache_of_every_row() -> None:
    """In bf16: 2 bytes a parameter but the embedding's, of which a row each is read; keys and values three times."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = planned(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=1024, **heads)
    config = model.module.config
    peaks = {**H100.device.flops_per_s, "bfloat16": FREE, "float32": FREE}
    cluster = bound_by_memory()
    cluster = replace(cluster, device=replace(cluster.device, flops_per_s=peaks))
    sizes = {"model": "actor", "kind": "generate", "rows": 4, "prompt": 100}
    of = costs(model, cluster)
    few, many = (of.of(Work(**sizes, new=new), MeshSpec()).seconds for new in (101, 301))
    weights = 2 * sum(each.numel() for name, each in model.module.named_parameters() if "embed" not in name)
    cache = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    rate = cluster.device.memory_bytes_per_s

    def decode_s(new: int) -> float:
        return (new - 1) * (weights + 3 * 4 * (100 + new / 2) * cache) / rate

    # The prefill of 100 tokens is the same, and taken away.
    assert many - few == pytest.approx(decode_s(301) - decode_s(101), rel=TOL_NORMS)


def test_minibatches_are_steps_and_passes_repeat_them() -> None:
    of = costs(planned(), H100)
    sizes: dict[str, Any] = {"model": "actor", "kind": "train", "prompt": 16, "new": 16}
    spec = MeshSpec(dp_shard=2)
    step_s = of.of(Work(rows=8, **sizes), spec).seconds
    assert of.of(Work(rows=32, minibatches=4, passes=3, **sizes), spec).seconds == pytest.approx(12 * step_s)
    infer_s = of.of(Work(**{**sizes, "kind": "infer"}, rows=8), spec).seconds
    assert 0 < infer_s < step_s


def test_seconds_of_a_sync_are_its_bytes_over_the_link() -> None:
    model = planned()
    moves = Moves({"actor": model}, H100, unit_ranks=1, dtype=torch.bfloat16)
    of = costs(model, H100)
    sizes: dict[str, Any] = {"model": "actor", "rows": 8, "prompt": 8, "new": 8}

    def lies(first: int, count: int, layout: str, kind: str) -> Alternative:
        held = of.of(Work(kind=kind, **sizes), MeshSpec.parse(layout)).static_bytes
        return Alternative(first=first, count=count, layout=layout, seconds={}, static_bytes={"actor": held})

    one, other = lies(0, 1, "dp_shard=1", "train"), lies(1, 1, "dp_shard=1", "generate")
    size = 2 * sum(each.numel() for each in model.module.parameters())
    tier = H100.tiers[0]
    assert moves.seconds("actor", one, other) == pytest.approx(tier.latency_s + size / tier.carried_bytes_per_s)
    # The nearest half of a copy on the same ranks is there already: each rank lacks the other half.
    half, whole = lies(0, 2, "dp_shard=2", "train"), lies(0, 2, "dp_replicate=2", "generate")
    assert moves.seconds("actor", half, whole) == pytest.approx(
        tier.latency_s + size / 2 / tier.carried_bytes_per_s, rel=0.02
    )
    for source, destination in ((one, other), (half, whole), (half, other)):
        least_s = moves.least_s("actor", source, destination)
        assert 0 < least_s <= moves.seconds("actor", source, destination) * (1 + 1e-9)


def nothing(samples: list[Sample]) -> None:
    """Of a call that is planned alone."""


def test_a_plan_is_read_and_made_by_every_rank(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"model": "actor", "rows": 8, "prompt": 8, "new": 8}
    calls = [
        Call(name="write", on="write", function=nothing, gives=["a"], works=[Work(kind="generate", **sizes)]),
        Call(
            name="learn", on="learn", function=nothing, needs=["a"], stage="train", works=[Work(kind="train", **sizes)]
        ),
    ]
    asked = PlannedRun(calls=calls, models={"actor": planned()}, staleness=1)
    plan = plan_rl(asked, "cpu", world=2, space=PlanSpace(pp=(1,), recompute=("none",)), workers=2)
    plan.write(tmp_path / "plan.toml")
    assert plan.gap <= 0.02
    meshes = pool(2).run(made_meshes, tmp_path / "plan.toml")
    for name in ("write", "learn"):
        assert [rank for rank, here in enumerate(meshes) if here[name]] == list(plan.ranks(name))
    with pytest.raises(PlanError, match="a plan with a mesh for each call has no flags"):
        _ = plan.flags


def made_meshes(path: Path) -> dict[str, bool]:
    return {name: mesh.here for name, mesh in read_meshes(path).items()}


TINY = ["--prompts", "4", "--samples", "2", "--kl", "0.1"]


def test_the_command_prints_flags_that_the_recipe_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the calls that it planned are those of the recipe's flow."""
    out = tmp_path / "plan.toml"
    args = [str(ROOT / "examples/ppo.py"), "--world", "2", "--cluster", "cpu", "--pp", "1", "--out", str(out)]
    command([*args, "--svg", str(tmp_path / "plan.svg"), *TINY])
    said = capsys.readouterr().out
    flags = next(line for line in said.splitlines() if line.startswith("--mesh"))
    assert '<svg xmlns="http://www.w3.org/2000/svg"' in (tmp_path / "plan.svg").read_text()
    words = [word.strip('"') for word in flags.replace('" --', '"\n--').replace(" ", "\n", 0).splitlines()]
    given = [part for word in words for part in word.split(' "' if ' "' in word else " ", 1)]
    given = [part.strip('"') for part in given]
    short = ["--steps", "3", "--sft-steps", "1", "--eval-prompts", "4", "--warmup-steps", "0", "--epochs", "1"]
    status, output = run(2, ROOT / "examples/ppo.py", *given, *TINY, *short, "--out", str(tmp_path / "run"))
    assert status == 0, output
    config = mk_recipe().Config(prompts=4, samples=2, kl=0.1)
    asked = mk_recipe().planned_calls(config)
    syncs = [Sync(name="weights", source="actor", destination="sampler", function=lambda: None)]
    syncs = syncs if "--sampler-mesh" in flags else []
    rows = program(list(asked.calls), syncs, PROMPTED, iterations=range(2, 3), total=9, staleness=0, made=2)
    for row in rows:
        assert str(row).split(maxsplit=1)[1] in output, row


def mk_recipe() -> Any:
    from meshkit.preflight.estimate.recipe import load_script

    return load_script(ROOT / "examples/ppo.py", verb="plan-rl", needs=("Config", "planned_calls"), flags=())


def test_refusals_say_what_to_change(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"model": "actor", "rows": 8, "prompt": 8, "new": 8}
    with pytest.raises(PlanError, match="kind='score'.: choose one of generate, infer, train"):
        Work(**{**sizes, "kind": "score"})
    with pytest.raises(PlanError, match="minibatches=9.* of 'actor' with rows=8"):
        Work(kind="train", minibatches=9, **sizes)
    calls = [Call(name="learn", on="learn", function=nothing, stage="train", works=[Work(kind="train", **sizes)])]
    asked = PlannedRun(calls=calls, models={"actor": planned()})
    with pytest.raises(PlanError, match="world=12.*: not of whole units of 8 ranks"):
        problem_of(asked, "h100", world=12)
    with pytest.raises(PlanError, match="no layout runs the calls of mesh 'learn': memory is too small"):
        problem_of(asked, "cpu", world=1, device_memory=1000.0, space=PlanSpace(pp=(1,)))
    with pytest.raises(PlanError, match="model 'actor', which is not there. There are critic"):
        problem_of(replace(asked, models={"critic": planned()}), "cpu", world=1)
    no_plan = tmp_path / "x.toml"
    no_plan.write_text("a = 1")
    with pytest.raises(PlanError, match="is no plan of plan_rl"):
        read_meshes(no_plan)
    script = tmp_path / "script.py"
    script.write_text("class Config: ...\n")
    with pytest.raises(PlanError, match="has no planned_calls. The command needs"):
        command([str(script), "--world", "1"])
