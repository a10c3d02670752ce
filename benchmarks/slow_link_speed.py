"""Tokens a second over a link that is really slow: summed gradients, quantized wires and local updates, in one run.

    python -m benchmarks.slow_link_speed --record      # 20 minutes; as root, for network namespaces; results/slow_links.jsonl

Two hosts (network namespaces) of two ranks each, joined by a cable that tc shapes, or with a delay by `far_link`. The mesh is
dp_replicate=2 dp_shard=2, so dp_replicate alone crosses the link. Bytes are those of the card's counter, less the headers
of its packets, beside what `explain` says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.far_link import CARD as FAR
from benchmarks.namespaces import ROOT, run_ranks
from benchmarks.rows import environment
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.optim.outer import CO2, DiLoCo, OuterOptimizer, Policy
from meshkit.strategy import DataPolicy
from tests.faults.hosts import CARD as NEAR
from tests.faults.hosts import Hosts, two_hosts

RESULTS = ROOT / "benchmarks" / "results" / "slow_links.jsonl"
MESH, ROWS, PERIOD = "dp_replicate=2 dp_shard=2", 1, 48
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
# (policy of local updates, wires, steps before the clock starts, steps on the clock)
RUNS: dict[str, tuple[Policy | None, DataPolicy, int, int]] = {
    "summed": (None, DataPolicy(), 2, 4),
    "wires int4": (None, DataPolicy(reduce="int4"), 2, 8),  # gathers stay inside of a host
    "alone": (DiLoCo(every=10_000), DataPolicy(), 2, PERIOD),
    "DiLoCo": (DiLoCo(every=PERIOD), DataPolicy(), PERIOD, PERIOD),
    "Streaming DiLoCo": (
        DiLoCo(every=PERIOD, fragments=4, delay=6, mixing=0.5, wire="int4"),
        DataPolicy(),
        PERIOD,
        PERIOD,
    ),
    "CO2": (CO2(every=PERIOD), DataPolicy(), PERIOD, PERIOD),
}
HEADERS = {NEAR: 14 + 20 + 32, FAR: 20 + 32}  # Ethernet, IP and TCP with time stamps


def crossing(card: str) -> int:
    """Bytes that have left by the card, without headers."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()  # of this namespace; /sys is mounted for another
    sent = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{card}:"))
    return int(sent[8]) - HEADERS[card] * int(sent[9])


def at_rest(card: str) -> int:
    """`crossing`, once nothing travels any more: what a meeting has sent goes on beside the next steps."""
    sent = crossing(card)
    while True:
        time.sleep(2.0)
        if (now := crossing(card)) - sent < 1000:
            return now
        sent = now


def explained(run: mk.Run, outer: OuterOptimizer | None, steps: int, seq_len: int) -> float:
    """Bytes that leave a host over dp_replicate, in so many steps: of its two ranks."""
    if outer is not None:
        period = outer.period
        return 2 * period.sent_bytes * steps / period.steps if steps >= period.steps else 0.0
    said = mk.explain(run, rows=ROWS, seq_len=seq_len)
    shares = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 1.0}  # of two ranks
    return 2 * steps * sum(each.bytes * shares[each.op] for each in said.traffic if each.axis == "dp_replicate")


def timed(name: str, mesh: mk.Mesh, card: str, seq_len: int) -> dict[str, float]:
    policy, data, before, steps = RUNS[name]
    with torch.device("meta"):
        model = Llama(CONFIG)
    run = mk.parallelize(model, mesh if policy is None else replica_mesh(mesh), plan=LLAMA_PLAN, data=data)
    mk.init_weights(run.model, seed=0, plan=run.plan)
    optimizer = mk.adamw(run, lr=1e-4)
    outer = None if policy is None else OuterOptimizer(run, optimizer, mesh, policy)
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, seq_len + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    for step in range(before + steps):
        if step == before:
            dist.barrier()
            before_bytes = at_rest(card)
            dist.barrier()
            began = time.perf_counter()
        run.forward_backward(batch)
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step()
    took_s = time.perf_counter() - began
    dist.barrier()
    sent = at_rest(card) - before_bytes
    dist.barrier()
    said = explained(run, outer, steps, seq_len)
    if outer is not None:
        outer.meet()
    return {
        "step_s": round(took_s / steps, 4),
        "tokens_per_s": round(4 * ROWS * seq_len * steps / took_s, 1),
        "sent_bytes": sent,
        "explained_bytes": round(said),
    }


