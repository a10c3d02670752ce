"""Are searched plans of reinforcement learning right, and better than Megatron's symmetric heuristic?

    python -m benchmarks.plan_rl --part cpu              # five plans on 4 gloo ranks: measured beside forecast
    python -m benchmarks.plan_rl --part published        # ReaLHF's settings on the datasheet of A100s, no ranks
    python -m benchmarks.plan_rl --part published --record     # adds rows to results/plan_rl.jsonl

cpu: a policy that writes, a reference that reads, a policy that learns, by `Flow` on the meshes of each plan. The ranks
measure themselves as `measure-cluster` does; then all plans run in turn, `--passes` times. Forecasts come after, from the
cluster alone, and once more with each call as much slower as the first plan's was, which then counts no more.
published: models and lengths of ReaLHF's public benchmark scripts (7B on 8 GPUs, 13B on 16, 34B on 32, 70B on 64, with rows
x answers of 128 x 896, 256 x 384 and 512 x 128, prompts of 128, 8 minibatches); the actor is scaled and the critic is 7B, or
the other way round. The heuristic is tp=8, pp=GPUs/8 and dp=1 for every call. 6 calls on 16 nodes are one more setting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.accuracy.fit import spearman
from benchmarks.rows import environment
from meshkit.algos import dataflow, plan_rl, reallocate, rollout
from meshkit.algos.dataflow import Call, Sample, Work
from meshkit.algos.plan_rl import PlannedModel, PlannedRun, PlanSpace, Problem
from meshkit.cluster import Cluster
from meshkit.cluster.measure import measure
from meshkit.errors import PlanError
from meshkit.mesh.world import start_world

RESULTS = Path("benchmarks/results/plan_rl.jsonl")

# ------------------------------------------------------------------------------------------------ five plans on 4 ranks

CONFIG = mk.models.LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=32,
    max_position_embeddings=512,
)
ROWS, PROMPT, NEW = 32, 32, 64
TOKENS_PER_MICROBATCH = 2048
WARMUP, STEPS = 1, 3  # iterations of a pass
RANKS = 4
ALL = dict.fromkeys(("write", "read", "learn"), ("dp_shard=4", 0, 4))
ONE = ("dp_shard=1", 0, 1)
Places = dict[str, tuple[str, int, int]]
"""by mesh: axes, first rank, ranks"""
SETS: dict[str, dict[str, Places]] = {
    # Chosen before anything was measured; forecasts of some differ by less than they may be wrong.
    "close": {
        "sharded": ALL,
        "tensor": dict.fromkeys(ALL, ("tp=4", 0, 4)),
        "mixed": {**ALL, "write": ("dp_replicate=4", 0, 4), "learn": ("dp_shard=2 tp=2", 0, 4)},
        "apart": {"write": ("dp_replicate=2", 2, 2), "read": ("dp_shard=2", 0, 2), "learn": ("dp_shard=2", 0, 2)},
        "pipeline": {"write": ("tp=2", 2, 2), "read": ("tp=2", 2, 2), "learn": ("pp=2 dp_shard=2", 0, 4)},
    },
    # Chosen by their forecasts, each an eighth above the one before or more.
    "spaced": {
        "sharded": ALL,
        "one learns": {"write": ("dp_replicate=4", 0, 4), "read": ONE, "learn": ONE},
        "one writes": {"write": ("dp_shard=1", 3, 1), "read": ("dp_shard=3", 0, 3), "learn": ("dp_shard=3", 0, 3)},
        "tensor writes": {**ALL, "write": ("tp=4", 0, 4)},
        "tensor writes, one learns": {"write": ("tp=4", 0, 4), "read": ONE, "learn": ONE},
    },
}
"""calls are calibrated by the first plan of a set"""
SIZES: dict[str, Any] = {"rows": ROWS, "prompt": PROMPT, "new": NEW}


def meta_model() -> torch.nn.Module:
    with torch.device("meta"):
        return mk.models.Llama(CONFIG)


def calls_of(functions: Mapping[str, Any]) -> list[Call]:
    """The iteration of both the flow and the plan."""
    written = [name for name in dataflow.ROLLOUT if name not in dataflow.PROMPTED]
    return [
        Call(
            name="write",
            on="write",
            function=functions["write"],
            needs=["key"],
            gives=written,
            works=[Work(model="actor", kind="generate", **SIZES)],
        ),
        replace(
            functions["read"],
            name="read",
            on="read",
            needs=dataflow.ROLLOUT,
            works=[Work(model="reference", kind="infer", **SIZES)],
        ),
        Call(
            name="learn",
            on="learn",
            function=functions["learn"],
            needs=[*dataflow.ROLLOUT, "read"],
            stage="train",
            works=[Work(model="actor", kind="train", **SIZES)],
        ),
    ]


def nothing(samples: list[Sample]) -> None:
    """Of a call that is planned alone."""


def flow_of(places: Places, total: int) -> dataflow.Flow:
    by_place = {place: mk.init_mesh(place[0], ranks=range(place[1], place[1] + place[2])) for place in places.values()}
    meshes = {name: by_place[place] for name, place in places.items()}

    def run_on(mesh: mk.Mesh) -> mk.Run | None:
        if not mesh.here:
            return None
        run = mk.parallelize(meta_model(), mesh, plan=mk.models.LLAMA_PLAN)
        mk.init_weights(run.model, seed=0, plan=run.plan)
        return run

    learner, reader = run_on(meshes["learn"]), run_on(meshes["read"])
    writer = learner if places["write"] == places["learn"] else run_on(meshes["write"])
    optimizer = mk.adamw(learner, lr=1e-5) if learner is not None else None
    sampling = rollout.Sampling(max_new_tokens=NEW)

    def write(samples: list[Sample]) -> list[Sample]:
        by_key = {sample["key"]: sample for sample in samples}
        prompts = [
            rollout.Prompt(ids=np.random.default_rng(key).integers(0, CONFIG.vocab_size, PROMPT), key=key)
            for key in by_key
        ]
        assert writer is not None
        written = rollout.generate(writer, prompts, sampling=sampling)
        names = [name for name in dataflow.ROLLOUT if name not in dataflow.PROMPTED]
        return [{**by_key[each.key], **{name: getattr(each, name) for name in names}} for each in written]

    def learn(samples: list[Sample]) -> None:
        assert learner is not None and optimizer is not None
        rows = [np.concatenate([sample["prompt_ids"], sample["ids"]]) for sample in samples]
        ids = torch.from_numpy(np.stack(rows))
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        count = -(-len(rows) // (TOKENS_PER_MICROBATCH // (PROMPT + NEW)))
        count = max(count, min(len(rows), 2 * learner.mesh.spec.pp)) if learner.mesh.spec.pp > 1 else count
        learner.forward_backward(batch, microbatches=count)
        mk.clip_grad_norm(learner, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    read = dataflow.log_prob_call(
        "read", reader, rollout.label_log_probs, on="read", tokens_per_microbatch=TOKENS_PER_MICROBATCH
    )
    syncs = []
    if places["write"] != places["learn"]:
        weights = reallocate.prepare_reallocation(learner, writer)
        syncs = [dataflow.Sync(name="sync", source="learn", destination="write", function=weights)]
    return dataflow.Flow(
        meshes,
        calls_of({"write": write, "read": replace(read, stage="rollout"), "learn": learn}),
        source=lambda step: [{"key": step * ROWS + index, "fields": {}} for index in range(ROWS)],
        fields=dataflow.PROMPTED,
        total=total,
        syncs=syncs,
    )


def measured_world(folder: Path, passes: int, plans: Mapping[str, Places]) -> None:
    """What each rank does; rank 0 writes the cluster, and for each plan seconds of iterations and of calls."""
    start_world("cpu", timedelta(minutes=5))
    torch.set_num_threads(1)
    cluster = measure(torch.device("cpu"), group=dist.group.WORLD)
    periods: defaultdict[str, list[float]] = defaultdict(list)
    calls: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(passes):
        for name, places in plans.items():
            flow = flow_of(places, WARMUP + STEPS + 1)
            for _ in range(WARMUP):
                flow.step()
            for _ in range(STEPS):
                dist.barrier()
                began = time.perf_counter()
                flow.step()
                dist.barrier()
                periods[name].append(time.perf_counter() - began)
                every: list[dict[str, float]] = [{}] * RANKS
                dist.all_gather_object(every, flow.seconds)
                calls[name].append({key: max(each.get(key, 0.0) for each in every) for key in {*every[0], *every[-1]}})
            if dist.get_rank() == 0:
                print(f"{name}: {statistics.median(periods[name]):.3f} s", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        cluster.write(folder / "cluster.toml")
        (folder / "measured.json").write_text(json.dumps({"periods": periods, "calls": calls}), encoding="utf-8")
    dist.destroy_process_group()


def planned_cpu(cluster: Cluster, plans: Mapping[str, Places]) -> Problem:
    actor = PlannedModel(module=meta_model(), plan=mk.models.LLAMA_PLAN)
    not_run = dataflow.log_prob_call("read", None, rollout.label_log_probs, on="read", tokens_per_microbatch=1)
    functions = {"write": nothing, "learn": nothing, "read": replace(not_run, stage="rollout")}
    run = PlannedRun(
        calls=calls_of(functions),
        models={"actor": actor, "reference": actor},
        tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        strategy=mk.Strategy(sequence=False),
    )
    layouts = {axes for places in plans.values() for axes, _, _ in places.values()}
    return plan_rl.problem_of(
        run, cluster, world=RANKS, space=PlanSpace(keep=tuple(layouts), recompute=("none",), pp=(1, 2))
    )


def choice_of(problem: Problem, places: Places) -> dict[str, plan_rl.Alternative]:
    return {
        mesh: next(each for each in problem.meshes[mesh] if (each.layout, each.first, each.count) == places[mesh])
        for mesh in problem.meshes
    }


def beside(folder: Path, plans: Mapping[str, Places]) -> dict[str, Any]:
    # Cores that others use as well are measured wrongly: one rank alone is then as slow as all together.
    cores = float(len(os.sched_getaffinity(0)))
    cluster = Cluster.read(folder / "cluster.toml").changed(**{"host.cores": cores})
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    problem = planned_cpu(cluster, plans)
    medians = {name: statistics.median(measured["periods"][name]) for name in plans}
    first = next(iter(plans))
    seconds = {
        name: statistics.median(step[name] for step in measured["calls"][first]) for name in ("write", "read", "learn")
    }
    told = choice_of(problem, plans[first])
    factors = {name: seconds[name] / told[name].seconds[name] for name in seconds}
    found: dict[str, Any] = {"factors": {name: round(factor, 3) for name, factor in factors.items()}, "plans": {}}
    for name, places in plans.items():
        row: dict[str, Any] = {"measured_s": round(medians[name], 4)}
        for level, of in (("forecast_s", problem), ("calibrated_s", problem.slower(factors))):
            row[level] = round(plan_rl.evaluate(of, choice_of(of, places)).steady.period_s, 4)
        row["calls_s"] = {
            call: [
                round(statistics.median(step.get(call, 0.0) for step in measured["calls"][name]), 4),
                round(choice_of(problem, places)[call].seconds[call] * factors[call], 4),
            ]
            for call in seconds
        }
        found["plans"][name] = row
    held_out = [row for name, row in found["plans"].items() if name != first]
    for level in ("forecast_s", "calibrated_s"):
        of = list(found["plans"].values()) if level == "forecast_s" else held_out
        errors = [row[level] / row["measured_s"] - 1 for row in of]
        found[level.removesuffix("_s")] = {
            "most": round(max(map(abs, errors)), 4),
            "mean": round(statistics.mean(map(abs, errors)), 4),
            "spearman": round(
                spearman(
                    [row[level] for row in found["plans"].values()],
                    [row["measured_s"] for row in found["plans"].values()],
                ),
                4,
            ),
        }
    return found


# ------------------------------------------------------------------------------------------------ published settings

L7 = mk.models.LLAMA2_7B
LLAMA = {
    7: L7,
    13: replace(
        L7,
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
    34: replace(
        L7,
        hidden_size=8192,
        intermediate_size=22_016,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    70: replace(
        L7,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
GPUS = {7: 8, 13: 16, 34: 32, 70: 64}
LENGTHS = ((128, 896), (256, 384), (512, 128))
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Setting:
    actor: int
    critic: int
    gpus: int
    rows: int
    new: int


def settings() -> Iterator[Setting]:
    for size, gpus in GPUS.items():
        for rows, new in LENGTHS:
            yield Setting(actor=size, critic=7, gpus=gpus, rows=rows, new=new)
            if size != 7:
                yield Setting(actor=7, critic=size, gpus=gpus, rows=rows, new=new)
    yield Setting(actor=70, critic=7, gpus=128, rows=512, new=1024)


def ppo(setting: Setting) -> PlannedRun:
    """Six calls of four models, each on a mesh of its own: ReaLHF's PPO."""
    sizes: dict[str, Any] = {"rows": setting.rows, "prompt": 128, "new": setting.new}
    call = partial(Call, function=nothing)
    train = {"kind": "train", "minibatches": 8, **sizes}
    calls = [
        call(name="write", on="write", gives=["answer"], works=[Work(model="actor", kind="generate", **sizes)]),
        call(
            name="reward",
            on="reward",
            needs=["answer"],
            gives=["score"],
            works=[Work(model="reward", kind="infer", **sizes)],
        ),
        call(
            name="reference",
            on="reference",
            needs=["answer"],
            gives=["log_probs"],
            works=[Work(model="reference", kind="infer", **sizes)],
        ),
        call(
            name="values",
            on="values",
            needs=["answer"],
            gives=["value"],
            stage="train",
            works=[Work(model="critic", kind="infer", **sizes)],
        ),
        *(
            call(
                name=f"learn {model}",
                on=f"learn {model}",
                needs=["score", "log_probs", "value"],
                stage="train",
                works=[Work(model=model, **train)],
            )
            for model in ("actor", "critic")
        ),
    ]
    with torch.device("meta"):
        actor = PlannedModel(module=mk.models.Llama(LLAMA[setting.actor]), plan=mk.models.LLAMA_PLAN)
        critic = PlannedModel(
            module=mk.models.RewardModel(LLAMA[setting.critic]),
            plan=mk.models.reward_plan(LLAMA[setting.critic]),
            loss=plan_rl.score_loss,
        )
    return PlannedRun(
        calls=calls,
        models={"actor": actor, "reference": actor, "critic": critic, "reward": critic},
        strategy=mk.Strategy(memory=mk.MemoryPolicy(precision=mk.strategy.Precision())),
    )


