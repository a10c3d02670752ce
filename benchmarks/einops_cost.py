"""What does it cost to write shapes as einops patterns, in eager and in compiled steps?

    python benchmarks/einops_cost.py              # one process, one thread; a minute
    python benchmarks/einops_cost.py --record     # adds a row to results/einops.jsonl

Eager: nanoseconds of a pattern beside the view chain that does the same, on the shapes of the peer suite's tiny model. Both
give views of one memory, or no number is reported. The share of a step is what the patterns add to one forward and backward
of that model if *every* line of meshkit's that splits, merges or moves dims were a pattern: their number, counted by a
`TorchFunctionMode`, and that of calls of einops already in the tree, times the largest difference of the pairs.

Compiled: attention written in both ways, forward and backward. The graphs that inductor gets must be the same text, and the
number of its kernels is counted.
Both ways take turns; a ratio is taken within a round, and its median over rounds is printed with its quartiles.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import einops.einops
import torch
import torch.nn.functional as F
import tyro
from einops import rearrange, repeat
from rich.console import Console
from rich.table import Table
from rows import Spread, environment, spread
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.overrides import TorchFunctionMode

import meshkit as mk
from benchmarks.peers.work import PRESETS

RESULTS = Path(__file__).parent / "results" / "einops.jsonl"
ROOT = str(Path(mk.__file__).parent)
VIEWS, PATTERNS = "views", "patterns"
TRAINING, ONE_TOKEN = "training step", "forward of one token a row"
REPEAT = "repeat choices"  # once in a layer of experts, beside a sort: it is in no dense model
REPEATED = 20  # forwards of one token, which are too short for the processor's clock
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32
MOVES = {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "expand", "repeat_interleave"}
MOVES |= {"unsqueeze", "squeeze"}
"""methods of tensors that a pattern could take the place of"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    rounds: int = 21
    calls: int = 2000
    """of a pair, in each round"""
    steps: int = 5
    """of the compiled attention, in each round"""
    record: bool = False
    """append a row to benchmarks/results/einops.jsonl"""


# ----------------------------------------------------------------------------------------------------- both ways

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def pairs() -> dict[str, tuple[Tensor, Pair]]:
    """Name -> (tensor, (view chain, pattern)): what the models and collectives do to shapes."""
    hidden, heads = torch.randn(8, 256, HEADS * HEAD_DIM), torch.randn(8, 256, HEADS, HEAD_DIM)
    return {
        "split heads": (
            hidden,
            (lambda x: x.unflatten(-1, (-1, HEAD_DIM)), lambda x: rearrange(x, "b t (h d) -> b t h d", d=HEAD_DIM)),
        ),
        "merge heads": (heads, (lambda x: x.flatten(-2), lambda x: rearrange(x, "b t h d -> b t (h d)"))),
        "heads first": (heads, (lambda x: x.transpose(1, 2), lambda x: rearrange(x, "b t h d -> b h t d"))),
        "rows to tokens": (hidden, (lambda x: x.flatten(0, -2), lambda x: rearrange(x, "... c -> (...) c"))),
        REPEAT: (
            hidden[0],
            (
                lambda x: x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1),
                lambda x: repeat(x, "n c -> (n k) c", k=2),
            ),
        ),
    }


