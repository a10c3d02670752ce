"""How many tokens a second does `generate` answer, beside transformers' `generate`, with one model and one thread?

    python benchmarks/generation.py                 # one process, one thread, fp32: samples of a group of prompts
    python benchmarks/generation.py --grid          # answers of equal lengths: 1, 8 and 64 of 64 and of 512 tokens
    python benchmarks/generation.py --in-place      # transformers' own module in `generate`, over its own cache

Both answer the same prompts with the same number of samples, which end as chance has it: at an id that the workload says is
the end. First both must answer greedily with the same ids, or no ratio is reported. Then they sample in turn; tokens are
those up to the end of each answer, seconds are those of the processor, and the ratio of a round is of the two that ran next
to each other, in the opposite order every second time. A round of short answers has several calls.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import tyro
from rows import environment, spread

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.models import build_model, config_from_pretrained, load_pretrained

RESULTS = Path(__file__).parent / "results" / "generation.jsonl"
TOKENS_OF_A_ROUND = 512  # of each answer, at least


@dataclass(frozen=True, kw_only=True)
class Settings:
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 4096
    prompts: int = 4
    prompt_tokens: int = 48
    """of the longest; the shortest has half of them"""
    samples: int = 8
    new_tokens: int = 256
    ends: int = 40
    """ids of the vocabulary that end an answer: more make answers shorter"""
    rounds: int = 5
    grid: bool = False
    """one prompt, no ends; a row for each number of samples and of new tokens"""
    in_place: bool = False
    """give transformers' module to `mk.parallelize`, instead of ours with its values"""
    write: bool = False
    """add a row to the results"""

    @property
    def cells(self) -> Iterator[Settings]:
        if not self.grid:
            yield self
            return
        for new_tokens, samples in product((64, 512), (1, 8, 64)):
            yield replace(self, prompts=1, ends=0, samples=samples, new_tokens=new_tokens)


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    theirs, run = models(settings)
    for cell in settings.cells:
        row = {**asdict(cell), **measured(cell, theirs, run), "transformers": transformers.__version__, **environment()}
        print(json.dumps(row), flush=True)
        if settings.write:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


def measured(settings: Settings, theirs: Any, run: mk.Run) -> dict[str, Any]:
    """Rates of both, and their ratio."""
    draw = np.random.default_rng(0)
    lengths = np.linspace(settings.prompt_tokens, settings.prompt_tokens // 2, settings.prompts).astype(int)
    prompts = [Prompt(ids=draw.integers(0, settings.vocabulary, n), key=i) for i, n in enumerate(lengths)]
    ends = tuple(draw.choice(settings.vocabulary, settings.ends, replace=False).tolist())
    batch = padded(prompts)

    def ours_of(sampling: Sampling, samples: int, seed: int) -> list[np.ndarray]:
        return [c.ids for c in generate(run, prompts, sampling=sampling, samples=samples, seed=seed)]

    def theirs_of(**options: Any) -> list[np.ndarray]:
        answers = theirs.generate(
            **batch, max_new_tokens=settings.new_tokens, eos_token_id=list(ends) or None, pad_token_id=0, **options
        )[:, batch["input_ids"].shape[1] :]
        return [until_end(row.numpy(), ends) for row in answers]

    greedy = Sampling(max_new_tokens=settings.new_tokens, temperature=0, stop_ids=ends)
    expected = theirs_of(do_sample=False)
    answers = ours_of(greedy, 1, 0)
    if not all(np.array_equal(answer, other) for answer, other in zip(answers, expected, strict=True)):
        raise SystemExit("the greedy answers differ, so no speeds are compared")
    sampling = Sampling(max_new_tokens=settings.new_tokens, stop_ids=ends)
    calls: dict[str, Callable[[int], list[np.ndarray]]] = {
        "ours": partial(ours_of, sampling, settings.samples),
        "transformers": lambda seed: theirs_of(do_sample=True, num_return_sequences=settings.samples, top_k=0),
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(settings.rounds):
        torch.manual_seed(number)
        for name in calls if number % 2 else reversed(calls):
            tokens, begin = 0, time.process_time()
            for seed in range(-(-TOKENS_OF_A_ROUND // settings.new_tokens)):
                tokens += sum(map(len, calls[name](seed)))
            rates[name].append(tokens / (time.process_time() - begin))
    return {
        "tokens_per_s": {name: asdict(spread(values)) for name, values in rates.items()},
        "ratio": asdict(spread([a / b for a, b in zip(rates["ours"], rates["transformers"], strict=True)])),
    }


def models(settings: Settings) -> tuple[Any, mk.Run]:
    """One model, as transformers has it and as we do."""
    config = transformers.LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=settings.hidden // 64,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    mesh = mk.init_mesh("dp_shard=1", device_type="cpu")
    if settings.in_place:
        return theirs, mk.parallelize(copy.deepcopy(theirs), mesh)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = build_model(config_from_pretrained(folder))
        load_pretrained(ours, folder)
    return theirs, mk.parallelize(ours, mesh, plan=mk.models.LLAMA_PLAN)


def padded(prompts: list[Prompt]) -> dict[str, torch.Tensor]:
    """On the left, as transformers needs it."""
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
        seen[row, width - len(prompt.ids) :] = 1
    return {"input_ids": ids, "attention_mask": seen}


def until_end(ids: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """The answer with its end, without what follows."""
    end_positions = np.flatnonzero(np.isin(ids, ends))
    return ids[: end_positions[0] + 1] if len(end_positions) else ids


if __name__ == "__main__":
    main(tyro.cli(Settings))
