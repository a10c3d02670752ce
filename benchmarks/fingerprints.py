"""Which rollouts that are not what they claim does `verify_rollouts` find, and how far off are honest ones?

    python benchmarks/fingerprints.py --record

A small byte-level Llama learns this repository's pages for some hundred steps, so that logits and updates are of the size of
a trained model's. It then writes answers to beginnings of these pages, and so do models that are a little other: an update
older or newer at several learning rates, with weights rounded to int8 or int4, in another dtype, of other random numbers.
A trainer with the right weights verifies all of them. Honest answers are also those of deep models that learnt nothing, since
rounding grows with depth. Reported are the least, the median and the most of each number, and the share of rollouts that is
found: by the bounds of the dtype, and by those that twice as much as other honest rollouts of the same model gives.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from rows import environment
from torch import nn

import meshkit as mk
from meshkit.algos.rollout import (
    FingerprintBounds,
    Prompt,
    Rollout,
    Sampling,
    Verdict,
    generate,
    honest_bounds,
    verify_rollouts,
)

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "fingerprints.jsonl"
NUMBERS = tuple(each.name for each in fields(FingerprintBounds))


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = 300
    """of training, before anything is written"""
    prompts: int = 24
    tokens: int = 96
    """of an answer"""
    depths: tuple[int, ...] = (8, 24)
    """layers of the models that learnt nothing"""
    rates: tuple[float, ...] = (1e-3, 3e-4, 1e-4, 1e-5, 1e-6)
    """learning rates of the one update that a version is older"""
    record: bool = False
    """append rows to benchmarks/results/fingerprints.jsonl"""


def config(layers: int, hidden: int) -> mk.models.LlamaConfig:
    return mk.models.LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
    )


def batches(text: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = np.random.default_rng(0)
    while True:
        rows = np.stack([text[first : first + 129] for first in draw.integers(0, len(text) - 129, 8)])
        ids = torch.from_numpy(rows.astype(np.int64))
        yield ids[:, :-1], ids[:, 1:]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = nn.functional.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """The same with each row of a matrix rounded to so many bits, and back."""
    model, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                scale = parameter.abs().amax(1, keepdim=True) / most
                parameter.copy_((parameter / scale).round() * scale)
    return model


def run_of(model: nn.Module, dtype: torch.dtype) -> mk.Run:
    return mk.parallelize(copy.deepcopy(model).to(dtype), mk.init_mesh(), plan=mk.models.LLAMA_PLAN)


def answers(model: nn.Module, dtype: torch.dtype, prompts: list[Prompt], tokens: int, seed: int = 1) -> list[Rollout]:
    run = run_of(model, dtype)
    return generate(run, prompts, sampling=Sampling(max_new_tokens=tokens), samples=2, seed=seed, fingerprints=True)


def told(verdicts: list[Verdict], own: FingerprintBounds) -> dict[str, Any]:
    values = {name: [getattr(each, name) for each in verdicts] for name in NUMBERS}
    return {
        "found": sum(not each.ok for each in verdicts) / len(verdicts),
        "found_by_own": sum(any(getattr(each, n) > getattr(own, n) for n in NUMBERS) for each in verdicts)
        / len(verdicts),
        "median": {name: float(np.median(each)) for name, each in values.items()},
        "worst": {name: float(np.max(each)) for name, each in values.items()},
        "least": {name: float(np.min(each)) for name, each in values.items()},
    }


def main(settings: Settings) -> None:
    torch.manual_seed(0)
    text = np.frombuffer("".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))).encode(), np.uint8)
    prompts = [
        Prompt(ids=text[first : first + 40].astype(np.int64), key=number)
        for number, first in enumerate(np.random.default_rng(1).integers(0, len(text) - 40, settings.prompts))
    ]
    model = mk.models.Llama(config(4, 128))
    mk.init_weights(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    rows = batches(text)
    for step in range(settings.steps):
        loss = update(model, optimizer, next(rows))
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.2f}", flush=True)
    others: dict[str, nn.Module] = {"honest": model}
    others |= {f"int{bits} weights": rounded(model, bits) for bits in (8, 4)}
    for rate in settings.rates:
        others[f"an update of {rate:.0e} apart"] = apart = copy.deepcopy(model)
        own = torch.optim.AdamW(apart.parameters(), lr=rate, betas=(0.9, 0.95))
        own.load_state_dict(optimizer.state_dict())
        for group in own.param_groups:
            group["lr"] = rate
        update(apart, own, next(rows))
    others["random weights"] = mk.init_weights(mk.models.Llama(config(4, 128)), seed=1)
    deep = {layers: mk.init_weights(mk.models.Llama(config(layers, 256)), seed=2) for layers in settings.depths}
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        unlike = torch.bfloat16 if dtype == torch.float32 else torch.float32
        kinds: list[tuple[str, nn.Module, torch.dtype, nn.Module]] = [
            (name, other, dtype, model) for name, other in others.items()
        ]
        kinds.append((f"written in {name_of(unlike)}", model, unlike, model))
        kinds += [(f"honest, {layers} layers", other, dtype, other) for layers, other in deep.items()]
        bounds: dict[nn.Module, FingerprintBounds] = {}
        for name, writer, wrote_in, right in kinds:
            trainer = run_of(right, dtype)
            if right not in bounds:
                honest = answers(right, dtype, prompts, settings.tokens, seed=2)
                bounds[right] = honest_bounds(verify_rollouts(trainer, honest, tokens_per_microbatch=1024))
            wrote = answers(writer, wrote_in, prompts, settings.tokens)
            verdicts = verify_rollouts(trainer, wrote, tokens_per_microbatch=1024)
            found.append({"what": name, "dtype": name_of(dtype), **told(verdicts, bounds[right])})
    table = Table("dtype", "what", "found", "by own bounds", *NUMBERS)
    for row in found:
        numbers = [f"{row['least'][name]:.2g} {row['median'][name]:.2g} {row['worst'][name]:.2g}" for name in NUMBERS]
        table.add_row(row["dtype"], row["what"], f"{row['found']:.0%}", f"{row['found_by_own']:.0%}", *numbers)
    Console(width=190).print(table)
    if settings.record:
        with RESULTS.open("a") as file:
            for row in found:
                file.write(json.dumps({**environment(), "name": "fingerprints", **asdict(settings), **row}) + "\n")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main(tyro.cli(Settings))