def attention_by_views(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    q, k, v = F.linear(x, qkv).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
    q, k, v = (heads.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for heads in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(attended.transpose(1, 2).flatten(-2), out)


def attention_by_patterns(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    q, k, v = F.linear(x, qkv).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
    q, k, v = (rearrange(heads, "b t (h d) -> b h t d", d=HEAD_DIM) for heads in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(rearrange(attended, "b h t d -> b t (h d)"), out)


ATTENTION = {VIEWS: attention_by_views, PATTERNS: attention_by_patterns}


# ------------------------------------------------------------------------------------------------------ measuring


def take_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of each run in each round: with one thread they leave out what other processes take."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name, run in runs.items() if turn % 2 == 0 else reversed(runs.items()):
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return times


def eager_ns(settings: Settings) -> dict[str, dict[str, Spread]]:
    """Name -> nanoseconds a call of the view chain, of the pattern, and what the pattern adds within a round."""

    def repeated(function: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
        for _ in range(settings.calls):
            function(tensor)

    rows = {}
    for name, (tensor, (views, pattern)) in pairs().items():
        expected, got = views(tensor), pattern(tensor)
        shares = expected.data_ptr() == tensor.data_ptr()
        if not torch.equal(expected, got) or shares != (got.data_ptr() == tensor.data_ptr()):
            raise SystemExit(f"{name}: the pattern does not do what the view chain does")
        runs = {VIEWS: lambda f=views, x=tensor: repeated(f, x), PATTERNS: lambda f=pattern, x=tensor: repeated(f, x)}
        times = {
            way: [s / settings.calls * 1e9 for s in seconds]
            for way, seconds in take_turns(runs, settings.rounds).items()
        }
        added = [ours - theirs for ours, theirs in zip(times[PATTERNS], times[VIEWS], strict=True)]
        rows[name] = {**{way: spread(values) for way, values in times.items()}, "added": spread(added)}
    return rows


class CountMoves(TorchFunctionMode):
    """Counts what lines of meshkit's do to shapes by methods of tensors."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in MOVES and sys._getframe(1).f_code.co_filename.startswith(ROOT):
            self.calls += 1
        return func(*args, **(kwargs or {}))


def count_calls(step: Callable[[], Any]) -> dict[str, int]:
    """Of one step: methods that a pattern could take the place of, and patterns that are there already."""
    patterns = 0
    reduce = einops.einops.reduce  # `rearrange` and `repeat` go through it

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal patterns
        patterns += 1
        return reduce(*args, **kwargs)

    einops.einops.reduce = counted
    try:
        with CountMoves() as moves:
            step()
    finally:
        einops.einops.reduce = reduce
    return {"methods": moves.calls, "patterns": patterns}


def demo_steps() -> dict[str, Callable[[], Any]]:
    """Of the tiny model of the peer suite on a mesh of one rank: a training step, and a forward of one token a row.

    The second has next to nothing to compute: it is what Python's part of a step comes to where the device is fast, or in
    generation.
    """
    preset = PRESETS["tiny"]
    torch.manual_seed(0)
    run = mk.parallelize(mk.models.Llama(preset.config), mk.init_mesh(device_type="cpu"))
    ids = torch.randint(0, preset.config.vocab_size, (preset.rows, preset.tokens + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    @torch.no_grad()
    def one_token() -> None:
        for _ in range(REPEATED):
            run.model(ids[:, :1])

    return {TRAINING: lambda: run.forward_backward(batch), ONE_TOKEN: one_token}


def compiled() -> tuple[dict[str, Callable[[], Any]], dict[str, list[str]], dict[str, int]]:
    """(forward and backward, graphs that inductor gets, kernels that it makes) of attention in both ways."""
    torch.manual_seed(0)
    x = torch.randn(8, 256, HEADS * HEAD_DIM, requires_grad=True)
    qkv = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HEADS * HEAD_DIM, requires_grad=True)
    out = torch.randn(HEADS * HEAD_DIM, HEADS * HEAD_DIM, requires_grad=True)
    runs: dict[str, Callable[[], Any]] = {}
    graphs: dict[str, list[str]] = {}
    kernels: dict[str, int] = {}
    for way, attention in ATTENTION.items():
        graphs[way] = []

        def keep(graph: Any, inputs: Any, texts: list[str] = graphs[way], **kwargs: Any) -> Any:
            texts.append(graph.code)
            return compile_fx_inner(graph, inputs, **kwargs)

        def backend(graph: Any, inputs: Any, keep: Any = keep) -> Any:
            return compile_fx(graph, inputs, inner_compile=keep)

        function = torch.compile(attention, fullgraph=True, backend=backend)

        def step(function: Any = function) -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(x, qkv, out).square().sum(), (x, qkv, out))

        metrics.reset()
        step()
        kernels[way] = metrics.generated_kernel_count
        runs[way] = step
    if not all(map(torch.equal, runs[VIEWS](), runs[PATTERNS]())):
        raise SystemExit("compiled: the gradients differ")
    return runs, graphs, kernels


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(1)
    load = [round(os.getloadavg()[0], 1)]
    eager = eager_ns(settings)
    most_ns = max(values["added"].median for name, values in eager.items() if name != REPEAT)
    steps = demo_steps()
    calls = {name: count_calls(step) for name, step in steps.items()}  # and warms up
    step_s = {name: spread(seconds) for name, seconds in take_turns(steps, settings.rounds).items()}
    shares = {name: sum(calls[name].values()) * most_ns * 1e-9 / step_s[name].median for name in steps}

    runs, graphs, kernels = compiled()

    def repeated(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [run() for _ in range(settings.steps)]

    times = take_turns({way: repeated(run) for way, run in runs.items()}, settings.rounds)
    ratio = spread([ours / theirs for ours, theirs in zip(times[PATTERNS], times[VIEWS], strict=True)])
    load.append(round(os.getloadavg()[0], 1))
    same = graphs[VIEWS] == graphs[PATTERNS]
    show(eager, calls, step_s, shares, same, kernels, ratio)
    if settings.record:
        row = {
            **environment(),
            "einops": einops.__version__,
            "rounds": settings.rounds,
            "loadavg": load,
            "eager_ns": {name: {way: asdict(ns) for way, ns in values.items()} for name, values in eager.items()},
            "calls": calls,
            "s": {name: asdict(seconds) for name, seconds in step_s.items()},
            "share": {name: round(share, 6) for name, share in shares.items()},
            "compiled_graphs_same": same,
            "compiled_kernels": kernels,
            "compiled_patterns_over_views": asdict(ratio),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def show(
    eager: dict[str, dict[str, Spread]],
    calls: dict[str, dict[str, int]],
    step_s: dict[str, Spread],
    shares: dict[str, float],
    same: bool,
    kernels: dict[str, int],
    ratio: Spread,
) -> None:
    table = Table(title="eager, nanoseconds a call")
    for column in ("what", VIEWS, PATTERNS, "added"):
        table.add_column(column)
    for name, values in eager.items():
        table.add_row(name, *(f"{ns.median:.0f} ({ns.low:.0f} to {ns.high:.0f})" for ns in values.values()))
    console = Console(width=120)
    console.print(table)
    for name, share in shares.items():
        console.print(f"{name}: {calls[name]} in {step_s[name].median * 1e3:.1f} ms, at most {share:.3%} of it")
    console.print(
        f"compiled: {'the same graphs' if same else 'other graphs'}, kernels {kernels}, patterns over views "
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    )


if __name__ == "__main__":
    main()
