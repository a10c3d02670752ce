"""Saving a checkpoint, now or asynchronously: collect the state of a run, copy it to the host, write it in the background."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from meshkit.checkpoint import _folder as files
from meshkit.checkpoint._agree import on_rank_0, shared_out
from meshkit.checkpoint._dcp import INDEX, METADATA, Checksum, Part, read_index, write_parts
from meshkit.checkpoint._lease import Lease
from meshkit.checkpoint._snapshot import STATE, Snapshot, copy_state, encode_config, write_snapshot
from meshkit.checkpoint._state import (
    MODEL,
    WIRES,
    dtype_name,
    parameter_of,
    parts_to_write,
    rng_tensors,
)
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.core.optimizer_state import HoldsState, ParameterFacts, finish_update, optimizer_state, parameter_names
from meshkit.errors import CheckpointError, MeshkitError
from meshkit.mesh import HostRanks
from meshkit.parallel.wires import rounding_errors
from meshkit.step import Run


def collect(
    run: Run,
    optimizer: HoldsState | None,
    *,
    step: int,
    scheduler: Stateful | None,
    loader: Stateful | None,
    config: Any,
    extra: Any,
) -> tuple[Snapshot, dict[str, Part]]:
    """(snapshot, parts) of this rank. The parts are the run's own tensors, not copies: see `HostCopies`."""
    if optimizer is not None:
        finish_update(optimizer)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model_tensors(run.model).items()}
    copied = set(copies_of(run.model).values())  # tied weights of another pipeline stage, which writes them
    facts: dict[str, ParameterFacts] = {}
    if optimizer is not None:
        moments, facts = optimizer_state(optimizer, parameter_names(run.model))
        tensors |= moments
        facts = {name: entry for name, entry in facts.items() if name not in copied}
    tensors = {key: tensor for key, tensor in tensors.items() if parameter_of(key) not in copied}
    # Of copies too: each stage has rounded the gradient of its own use.
    tensors |= {f"{WIRES}{name}": errors for name, errors in rounding_errors(run.model).items()}
    state = {
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "loader": None if loader is None else loader.state_dict(),
        "extra": extra,
    }
    # State is copied in any case: it is small, and the loader and the schedule go on changing theirs.
    snapshot = Snapshot(step=step, state=copy_state(state), facts=facts, config=encode_config(config))
    return snapshot, parts_to_write({**tensors, **rng_tensors(run.mesh.rank, run.mesh.device)})


