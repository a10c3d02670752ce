"""What does a lost rollout worker cost? Two workers write for a trainer; one is killed, and another comes in its place.

    python benchmarks/workers.py --record

Trainers sleep for --train-s in each step, as stand-ins for compute; workers are real, of a small model, in processes of their
own, and their lease is --lease-s. Runs in which nobody is killed and runs in which one is take turns. `longest_s` is the
longest step of a run, `whole_s` all steps; each after the first five, by when the workers have come.
Prints one JSON row; --record adds it to results/workers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.algos.dataflow import PROMPTED, Call
from meshkit.algos.rollout import Sampling
from meshkit.algos.workers import GIVES, WorkerFlow, WorkerPolicy, prompt_of, read_answers
from meshkit.data import REFERENCE_ALPHABET, character_tokenizer
from meshkit.recipes import small_model

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/workers.jsonl"
FIRST = 5


def start_worker(port: int, secret: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "meshkit",
        "rollout-worker",
        f"http://127.0.0.1:{port}",
        "--secret-file",
        str(secret),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)


def run_of(options: argparse.Namespace, folder: Path, kill_at: int | None) -> list[float]:
    """Seconds of each step."""
    mesh, tokenizer = mk.init_mesh(), character_tokenizer(REFERENCE_ALPHABET)
    shape = small_model(tokenizer.vocab_size)
    run = mk.parallelize(mk.models.build_model(shape), mesh, plan=mk.models.model_plan(shape))
    mk.init_weights(run.model, seed=0, plan=run.plan)
    sampling = Sampling(max_new_tokens=options.tokens, stop_ids=(tokenizer.eos_id,))
    told = {"sampling": asdict(sampling), "samples": options.samples, "seed": 0, "precision": "fp32"}
    policy = WorkerPolicy(
        port=0,
        folder=folder / "weights",
        host="127.0.0.1",
        secret="of this run",
        lease_s=options.lease_s,
        tokens=options.samples * options.tokens,
        settings=told,
        gives=GIVES,
    )
    secret = folder / "secret"
    secret.write_text(policy.secret)

    def source(step: int) -> list[dict[str, Any]]:
        keys = range(step * options.prompts, (step + 1) * options.prompts)
        return [{"key": key, "fields": {"prompt": f"{key}+{key}="}} for key in keys]

    flow = WorkerFlow(
        {"actor": mesh},
        [
            Call(
                name="learn",
                on="actor",
                function=lambda _: time.sleep(options.train_s),
                needs=(*PROMPTED, *GIVES),
                stage="train",
            )
        ],
        policy,
        source=source,
        fields=PROMPTED,
        total=options.steps,
        staleness=options.staleness,
        publish=lambda folder: run.export(folder, tokenizer),
        first=partial(prompt_of, tokenizer=tokenizer),
        read=partial(read_answers, tokenizer=tokenizer, sampling=sampling, samples=options.samples),
    )
    assert flow.port is not None
    port = flow.port
    workers = [start_worker(port, secret) for _ in range(2)]
    seconds = []
    try:
        for step in range(options.steps):
            if step == kill_at:
                os.kill(workers[0].pid, signal.SIGKILL)
                workers.append(start_worker(port, secret))
            began = time.perf_counter()
            flow.step()
            seconds.append(time.perf_counter() - began)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--train-s", type=float, default=0.5)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--lease-s", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    longest: dict[bool, list[float]] = {False: [], True: []}
    whole: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.repeats):
        for kills in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                seconds = run_of(options, Path(folder), options.steps // 2 if kills else None)[FIRST:]
            longest[kills].append(max(seconds))
            whole[kills].append(sum(seconds))
    row = {"benchmark": "workers", **{name: value for name, value in vars(options).items() if name != "record"}}
    for kills, name in ((False, "calm"), (True, "killed")):
        row[name] = {"longest_s": asdict(spread(longest[kills])), "whole_s": asdict(spread(whole[kills]))}
    row |= {"lost_s": asdict(spread([b - a for a, b in zip(whole[False], whole[True], strict=True)])), **environment()}
    print(json.dumps(row))
    if options.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
