"""A small training run in which one rank is killed, raises, is held up or is fed NaN at a random moment in one block.

The moment: in step `step`, when the rank enters the `moment`-th Python function of the block, however deep.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.dataflow import Call, Flow, Sample
from meshkit.algos.reallocate import prepare_reallocation
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.core.calls import ring
from meshkit.data import Loader
from meshkit.faults import run_main
from meshkit.metrics import Logger, Meter, Stragglers
from meshkit.models import LlamaConfig, MixtralConfig, build_model, moe_plan
from meshkit.models.llama import LLAMA_PLAN
from tests.checkpoint.training import CONFIG, ROWS, SEQ_LEN, tokens
from tests.planted import of_the_machine


@dataclass(frozen=True)
class Block:
    """files: where the functions of the block are defined; nan: whether it can be fed one."""

    mesh: str
    files: str
    memory: mk.MemoryPolicy | None = None
    nan: bool = True


BLOCKS = {
    "data": Block("dp_shard=2", "/torch/distributed/fsdp/"),
    "tensor": Block("tp=2", "/meshkit/core/collectives.py"),
    "context": Block("cp=2", "/meshkit/parallel/context/"),
    "pipeline": Block("pp=2", "/meshkit/parallel/pipeline/"),
    "expert": Block("dp_shard=2 ep=2", "/meshkit/parallel/expert/"),
    "recompute": Block("dp_shard=2", "/meshkit/memory/_recompute.py", mk.MemoryPolicy(recompute="full")),
    "offload": Block(
        "dp_shard=2", "/meshkit/memory/offload/", mk.MemoryPolicy(offload=mk.strategy.ActivationOffload())
    ),
    "checkpoint": Block("dp_shard=2", "/meshkit/checkpoint/", nan=False),
    "loader": Block("dp_shard=2", "/meshkit/data/", nan=False),
    "rollout": Block("dp_shard=2", "/meshkit/algos/rollout/", nan=False),
    "dataflow": Block("dp_shard=2", "/meshkit/algos/dataflow/", nan=False),
    "reallocate": Block("dp_shard=2", "/meshkit/core/reshard/", nan=False),
}


@dataclass(frozen=True, kw_only=True)
class Drill:
    out: Path
    block: str = "data"
    mesh: str = ""
    """default: the block's"""
    fault: str = "none"
    """kill, raise, delay, stay (away for good), nan, slow (in each step, from `step` on)"""
    rank: int = 1
    step: int = 3
    moment: int = 1
    steps: int = 4
    delay_s: float = 4.0
    pause_s: float = 0.0
    """of every step, for drills that act from outside"""
    timeout_s: float = 60.0
    stall_s: float = 20.0
    measure: int = 0
    """ranks and links, every so many steps"""


class HadEnough(Exception):
    pass


def main(drill: Drill) -> None:
    block = BLOCKS[drill.block]
    mesh = mk.init_mesh(drill.mesh or block.mesh, device_type="cpu", timeout=timedelta(seconds=drill.timeout_s))
    config = replace(CONFIG, num_hidden_layers=2, tie_word_embeddings=False)
    plan = LLAMA_PLAN
    if drill.block == "expert":
        config = MixtralConfig(**vars(config), num_local_experts=4)
        plan = moe_plan(config)
    run = build(config, mesh, plan, block.memory)
    mk.init_weights(run.model, seed=0, plan=run.plan)
    optimizer = mk.adamw(run, lr=1e-2)
    loader = Loader(tokens(), seq_len=SEQ_LEN, global_batch=ROWS, seed=0, rank=mesh.data_rank, ranks=mesh.data_ranks)
    besides = BESIDES[drill.block](drill, run) if drill.block in BESIDES else lambda: None
    guard = mk.faults.NonFiniteGuard()
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    struck = mesh.rank == drill.rank and first_life
    with mk.Checkpointer(drill.out / "checkpoints", timeout=timedelta(seconds=drill.timeout_s)) as checkpoints:
        start = checkpoints.resume(run, optimizer, loader=loader)
        with Logger(drill.out, start_step=start, enabled=mesh.rank == 0, trackers=()) as logger:
            stragglers = Stragglers(mesh, every_steps=drill.measure or 1000, steps=min(2, drill.measure or 1), factor=2)
            meter = Meter(total_steps=drill.steps, start_step=start)
            for step in range(start + 1, drill.steps + 1):
                now = struck and step == drill.step and drill.fault != "slow"
                with ExitStack() as stack:
                    stack.enter_context(stragglers.measure(step))
                    stack.enter_context(strike(drill, run) if now else nullcontext())
                    if struck and drill.fault == "slow" and step >= drill.step:
                        slow_down(drill)
                    batch = next(loader)
                    loss = run.forward_backward(batch, microbatches=2)
                    norm = mk.clip_grad_norm(run, 1.0)
                    if guard.allows(run, norm, step=step):
                        optimizer.step()
                    optimizer.zero_grad()
                    besides()
                    if drill.block == "checkpoint" or step == 2:
                        checkpoints.save(step, run, optimizer, loader=loader)
                    if drill.block == "checkpoint":
                        checkpoints.wait()
                logger.log(step, {"loss": loss.item()})
                if mesh.rank == 0 and stragglers.last is not None and stragglers.last.step == step:
                    print(*filter(None, [stragglers.slow, *stragglers.slow_links]), sep="\n", flush=True)
                time.sleep(drill.pause_s)
                meter.step(1)


