"""Loading a checkpoint onto any mesh (resume, resharding): check every file and the model first, then read in place."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from meshkit.checkpoint import _folder as files
from meshkit.checkpoint._agree import gather_results, on_each_rank, on_rank_0
from meshkit.checkpoint._dcp import FileReader, Index, read_index, read_into
from meshkit.checkpoint._snapshot import (
    CONFIG,
    PICKLED_STATE,
    STATE,
    STATE_TENSORS,
    Snapshot,
    config_difference,
    encode_config,
    read_snapshot,
    read_state,
)
from meshkit.checkpoint._state import (
    MODEL,
    WIRES,
    dtype_name,
    full_model_tensors,
    rng_targets,
    set_rng,
    set_wires,
    wires_to_read,
)
from meshkit.checkpoint.in_memory import Kept, SlotReader, index_of, snapshot_in_memory
from meshkit.core.model_state import model_tensors
from meshkit.core.optimizer_state import HoldsState, finish_update, optimizer_targets, parameter_names, set_optimizer
from meshkit.errors import CheckpointError
from meshkit.mesh import HostRanks
from meshkit.moving import bring_home
from meshkit.step import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that has been checked; its tensors are still where they were saved.

    place: as errors name it. tensors: (shape, dtype) of parameters and persistent buffers. ranks: that saved it. read_into:
    fills tensors by key, plain or DTensors on any mesh, in place; a collective.
    """

    place: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    ranks: int
    index: Index
    snapshot: Snapshot
    read_into: Callable[[dict[str, Tensor]], None]


def choose_step(folder: Path, step: int | None) -> int:
    """step: None is the newest. Raises: CheckpointError where there is no such complete checkpoint."""
    present = files.complete_steps(folder)
    # Never another step than the one asked for, and never an older one in place of a damaged newest: which to go on
    # from is the user's choice.
    if not present:
        raise CheckpointError(
            f"load(): {folder} holds no complete checkpoint. Give the folder of a run that saved one."
        )
    if step is not None and step not in present:
        raise CheckpointError(f"load(step={step}): {folder} holds the steps {', '.join(map(str, present))}.")
    return present[-1] if step is None else step


def config_of(folder: Path, step: int) -> Any:
    """The configuration of a step, from a file that has been checked. No communication."""
    path = folder / files.step_name(choose_step(folder, step))
    _check_named(path, files.read_manifest(path), CONFIG)
    return json.loads((path / CONFIG).read_text())


def state_of(folder: Path, step: int) -> dict[str, Any]:
    """The state of a step that is not tensors of the model, from files that have been checked. No communication."""
    path = folder / files.step_name(choose_step(folder, step))
    manifest = files.read_manifest(path)
    pickled = manifest.format == files.PICKLED
    _check_named(path, manifest, *((PICKLED_STATE,) if pickled else (STATE, STATE_TENSORS)))
    return read_state(path, pickled=pickled)


def _check_named(path: Path, manifest: files.Manifest, *names: str) -> None:
    for name in names:
        files.check_file(path / name, manifest.files[name])


def open_checked(folder: Path, step: int, ranks: HostRanks) -> SavedCheckpoint:
    """Check every file of a checkpoint, each rank a share, and read what is not tensors.

    Raises: CheckpointError, on every rank the same, naming the damaged file and the newest sound step before.
    """
    try:
        manifest = _check_files(folder, step, ranks)
    except CheckpointError as damage:
        _refuse_damaged(folder, step, damage, ranks)
    path = folder / files.step_name(step)

    def read() -> SavedCheckpoint:
        pickled = manifest.format == files.PICKLED
        return SavedCheckpoint(
            place=str(path),
            tensors=manifest.tensors,
            ranks=manifest.world_size,
            index=read_index(path, pickled=pickled),
            snapshot=read_snapshot(path, step, pickled=pickled),
            read_into=lambda targets: read_into(
                targets, FileReader(path, pickled=pickled), ranks, action=f"reading {path}, with the run half loaded"
            ),
        )

    return on_each_rank(ranks, f"load(step={step})", read)


def of_memory(kept: Kept, ranks: HostRanks, device: torch.device) -> SavedCheckpoint:
    """One that the hosts have in memory."""
    index, place = index_of(kept), f"step {kept.step} in memory"
    return SavedCheckpoint(
        place=place,
        tensors={
            key.removeprefix(MODEL): (shape, dtype_name(dtype))
            for key, (shape, dtype) in index.tensors.items()
            if key.startswith(MODEL)
        },
        ranks=len(kept.headers),
        index=index,
        snapshot=snapshot_in_memory(kept),
        read_into=lambda targets: read_into(
            targets, SlotReader(kept, ranks, device), ranks, action=f"reading {place}, with the run half loaded"
        ),
    )


def _check_files(folder: Path, step: int, ranks: HostRanks) -> files.Manifest:
    path = folder / files.step_name(step)
    # Each rank reads it: it is small, and a rank that sees another folder than rank 0 is found here.
    manifest = on_each_rank(ranks, f"load(step={step})", lambda: files.read_manifest(path))

    def check() -> None:
        share = files.share_files(manifest.files, ranks.size)[ranks.rank]
        for name in share:
            files.check_file(path / name, manifest.files[name])

    gather_results(ranks, f"load(step={step})", check)
    return manifest


