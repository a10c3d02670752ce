"""Is a training step of a Qwen3-MoE as fast with meshkit's experts as with transformers'?

    python benchmarks/experts.py                                     # one process, one thread, fp32
    python benchmarks/experts.py --shapes 64-experts --rounds 21

Forward and backward of the same model with the same weights: transformers' class with each way it has to compute experts, and
meshkit's with each kernel it has. First all must give the same logits, loss and gradients, or no ratio is reported. All of
them live in one process and take blocks of a few steps in turn; a ratio is taken within a round, where the load of the
machine is nearly the same, and its median over rounds is printed with its quartiles. Nothing is distributed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from rows import Spread, environment, spread
from torch import Tensor, nn

from meshkit.models import Experts, build_model, config_from_pretrained, load_pretrained
from meshkit.step import next_token_loss

RESULTS = Path(__file__).parent / "results" / "experts.jsonl"
TOL_FP32 = 1e-5  # relative to the largest value; only the order of sums differs

Shape = Literal["8-experts", "64-experts"]
EXPERTS = {  # as many weights, and as many multiplied with a token: Mixtral's kind and Qwen3's
    "8-experts": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    "64-experts": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128},
}
OURS, KERNELS = "meshkit", ("grouped", "loop")
THEIRS = ("grouped_mm", "eager")  # the first is what transformers takes when nobody says


@dataclass(frozen=True, kw_only=True)
class Settings:
    shapes: tuple[Shape, ...] = ("8-experts", "64-experts")
    hidden: int = 256
    layers: int = 4
    vocab: int = 1024
    rows: int = 2
    tokens: int = 256
    """of a row"""
    rounds: int = 11
    steps: int = 3
    """of a block: in a round each implementation takes one block"""
    warmup: int = 2
    threads: int = 1
    record: bool = False
    """append a row for each shape to benchmarks/results/experts.jsonl"""


# --------------------------------------------------------------------------------------------------- the same model


def implementations(shape: Shape, settings: Settings) -> dict[str, nn.Module]:
    """Models with equal weights: meshkit's with each kernel, transformers' with each way of its own."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=settings.hidden // 64,
        head_dim=32,
        norm_topk_prob=True,
        use_cache=False,
        pad_token_id=None,
        **EXPERTS[shape],
    )
    torch.manual_seed(0)
    first, *others = (theirs(config, way) for way in THEIRS)
    models: dict[str, nn.Module] = {}
    with tempfile.TemporaryDirectory() as folder:
        first.save_pretrained(folder)
        for kernel in KERNELS:
            model = build_model(config_from_pretrained(folder))
            load_pretrained(model, folder)
            for module in model.modules():
                if isinstance(module, Experts):
                    module.kernel = kernel
            models[f"{OURS} {kernel}"] = model
    for way, model in zip(THEIRS, (first, *others), strict=True):
        model.load_state_dict(first.state_dict())
        models[f"transformers {way}"] = model
    return {name: model.train() for name, model in models.items()}


def theirs(config: transformers.Qwen3MoeConfig, way: str) -> transformers.PreTrainedModel:
    """With a configuration of its own: a model keeps in it which way it computes experts."""
    model = transformers.Qwen3MoeForCausalLM._from_config(
        copy.deepcopy(config), attn_implementation="sdpa", experts_implementation=way
    )
    assert model.config._experts_implementation == way
    return model


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    loss = next_token_loss(model, batch) / batch["labels"].numel()
    loss.backward()
    return loss.detach()


def largest_difference(models: dict[str, nn.Module], batch: dict[str, Tensor]) -> float:
    """Relative, of logits, loss and the gradients that have one name everywhere, from those of the first model."""
    values = {}
    for name, model in models.items():
        with torch.no_grad():
            logits = getattr(out := model(batch["input_ids"]), "logits", out)
        loss = step(model, batch)
        grads = {key.removeprefix("model."): param.grad for key, param in model.named_parameters()}
        values[name] = {"logits": logits, "loss": loss, **grads}
    expected, *others = values.values()
    worst = 0.0
    for other in others:
        for key in expected.keys() & other.keys():
            difference = (other[key] - expected[key]).abs().max() / expected[key].abs().max()
            worst = max(worst, difference.item())
    return worst


# ------------------------------------------------------------------------------------------------------ measuring


def block_s(model: nn.Module, batch: dict[str, Tensor], settings: Settings) -> float:
    """Processor seconds of a step: with one thread what it takes, without what other processes take meanwhile."""
    began = time.process_time()
    for _ in range(settings.steps):
        step(model, batch)
    return (time.process_time() - began) / settings.steps


def measure(models: dict[str, nn.Module], batch: dict[str, Tensor], settings: Settings) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(settings.warmup):
            step(model, batch)
    for index in range(settings.rounds):
        for name in models if index % 2 == 0 else reversed(models):
            taken[name].append(block_s(models[name], batch, settings))
    return taken


def ratios(taken: dict[str, list[float]]) -> dict[str, Spread]:
    """Speed of the first over each; above 1 is in favour of the first."""
    mine, *others = taken
    return {
        f"{mine} / {other}": spread([theirs / ours for ours, theirs in zip(taken[mine], taken[other], strict=True)])
        for other in others
    }


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, settings.vocab, (settings.rows, settings.tokens + 1), generator=generator)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    table = Table("shape", "tokens per processor second", "ratio", "speed")
    for shape in settings.shapes:
        models = implementations(shape, settings)
        worst = largest_difference(models, batch)
        print(f"{shape}: logits, loss and gradients differ by {worst:.1e} at most", flush=True)
        if not worst <= TOL_FP32:  # true for nan as well
            raise SystemExit(f"{shape}: more than {TOL_FP32:.0e}, so it is not the same work: no ratio.")
        load = [round(os.getloadavg()[0], 1)]
        taken = measure(models, batch, settings)
        load.append(round(os.getloadavg()[0], 1))
        rates = {name: batch["labels"].numel() / statistics.median(times) for name, times in taken.items()}
        speed_ratios = ratios(taken)
        for name, rate in rates.items():
            row = next(((title, ratio) for title, ratio in speed_ratios.items() if title.endswith(f"/ {name}")), None)
            text = f"{row[1].median:.2f} ({row[1].low:.2f} to {row[1].high:.2f})" if row else ""
            table.add_row(shape, f"{name}: {rate:.0f}", row[0] if row else "", text)
        if settings.record:
            record(
                settings, shape=shape, difference=worst, loadavg=load, tokens_per_cpu_s=rates, speed_ratio=speed_ratios
            )
    Console(soft_wrap=True, width=120).print(table)


def record(
    settings: Settings, *, speed_ratio: dict[str, Spread], tokens_per_cpu_s: dict[str, float], **numbers: Any
) -> None:
    row = {**environment(), "transformers": transformers.__version__, **dataclasses.asdict(settings), **numbers}
    del row["shapes"], row["record"]
    row["tokens_per_cpu_s"] = {name: round(rate, 1) for name, rate in tokens_per_cpu_s.items()}
    row["speed_ratio"] = {name: dataclasses.asdict(ratio) for name, ratio in speed_ratio.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
