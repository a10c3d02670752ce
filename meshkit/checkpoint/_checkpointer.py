"""Save a run without stopping it, and go on from a save on any mesh."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from meshkit.checkpoint import _folder as files
from meshkit.checkpoint._agree import agree, each, host_group, on_first
from meshkit.checkpoint._dcp import Index, Part, Sum, read_index, read_into, write_parts
from meshkit.checkpoint._state import (
    MODEL,
    ParameterFacts,
    finish_update,
    optimizer_state,
    optimizer_targets,
    parameter_names,
    parameter_of,
    parts_to_write,
    rng_targets,
    rng_tensors,
    set_optimizer,
    set_rng,
    whole_tensors,
)
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.errors import CheckpointError, MeshkitError
from meshkit.step import Run

STATE = "state.pt"
CONFIG = "config.json"
METADATA = ".metadata"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Collected:
    """What this rank has to offer to a checkpoint; its tensors are still the run's own."""

    parts: dict[str, Part]
    facts: dict[str, ParameterFacts]
    state: dict[str, Any]
    config: str


@dataclass(frozen=True, kw_only=True)
class _Save:
    """All a background thread needs to write one checkpoint: nothing in it changes while training goes on."""

    step: int
    content: _Collected
    mesh: dict[str, int]
    group: dist.ProcessGroup
    abandoned: list[int]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What one checkpoint holds that is not a tensor of the run."""

    path: Path
    manifest: files.Manifest
    index: Index
    state: dict[str, Any]
    facts: dict[str, ParameterFacts]


class Checkpointer:
    """A folder of checkpoints of one run, at `folder/step-00000010` and so on.

    A checkpoint holds model, optimizer, schedule, torch's RNG of each rank, data position, step and configuration, in
    torch.distributed.checkpoint's format. It gets its name when it is complete and on disk, so a kill at any instant
    leaves those before it as they were. It loads onto any mesh, bit for bit what was saved; on the same mesh, going on
    is bit for bit never having stopped.
    keep: delete all but the newest so many, once a new one is complete; None keeps all.
    asynchronous: `save` returns when the values are copied to host memory, and a thread writes them; the host holds one
    copy of this rank's state until then (with an accelerator, in pinned buffers that are kept for the next save).
    timeout: how long a rank waits for the others, which may be writing.
    folder: on a file system that all nodes share.
    Use it as a context manager, or call `wait()` before the program ends: an error in the thread surfaces at the next
    `save` or `wait`. `save`, `load` and `resume` are collective: every rank calls them, with the same values.
    Ranks are those of the run's mesh: runs on parts of the world have a Checkpointer and a folder each.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        asynchronous: bool = True,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"Checkpointer keep={keep}: keep at least the newest 1, or None to keep all.")
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self._timeout = timeout
        self._own_group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._pinned: dict[str, Tensor] = {}
        self._current: int | None = None  # the newest step that this run has loaded or saved

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"Also: {failed}")
        finally:
            self._thread.shutdown()

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first. Looks at the folder; no communication."""
        return files.complete_steps(self.folder)

    def latest(self) -> int | None:
        """The newest of `steps()`. Ranks may see a folder differently; `resume` has rank 0 decide for all."""
        return max(self.steps(), default=None)

    def config(self, step: int) -> Any:
        """The configuration saved with a step, as JSON values. No communication."""
        self._check_small(step, CONFIG)
        return json.loads((self._path(step) / CONFIG).read_text())

    def extra(self, step: int) -> Any:
        """What was saved as `extra` with a step. No communication."""
        self._check_small(step, STATE)
        return _read_state(self._path(step))["extra"]

    def save(
        self,
        step: int,
        run: Run,
        optimizer: Optimizer | None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        config: Any = None,
        extra: Any = None,
    ) -> None:
        """Save what the run is after `step` optimizer steps. Training may go on at once.

        First waits for the save before. scheduler, loader: their state_dict() is saved, which must be the same on every
        rank. config: a dataclass or JSON values, to be read and compared later. extra: numbers, strings, tensors and
        containers of them. A step that this run has just loaded or saved is complete, and not written again.
        A run that went back, by load(step=...), to an older step sets the newer ones aside as `abandoned-step-...`.
        Wire: three small all-gathers over a gloo group of its own; that group alone in the background.
        Raises: CheckpointError, on every rank the same: for state that cannot be saved or differs between ranks, for a
        folder with checkpoints of a run that this one did not load, for a step before one that is saved, and for what
        went wrong with the save before.
        """
        self.wait()
        group = self._group(run)
        what = f"save(step={step})"
        content = each(
            group,
            what,
            lambda: _collect(run, optimizer, scheduler=scheduler, loader=loader, config=config, extra=extra),
        )
        answers = agree(group, what, lambda: (_common(step, content), self.steps()))
        _refuse_different([common for common, _ in answers])
        present = answers[0][1]  # rank 0's, since others may see a folder on the network a little later
        if step == self._current and step in present:
            return
        self._refuse_foreign(step, present)
        if self.asynchronous:
            content = dataclasses.replace(content, parts=each(group, what, lambda: self._snapshot(content.parts)))
        job = _Save(
            step=step,
            content=content,
            mesh=run.mesh.spec.sizes(),
            group=group,
            abandoned=[other for other in present if self._current is not None and other > self._current],
        )
        if self.asynchronous:
            self._pending = step, self._thread.submit(self._write, job)
        else:
            self._write(job)
            self._current = step

    def wait(self) -> None:
        """Return when the last save is on disk. No communication on the calling thread.

        Raises: CheckpointError if it failed, on every rank the same; the checkpoints before it are untouched.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        future.result()
        self._current = step

    def resume(
        self,
        run: Run,
        optimizer: Optimizer | None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        config: Any = None,
    ) -> int:
        """`load` the newest checkpoint; 0, with nothing changed, when there is none. Rank 0 decides which it is."""
        self.wait()
        newest = on_first(self._group(run), "resume()", self.latest)
        if newest is None:
            return 0
        return self.load(run, optimizer, scheduler=scheduler, loader=loader, step=newest, config=config)

    def load(
        self,
        run: Run,
        optimizer: Optimizer | None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        step: int | None = None,
        config: Any = None,
    ) -> int:
        """Give the run the saved state, in place, on whatever mesh it is; returns the step.

        step: which one; None is the newest, and never another when that one is damaged. optimizer=None: the model
        alone. config: this run's, to say in a refusal what else differs.
        Every file is checked against its checksum first, each rank checking a share, and the model against the saved
        names, shapes and dtypes: until all ranks have found all well, nothing is changed.
        RNG states go to the ranks they came from; on a larger world, a rank that has none saved keeps its own.
        Load only what you trust: torch.distributed.checkpoint unpickles its index.
        Wire: small all-gathers over a gloo group; the values come from the files.
        Raises: CheckpointError, on every rank the same: naming the damaged file, the first key in it and the newest
        sound step; or naming the first key that differs. The loader's DataError for other data.
        """
        self.wait()
        group = self._group(run)
        chosen = on_first(group, "load()", lambda: self._choose(step))
        saved = self._checked(chosen, group)
        what = f"load(step={chosen})"
        holders = {"scheduler": scheduler, "loader": loader}
        targets = each(group, what, lambda: _targets(run, optimizer, saved, config, holders))
        # Before the tensors, since a loader may refuse.
        each(group, what, lambda: loader.load_state_dict(saved.state["loader"]) if loader is not None else None)
        read_into(targets, saved.path, group)
        torch.autograd.graph.increment_version(
            [*targets.values()]
        )  # what follows parameters sees that they were written
        if optimizer is not None:
            read = {key: tensor for key, tensor in targets.items() if key.startswith("optimizer.")}
            set_optimizer(optimizer, parameter_names(run.model), read, saved.facts)
        if scheduler is not None:
            scheduler.load_state_dict(saved.state["scheduler"])
        set_rng({key: state for key, state in targets.items() if key.startswith("rng.")})
        if run.mesh.rank == 0:
            _say_what_is_not_restored(saved, dist.get_world_size(group), holders)
        self._current = chosen
        return chosen

    def _group(self, run: Run) -> dist.ProcessGroup:
        if self._own_group is None:
            self._own_group = host_group(run.mesh, self._timeout)
        return self._own_group

    def _path(self, step: int) -> Path:
        return self.folder / files.step_name(step)

    def _refuse_foreign(self, step: int, present: list[int]) -> None:
        if self._current is None and present:
            raise CheckpointError(
                f"save(step={step}): {self.folder} holds step {present[-1]} of a run that this one did not load. Call "
                "resume() first to go on from there, or give this run a folder of its own."
            )
        if self._current is not None and step <= self._current:
            raise CheckpointError(
                f"save(step={step}): this run is at step {self._current} already. Steps increase from save to save."
            )

    def _snapshot(self, parts: dict[str, Part]) -> dict[str, Part]:
        """Copies on the host. The pinned buffers are free: the save before is done."""
        copies = {}
        for key, part in parts.items():
            source = part.tensor
            if source.device.type == "cpu":
                copy = torch.empty_like(source, memory_format=torch.contiguous_format)
            else:
                copy = self._pinned.get(key, source.new_empty(0, device="cpu"))
                if copy.shape != source.shape or copy.dtype != source.dtype:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                    self._pinned[key] = copy
            copies[key] = dataclasses.replace(part, tensor=copy.copy_(source, non_blocking=True))
        if self._pinned:
            torch.accelerator.current_stream().synchronize()
        return copies

    def _write(self, job: _Save) -> None:
        """Write one checkpoint and give it its name. Every phase ends with all ranks agreeing that it went well."""
        what = f"step {job.step} was not saved"
        try:
            temporary = on_first(job.group, what, lambda: files.begin(self.folder, job.step))
            sums = write_parts(job.content.parts, temporary, job.group)
            reports = agree(job.group, what, lambda: (sums, job.content.facts))
            on_first(job.group, what, lambda: self._finish(job, temporary, reports))
        except MeshkitError:
            raise
        except Exception as error:  # the group itself: a rank is gone
            raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error

    def _finish(
        self, job: _Save, temporary: Path, reports: list[tuple[dict[str, Sum], dict[str, ParameterFacts]]]
    ) -> None:
        """On rank 0: what is not tensors, the manifest, and the name. Then delete the oldest."""
        sums = {name: total for totals, _ in reports for name, total in totals.items()}
        facts = {name: dataclasses.asdict(entry) for _, entries in reports for name, entry in entries.items()}
        for name, total in sums.items():
            if not (temporary / name).exists() or (temporary / name).stat().st_size != total.bytes:
                raise CheckpointError(
                    f"step {job.step} was not saved: another rank wrote {name}, but rank 0 does not see it in "
                    f"{temporary}. The folder must be on a file system that all nodes share."
                )
        buffer = io.BytesIO()
        torch.save({**job.content.state, "optimizer": facts}, buffer)
        sums[STATE] = files.write_file(temporary / STATE, buffer.getvalue())
        sums[CONFIG] = files.write_file(temporary / CONFIG, job.content.config.encode())
        sums[METADATA] = files.sum_file(temporary / METADATA)
        index = read_index(temporary)
        first_keys = {**index.first_keys, METADATA: next(iter(index.tensors)), STATE: "scheduler"}
        manifest = files.Manifest(
            format=files.FORMAT,
            step=job.step,
            world_size=dist.get_world_size(job.group),
            mesh=job.mesh,
            torch=torch.__version__,
            tensors={
                key.removeprefix(MODEL): (shape, _dtype_name(dtype))
                for key, (shape, dtype) in index.tensors.items()
                if key.startswith(MODEL)
            },
            files={
                name: files.File(bytes=total.bytes, crc32=total.crc32, first_key=first_keys.get(name))
                for name, total in sums.items()
            },
        )
        files.write_manifest(temporary, manifest)
        for step in job.abandoned:
            files.set_aside(self.folder, step)
        files.publish(temporary, self._path(job.step))
        files.keep_newest(self.folder, self.keep)

    def _choose(self, step: int | None) -> int:
        present = self.steps()
        if not present:
            raise CheckpointError(
                f"load(): {self.folder} holds no complete checkpoint. Give the folder of a run that saved one."
            )
        if step is not None and step not in present:
            raise CheckpointError(f"load(step={step}): {self.folder} holds the steps {', '.join(map(str, present))}.")
        return present[-1] if step is None else step

    def _checked(self, step: int, group: dist.ProcessGroup) -> _Saved:
        """What the checkpoint holds, once all its files are found to be what was written."""
        try:
            manifest = self._check_files(step, group)
        except CheckpointError as damage:
            self._refuse_damaged(step, damage, group)
        path = self._path(step)

        def read() -> _Saved:
            state = _read_state(path)
            facts = {name: ParameterFacts(**entry) for name, entry in state["optimizer"].items()}
            return _Saved(path=path, manifest=manifest, index=read_index(path), state=state, facts=facts)

        return each(group, f"load(step={step})", read)

    def _check_files(self, step: int, group: dist.ProcessGroup) -> files.Manifest:
        path = self._path(step)
        manifest = each(group, f"load(step={step})", lambda: files.read_manifest(path))

        def check() -> None:
            share = files.share_files(manifest.files, dist.get_world_size(group))[dist.get_rank(group)]
            for name in share:
                files.check_file(path / name, manifest.files[name])

        agree(group, f"load(step={step})", check)
        return manifest

    def _refuse_damaged(self, step: int, damage: CheckpointError, group: dist.ProcessGroup) -> NoReturn:
        """Look for the newest sound one before, which takes reading it, and name it; the choice is the caller's."""
        older = on_first(group, "load()", lambda: [other for other in self.steps() if other < step])
        for other in reversed(older):
            try:
                self._check_files(other, group)
            except CheckpointError:
                continue
            raise CheckpointError(
                f"{damage} Nothing was loaded. The newest sound checkpoint before it is step {other}: pass "
                f"step={other} to go on from there."
            ) from damage
        raise CheckpointError(f"{damage} Nothing was loaded, and there is no sound checkpoint before it.") from damage

    def _check_small(self, step: int, name: str) -> None:
        self._choose(step)
        path = self._path(step)
        files.check_file(path / name, files.read_manifest(path).files[name])


