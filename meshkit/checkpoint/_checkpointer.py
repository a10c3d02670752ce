"""Checkpointer: save a run without stopping it (asynchronous checkpointing), and resume from a save on any mesh."""

from __future__ import annotations

import errno
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from meshkit.checkpoint import _folder as files
from meshkit.checkpoint._agree import gather_results, on_each_rank, on_rank_0
from meshkit.checkpoint._lease import Lease, take
from meshkit.checkpoint._load import choose_step, config_of, of_memory, open_checked, restore, state_of
from meshkit.checkpoint._save import HostCopies, WriteJob, collect, write
from meshkit.checkpoint.in_memory import InMemory, Keeper
from meshkit.core.optimizer_state import HoldsState
from meshkit.core.to_device import wait_for_device
from meshkit.errors import CheckpointError, CorruptionError
from meshkit.mesh import HostRanks
from meshkit.moving import experts_at_home
from meshkit.step import Run

# [Note: pinning between idle devices]
# The driver may finish all that is queued on a device before it pins memory. A collective that is queued there ends only
# when its other ranks have queued theirs, and a rank that pins does not get to queue what they wait for: a deadlock. The
# first save pins in the middle of training. So each rank waits for its own device before the collectives of a save on the
# host: all devices are idle then, and no rank leaves the save, to queue more, before all have pinned.


