"""Reference model: its log-probabilities computed once and stored in a file, or a model that follows the policy.

Training with a stored reference needs no second model. The file records what it was computed from. A file from another
model, template or truncation has other tokens or other numbers, which would train in silence; so it is refused.
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
from meshkit.core.digests import digest_bytes
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.core.sharding import local_tensor
from meshkit.data.examples import Example, Unit, like, members, units_fingerprint
from meshkit.data.examples_loader import example_batches
from meshkit.errors import DataError, PlanError
from meshkit.step import Run

EXAMPLE_INDEX, TENSOR, EXAMPLES, DIGEST = "example_index", "log_probs", "examples", "digest"


def stored_reference(
    run: Run,
    units: Sequence[Unit],
    path: str | os.PathLike[str],
    *,
    made_of: Mapping[str, str],
    seq_len: int,
    rows: int = 8,
) -> list[Unit]:
    """Add to each example the reference model's log-probabilities of its learnt tokens, as "reference_log_probs".

    They are read from the file at `path`; or `run`, the reference model, computes them, `rows` rows of seq_len tokens at a
    time, and writes it. made_of: what they depend on besides the examples, by name: the model, perhaps as
    `folder_fingerprint(folder)`, the template, the truncation. The file is fp32, a number for each learnt token, on a file
    system that all nodes share.
    Every rank must call it. Memory: all of them on the host. Wire: `token_values`, and an all-reduce of all of them.
    Raises: DataError, on every rank, for a file that is damaged or was made of something else, naming the difference.
    """
    path = Path(path)
    made_of = {**made_of, EXAMPLES: units_fingerprint(units)}
    refusal: list[str | None] = [None]
    if run.mesh.rank == 0 and path.exists():
        refusal = [_why_not(path, made_of)]
    # Rank 0 looks for all: other nodes may see a file of a shared file system later. See [Note: gather the error, then raise]
    # in rewards/_score.py.
    exists_and_refusal = [path.exists(), refusal[0]]
    dist.broadcast_object_list(exists_and_refusal, src=run.mesh.ranks[0], group=run.mesh.group)
    exists, reason = exists_and_refusal
    if reason is not None:
        raise DataError(reason)
    if not exists:
        values = _compute(run, [example for unit in units for example in members(unit)], seq_len, rows)
        if run.mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and renamed: a job that is killed here leaves no half file that the next would read.
            partial = path.with_name(f"{path.name}.partial")
            with telling_of_a_full_disk(DataError, f"writing {path}", path.parent, values.nbytes):
                save_file({TENSOR: torch.from_numpy(values)}, partial, metadata={**made_of, DIGEST: _digest(values)})
            os.replace(partial, path)
        # The others read what rank 0 wrote.
        run.mesh.host.barrier()
    with safe_open(path, framework="pt") as file:
        return _with_values(units, file.get_tensor(TENSOR).double().numpy())


def folder_fingerprint(folder: str | os.PathLike[str]) -> str:
    """A hash of the content of a Hugging Face folder's weights and config; reads all of them."""
    folder = Path(folder)
    digest = hashlib.blake2b(digest_size=16)
    # Sorted: the order of a folder's files differs between file systems.
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            # In pieces of 16 MiB: a shard of a large model does not fit beside the model.
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _why_not(path: Path, made_of: Mapping[str, str]) -> str | None:
    try:
        with safe_open(path, framework="pt") as file:
            recorded = file.metadata() or {}
            values = file.get_tensor(TENSOR).numpy() if TENSOR in file.keys() else None  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        return f"{path} is damaged: {error}. Remove it, to compute the reference again."
    differing = [name for name in made_of if recorded.get(name) != made_of[name]]
    # Another template or truncation makes other examples, too: name only the cause.
    causes = [name for name in differing if name != EXAMPLES] or differing
    if not causes:
        # Files of older versions have no digest.
        if values is not None and recorded.get(DIGEST, _digest(values)) == _digest(values):
            return None
        return f"{path} is damaged: its numbers are not those that were written. Remove it, to compute the reference again."
    changes = "; ".join(f"{name} was {recorded.get(name)} and is {made_of[name]}" for name in causes)
    return (
        f"{path} holds the reference of something else: {changes}. Name another file, or remove this one to compute it "
        "again."
    )


def _digest(values: np.ndarray) -> str:
    return digest_bytes(np.ascontiguousarray(values).tobytes())


