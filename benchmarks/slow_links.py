"""How far does DiLoCo with few meetings fall behind gradients that are summed in each step, at how many of the bytes?

python -m benchmarks.slow_links --only synchronous diloco-25      # some minutes a run; rows go to results/slow_links.jsonl
python -m benchmarks.slow_links --base runs/base --lr 1e-3 ...    # from a model after 200 synchronous steps, kept in --base

The demo of examples/llama_pretrain.py and examples/diloco_pretrain.py on four replicas, with one seed, data and schedule.
Bytes are those that leave a rank on dp_replicate in a step, on average; losses are held-out bits per byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import meshkit as mk
from benchmarks.rows import environment
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, Policy

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "slow_links.jsonl"
REPLICAS, SEQ_LEN, ROWS = 4, 256, 16
BASE_STEPS = 200
RUNS: dict[str, tuple[Policy | None, dict[str, Any]]] = {
    "synchronous": (None, {}),
    "diloco-25": (
        DiLoCo(every=25, lr=1.0, momentum=0.6),
        {"every": 25, "outer_lr": 1.0, "outer_momentum": 0.6},
    ),
    "diloco-25-low-momentum": (
        DiLoCo(every=25, lr=1.0, momentum=0.3),
        {"every": 25, "outer_lr": 1.0, "outer_momentum": 0.3},
    ),
    "diloco-25-published": (DiLoCo(every=25), {"every": 25}),
    "streaming-24-int4": (
        DiLoCo(every=24, lr=1.0, momentum=0.6, fragments=4, delay=2, mixing=0.5, wire="int4"),
        {
            "every": 24,
            "outer_lr": 1.0,
            "outer_momentum": 0.6,
            "fragments": 4,
            "delay": 2,
            "mixing": 0.5,
            "wire": "int4",
        },
    ),
    "co2-10": (CO2(every=10), {"algorithm": "co2", "every": 10}),
    "local-sgd-25": (LocalSGD(every=25), {"algorithm": "local-sgd", "every": 25}),
}


def bytes_a_step(policy: Policy | None) -> float:
    """That leave a rank on dp_replicate, by `explain`: of an all-reduce as a ring sends it."""
    with torch.device("meta"):
        model = Llama(demo())
    shape = {"rows": ROWS // REPLICAS, "seq_len": SEQ_LEN}
    if policy is not None:
        period = mk.explain(model, f"dp_replicate={REPLICAS}", plan=LLAMA_PLAN, outer=policy, **shape).period
        assert period is not None
        return period.sent_bytes / period.steps
    said = mk.explain(model, f"dp_replicate={REPLICAS}", plan=LLAMA_PLAN, **shape)
    gradients = [each for each in said.traffic if each.axis == "dp_replicate" and each.op == "all_reduce"]
    return sum(each.bytes for each in gradients) * 2 * (REPLICAS - 1) / REPLICAS


def demo() -> mk.models.LlamaConfig:
    sys.path.insert(0, str(ROOT / "examples"))
    import diloco_pretrain

    return diloco_pretrain.DEMO


def launch(recipe: str, **flags: Any) -> None:
    given = {
        "mesh": f"dp_replicate={REPLICAS}",
        "seq-len": SEQ_LEN,
        "save-every": 10_000,
        **flags,
    }
    words = [word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(REPLICAS)]
    subprocess.run([*command, str(ROOT / "examples" / recipe), "--sample-tokens", "1", *words], check=True)


def run(name: str, *, steps: int, rows: int, seed: int, lr: float, base: Path | None) -> dict[str, Any]:
    policy, flags = RUNS[name]
    recipe = "llama_pretrain.py" if policy is None else "diloco_pretrain.py"
    begin = {} if base is None else {"pretrained": base / f"model-{BASE_STEPS}", "tokenizer": base / "tokenizer"}
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        launch(
            recipe,
            steps=steps,
            global_batch=rows,
            eval_batches=8 * ROWS // rows,
            seed=seed,
            out=out,
            lr=lr,
            eval_every=25,
            **begin,
            **flags,
        )
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["held_out_bits_per_byte"] for line in lines if "held_out_bits_per_byte" in line}
    return {
        "question": "how far behind gradients that are summed in each step, at how many of the bytes",
        "run": name,
        "policy": str(policy),
        "mesh": f"dp_replicate={REPLICAS}",
        "steps": steps,
        "global_batch": rows,
        "after_synchronous_steps": 0 if base is None else BASE_STEPS,
        "lr": lr,
        "seed": seed,
        "held_out_bits_per_byte": {str(step): round(value, 4) for step, value in held_out.items()},
        "end": round(held_out[steps], 4),
        "bytes_a_step": round(bytes_a_step(policy)),
        "took_s": round(time.monotonic() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a step, over all replicas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--base", type=Path, default=None)
    args = parser.parse_args()
    if args.base is not None and not (args.base / f"model-{BASE_STEPS}").exists():
        launch("llama_pretrain.py", steps=BASE_STEPS, global_batch=ROWS, out=args.base)
        trained = max(Path("~/.cache/meshkit").expanduser().glob("tokenizer-*"), key=lambda path: path.stat().st_atime)
        shutil.copytree(trained, args.base / "tokenizer")  # of the data, which the run has just read
    for name in args.only:
        row = {
            **environment(),
            **run(name, steps=args.steps, rows=args.rows, seed=args.seed, lr=args.lr, base=args.base),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row))


if __name__ == "__main__":
    main()
