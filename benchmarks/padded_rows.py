"""What do padded exchanges of routed experts cost, and what do they spare the host?

    torchrun --nproc-per-node 2 benchmarks/padded_rows.py                        # ep=2; a minute
    torchrun --nproc-per-node 4 benchmarks/padded_rows.py --mesh "dp_shard=4 ep=4" --record

The same Qwen3-MoE with the same weights and rows: exchanges sized by counts, of which the host reads one table a layer, and
exchanges padded to `max_rows`: the fewest that hold (as many as the fullest had in the exchange with counts), 1.25 and 1.5 of
the even share, if they hold, and all pairs of a rank, which always hold. First all must give the same loss and gradient norm.
They take blocks of steps in turn, and a ratio is taken within a round. Waits are those a GPU would have (`preflight.waits`),
bytes those that a rank sends in a step over ep, memory the peak that `estimate` says.
Prints one JSON row, of rank 0; --record adds it to results/padded_rows.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.errors import StepError
from meshkit.models import Qwen3Moe, Qwen3MoeConfig, moe_plan
from meshkit.parallel.expert import AllToAll, DispatchPlan
from meshkit.preflight.observe import observe
from meshkit.preflight.waits import recording
from meshkit.strategy import ExpertPolicy

RESULTS = Path(__file__).parent / "results/padded_rows.jsonl"
SIZED = "sized by counts"
TOL = 1e-5  # relative, fp32: only the order of sums differs


class Noting(AllToAll):
    """Also keeps the most rows that any rank had for another."""

    most = 0

    def plan(self, counts: Any) -> DispatchPlan:
        plan = super().plan(counts)
        for i in range(plan.ranks[0]):
            for j in range(plan.ranks[1]):
                Noting.most = max(Noting.most, *DispatchPlan(plan.counts, (i, j)).sent())
        return plan


def note(experts: int, axes: DeviceMesh) -> Noting:
    return Noting.on(experts, axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp_shard=2 ep=2")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank in a step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    mesh = mk.init_mesh(options.mesh)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        moe_intermediate_size=options.hidden // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 64,
        head_dim=32,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
    )
    torch.manual_seed(0)
    model = Qwen3Moe(config)
    torch.manual_seed(1 + mesh.data_rank)
    ids = torch.randint(config.vocab_size, (1, options.tokens + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def made(policy: ExpertPolicy) -> mk.Run:
        return mk.parallelize(copy.deepcopy(model), mesh, plan=moe_plan(config), experts=policy)

    made(ExpertPolicy(dispatcher=note)).forward_backward(batch)
    most = torch.tensor(Noting.most)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    pairs = options.tokens * options.chosen
    even = pairs / mesh.spec.ep
    policies = {SIZED: ExpertPolicy(), "fewest rows": ExpertPolicy(max_rows=int(most))}
    policies |= {f"{factor:g} of even": ExpertPolicy(max_rows=int(factor * even)) for factor in (1.25, 1.5)}
    policies["all pairs"] = ExpertPolicy(max_rows=pairs)
    runs: dict[str, mk.Run] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, policy in policies.items():
        run = made(policy)
        try:
            loss, norm = float(run.forward_backward(batch)), float(mk.step.grad_norm(run))
        except StepError:
            continue  # the routing of this model does not fit
        run.model.zero_grad()
        runs[name], numbers[name] = run, {"max_rows": policy.max_rows, "loss": loss, "norm": norm}
    for name, run in runs.items():
        for of in ("loss", "norm"):
            want = numbers[SIZED][of]
            if not abs(numbers[name][of] - want) <= TOL * want:
                raise SystemExit(
                    f"{name}: {of} {numbers[name][of]}, and {want} with counts: not the same work, no ratio."
                )
        with observe(mesh) as seen:
            run.forward_backward(batch)
        numbers[name]["ep_mib"] = round(sum(m.size * n for m, n in seen.items() if m.op == "all_to_all") / 2**20, 2)
        with recording(run) as waited:
            run.forward_backward(batch)
            waited.take()
            run.forward_backward(batch)
            step = waited.take()
        numbers[name] |= {"waits": len(step.waits), "launches": step.launches.total()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for index in range(options.rounds):
        for name in list(runs) if index % 2 == 0 else list(reversed(runs)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                runs[name].forward_backward(batch)
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    for name in runs:
        of = zip(taken[name], taken[SIZED], strict=True)
        wall_ratio, cpu_ratio = zip(*((w / sw, c / sc) for (w, c), (sw, sc) in of), strict=True)
        numbers[name] |= {"wall": asdict(spread(list(wall_ratio))), "cpu": asdict(spread(list(cpu_ratio)))}
    row = {**environment(), **vars(options), "pairs": pairs, "even_rows": even, "policies": numbers}
    del row["record"]
    first = mesh.rank == 0
    dist.destroy_process_group()  # `estimate` makes a world of its own
    for name in runs:
        found = mk.estimate(
            Qwen3Moe(config),
            options.mesh,
            plan=moe_plan(config),
            experts=policies[name],
            rows=1,
            seq_len=options.tokens,
            kernels="cpu",
        )
        numbers[name]["peak_mib"] = round(found.peak_bytes / 2**20, 1)
    if first:
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
