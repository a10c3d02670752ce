"""How long do episodes take whose environments sleep, beside the larger of generation alone and the environments alone?

    python benchmarks/environments.py                       # environments sleep as long as a group's turn takes to write
    python benchmarks/environments.py --groups 8 --every-at-once

Environments sleep `--sleeps` times as long as a group's turn takes to write, which is measured first. As those of a simulator
do, a group's sleep at the same time and those of the next group after them; with --every-at-once those of all groups may.
Two runs of the same episodes, each round: an engine that takes no time (step), and both. The seconds of generation are those
within the latter, since another run's would have another load of the machine beside it. The ratio is both over the larger of
step and generation; without overlap it is their sum over the larger. One rank, one thread.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rows import environment, spread

import meshkit as mk
from meshkit.algos.environments import Action, Observation, Player
from meshkit.algos.rollout import Engine, KeptCache, Prompt, Rollout, Sampling, generate

RESULTS = Path(__file__).parent / "results" / "environments.jsonl"


@dataclass(frozen=True, kw_only=True)
class Settings:
    hidden: int = 128
    layers: int = 2
    prompts: int = 8
    samples: int = 2
    turns: int = 8
    tokens: int = 12
    """of a turn"""
    groups: int = 4
    sleeps: float = 1.0
    """how long an environment's step is, in turns of a group"""
    every_at_once: bool = False
    rounds: int = 3
    write: bool = False
    """add a row to the results"""


class Sleeper:
    """Says three tokens after a while."""

    seconds = 0.0
    size = 0
    free_at = 0.0
    waiting = 0

    async def reset(self, fields: Mapping[str, Any], seed: int) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Observation:
        if Sleeper.size:
            # The first of a group takes the simulator when it is free, the others of it share it.
            if Sleeper.waiting % Sleeper.size == 0:
                Sleeper.free_at = max(Sleeper.free_at, time.perf_counter()) + Sleeper.seconds
            Sleeper.waiting += 1
            await asyncio.sleep(max(0.0, Sleeper.free_at - time.perf_counter()))
        else:
            await asyncio.sleep(Sleeper.seconds)
        return Observation(ids=(1, 2, 3))


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    config = mk.models.LlamaConfig(
        vocab_size=1024,
        hidden_size=settings.hidden,
        intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=settings.hidden // 4,
    )
    run = mk.parallelize(mk.models.Llama(config), mk.init_mesh(), plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    engine = partial(generate, run, cache=KeptCache())
    Sleeper.size = 0 if settings.every_at_once else settings.prompts * settings.samples // settings.groups
    _seconds(run, engine, settings, 0.0)  # warm
    _, alone = _seconds(run, engine, settings, 0.0)
    sleep = settings.sleeps * alone / settings.turns / settings.groups
    found: dict[str, list[float]] = {"generate": [], "step": [], "both": []}
    for _ in range(settings.rounds):
        found["step"].append(_seconds(run, instant, settings, sleep)[0])
        both, generated = _seconds(run, engine, settings, sleep)
        found["both"].append(both)
        found["generate"].append(generated)
    rounds = list(zip(*found.values(), strict=True))
    ratios = [both / max(generated, stepped) for generated, stepped, both in rounds]
    in_turn = [(generated + stepped) / max(generated, stepped) for generated, stepped, _ in rounds]
    row = {
        "benchmark": "environments",
        **environment(),
        "settings": asdict(settings),
        "sleep_s": round(sleep, 4),
        "ratio": spread(ratios),
        "without_overlap": spread(in_turn),
        **{f"{name}_s": spread(values) for name, values in found.items()},
    }
    print(json.dumps(row, default=vars))
    if settings.write:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row, default=vars) + "\n")


def _seconds(run: mk.Run, engine: Engine, settings: Settings, sleep: float) -> tuple[float, float]:
    """(of all, within the engine)"""
    Sleeper.seconds, Sleeper.free_at, Sleeper.waiting = sleep, 0.0, 0
    if isinstance(engine, partial):
        engine.keywords["cache"].forget()
    prompts = [Prompt(ids=np.arange(20) * (key + 1) % 1024, key=key) for key in range(settings.prompts)]
    player = Player(
        mesh=run.mesh,
        engine=engine,
        environment=Sleeper,
        encode=lambda text: [],
        turns=settings.turns,
        groups=settings.groups,
    )
    began = time.perf_counter()
    player(prompts, sampling=Sampling(max_new_tokens=settings.tokens), samples=settings.samples)
    seconds = time.perf_counter() - began
    player.pool.close()
    return seconds, player.seconds["engine"]


def instant(prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, **options: Any) -> list[Rollout]:
    ids, log_probs = np.zeros(sampling.max_new_tokens, np.int64), np.zeros(sampling.max_new_tokens)
    return [Rollout(ids=ids, log_probs=log_probs, key=prompt.key) for prompt in prompts for _ in range(samples)]


if __name__ == "__main__":
    main(tyro.cli(Settings))
