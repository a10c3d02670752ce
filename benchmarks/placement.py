"""Is a placement that was found faster than the ranks as they come, on unlike links and a throttled rank?

    python -m benchmarks.placement --record    # six minutes; as root, for network namespaces; results/placement.jsonl

Four ranks with a network card each, on a switch on which what 0 and 1, and 2 and 3, send each other goes at --rate; rank 3 is
stopped for half of the time. They measure what is unlike, `mk.place` finds an order of ranks and stages, and steps of both
strategies are timed in turn, in one run.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.namespaces import ROOT, on_switch, run_ranks
from benchmarks.rows import environment, spread
from meshkit.cluster import Cluster
from meshkit.cluster.measure import write_measured
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.strategy import Strategy
from tests.faults.switch import CARD, Switch, switch

RESULTS = ROOT / "benchmarks" / "results" / "placement.jsonl"
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
BATCH = mk.Batch(sequences=8, seq_len=256)
MESHES = {"pp=2 tp=2": 4, "dp_replicate=2 tp=2": 1}  # microbatches
WARMUP, STEPS = 2, 6
BEAT_S = 0.01  # for which the throttled rank is stopped, and lives


def rank_main(folder: Path, strategy: Path | None) -> None:
    """One process: measures with the others, or trains."""
    if strategy is None:
        write_measured(folder / "cluster.toml", "cpu", unlike=True)
        return
    chosen = Strategy.read(strategy)
    mesh = mk.init_mesh(chosen.mesh, device_type="cpu", timeout=timedelta(minutes=3))
    with torch.device("meta"):
        model = Llama(CONFIG)
    run = mk.parallelize(model, mesh, replace(chosen, plan=LLAMA_PLAN))
    mk.init_weights(run.model, seed=0, plan=run.plan)
    optimizer = mk.adamw(run, lr=1e-4)
    torch.manual_seed(mesh.data_rank)
    ids = torch.randint(0, CONFIG.vocab_size, (BATCH.rows(mesh.spec), BATCH.seq_len + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    seconds = []
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        began = time.perf_counter()
        run.forward_backward(batch, microbatches=chosen.microbatches)
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds[WARMUP:]))
    dist.destroy_process_group()


def world(net: Switch, folder: Path, strategy: Path | None) -> None:
    """Four ranks, the last of them throttled, until all have ended."""

    def beat(ranks: list[subprocess.Popen[bytes]]) -> None:
        for signal_ in (signal.SIGSTOP, signal.SIGCONT):
            if ranks[-1].poll() is None:
                ranks[-1].send_signal(signal_)
            time.sleep(BEAT_S)

    code = (
        "from pathlib import Path; from benchmarks.placement import rank_main; "
        f"rank_main(Path({str(folder)!r}), {f'Path({str(strategy)!r})' if strategy else None})"
    )
    commands = [on_switch(net, rank, code) for rank in range(net.size)]
    run_ranks(commands, address=net.addresses[0], card=CARD, timeout_s=300, meanwhile=beat)


def compare(
    net: Switch, folder: Path, cluster: Cluster, mesh: str, microbatches: int, passes: int
) -> dict[str, object]:
    with torch.device("meta"):
        model = Llama(CONFIG)
    given = Strategy(mesh=mesh, microbatches=microbatches)
    found = mk.place(model, replace(given, plan=LLAMA_PLAN), cluster, BATCH)
    print(found, flush=True)
    strategies = {"given": given, "found": replace(found.strategy, plan=None)}
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    for _ in range(passes):
        for name, strategy in strategies.items():
            strategy.write(folder / f"{name}.toml")
            world(net, folder, folder / f"{name}.toml")
            seconds[name].append(statistics.median(json.loads((folder / "seconds.json").read_text())))
            print(f"{mesh} {name}: {seconds[name][-1]:.3f} s", flush=True)
    ratios = [one / other for one, other in zip(seconds["given"], seconds["found"], strict=True)]
    return {
        "mesh": mesh,
        "microbatches": microbatches,
        "found": found.strategy.mesh_for().text,
        "stages": found.strategy.pipeline.stages,
        "forecast_s": {"given": round(found.given.seconds, 4), "found": round(found.forecast.seconds, 4)},
        "measured_s": {name: [round(each, 4) for each in of] for name, of in seconds.items()},
        "speedup": asdict(spread(ratios)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the two slow links")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, switch(4) as net:
        folder = Path(temporary)
        net.slow_down(0, 1, options.rate)
        net.slow_down(2, 3, options.rate)
        world(net, folder, None)
        cluster = Cluster.read(folder / "cluster.toml")
        assert cluster.unlike is not None
        print(cluster.unlike, flush=True)
        rows = [
            compare(net, folder, cluster, mesh, microbatches, options.passes) for mesh, microbatches in MESHES.items()
        ]
    said = {
        **environment(),
        "question": "is a found placement faster than the ranks as they come",
        "rate": options.rate,
        "throttled": "rank 3 stopped for half of the time",
        "unlike": {"speed": cluster.unlike.speed, "bytes_per_s": cluster.unlike.bytes_per_s},
        "rows": rows,
    }
    print(json.dumps(said))
    if options.record:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