class Checkpointer:
    """A folder of checkpoints of one run, at `folder/step-00000010` and so on.

    A checkpoint holds model, optimizer, schedule, torch's RNG of each rank, data position, step and configuration, in
    torch.distributed.checkpoint's format with an index in JSON. It gets its name when it is complete and on disk, so a kill
    at any instant leaves those before it as they were. It loads onto any mesh, bit for bit what was saved; on the same mesh,
    going on is bit for bit never having stopped.
    keep: delete all but the newest so many, once a new one is complete; None keeps all.
    memory: checkpoints in the memory of the hosts besides, see `InMemory` and `save_in_memory`; `resume` takes the newest of
    both. A clean end of the block gives that memory back: what is to stay is saved on disk.
    asynchronous: `save` returns when the values are copied to host memory, and a thread writes them; the host holds one
    copy of this rank's state until then (with an accelerator, in pinned buffers that are kept for the next save).
    timeout: how long a rank waits for the others, which may be writing.
    resumed_in_memory: whether `resume` found the newest step there, so that it is not on disk.
    folder: on a file system that all nodes share. One job at a time saves there: `resume` and `save` take a lease on it,
    which ends with the block or with the process, also if that is killed.
    Use it as a context manager, or call `wait()` before the program ends: an error in the thread surfaces at the next
    `save` or `wait`. `save`, `load` and `resume` are collective: every rank calls them, with the same values.
    Ranks are those of the run's mesh: runs on parts of the world have a Checkpointer and a folder each.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        memory: InMemory | None = None,
        asynchronous: bool = True,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"Checkpointer keep={keep}: keep at least the newest 1, or None to keep all.")
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self._timeout = timeout
        self._memory = None if memory is None else Keeper(memory, self.folder)
        # Made at the first save or load: the mesh comes with the run, and to make its groups is a collective.
        self._ranks: HostRanks | None = None
        # One worker: saves are written in order, and the ranks below meet in one thread at a time.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._copies = HostCopies()
        self._lease: Lease | None = None  # on rank 0 of the mesh
        self.resumed_in_memory = False
        self._in_memory: int | None = None  # the newest step that is there
        self._current: int | None = None  # the newest step that this run has loaded or saved

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # What a corrupt run has in memory is not gone on from.
            self.close(keep_memory=error is not None and not isinstance(error, CorruptionError))
        except CheckpointError as failed:
            # The error of the with block comes first; that of the last save is a note on it.
            if error is None:
                raise
            error.add_note(f"Also: {failed}")

    def close(self, *, keep_memory: bool = False) -> None:
        """What the end of the block does: wait for the last save, give back the lease, and the memory of the hosts.

        keep_memory: what is there stays, for a job that goes on from it.
        Raises: CheckpointError if the last save failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            ranks, self._ranks = self._ranks, None
            if ranks is not None:
                ranks.close()
            try:
                if self._memory is not None:
                    self._memory.close(discard=not keep_memory)
            finally:
                self.release()

    def claim(self, run: Run) -> None:
        """Take the lease on the folder, as `resume` and `save` do: no other job saves there until `release`. Collective.

        Raises: CheckpointError, on every rank, naming host, pid and start of the job that holds it.
        """
        on_rank_0(self._ranks_of(run), "claim()", self._hold)

    def release(self) -> None:
        """Give the lease back, as the end of the block does. No communication."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._released.detach()
            lease.release()

    def _hold(self) -> None:
        if self._lease is not None:
            self._lease.check()
            return
        self._lease = take(self.folder)
        # Of a Checkpointer that nobody closed the lease ends with the object.
        self._released = weakref.finalize(self, self._lease.release)

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first. Looks at the folder; no communication."""
        return files.complete_steps(self.folder)

    def latest(self) -> int | None:
        """The newest of `steps()`. Ranks may see a folder differently; `resume` has rank 0 decide for all."""
        return max(self.steps(), default=None)

    def config(self, step: int) -> Any:
        """The configuration saved with a step, as JSON values. No communication."""
        return config_of(self.folder, step)

    def extra(self, step: int) -> Any:
        """What was saved as `extra` with a step. No communication."""
        return state_of(self.folder, step)["extra"]

    def save(
        self,
        step: int,
        run: Run,
        optimizer: HoldsState | None,
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
        Wire: an all-reduce in which ranks agree on the call; and small values between the ranks of the hosts
        (`mesh.host`), also in the background.
        Raises: CheckpointError, on every rank the same: for state that cannot be saved or differs between ranks, for a
        folder that another job holds, or with checkpoints of a run that this one did not load, for a step before one that is
        saved, and for what went wrong with the save before.
        """
        run.mesh.agreement.meet("save", facts={"step": step, "folder": self.folder.name})
        self.wait()
        with experts_at_home(run, optimizer):
            self._save(step, run, optimizer, scheduler=scheduler, loader=loader, config=config, extra=extra)

    def _save(
        self,
        step: int,
        run: Run,
        optimizer: HoldsState | None,
        *,
        scheduler: Stateful | None,
        loader: Stateful | None,
        config: Any,
        extra: Any,
    ) -> None:
        ranks = self._ranks_of(run)
        action = f"save(step={step})"
        if self.asynchronous:
            wait_for_device(run.mesh.device)  # see [Note: pinning between idle devices]
        # Everything that may refuse comes before the thread starts: an error belongs to the save that caused it, and
        # on every rank.
        snapshot, parts = on_each_rank(
            ranks,
            action,
            lambda: collect(run, optimizer, step=step, scheduler=scheduler, loader=loader, config=config, extra=extra),
        )
        reports = gather_results(ranks, action, lambda: (snapshot.shared_text(), self._held_steps(run)))
        _refuse_different([shared for shared, _ in reports])
        present = reports[0][1]  # rank 0's, since others may see a folder on the network a little later
        # The last save of a loop may fall on the step that a signal or an interval saved already; in `present`, since
        # someone may have deleted it.
        if step == self._current and step in present:
            return
        # After the collectives, with values that all ranks share: all refuse or none does.
        self._refuse_foreign(step, present)
        if self.asynchronous:
            parts = on_each_rank(ranks, action, lambda: self._copies.copy(parts))
        job = WriteJob(
            folder=self.folder,
            snapshot=snapshot,
            parts=parts,
            mesh=run.mesh.spec.sizes(),
            ranks=ranks,
            # Set aside and not deleted: a run that went back may still have been wrong to. They are renamed
            # just before the new checkpoint gets its name.
            abandoned=[newer for newer in present if self._current is not None and newer > self._current],
            keep=self.keep,
            lease=self._lease,
        )
        if self.asynchronous:
            self._pending = step, self._thread.submit(write, job)
        else:
            write(job)
            self._current = step

    def save_in_memory(
        self,
        step: int,
        run: Run,
        optimizer: HoldsState | None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        config: Any = None,
        extra: Any = None,
    ) -> None:
        """As `save`, into the memory of this host, and a copy into that of others: `Checkpointer(memory=InMemory())`.

        A job that is started again on hosts that are still there, or of which no more are gone than there are copies, goes on
        from here by `resume`, on any mesh. Training may go on at once, but for the time to copy this rank's state once. First
        waits for the save in memory before, of which nothing is lost until this one is whole on every rank.
        Wire: an all-reduce in which ranks agree on the call; with copies, this rank's state to another host for each, in
        the background, over a gloo group of the ranks that keep each other's.
        Raises: CheckpointError without `memory`, for state that cannot be saved, on every rank the same for a host that has
        not enough memory, and for what went wrong with the save before.
        """
        if self._memory is None:
            raise CheckpointError("save_in_memory(): this Checkpointer keeps nothing there. Give it memory=InMemory().")
        self.wait_in_memory()
        with experts_at_home(run, optimizer):
            snapshot, parts = collect(
                run, optimizer, step=step, scheduler=scheduler, loader=loader, config=config, extra=extra
            )
            unknown = torch.tensor(not self._memory.has_room(parts), device=run.mesh.device)
            # Whoever is here has waited for its save before: all know now that it is whole everywhere.
            (to_make_room,) = run.mesh.agreement.meet("save_in_memory", unknown, facts={"step": step})
            if self._in_memory is not None and step <= self._in_memory:
                raise CheckpointError(
                    f"save_in_memory(step={step}): step {self._in_memory} is there already. Steps increase from save to save."
                )
            self._in_memory = step
            if int(to_make_room):
                wait_for_device(run.mesh.device)  # see [Note: pinning between idle devices]
                self._memory.make_room(parts, run.mesh, self._timeout)
            self._memory.save(snapshot, parts, run.mesh.spec.sizes())

    def wait_in_memory(self) -> None:
        """Return when the last save in memory is whole on this rank, and where its copies are. No communication on the
        calling thread. Raises: CheckpointError if it failed."""
        if self._memory is not None:
            self._memory.wait()

    def wait(self) -> None:
        """Return when the last save is on disk. No communication on the calling thread.

        Raises: CheckpointError if it failed, on every rank the same; the checkpoints before it are untouched.
        """
        if self._pending is None:
            return
        # Cleared before result() raises, so that the next save starts afresh and the error is not raised twice.
        (step, future), self._pending = self._pending, None
        future.result()
        self._current = step

    def resume(
        self,
        run: Run,
        optimizer: HoldsState | None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        config: Any = None,
    ) -> int:
        """`load` the newest checkpoint; 0, with nothing changed, when there is none. Rank 0 decides which it is.

        With `memory` one that the hosts still have there, if it is newer, whichever ranks saved it.

        Takes the lease on the folder first, unless nothing can be written there: whoever only reads takes `load`.
        """
        run.mesh.agreement.meet("resume", facts={"folder": self.folder.name})
        self.wait()
        # Rank 0 alone looks: on a network file system others may not see the newest folder yet.
        ranks = self._ranks_of(run)
        newest = on_rank_0(ranks, "resume()", self._held_latest)
        if self._memory is not None:
            kept = self._memory.newest(ranks)
            if kept is not None and kept.step > (newest or 0):
                saved = of_memory(kept, ranks, run.mesh.device)
                restore(saved, run, optimizer, scheduler=scheduler, loader=loader, config=config, ranks=ranks)
                self._memory.begin(ranks, loaded=kept)
                self.resumed_in_memory, self._in_memory = True, kept.step
                self._current = kept.step
                return kept.step
        if newest is None:
            return 0
        return self.load(run, optimizer, scheduler=scheduler, loader=loader, step=newest, config=config)

    def load(
        self,
        run: Run,
        optimizer: HoldsState | None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        step: int | None = None,
        config: Any = None,
    ) -> int:
        """Give the run the saved state, in place, on whatever mesh it is; returns the step.

        step: which one; None is the newest, and never another when that one is damaged. optimizer=None: the model
        alone. config: this run's, to say in a refusal what else differs.
        Every file is checked against its digest first, each rank checking a share, and the model against the saved
        names, shapes and dtypes: until all ranks have found all well, nothing is changed.
        RNG states go to the ranks they came from; on a larger world, a rank that has none saved keeps its own.
        What is read is JSON, safetensors and torch's files of single tensors (weights_only): nothing in it can run. A
        checkpoint of format 1 has pickles, of which nothing but records and tensors is read; the next save is of format 2.
        Wire: an all-reduce in which ranks agree on the call, small values between hosts; the values come from the
        files.
        Raises: CheckpointError, on every rank the same: naming the damaged file, the first key in it and the newest
        sound step; or naming the first key that differs. The loader's DataError for other data.
        """
        run.mesh.agreement.meet("load", facts={"step": step, "folder": self.folder.name})
        self.wait()
        ranks = self._ranks_of(run)
        chosen = on_rank_0(ranks, "load()", lambda: choose_step(self.folder, step))
        saved = open_checked(self.folder, chosen, ranks)
        restore(saved, run, optimizer, scheduler=scheduler, loader=loader, config=config, ranks=ranks)
        if self._memory is not None:
            self._memory.begin(ranks)
        self._current, self._in_memory = chosen, None
        return chosen

    def _held_latest(self) -> int | None:
        try:
            self._hold()
        except OSError as error:
            # Who cannot write there does nobody harm; `save` will say so.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
        return self.latest()

    def _held_steps(self, run: Run) -> list[int]:
        if self._ranks_of(run).rank == 0:
            self._hold()
        return self.steps()

    def _ranks_of(self, run: Run) -> HostRanks:
        if self._ranks is None:
            self._ranks = run.mesh.host.apart(self._timeout)
        return self._ranks

    def _refuse_foreign(self, step: int, present: list[int]) -> None:
        if self._current is None and present:
            raise CheckpointError(
                f"save(step={step}): {self.folder} holds step {present[-1]} of a run that this one did not load. Call "
                "resume() first to go on from there, or give this run a folder of its own."
            )
        # The same step again is one that came from memory, or was deleted.
        if self._current is not None and step < self._current:
            raise CheckpointError(
                f"save(step={step}): this run is at step {self._current} already. Steps increase from save to save."
            )


def _refuse_different(shared_texts: list[dict[str, str]]) -> None:
    """shared_texts: `Snapshot.shared_text` of each rank."""
    for name, first in shared_texts[0].items():
        for rank, texts in enumerate(shared_texts):
            if texts[name] != first:
                raise CheckpointError(
                    f"save(): {name} differs between ranks: {_short(first)} on rank 0, {_short(texts[name])} on rank "
                    f"{rank}. One is saved for all, so it must be the same on every rank."
                )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
