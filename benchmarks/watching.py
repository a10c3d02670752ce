"""What does watching cost: the guard's digests, a replay, the ring of calls and agreement, as shares of a step, in one run?

    torchrun --nproc-per-node 2 benchmarks/watching.py --mesh dp_shard=2
    torchrun --nproc-per-node 2 benchmarks/watching.py --mesh tp=2 --tokens 8192 --record

Shares are of a step's processor time without them, of rank 0. Blocks of watched and of bare steps take turns, and
`on_over_off` is the processor time of one over that of the other within a round; it has the noise of the machine. The shares
are the time inside of the functions that watch, by the processor's clock; that of the ring its calls times what one costs,
which 20,000 calls of a function that does nothing tell in each round. Digests read each weight, moment and gradient, and a
step computes with each weight for each token, so their share falls with the tokens of a rank, and with the ranks that share
the weights.
Prints one JSON row, of rank 0; --record adds it to results/watching.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.core import _torch
from meshkit.core._torch import calls
from meshkit.core.calls import ring
from meshkit.faults import CorruptionGuard, replay
from meshkit.faults.replay import Replay
from meshkit.faults.rest import AtRest
from meshkit.mesh.agreement import Agreement
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig

RESULTS = Path(__file__).parent / "results/watching.jsonl"
INTERVAL = 400  # steps from replay to replay of which the share is told
WATCHED = {
    "digests": [(CorruptionGuard, ("_before_step", "_after_step", "check")), (AtRest, ("begin", "end"))],
    "replay": [
        (mk.Run, ("_repeat",)),
        (Replay, ("begin", "end", "_enter", "_leave", "_got", "_sent", "_gradient")),
        (replay, ("_rng", "_set_rng", "_buffers", "_set_buffers")),
    ],
    "agreement": [(Agreement, ("meet", "note"))],
}


class Clock:
    """Processor time inside of functions, by subject. A function that another one calls counts as the other's."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(WATCHED, 0.0)
        self.inside = ""

    def counted(self, subject: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, began = subject, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[subject] += time.process_time() - began
                self.inside = ""

        return inner

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The message of a meeting has what is summed anyway."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            if self.inside != "agreement":
                return function(*args, **kwargs)
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent["agreement"] -= time.process_time() - began

        return inner


def cost_of_a_call(group: Any, times: int = 20_000) -> float:
    """Seconds that the ring takes for one call."""
    work, sent = dist.Work(), [torch.zeros(1024)]

    def issue(group: Any, tensors: Any, options: Any) -> dist.Work:
        return work

    def wait(work: dist.Work) -> bool:
        return True

    recorded, ending = calls._recorded(issue, "all_reduce", 0), calls._ending(wait)

    def took(one: Callable[..., Any], other: Callable[..., Any]) -> float:
        began = time.process_time()
        for _ in range(times):
            one(group, sent, None)
            other(work)
        return time.process_time() - began

    kept = list(ring.calls), group.group_name in ring.meetings and ring.meetings[group.group_name].count
    cost = (took(recorded, ending) - took(issue, wait)) / times
    ring.calls.clear()
    ring.calls.extend(kept[0])
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp_shard=2")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank in a step")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--every-steps", type=int, default=5, help="from check to check, and those of a block")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    mesh = mk.init_mesh(options.mesh)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.hidden // 8,
    )
    torch.manual_seed(0)
    model = Llama(config)
    parameters = sum(param.numel() for param in model.parameters())
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN)
    optimizer = mk.adamw(run, lr=1e-4)
    torch.manual_seed(mesh.data_rank)
    ids = torch.randint(0, config.vocab_size, (options.tokens // 512, 513))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    _torch.record_calls()
    clock = Clock()

    def steps(guard: CorruptionGuard | None, first: int, last: int) -> float:
        began = time.process_time()
        for step in range(first, last + 1):
            optimizer.zero_grad()
            run.forward_backward(batch, microbatches=options.microbatches)
            mk.clip_grad_norm(run, 1.0)
            optimizer.step()
            if guard is not None:
                guard.check(step)
        return time.process_time() - began

    def block(replay_every: int, last: int) -> tuple[float, dict[str, float], int]:
        """(seconds of `last` steps, of which inside by subject, calls in the ring); guarded ones are warmed up by a step.

        replay_every: counts the step that warms up; -1 without a guard.
        """
        with ExitStack() as stack:
            guard = None
            if replay_every >= 0:
                guard = stack.enter_context(
                    CorruptionGuard(run, optimizer, every_steps=options.every_steps, replay_every=replay_every)
                )
                steps(guard, 0, 0)  # the first check of a guard learns which ranks have copies
            ring.paused = guard is None
            before = sum(meeting.count for meeting in ring.meetings.values())
            clock.spent = dict.fromkeys(WATCHED, 0.0)
            took_s = steps(guard, 1, last)
            ring.paused = False
            return took_s, clock.spent, sum(meeting.count for meeting in ring.meetings.values()) - before

    shares: dict[str, list[float]] = {
        name: [] for name in ("digests", "one_replay", "ring", "agreement", "on_over_off")
    }
    calls_of_a_step = 0.0
    with ExitStack() as patches:
        for subject, owners in WATCHED.items():
            for owner, names in owners:
                functions = {name: clock.counted(subject, getattr(owner, name)) for name in names}
                patches.enter_context(mock.patch.multiple(owner, **functions))
        patches.enter_context(mock.patch.object(dist, "all_reduce", clock.aside(dist.all_reduce)))
        steps(None, 0, 1)
        for repeat in range(options.repeats):
            order = (-1, 0) if repeat % 2 else (0, -1)
            blocks = {every: block(every, options.every_steps) for every in order}
            (off_s, bare, _), (on_s, spent, made) = blocks[-1], blocks[0]
            _, replayed, _ = block(2, 1)  # one step, with a replay
            step_s = (on_s - spent["digests"]) / options.every_steps
            calls_of_a_step = made / options.every_steps
            shares["on_over_off"].append(on_s / off_s)
            shares["digests"].append(spent["digests"] / options.every_steps / step_s)
            shares["one_replay"].append(replayed["replay"] / step_s)
            shares["agreement"].append((spent["agreement"] + bare["agreement"]) / 2 / options.every_steps / step_s)
            shares["ring"].append(calls_of_a_step * cost_of_a_call(mesh.group) / step_s)
    if mesh.rank == 0:
        row = {
            "benchmark": "watching",
            "mesh": options.mesh,
            "parameters": parameters,
            "tokens_of_a_rank": options.tokens,
            "microbatches": options.microbatches,
            "every_steps": options.every_steps,
            "calls_of_a_step": round(calls_of_a_step, 1),
            **{name: _spread(values) for name, values in shares.items()},
            f"replay_every_{INTERVAL}": _spread([share / INTERVAL for share in shares["one_replay"]]),
            **environment(),
        }
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()


def _spread(values: list[float]) -> dict[str, float]:
    """In millionths, as shares are small."""
    return {name: round(value / 1e4, 6) for name, value in vars(spread([1e4 * value for value in values])).items()}


if __name__ == "__main__":
    main()