def _collect(
    run: Run,
    optimizer: Optimizer | None,
    *,
    scheduler: Stateful | None,
    loader: Stateful | None,
    config: Any,
    extra: Any,
) -> _Collected:
    if optimizer is not None:
        finish_update(optimizer)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model_tensors(run.model).items()}
    copied = set(copies_of(run.model).values())  # another rank writes them
    facts: dict[str, ParameterFacts] = {}
    if optimizer is not None:
        moments, facts = optimizer_state(optimizer, parameter_names(run.model))
        tensors |= moments
        facts = {name: entry for name, entry in facts.items() if name not in copied}
    tensors = {key: tensor for key, tensor in tensors.items() if parameter_of(key) not in copied}
    state = {
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "loader": None if loader is None else loader.state_dict(),
        "extra": extra,
    }
    return _Collected(
        parts=parts_to_write({**tensors, **rng_tensors(run.mesh.rank, run.mesh.device)}),
        facts=facts,
        state=_frozen(state),
        config=_encode_config(config),
    )


def _targets(
    run: Run, optimizer: Optimizer | None, saved: _Saved, config: Any, holders: Mapping[str, Stateful | None]
) -> dict[str, Tensor]:
    """What to read into, by key; changes nothing.

    Raises: CheckpointError for another model or optimizer, and for state that was not saved.
    """
    if optimizer is not None:
        finish_update(optimizer)
    for name, holder in holders.items():
        if holder is not None and saved.state[name] is None:
            raise CheckpointError(f"{saved.path} was saved without {name}=, so it has no state for this run's {name}.")
    tensors = model_tensors(run.model)
    _refuse_other_model(saved, whole_tensors(run.model), config)
    targets = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    if optimizer is not None:
        targets |= optimizer_targets(optimizer, parameter_names(run.model), saved.index, saved.facts)
    return targets | rng_targets(run.mesh.rank, run.mesh.device, saved.index)


