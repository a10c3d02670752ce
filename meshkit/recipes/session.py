"""Session of a recipe's training steps: resume, checkpoints, signals, logs, progress, profiler, stragglers.

It owns files and clocks. Model, loss, gradients and the optimizer stay in the recipe, whose loop it does not run:

    with Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        for step in session.steps():
            loss = run.forward_backward(next(loader))
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm)
            session.stop_clock(tokens=config.global_batch * config.seq_len)
            if session.evaluates(step):
                session.log(held_out=evaluate(run))
    if not session.finished:
        return
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshkit.checkpoint import Checkpointer, InMemory, SaveOnSignal
from meshkit.core.optimizer_state import HoldsState
from meshkit.core.to_device import HOST, copy_to_host
from meshkit.errors import CorruptionError, MeetingError, MeshkitError, PlanError, StepError
from meshkit.faults import send_alert, watch_with
from meshkit.faults.corruption import CorruptionGuard
from meshkit.faults.nan_guard import NonFiniteGuard
from meshkit.mesh import Mesh
from meshkit.metrics import FlopsPerToken, Logger, Meter, Progress, Stragglers, peak_flops_per_s, profile
from meshkit.parallel.pipeline import record_trace
from meshkit.resolve import resolve
from meshkit.step import Run
from meshkit.strategy import Strategy

from .flags import ParallelFlags, RunFlags, StepFlags, TrainFlags
from .folders import make_folder, refuse_folder
from .foresight import Foresight
from .optimizers import set_mode
from .process import add_in_one_order, collecting_garbage, multiplying_fp32
from .replanning import Replanning

ROLLBACKS = 3  # of a process: what comes back so often is no cosmic ray

Part = tuple[Run | None, HoldsState | None, LRScheduler | None]
Line = tuple[int, dict[str, float], dict[str, Callable[[], Tensor]]]
"""(step, its scalars, those that are still on their way to the host)"""


def print0(*values: Any) -> None:
    """`print` on rank 0 of the world only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*values)