def rank_main(card: str, folder: Path, names: list[str], seq_len: int) -> None:
    mesh = mk.init_mesh(MESH, device_type="cpu", timeout=timedelta(minutes=5))
    for name in names:
        found = timed(name, mesh, card, seq_len)
        if dist.get_rank() == 0:
            print(f"  {name}: {found}", flush=True)
            (folder / "found.json").write_text(json.dumps({**_read(folder), name: found}))
    dist.destroy_process_group()


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "found.json"
    return json.loads(path.read_text()) if path.exists() else {}


@contextmanager
def link(hosts: Hosts, mbit: float, delay_s: float) -> Iterator[tuple[str, str]]:
    """(card, address of rank 0). Without a delay the cable, shaped by tc; with one, a link in user space beside it."""
    if not delay_s:
        for space in hosts.spaces:
            tbf = f"tbf rate {mbit:g}mbit burst {max(16, mbit):g}k latency 1s"
            tools = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
            subprocess.run(
                ["tc", "-n", space, "qdisc", "replace", "dev", NEAR, "root", *tbf.split()], env=tools, check=True
            )
            subprocess.run(["ip", "-n", space, "link", "set", NEAR, "mtu", "9000"], env=tools, check=True)
        yield NEAR, hosts.addresses[0]
        return
    words = [*hosts.spaces, "10.79.0.1,10.79.0.2", str(mbit * 1e6 / 8), str(delay_s)]
    far = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.far_link", *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert far.stdin is not None and far.stdout is not None
    try:
        if far.stdout.readline().strip() != b"ready":
            raise RuntimeError("the link did not come up")
        yield FAR, "10.79.0.1"
    finally:
        far.stdin.close()
        far.wait(10)


def over(hosts: Hosts, mbit: float, delay_s: float, names: list[str], seq_len: int) -> dict[str, Any]:
    print(f"{mbit:g} Mbit/s, {delay_s * 1e3:g} ms", flush=True)
    with tempfile.TemporaryDirectory() as temporary, link(hosts, mbit, delay_s) as (card, address):
        folder = Path(temporary)
        code = (
            "from pathlib import Path; from benchmarks.slow_link_speed import rank_main; "
            f"rank_main({card!r}, Path({str(folder)!r}), {names!r}, {seq_len})"
        )
        commands = [hosts.command(rank // 2, [sys.executable, "-c", code]) for rank in range(4)]
        run_ranks(commands, address=address, card=card, per_node=2)
        return _read(folder)


def parameters() -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Llama(CONFIG).parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="*", default=[1000.0, 100.0, 20.0])
    parser.add_argument("--delay-ms", type=float, nargs="*", default=[0.0, 50.0], help="of each way")
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seq-len", type=int, default=256, help="of a rank's one row; fewer tokens, more link")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    for mbit in options.mbit:
        for delay_ms in options.delay_ms:
            with two_hosts() as hosts:
                found = over(hosts, mbit, delay_ms / 1e3, options.only, options.seq_len)
            row = {
                **environment(),
                "question": "tokens a second over a slow link",
                "mesh": MESH,
                "parameters": parameters(),
                "tokens_a_step": 4 * ROWS * options.seq_len,
                "period": PERIOD,
                "mbit": mbit,
                "delay_ms": delay_ms,
                "runs": found,
            }
            if options.record:
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