def build(config: LlamaConfig, mesh: mk.Mesh, plan: mk.Plan, memory: mk.MemoryPolicy | None) -> mk.Run:
    with torch.device("meta"):
        model = build_model(config).double()
    return mk.parallelize(model, mesh, plan=plan, memory=memory)


# What a block does after each step of training that is no part of it.


def generating(drill: Drill, run: mk.Run) -> Callable[[], object]:
    return lambda: generate(run, [Prompt(ids=[1, 2], key=0)], sampling=Sampling(max_new_tokens=4))


def flowing(drill: Drill, run: mk.Run) -> Callable[[], object]:
    """Samples from this mesh to another one."""

    def write(samples: list[Sample]) -> list[Sample]:
        return [{**sample, "answer": 2 * sample["prompt"]} for sample in samples]

    other = mk.init_mesh("tp=2", device_type="cpu", timeout=timedelta(seconds=drill.timeout_s))
    return Flow(
        {"sampler": run.mesh, "actor": other},
        [
            Call(name="write", on="sampler", function=write, needs=["prompt"], gives=["answer"]),
            Call(name="read", on="actor", function=lambda samples: None, needs=["answer"], stage="train"),
        ],
        source=lambda iteration: [{"prompt": 2 * iteration}, {"prompt": 2 * iteration + 1}],
        fields=["prompt"],
        total=drill.steps,
        timeout=timedelta(seconds=drill.timeout_s),
    ).step


def moving(drill: Drill, run: mk.Run) -> Callable[[], object]:
    """Parameters from this mesh to another one."""
    other = mk.init_mesh("tp=2", device_type="cpu", timeout=timedelta(seconds=drill.timeout_s))
    return prepare_reallocation(run, build(run.model.config, other, LLAMA_PLAN, None))


BESIDES = {"rollout": generating, "dataflow": flowing, "reallocate": moving}


class strike:
    """While entered, waits for the moment and acts."""

    def __init__(self, drill: Drill, run: mk.Run) -> None:
        self.drill, self.left = drill, drill.moment
        self.files = BLOCKS[drill.block].files
        self.feed = _feed_nan(run.model, drill) if drill.fault == "nan" else None

    def __enter__(self) -> None:
        if self.feed is None:
            sys.setprofile(self._at_a_call)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        if self.feed is not None:
            self.feed()

    def _at_a_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.files not in frame.f_code.co_filename:
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self._act()

    def _act(self) -> None:
        strike_now(self.drill)
        match self.drill.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise HadEnough("this rank has had enough")
            case "delay":
                time.sleep(self.drill.delay_s)
            case "stay":
                time.sleep(1000)


def slow_down(drill: Drill) -> None:
    if not (drill.out / "struck").exists():
        strike_now(drill)
    time.sleep(drill.delay_s)


def strike_now(drill: Drill) -> None:
    """Writes when, and which calls this rank had made by then: the oracle of what is said about calls."""
    counts = [(meeting.axis, meeting.is_message, meeting.count) for meeting in ring.meetings.values()]
    host = {"host": socket.gethostname(), "calls": counts, "ranks": dist.get_world_size()}
    (drill.out / "struck_calls.json").write_text(json.dumps(host))
    (drill.out / "struck").write_text(str(time.time()))


def _feed_nan(model: nn.Module, drill: Drill) -> Callable[[], None]:
    """One NaN in what one of the modules returns."""
    leaves = [module for module in model.modules() if not list(module.children()) and list(module.parameters())]

    def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        (drill.out / "struck").write_text(str(time.time()))
        out = out.clone()
        out.view(-1)[drill.moment % out.numel()] = torch.nan
        return out

    return leaves[drill.moment % len(leaves)].register_forward_hook(of_the_machine(after)).remove


if __name__ == "__main__":
    drill = tyro.cli(Drill)
    run_main(lambda: main(drill), stall_s=drill.stall_s)
