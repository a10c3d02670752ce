"""A small training run, for the ranks of the checkpoint tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.model_state import copies_of
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.data import Loader, Tokens
from meshkit.mesh import Mesh
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.optim import lr_schedule
from meshkit.step import Batch, Run, next_token_loss
from tests.tiny import tiny_config

CONFIG = tiny_config(
    vocab_size=61,  # no mesh divides it
    hidden_size=24,
    intermediate_size=45,
    num_hidden_layers=1,
    head_dim=6,
    tie_word_embeddings=True,
)
SEQ_LEN, ROWS = 8, 4


@dataclass(kw_only=True)
class Training:
    run: Run
    optimizer: torch.optim.AdamW
    scheduler: LambdaLR
    loader: Loader

    def train(self, steps: int, *, noise: float = 0.0) -> list[float]:
        """The losses. With noise, every loss is scaled by a draw from the global generator."""
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.run.forward_backward(next(self.loader), loss=noisy_loss(noise))
            mk.clip_grad_norm(self.run, 1.0)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss))
        return losses

    def evaluate(self) -> None:
        """Leaves FSDP's root unit gathered, as a run that validates before it saves."""
        ids = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
        self.run.evaluate({"input_ids": ids, "labels": ids})

    @property
    def holders(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def local_state(self) -> str:
        """A digest of all that later steps depend on, on this rank, bit for bit."""
        digest = hashlib.sha256()
        for param in self.run.parameters():
            states = self.optimizer.state.get(param, {})
            for value in (param, *(states[key] for key in sorted(states))):
                digest.update(local_tensor(value).contiguous().numpy().tobytes())
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        digest.update(repr([options, self.scheduler.state_dict(), self.loader.state_dict()]).encode())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()

    def whole_state(self) -> dict[str, Tensor]:
        """Every parameter and every moment that this rank holds, as a whole, by single-device name. Collective."""
        whole = {}
        copies = copies_of(self.run.model)
        for here, param in self.run.named_parameters():
            name = copies.get(here, here)
            whole[name] = full_tensor(param).clone()
            for key, value in self.optimizer.state[param].items():
                whole[f"{name}/{key}"] = full_tensor(value).clone()
        return whole


@cache
def mesh_of(spec: str) -> Mesh:
    return mk.init_mesh(spec)


@cache
def tokens() -> Tokens:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 2000).astype(np.uint16)
    bounds = np.array([0, 700, 1500, 2000], dtype=np.int64)
    return Tokens(
        path=Path("made.tokens"),
        ids=ids,
        offsets=bounds,
        vocab_size=CONFIG.vocab_size,
        fingerprint="made",
        text_bytes=None,
    )


def build(
    spec: str,
    *,
    seed: int = 0,
    lr: float = 1e-2,
    zero: int | None = None,
    sequence: bool = False,
    schedule: str = "1f1b",
    **shape: Any,
) -> Training:
    """A new run on the mesh; with another seed it has nothing in common with the one that was saved."""
    mesh = mesh_of(spec)
    with torch.device("meta"):
        model = Llama(replace(CONFIG, **shape)).double()
    run = mk.parallelize(
        model,
        mesh,
        plan=LLAMA_PLAN,
        zero=zero,
        sequence=sequence,
        pipeline=mk.strategy.PipelinePolicy(schedule=schedule),
    )
    mk.init_weights(run.model, seed=seed)
    torch.manual_seed(1000 * seed + mesh.data_rank)
    optimizer = mk.adamw(run, lr=lr)
    loader = Loader(tokens(), seq_len=SEQ_LEN, global_batch=ROWS, seed=0, rank=mesh.data_rank, ranks=mesh.data_ranks)
    scheduler = lr_schedule(optimizer, kind="cosine", warmup_steps=3, total_steps=40)
    return Training(run=run, optimizer=optimizer, scheduler=scheduler, loader=loader)


def noisy_loss(noise: float) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, part: Batch) -> Tensor:
        return next_token_loss(model, part) * (1 + noise * torch.rand(()))

    return loss


def saved_run(folder: str, spec: str, *, steps: tuple[int, ...] = (1, 2), **options: Any) -> list[int]:
    """Train and save after each of these steps; the steps that are complete then."""
    training = build(spec, **options)
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        for before, step in pairwise((0, *steps)):
            training.train(step - before)
            checkpointer.save(step, training.run, training.optimizer, **training.holders, config={"width": 24})
    return checkpointer.steps()


def refusal(act: Callable[[], Any]) -> str:
    """The text of the meshkit error that `act` raises; the world lives on."""
    try:
        act()
    except mk.MeshkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