def _refuse_damaged(folder: Path, step: int, damage: CheckpointError, ranks: HostRanks) -> NoReturn:
    """Name the newest sound checkpoint before the damaged one, which takes reading it. The caller chooses, not we."""
    older_steps = on_rank_0(ranks, "load()", lambda: [older for older in files.complete_steps(folder) if older < step])
    for older in reversed(older_steps):
        try:
            _check_files(folder, older, ranks)
        except CheckpointError:
            continue
        raise CheckpointError(
            f"{damage} Nothing was loaded. The newest sound checkpoint before it is step {older}: pass "
            f"step={older} to go on from there."
        ) from damage
    raise CheckpointError(f"{damage} Nothing was loaded, and there is no sound checkpoint before it.") from damage


def restore(
    saved: SavedCheckpoint,
    run: Run,
    optimizer: HoldsState | None,
    *,
    scheduler: Stateful | None,
    loader: Stateful | None,
    config: Any,
    ranks: HostRanks,
) -> None:
    """Give the run the saved state, in place. Everything that may refuse comes before the first change.

    Raises: CheckpointError, on every rank the same, and the loader's DataError for other data.
    """
    action = f"load(step={saved.snapshot.step})"
    bring_home(run, optimizer)
    state = saved.snapshot.state
    stateful = {"scheduler": scheduler, "loader": loader}
    targets = on_each_rank(ranks, action, lambda: _targets(run, optimizer, saved, config, stateful))
    # Before the tensors, since a loader may refuse.
    on_each_rank(ranks, action, lambda: loader.load_state_dict(state["loader"]) if loader is not None else None)
    saved.read_into(targets)
    # DCP copies into local tensors, and a DTensor has a version counter of its own. Whoever keeps a copy of a parameter
    # (a cast, a master weight) learns from the counter that the parameter was written.
    torch.autograd.graph.increment_version([*targets.values()])
    if optimizer is not None:
        optimizer_tensors = {key: tensor for key, tensor in targets.items() if key.startswith("optimizer.")}
        set_optimizer(optimizer, parameter_names(run.model), optimizer_tensors, saved.snapshot.facts)
    set_wires(run.model, {key: tensor for key, tensor in targets.items() if key.startswith(WIRES)})
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    # Last, so that nothing of the load itself draws from the generators after they are set.
    set_rng({key: rng_state for key, rng_state in targets.items() if key.startswith("rng.")})
    if run.mesh.rank == 0:
        _warn_not_restored(saved, ranks.size, stateful)


def _targets(
    run: Run,
    optimizer: HoldsState | None,
    saved: SavedCheckpoint,
    config: Any,
    stateful: Mapping[str, Stateful | None],
) -> dict[str, Tensor]:
    """The tensors to read into, by key; changes nothing.

    Raises: CheckpointError for another model or optimizer, and for state that was not saved.
    """
    if optimizer is not None:
        finish_update(optimizer)
    for name, target in stateful.items():
        if target is not None and saved.snapshot.state[name] is None:
            raise CheckpointError(f"{saved.place} was saved without {name}=, so it has no state for this run's {name}.")
    # First for its side effect: FSDP puts its shards back, see `model_tensors`. Names and ids read before it would be
    # of gathered copies.
    tensors = model_tensors(run.model)
    _refuse_other_model(saved, full_model_tensors(run.model), config)
    targets = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    if optimizer is not None:
        names = parameter_names(run.model)
        wanted = optimizer_targets(optimizer, names, saved.index.tensors, saved.snapshot.facts)
        targets |= {key: target.make() for key, target in wanted.items()}
    targets |= wires_to_read(run.model, saved.index)
    return targets | rng_targets(run.mesh.rank, run.mesh.device, saved.index)


def _refuse_other_model(saved: SavedCheckpoint, tensors: dict[str, Tensor], config: Any) -> None:
    saved_tensors = saved.tensors
    current = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
    # In the model's order, so that the first difference is the one nearest to the input.
    for name in [*current, *saved_tensors]:
        if current.get(name) == saved_tensors.get(name):
            continue
        if name not in saved_tensors:
            difference = f"it has no {name!r}, which this model has with shape {current[name][0]}"
        elif name not in current:
            difference = f"it has {name!r} with shape {saved_tensors[name][0]}, which this model has not"
        elif current[name][0] != saved_tensors[name][0]:
            difference = f"{name!r} has shape {saved_tensors[name][0]} there and {current[name][0]} here"
        else:
            difference = f"{name!r} is {saved_tensors[name][1]} there and {current[name][1]} here"
        raise CheckpointError(
            f"{saved.place} is a checkpoint of another model: {difference}. Nothing was loaded. Build the model that "
            f"was saved, or give another folder.{config_difference(saved.snapshot.config, encode_config(config))}"
        )


def _warn_not_restored(saved: SavedCheckpoint, world: int, stateful: Mapping[str, Stateful | None]) -> None:
    if world != (before := saved.ranks):
        logger.warning(
            "%s was saved by %d ranks; %s.",
            saved.place,
            before,
            f"ranks {before} to {world - 1} keep their own RNG state"
            if world > before
            else f"the RNG states of ranks {world} to {before - 1} are not used",
        )
    for name, target in stateful.items():
        if target is None and saved.snapshot.state[name] is not None:
            logger.warning("%s holds the state of a %s, but load() got no %s=.", saved.place, name, name)