def planned(setting: Setting) -> dict[str, Any]:
    began = time.perf_counter()
    nodes = setting.gpus // 8
    symmetric = f"pp={nodes} tp=8" if nodes > 1 else "tp=8"
    unit_ranks = 8 if nodes > 1 else 4  # ReaLHF's least mesh on a node is 4 GPUs
    space = PlanSpace(keep=(symmetric,), pp=tuple(sorted({1, 2, 4, 8, nodes})), unit_ranks=unit_ranks)
    problem = plan_rl.problem_of(ppo(setting), "a100", world=setting.gpus, device_memory=80 * GIB, space=space)
    priced_s = time.perf_counter() - began
    row = {**vars(setting), "nodes": nodes, "priced_s": round(priced_s, 1)}
    alike = {
        mesh: [each for each in of if each.layout == symmetric and each.count == problem.units]
        for mesh, of in problem.meshes.items()
    }
    heuristic = None
    if all(alike.values()):
        # Of recompute the fastest that fits.
        fastest = {mesh: min(of, key=lambda each: sum(each.seconds.values())) for mesh, of in alike.items()}
        smallest = {mesh: min(of, key=lambda each: each.active_bytes) for mesh, of in alike.items()}
        for choice in (fastest, smallest):
            try:
                heuristic = heuristic or plan_rl.evaluate(problem, choice)
            except PlanError:
                continue
    found = plan_rl.search_plan(problem, limit_s=30, gap=0.02, workers=2)
    print(plan_rl.RLPlan(found=found, cluster="a100", unit_ranks=unit_ranks, priced_s=priced_s), flush=True)
    row |= {"period_s": round(found.steady.period_s, 3), "gap": round(found.gap, 4), "search_s": round(found.took_s, 1)}
    gain = None if heuristic is None else round(heuristic.steady.period_s / found.steady.period_s, 3)
    return row | {"heuristic_s": heuristic and round(heuristic.steady.period_s, 3), "gain": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["cpu", "published"], default="cpu")
    parser.add_argument(
        "--folder", type=Path, help="of cpu: keeps the cluster and seconds; not measured again if there"
    )
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--plans", choices=list(SETS), default="spaced")
    parser.add_argument("--only", type=int, nargs="*", help="of published: numbers of settings")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if "MESHKIT_PLAN_RANK" in os.environ:
        measured_world(options.folder, options.passes, SETS[options.plans])
        return
    torch.set_num_threads(1)
    if options.part == "published":
        every = list(settings())
        rows = (planned(every[number]) for number in (options.only or range(len(every))))
    else:
        rows = (measured_beside(options.folder, options.passes, options.plans) for _ in range(1))
    for row in rows:
        print(json.dumps(row), flush=True)
        if options.record:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(environment() | {"part": options.part} | row) + "\n")


def measured_beside(folder: Path | None, passes: int, plans: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        kept = folder or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        if not (kept / "measured.json").exists():
            words = ["-m", "benchmarks.plan_rl", "--folder", str(kept), "--passes", str(passes), "--plans", plans]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "MESHKIT_PLAN_RANK": "1"}
            subprocess.run([*torchrun, *words], check=True, timeout=3600, env=env)
        return {"set": plans} | beside(kept, SETS[plans])


if __name__ == "__main__":
    main()
