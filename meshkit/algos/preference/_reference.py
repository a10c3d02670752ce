"""The reference model: its log-probabilities computed once and kept in a file, or a model that follows the policy.

Training with a stored reference needs no second model. The file says what it was made of: a reference of another model,
template or truncation has other tokens or other numbers, and would train silently towards them, so it is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.core.sharding import local_tensor
from meshkit.data.examples import Example, Unit, like, members, units_fingerprint
from meshkit.data.examples_loader import example_batches
from meshkit.errors import DataError, PlanError
from meshkit.step import Run

NUMBER, TENSOR, EXAMPLES = "number_of_example", "log_probs", "examples"


def stored_reference(
    run: Run, units: Sequence[Unit], path: Path, *, made_of: Mapping[str, str], seq_len: int, rows: int = 8
) -> list[Unit]:
    """The units, each example with the reference's log-probability of its learnt tokens under "reference_log_probs".

    From the file at `path`, or computed by `run`, the reference, and put there; `rows` rows of seq_len tokens at a time.
    made_of: what they depend on beside the examples themselves, by name: the model, say `folder_fingerprint(folder)`, the
    template, the truncation. The file is fp32, a number for each learnt token, on a file system that all nodes share.
    Every rank must call it. Memory: the host holds all of them. Wire: `token_values`, and an all-reduce of all of them.
    Raises: DataError, on every rank, for a file that was made of something else, naming what differs, or is damaged.
    """
    made_of = {**made_of, EXAMPLES: units_fingerprint(units)}
    refusal: list[str | None] = [None]
    if run.mesh.rank == 0 and path.exists():
        refusal = [_why_not(path, made_of)]
    there = [path.exists(), refusal[0]]
    dist.broadcast_object_list(there, src=run.mesh.ranks[0], group=run.mesh.group)
    if there[1] is not None:
        raise DataError(there[1])
    if not there[0]:
        values = _computed(run, [example for unit in units for example in members(unit)], seq_len, rows)
        if run.mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.partial")
            save_file({TENSOR: torch.from_numpy(values)}, partial, metadata=made_of)
            os.replace(partial, path)
        dist.barrier(group=run.mesh.group)
    with safe_open(path, framework="pt") as file:
        return _with_values(units, file.get_tensor(TENSOR).double().numpy())


def folder_fingerprint(folder: Path) -> str:
    """The content of a Hugging Face folder's weights and config; reads all of them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _why_not(path: Path, made_of: Mapping[str, str]) -> str | None:
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        return f"{path} is damaged: {error}. Remove it, to compute the reference again."
    others = [name for name in made_of if found.get(name) != made_of[name]]
    # Another template or truncation makes other examples: name the cause, not both.
    causes = [name for name in others if name != EXAMPLES] or others
    if not causes:
        return None
    told = "; ".join(f"{name} was {found.get(name)} and is {made_of[name]}" for name in causes)
    return f"{path} holds the reference of something else: {told}. Name another file, or remove this one to compute it again."


def _computed(run: Run, examples: Sequence[Example], seq_len: int, rows: int) -> np.ndarray:
    """[learnt tokens] fp32, of all examples in order, the same on every rank."""
    mesh = run.mesh
    numbered = [
        Example(ids=example.ids, learn=example.learn, source=example.source, scalars={NUMBER: number})
        for number, example in enumerate(examples)
    ]
    first = np.concatenate([[0], np.cumsum([_learnt(example).sum() for example in examples])])
    found = torch.zeros(int(first[-1]), dtype=torch.float32)
    batches = example_batches(numbered, seq_len=seq_len, rows=rows, rank=mesh.data_rank, ranks=mesh.data_ranks)
    for batch in batches:
        values = token_values(run, batch).cpu()
        learnt = batch["labels"] >= 0
        for segment in range(1, int(batch["segment_ids"].max()) + 1):
            here = batch["segment_ids"] == segment
            number = int(batch[NUMBER][here].sum())
            found[first[number] : first[number + 1]] = values[here & learnt].float()
    if mesh["cp"].get_local_rank() > 0:  # ranks of cp have the same rows
        found.zero_()
    found = found.to(mesh.device)
    if mesh.tokens.size() > 1:
        dist.all_reduce(found, group=mesh.tokens.get_group())
    return found.cpu().numpy()


def _with_values(units: Sequence[Unit], values: np.ndarray) -> list[Unit]:
    done, start = [], 0
    for unit in units:
        parts = []
        for example in members(unit):
            own, learnt = np.zeros(len(example)), _learnt(example)
            stop = start + int(learnt.sum())
            own[learnt], start = values[start:stop], stop
            parts.append(dataclasses.replace(example, token_values={**example.token_values, REFERENCE: own}))
        done.append(like(unit, parts))
    return done


def _learnt(example: Example) -> np.ndarray:
    """[L] bool: the tokens that are labels. The first of a sequence is none."""
    return np.concatenate([[False], example.learn[1:]])


@torch.no_grad()
def update_reference(reference: nn.Module, policy: nn.Module, *, alpha: float = 0.6) -> None:
    """reference <- alpha policy + (1 - alpha) reference, each parameter in place; alpha=1 is the hard update, a copy.

    Both have parameters of the same names, shapes and layout; the reference may have another dtype, to which it is rounded.
    Call it between steps, on every rank. Buffers stay. Log-probabilities of the reference that were
    computed before are stale after it. Wire: nothing.
    Raises: PlanError for alpha outside (0, 1], other names, shapes or layouts; before anything is changed.
    Source: Gorbatovski et al. 2024 (2404.09656), soft and hard update; alpha=0.6 and 512 steps are TRL's defaults.
    """
    if not 0 < alpha <= 1:
        raise PlanError(f"update_reference: alpha={alpha} is the policy's share. Use (0, 1]; 1 copies the policy.")
    old, new = dict(reference.named_parameters()), dict(policy.named_parameters())
    if old.keys() != new.keys():
        apart = sorted(old.keys() ^ new.keys())
        raise PlanError(f"update_reference: only one model has {apart[0]!r}, of {len(apart)} such parameters.")
    for name, target in old.items():
        for what, of in (("shape", lambda p: tuple(p.shape)), ("layout", _layout)):
            if of(target) != of(new[name]):
                raise PlanError(
                    f"update_reference: {name!r} has {what} {of(target)} in the reference and {of(new[name])} in the policy. "
                    "Build both with the same mesh and plan."
                )
    for name, target in old.items():
        own, other = local_tensor(target), local_tensor(new[name])
        own.copy_(other if alpha == 1 else torch.lerp(own.to(other.dtype), other, alpha))


def _layout(parameter: nn.Parameter) -> str:
    if not isinstance(parameter, DTensor):
        return "plain"
    return f"{parameter.placements} on {parameter.device_mesh.mesh_dim_names}"