def _compute(run: Run, examples: Sequence[Example], seq_len: int, rows: int) -> np.ndarray:
    """[learnt tokens] fp32, of all examples in order, the same on every rank."""
    mesh = run.mesh
    # Packing and cp reorder examples; the index travels along as a scalar, so each number finds its place again.
    numbered = [
        Example(ids=example.ids, learn=example.learn, source=example.source, scalars={EXAMPLE_INDEX: index})
        for index, example in enumerate(examples)
    ]
    offsets = np.concatenate([[0], np.cumsum([_learnt(example).sum() for example in examples])])
    log_probs = torch.zeros(int(offsets[-1]), dtype=torch.float32)
    batches = example_batches(numbered, seq_len=seq_len, rows=rows, rank=mesh.data_rank, ranks=mesh.data_ranks)
    for batch in batches:
        values = token_values(run, batch).cpu()
        learnt = batch["labels"] >= 0
        for segment in range(1, int(batch["segment_ids"].max()) + 1):
            in_example = batch["segment_ids"] == segment
            index = int(batch[EXAMPLE_INDEX][in_example].sum())  # it stands at one token of the example, the rest is 0
            # Places of other data ranks stay 0: the sum over ranks below joins the parts.
            log_probs[offsets[index] : offsets[index + 1]] = values[in_example & learnt].float()
    if mesh["cp"].get_local_rank() > 0:  # ranks of cp have the same rows, and only one may count
        log_probs.zero_()
    log_probs = log_probs.to(mesh.device)
    if mesh.tokens.size() > 1:
        dist.all_reduce(log_probs, group=mesh.tokens.get_group())
    return log_probs.cpu().numpy()


def _with_values(units: Sequence[Unit], values: np.ndarray) -> list[Unit]:
    with_values, start = [], 0
    for unit in units:
        parts = []
        for example in members(unit):
            log_probs, learnt = np.zeros(len(example)), _learnt(example)
            stop = start + int(learnt.sum())
            log_probs[learnt], start = values[start:stop], stop
            parts.append(dataclasses.replace(example, token_values={**example.token_values, REFERENCE: log_probs}))
        with_values.append(like(unit, parts))
    return with_values


def _learnt(example: Example) -> np.ndarray:
    """[L] bool: the tokens that are labels; the first token of a sequence never is one."""
    return np.concatenate([[False], example.learn[1:]])


@torch.no_grad()
def update_reference(reference: nn.Module, policy: nn.Module, *, alpha: float = 0.6) -> None:
    """reference <- alpha policy + (1 - alpha) reference, each parameter in place; alpha=1 is the hard update, a copy.

    Both have parameters of the same names, shapes and layout; the reference may have another dtype, to which the result is
    rounded. Call it between steps, on every rank. Buffers are not changed. Log-probabilities of the reference model that
    were computed before are stale afterwards. Wire: nothing.
    Raises: PlanError for alpha outside (0, 1], other names, shapes or layouts; before anything is changed.
    Source: Gorbatovski et al. 2024 (2404.09656), soft and hard update; alpha=0.6 and 512 steps are TRL's defaults.
    """
    if not 0 < alpha <= 1:
        raise PlanError(f"update_reference: alpha={alpha} is the policy's share. Use (0, 1]; 1 copies the policy.")
    old, new = dict(reference.named_parameters()), dict(policy.named_parameters())
    # All checks before the first write: a reference that moved half way would be neither model.
    if old.keys() != new.keys():
        unmatched = sorted(old.keys() ^ new.keys())
        raise PlanError(f"update_reference: only one model has {unmatched[0]!r}, of {len(unmatched)} such parameters.")
    for name, target in old.items():
        for what, of in (("shape", lambda p: tuple(p.shape)), ("layout", _layout)):
            if of(target) != of(new[name]):
                raise PlanError(
                    f"update_reference: {name!r} has {what} {of(target)} in the reference and {of(new[name])} in the policy. "
                    "Build both with the same mesh and plan."
                )
    for name, target in old.items():
        shard, policy_shard = local_tensor(target), local_tensor(new[name])
        # Shards, not DTensors: equal layouts make the update local, without a collective. lerp in the policy's dtype, since
        # in a bf16 reference's a small alpha would be rounded away.
        shard.copy_(policy_shard if alpha == 1 else torch.lerp(shard.to(policy_shard.dtype), policy_shard, alpha))


def _layout(parameter: nn.Parameter) -> str:
    if not isinstance(parameter, DTensor):
        return "plain"
    return f"{parameter.placements} on {parameter.device_mesh.mesh_dim_names}"