def _common(step: int, content: _Collected) -> dict[str, str]:
    """What is saved once for all ranks, as text to compare."""
    return {
        "step": repr(step),
        "config": content.config,
        **{name: repr(value) for name, value in content.state.items()},
    }


def _frozen(state: dict[str, Any]) -> dict[str, Any]:
    """A deep copy, through the encoding of the file, so that what could not be read back is refused now."""
    copies = {}
    for name, value in state.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            copies[name] = torch.load(buffer, weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise CheckpointError(
                f"save(): the state of {name} cannot be saved: {reason}. Use numbers, strings, tensors, and lists and "
                "dicts of them."
            ) from error
    return copies


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def _encode_config(config: Any) -> str:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    return json.dumps(config, indent=1, default=str)


def _refuse_different(answers: list[dict[str, str]]) -> None:
    for name, first in answers[0].items():
        for rank, answer in enumerate(answers):
            if answer[name] != first:
                raise CheckpointError(
                    f"save(): {name} differs between ranks: {_short(first)} on rank 0, {_short(answer[name])} on rank "
                    f"{rank}. One is saved for all, so it must be the same on every rank."
                )


def _refuse_other_model(saved: _Saved, tensors: dict[str, Tensor], config: Any) -> None:
    there = saved.manifest.tensors
    here = {name: (tuple(tensor.shape), _dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
    for name in [*here, *there]:
        if here.get(name) == there.get(name):
            continue
        if name not in there:
            difference = f"it has no {name!r}, which this model has with shape {here[name][0]}"
        elif name not in here:
            difference = f"it has {name!r} with shape {there[name][0]}, which this model has not"
        elif here[name][0] != there[name][0]:
            difference = f"{name!r} has shape {there[name][0]} there and {here[name][0]} here"
        else:
            difference = f"{name!r} is {there[name][1]} there and {here[name][1]} here"
        raise CheckpointError(
            f"{saved.path} is a checkpoint of another model: {difference}. Nothing was loaded. Build the model that "
            f"was saved, or give another folder.{_config_difference(saved.path, config)}"
        )


def _config_difference(path: Path, config: Any) -> str:
    """The first few fields that differ, as a sentence; nothing where either has none."""
    there = json.loads((path / CONFIG).read_text())
    here = json.loads(_encode_config(config))
    if there is None or here is None:
        return ""
    old, new = _flat(there), _flat(here)
    changes = [f"{key} was {old.get(key)}, is {new.get(key)}" for key in {**new, **old} if old.get(key) != new.get(key)]
    more = f", and {len(changes) - 4} more" if len(changes) > 4 else ""
    return f" The configuration differs: {'; '.join(changes[:4])}{more}." if changes else ""


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: json.dumps(value)}
    leaves: dict[str, str] = {}
    for key, inner in value.items():
        leaves |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return leaves


def _say_what_is_not_restored(saved: _Saved, world: int, holders: Mapping[str, Stateful | None]) -> None:
    if world != (before := saved.manifest.world_size):
        logger.warning(
            "%s was saved by %d ranks; %s.",
            saved.path,
            before,
            f"ranks {before} to {world - 1} keep their own RNG state"
            if world > before
            else f"the RNG states of ranks {world} to {before - 1} are not used",
        )
    for name, holder in holders.items():
        if holder is None and saved.state[name] is not None:
            logger.warning("%s holds the state of a %s, but load() got no %s=.", saved.path, name, name)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