class Session:
    """The steps of one process: from where `config.out` stands to the last one, or to a signal.

    run: what is resumed and saved in `out`/checkpoints, with the optimizer, scheduler and loader; or a Mesh, whose ranks
    save `parts`, each in a folder of its name: runs with their optimizers and schedulers, None on ranks that have none. Of
    parts the loader may be anything whose state all ranks of the mesh make together, such as a dataflow.
    signals_every: ask the other ranks only in every so many steps whether a signal came, and with parts for numbers that this
    rank has not, where each question crosses a slow link; a rank that gets a signal goes on until then.
    unit: what the loop counts; how many of them is the flag of that name, as --steps. writes: False keeps no file.
    start: steps made before. finished: whether the last step was made here. stopped: whether a signal ended it sooner.
    guard: against gradients that are not finite. --corruption-every compares copies here, also before each checkpoint; where
    something is wrong the steps go on from the newest checkpoint that was compared, up to three times.
    scalars: the line of this step so far, see `log`. logger: for pictures and texts.
    Every rank calls every method, at the same steps.
    """

    def __init__(
        self,
        run: Run | Mesh,
        config: RunFlags,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        loader: Any = None,
        parts: Mapping[str, Part] | None = None,
        unit: str = "step",
        writes: bool = True,
        signals_every: int = 1,
    ) -> None:
        (make_folder if writes else refuse_folder)("out", config.out)
        watch_with(
            alert=config.alert or None,
            page=config.out / "status.html" if config.status_page and writes else None,
            calls=config.out / "calls" if config.call_files else None,
        )
        self.mesh = run.mesh if isinstance(run, Run) else run
        self.start, self.finished, self.stopped = 0, False, False
        # Recipes without --max-skips stop at the first step that is not finite.
        self.guard = NonFiniteGuard(max_skips=config.max_skips if isinstance(config, StepFlags) else 0)
        self._run = run if isinstance(run, Run) else None
        self._config, self._unit, self._writes = config, unit, writes
        self._total: int = getattr(config, f"{unit}s")
        self._optimizer, self._scheduler, self._loader = optimizer, scheduler, loader
        folder = config.out / "checkpoints"
        self._memory_every = _every(config, "memory_every", run) if writes else 0
        memory = InMemory(copies=config.memory_copies) if self._memory_every and isinstance(config, StepFlags) else None
        self._checkpoints = Checkpointer(folder, keep=config.keep, memory=memory)
        # A folder for each part: parts may be on different ranks, and each is saved by the ranks of its mesh.
        self._parts = [(Checkpointer(folder / name, keep=config.keep), *part) for name, part in (parts or {}).items()]
        every = _every(config, "corruption_every", run)
        if every and getattr(config, "replay_every", 0) and self.mesh.device.type != "cpu":
            add_in_one_order()
        self._corruption = (
            CorruptionGuard(run, optimizer, every_steps=every, replay_every=config.replay_every)
            if every and isinstance(config, StepFlags) and isinstance(run, Run) and optimizer is not None
            else None
        )
        self._corrupt: CorruptionError | None = None  # found within the step
        self._next_strategy = config.move_strategy() if isinstance(config, TrainFlags) else None
        if self._next_strategy is not None:
            self._next_strategy = _resolved(self._next_strategy, run)
        self._move_at: int = getattr(config, "move_at", 0)
        self._foresight = (
            Foresight(self.mesh, config.forecast, out=config.out / "cluster.toml")
            if isinstance(config, TrainFlags) and config.forecast
            else None
        )
        self._replanning = (
            Replanning(self.mesh, limit=config.replan, folder=config.out, microbatches=config.microbatches)
            if isinstance(config, TrainFlags) and config.replan
            else None
        )
        if self._corruption is not None:
            self.guard.explained = self._is_corrupt
        self._rollbacks = 0
        self._skips: dict[int, tuple[int, int]] = {}  # of the guard, by the step of a checkpoint
        self._signals, self._signals_every = SaveOnSignal(), signals_every
        self._files = ExitStack()  # open from __enter__ to __exit__
        self._step, self._saved = 0, 0
        self._leaving: bool | None = None  # whether a signal came, once it was asked in this step
        self._clock_stopped = False
        self.scalars: dict[str, float] = {}
        self._arriving: dict[str, Callable[[], Tensor]] = {}  # of this step's line
        self._unwritten: list[Line] = []

    def __enter__(self) -> Self:
        config = self._config
        if self._run is not None:
            self.mesh.agreement.note("Session", dataclasses.asdict(config))
        if self._writes:
            self.start = self._step = self._resume()
        if self._checkpoints.resumed_in_memory:
            self._save(self.start)  # so that a lost host cannot cost it
        if self.start >= self._total:
            for checkpoints in (self._checkpoints, *(checkpoints for checkpoints, *_ in self._parts)):
                checkpoints.close()
            unit = f"{self._unit}s"
            print0(
                f"{config.out} has its {self.start} {unit}; give more --{unit} to go on, or another --out to begin anew"
            )
            return self
        if self.start:
            print0(f"resume from {self._unit} {self.start}{' in memory' * self._checkpoints.resumed_in_memory}")
        is_main = dist.get_rank() == 0
        if is_main and self._writes and isinstance(config, ParallelFlags):
            config.write(config.out)
        with ExitStack() as files:  # what is open is closed again where opening the rest fails
            for checkpoints in (self._checkpoints, *(checkpoints for checkpoints, *_ in self._parts)):
                files.enter_context(checkpoints)
            files.enter_context(self._signals)
            if self._foresight is not None:
                files.callback(self._foresight.close)
            if self._replanning is not None:
                files.callback(self._replanning.close)
            if self._corruption is not None:
                files.enter_context(self._corruption)
            files.enter_context(multiplying_fp32(config.fp32_precision))
            self._collect = files.enter_context(collecting_garbage(config.gc_every))
            progress = files.enter_context(Progress(total_steps=self._total, start_step=self.start, enabled=is_main))
            self.logger = files.enter_context(
                Logger(
                    config.out,
                    start_step=self.start,
                    enabled=is_main and self._writes,
                    trackers=config.track,
                    project=config.track_project,
                    name=config.track_name,
                    config=dataclasses.asdict(config),
                    also=[progress.update],
                )
            )
            self._end_profiled_step = files.enter_context(
                profile(config.out / "profile", rank=self.mesh.rank, device=self.mesh.device, enabled=config.profile)
            )
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, MeshkitError):  # else the device may be lost
            self._write_lines(waiting=0)
        if isinstance(error, MeetingError) and self._writes and self._step not in (self.start, self._saved):
            self._save(self._step)  # the values are those after it, on all ranks
            print0(f"saved {self._unit} {self._step}; start again to go on")
        self._files.__exit__(kind, error, trace)
        if self.stopped and error is None:
            received = self._signals.received or "a signal on another rank"
            print0(f"{received}: saved {self._unit} {self._step}; start again to go on")

    def steps(self) -> Iterator[int]:
        """The numbers of the training steps to make, from 1. After each, its line is logged and a due checkpoint saved.

        After the last, parameters have the values that are to be evaluated, where an optimizer tells them apart. Steps after
        a rollback come again.
        """
        step = self._step
        if step >= self._total:
            return
        self._meter = self._meter_from(step)
        stragglers = Stragglers(self.mesh)
        while step < self._total:
            step += 1
            if self._next_strategy is not None and step > self._move_at:
                self._move(step, self._next_strategy)
                stragglers = Stragglers(self.mesh)
            if self._replanning is not None and self._replans(step, self._replanning):
                stragglers = Stragglers(self.mesh)
            self._begin(step)
            with ExitStack() as self._pause:  # from stop_clock to the next step
                with ExitStack() as self._measured:  # from here to stop_clock
                    if self._run is not None:  # ranks of several meshes have unlike work, and none is slow
                        self._measured.enter_context(stragglers.measure(step))
                    if self._foresight is not None:
                        self._measured.enter_context(self._foresight.measure())
                    yield step
                    step = self._step
                if not self._clock_stopped:
                    raise StepError(
                        f"step {step}: its time has no end. Call session.stop_clock(tokens=...) in every step."
                    )
                if self._foresight is not None and (said := self._foresight.said(ends=step == self._total)):
                    print0(said)
                    if self._replanning is not None:
                        self._replanning.begin(self._foresight.off, self._foresight.measured_s)
                if stragglers.last is not None and stragglers.last.step == step:
                    self.scalars |= stragglers.last.scalars()
                    if stragglers.slow is not None:
                        print0(stragglers.slow)
                        if dist.get_rank() == 0:
                            send_alert(str(stragglers.slow), "slow")
                    for said in stragglers.slow_links:
                        print0(said)
                        if dist.get_rank() == 0:
                            send_alert(said, "slow")
                set_mode(self._optimizer, trains=True)  # what is saved
                try:
                    self._end(step)
                except CorruptionError as error:
                    step = self._go_back(error)
                self._collect(step)
            self._end_profiled_step()
            if self.stopped:
                return
        set_mode(self._optimizer, trains=False)
        self.finished = True

    def go_on_from(self, step: int) -> int:
        """This step has another number, and the next one follows it: where the run has taken the state of one that is further
        on. Before the loop, the first follows it. Returns it."""
        if step != self._step:
            self._step, self._meter = step, self._meter_from(step - 1)
        return step

    def stop_clock(self, *, tokens: int, flops_per_token: FlopsPerToken | None = None) -> None:
        """The work of the step ends here: evaluation, pictures and files that follow are no part of its time.

        tokens, flops_per_token: see `Meter.step`. With parts, `scalars` then has the numbers of all ranks, the first one's of
        those that several have. Wire: then a dict up and down a tree of hosts, in every `signals_every` steps.
        """
        self._clock_stopped = True
        self._measured.close()
        if self._run is None and self._step % self._signals_every == 0:
            self._share_scalars()
        self.scalars |= self._meter.step(tokens, flops_per_token=flops_per_token).scalars()
        self._pause.enter_context(self._meter.paused())

    def log(self, **scalars: float | Tensor) -> None:
        """Add numbers to this step's line. A tensor of one element on a device is on its way to the host until the line is
        written, a step later; before that it is NaN in `scalars`."""
        for name, value in scalars.items():
            if isinstance(value, Tensor) and value.device != HOST:
                self._arriving[name] = copy_to_host(value.detach())
                self.scalars[name] = math.nan
            else:
                self.scalars[name] = float(value)

    def _share_scalars(self) -> None:
        """Parts may be on ranks of their own: each rank gets the numbers that it has not, of the first rank that has them."""
        own = self.scalars | {name: read().item() for name, read in self._arriving.items()}
        # Where several ranks have a number, the first one's is kept.
        self.scalars = self.mesh.host.all_reduce(own, lambda parts: {**ChainMap(*parts)})
        self._arriving = {}

    def evaluates(self, step: int) -> bool:
        """Whether the step is one of --eval-every, or the last. Then parameters have the values that are to be evaluated."""
        due = self._is_due(step, self._config.eval_every)
        if due:
            set_mode(self._optimizer, trains=False)
        return due

    def saves(self, step: int) -> bool:
        """Whether there will be a checkpoint of this step: one of --save-every, the last, or because a signal came.

        Wire: one all-reduce of 4 bytes on the host, in the first call of a step of every `signals_every`.
        """
        # Asked once a step: a signal that comes between two calls would let ranks, or the recipe and the session, disagree.
        if self._leaving is None:
            self._leaving = step % self._signals_every == 0 and self._signals.should_stop(self.mesh)
        due = self._is_due(step, self._config.save_every) or self._leaving
        return due and self._writes

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._total or (every > 0 and step % every == 0)

    def trace_pipeline(self, run: Run) -> AbstractContextManager[None]:
        """Around forward and backward: with --profile and pp, records the second step and draws it beside its simulation."""
        # The second step: the first one compiles, allocates and opens connections.
        enabled = self._config.profile and self._step == self.start + 2
        return record_trace(run.pipeline, self._config.out / "pipeline.json", enabled=enabled)

    def _move(self, step: int, strategy: Strategy) -> None:
        """Before this step: the run goes on with another strategy. What looks at its tensors begins anew."""
        assert self._run is not None and self._optimizer is not None
        self._next_strategy = None
        guard, config = self._corruption, self._config
        if guard is not None:
            guard.close()
        began = time.perf_counter()
        if self._foresight is not None:  # of the strategy that was
            self._foresight.close()
        moved = self._run.move(strategy, optimizer=self._optimizer, loader=self._loader)
        self.mesh = self._run.mesh
        print0(f"move before {self._unit} {step}, in {time.perf_counter() - began:.1f} s, to {self.mesh.describe()}")
        print0(str(moved).splitlines()[0])
        if guard is not None and isinstance(config, StepFlags):
            every = config.corruption_every
            self._corruption = CorruptionGuard(
                self._run, self._optimizer, every_steps=every, replay_every=config.replay_every
            )
            self._files.enter_context(self._corruption)

    def _replans(self, step: int, replanning: Replanning) -> bool:
        """Whether the run goes on with another strategy from this step on."""
        strategy, said = replanning.next_strategy(step)
        if said:
            print0(said)
        if strategy is not None:
            self._move(step, _resolved(strategy, self._run or self.mesh))
        return strategy is not None

    def _begin(self, step: int) -> None:
        self._step, self._leaving, self._clock_stopped = step, None, False
        set_mode(self._optimizer, trains=True)
        self.scalars, self._arriving = {}, {}
        if self._run is not None:  # parts are on several meshes, and making the state of their loader is collective
            self.mesh.agreement.note("step", {"step": step, "loader": self._loader and self._loader.state_dict()})
        if self._scheduler is not None:
            self.scalars["lr"] = float(self._scheduler.get_last_lr()[0])  # of this step; then the recipe moves it on

    def _meter_from(self, step: int) -> Meter:
        return Meter(
            total_steps=self._total,
            start_step=step,
            devices=self.mesh.spec.world_size,
            peak_flops_per_s=peak_flops_per_s(self.mesh.device),
            device=self.mesh.device,
        )

    def _is_corrupt(self, step: int) -> bool:
        """Of a step that is not finite: whether a flipped bit made it so. Every rank has the same answer."""
        assert self._corruption is not None
        try:
            self._corruption.check(step, now=True)
        except CorruptionError as error:
            self._corrupt = error
        return self._corrupt is not None

    def _go_back(self, error: CorruptionError) -> int:
        """Load the newest checkpoint whose values were compared before it was saved. Returns its step.

        Every rank has the error, and its text. Raises: the error itself, where there is none, or after too many.
        """
        assert self._run is not None and self._optimizer is not None and self._corruption is not None
        self._rollbacks, self._corrupt = self._rollbacks + 1, None
        self._checkpoints.wait()  # the newest may not be on disk yet
        newest = [max(filter(self._was_compared, self._checkpoints.steps()), default=0) if self._writes else 0]
        dist.broadcast_object_list(newest, src=self.mesh.ranks[0], group=self.mesh.group)  # others may see files later
        (step,) = newest
        if not step or self._rollbacks > ROLLBACKS:
            raise error
        text = f"{error} Going back to {self._unit} {step}, rollback {self._rollbacks} of at most {ROLLBACKS}."
        print0(text)
        if dist.get_rank() == 0:
            send_alert(text, "corrupt")
        state = {"scheduler": self._scheduler, "loader": self._loader, "config": self._config}
        self._checkpoints.load(self._run, self._optimizer, step=step, **state)
        self._optimizer.zero_grad()
        self._corruption.forget()
        self.guard.skipped, self.guard.skipped_in_a_row = self._skips.get(step, (0, 0))
        self.stopped = False
        self._write_lines(waiting=0)
        self.logger.go_back(step)
        self._meter = self._meter_from(step)
        return step

    def _was_compared(self, step: int) -> bool:
        """A run without --corruption-every saved what nobody had looked at."""
        config = self._checkpoints.config(step)
        return isinstance(config, dict) and bool(config.get("corruption_every"))

    def _end(self, step: int) -> None:
        if self._corrupt is not None:
            raise self._corrupt
        self.scalars["skipped_steps"] = self.guard.skipped
        if self._run is not None and self._run.offload is not None:
            self.scalars.update(self._run.offload.last_step.scalars())
        saves, keeps = self.saves(step), bool(self._memory_every) and step % self._memory_every == 0
        if self._corruption is not None:  # also what is saved was compared: from there the run goes on
            self._corruption.check(step, now=saves or keeps)
            if self._corruption.outlier is not None:
                print0(self._corruption.outlier)
                if dist.get_rank() == 0:
                    send_alert(str(self._corruption.outlier), "corrupt")
        self.stopped = bool(self._leaving) and step < self._total
        self._unwritten.append((step, self.scalars, self._arriving))
        # A line is written a step later, when its numbers have come: the host does not wait for the device to log. Before a
        # checkpoint it does: a job that is killed while it saves has its numbers.
        self._write_lines(
            waiting=0 if saves or keeps or self.stopped or step == self._total or not self._arriving else 1
        )
        if saves:
            self._skips[step] = self.guard.skipped, self.guard.skipped_in_a_row
            self._save(step)
        if keeps and not self.stopped:
            state = {"scheduler": self._scheduler, "loader": self._loader, "config": self._config}
            assert self._run is not None
            self._checkpoints.save_in_memory(step, self._run, self._optimizer, **state)

    def _write_lines(self, *, waiting: int) -> None:
        """All but the last `waiting`."""
        while len(self._unwritten) > waiting:
            step, scalars, arriving = self._unwritten.pop(0)
            scalars.update({name: read().item() for name, read in arriving.items()})
            self.logger.log(step, scalars)

    def _resume(self) -> int:
        """Load the newest checkpoint that the run, or all parts, have. Returns its step, or 0 without one."""
        state = {"scheduler": self._scheduler, "loader": self._loader, "config": self._config}
        if self._run is not None:
            return self._checkpoints.resume(self._run, self._optimizer, **state)
        for checkpoints, run, *_ in self._parts:
            if run is not None:
                checkpoints.claim(run)
        # A checkpoint that one part has and another has not is half of one: the job was killed between the two.
        newest = [max(set.intersection(*(set(checkpoints.steps()) for checkpoints, *_ in self._parts)), default=0)]
        dist.broadcast_object_list(newest, src=self.mesh.ranks[0], group=self.mesh.group)  # others may see files later
        if newest[0]:
            for checkpoints, run, optimizer, scheduler in self._parts:
                if run is not None:
                    checkpoints.load(run, optimizer, scheduler=scheduler, step=newest[0], config=self._config)
            # The first part's checkpoint holds it, once, for all ranks: also those that have no part.
            self._loader.load_state_dict(self._parts[0][0].extra(newest[0]))
        return newest[0]

    def _save(self, step: int) -> None:
        config, self._saved = self._config, step
        if self._run is not None:
            state = {"scheduler": self._scheduler, "loader": self._loader, "config": config}
            self._checkpoints.save(step, self._run, self._optimizer, **state)
            return
        # On every rank, before any part is saved: making the state is collective.
        state = self._loader.state_dict()
        for index, (checkpoints, run, optimizer, scheduler) in enumerate(self._parts):
            if run is not None:
                extra = state if index == 0 else None
                checkpoints.save(step, run, optimizer, scheduler=scheduler, config=config, extra=extra)


def _resolved(strategy: Strategy, run: Run | Mesh) -> Strategy:
    """The one that the run will move to, with the run's plan.

    Raises: PlanError and MeshError now, for what could not run then.
    """
    if not isinstance(run, Run):
        raise PlanError("--move-to: this recipe trains several runs, and it is of one. Leave it out.")
    strategy = dataclasses.replace(
        strategy, mesh=strategy.mesh or run.mesh.spec, plan=strategy.plan or run.strategy.plan
    )
    spec = strategy.mesh_for(run.mesh.spec.world_size)
    resolve(run.resolved.program, strategy, spec, device_type=run.mesh.device.type)
    return strategy


def _every(config: RunFlags, flag: str, run: Run | Mesh) -> int:
    """How often, by a flag of recipes that train one run; 0 is never. Raises: PlanError for several runs."""
    every: int = getattr(config, flag, 0)
    if every and not isinstance(run, Run):
        raise PlanError(
            f"--{flag.replace('_', '-')} {every}: this recipe trains several runs, and it is of one. Leave it out."
        )
    return every