class HostCopies:
    """Copies of parts in host memory, which the background thread writes while training goes on.

    With an accelerator they lie in pinned buffers that are reused by the next save.
    """

    # [Note: who may write the pinned buffers] There is one set of buffers. `Checkpointer.save` waits for the write before
    # it, so no thread reads them when `copy` overwrites them. The copies are asynchronous on the current stream, behind
    # the optimizer step that made the values; `copy` returns when that stream has finished, so the optimizer may change
    # the parameters at once and the thread reads finished values.

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}

    def copy(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        copies = {}
        for key, part in parts.items():
            source = part.tensor
            if source.device.type == "cpu":
                # New memory at every save, freed when it is written: between saves a CPU run holds no second copy.
                copy = torch.empty_like(source, memory_format=torch.contiguous_format)
            else:
                # See [Note: who may write the pinned buffers].
                copy = self._pinned.get(key, source.new_empty(0, device="cpu"))
                if copy.shape != source.shape or copy.dtype != source.dtype:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                    self._pinned[key] = copy
            copies[key] = dataclasses.replace(part, tensor=copy.copy_(source, non_blocking=True))
        if self._pinned:
            torch.accelerator.current_stream().synchronize()
        return copies


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """All that the background thread needs to write one checkpoint. Nothing in it changes while training goes on.

    abandoned: steps newer than the one that the run went back to; they are renamed just before this one is published.
    keep: how many of the newest checkpoints stay; None is all. lease: on rank 0, looked at once more before that.
    """

    folder: Path
    snapshot: Snapshot
    parts: dict[str, Part]
    mesh: dict[str, int]
    ranks: HostRanks
    abandoned: list[int]
    keep: int | None
    lease: Lease | None = None


def write(job: WriteJob) -> None:
    """Write one checkpoint and give it its name. Each phase ends with all ranks agreeing that it succeeded.

    Wire: over `job.ranks`, which no other thread uses meanwhile. Raises: CheckpointError, on every rank the same.
    """
    action = f"step {job.snapshot.step} was not saved"
    try:
        temporary = on_rank_0(job.ranks, action, lambda: files.make_temporary(job.folder, job.snapshot.step))
        checksums = write_parts(job.parts, temporary, job.ranks)

        def publish(reports: list[tuple[dict[str, Checksum], Mapping[str, ParameterFacts]]]) -> list[None]:
            _publish(job, temporary, reports)
            return [None] * len(reports)

        shared_out(job.ranks, action, lambda: (checksums, job.snapshot.facts), publish)
    # The same on every rank already. Nobody writes any more: what was written goes, for the disk may be full.
    except MeshkitError:
        if job.ranks.rank == 0:
            shutil.rmtree(files.temporary_of(job.folder, job.snapshot.step), ignore_errors=True)
        raise
    except Exception as error:  # the group itself failed: a rank is gone
        raise CheckpointError(f"{action}: {type(error).__name__}: {error}") from error


def _publish(
    job: WriteJob, temporary: Path, reports: list[tuple[dict[str, Checksum], Mapping[str, ParameterFacts]]]
) -> None:
    """On rank 0: write what is not tensors and the manifest, rename the folder, delete the oldest checkpoints.

    reports: (checksums of the files it wrote, facts of its parameters) of each rank.
    """
    with telling_of_a_full_disk(CheckpointError, f"writing {temporary}", temporary):
        _publish_files(job, temporary, reports)


def _publish_files(
    job: WriteJob, temporary: Path, reports: list[tuple[dict[str, Checksum], Mapping[str, ParameterFacts]]]
) -> None:
    step = job.snapshot.step
    checksums = {name: checksum for written, _ in reports for name, checksum in written.items()}
    # A folder on each node's own disk would look complete to whoever wrote it and lack the rest after a restart
    # elsewhere.
    _refuse_unseen(step, temporary, checksums)
    facts = {name: entry for _, entries in reports for name, entry in entries.items()}
    checksums |= write_snapshot(temporary, dataclasses.replace(job.snapshot, facts=facts))
    checksums |= {name: files.checksum_file(temporary / name) for name in (INDEX, METADATA)}
    # After all other files, since it holds their checksums.
    files.write_manifest(temporary, _manifest(job, temporary, checksums))
    if job.lease is not None:
        job.lease.check()
    for newer in job.abandoned:
        files.set_aside(job.folder, newer)
    # The rename comes last. A kill before it leaves an .incomplete- folder, which the next save deletes.
    files.publish(temporary, job.folder / files.step_name(step))
    files.keep_newest(job.folder, job.keep)


def _refuse_unseen(step: int, temporary: Path, checksums: Mapping[str, Checksum]) -> None:
    for name, checksum in checksums.items():
        if not (temporary / name).exists() or (temporary / name).stat().st_size != checksum.bytes:
            raise CheckpointError(
                f"step {step} was not saved: another rank wrote {name}, but rank 0 does not see it in "
                f"{temporary}. The folder must be on a file system that all nodes share."
            )


def _manifest(job: WriteJob, temporary: Path, checksums: Mapping[str, Checksum]) -> files.Manifest:
    index = read_index(temporary)
    first_keys = {**index.first_keys, STATE: "scheduler", **dict.fromkeys((INDEX, METADATA), next(iter(index.tensors)))}
    return files.Manifest(
        format=files.FORMAT,
        step=job.snapshot.step,
        world_size=job.ranks.size,
        mesh=job.mesh,
        torch=torch.__version__,
        tensors={
            key.removeprefix(MODEL): (shape, dtype_name(dtype))
            for key, (shape, dtype) in index.tensors.items()
            if key.startswith(MODEL)
        },
        files={
            name: files.File(bytes=checksum.bytes, digest=checksum.digest, first_key=first_keys.get(name))
            for name, checksum in checksums.items()
        },
    )
