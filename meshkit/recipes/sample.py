"""A sample of generated text, for people to read."""

from __future__ import annotations

from typing import Any

from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.step import Run


def write_sample(run: Run, prompt_ids: Any, *, tokens: int, seed: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Up to `tokens` tokens that the model writes after the prompt, at temperature 0.8. Every rank must call it."""
    sampling = Sampling(max_new_tokens=tokens, temperature=0.8, stop_ids=stop_ids)
    (sample,) = generate(run, [Prompt(ids=prompt_ids, key=0)], sampling=sampling, seed=seed)
    written: list[int] = sample.ids.tolist()
    return written
