"""Pipeline parallelism (PP): a model cut into stages over the ranks of `pp`, run microbatch by microbatch by a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.arguments import require
from meshkit.core.asked_once import AskedOnce
from meshkit.core.code import of_this_library
from meshkit.core.model_state import FullModel, set_full_model
from meshkit.core.sharding import local_tensor
from meshkit.core.waiting import waiting
from meshkit.errors import PlanError
from meshkit.moe.aux_loss import Collected
from meshkit.parallel.data import after_pipeline, before_pipeline, find_units
from meshkit.parallel.pipeline._channels import GroupChannels, in_rounds, open_channels, ways_of
from meshkit.parallel.pipeline._check import Checked, check
from meshkit.parallel.pipeline._cut import Cut, plan_pipeline
from meshkit.parallel.pipeline._execute import Around, Loss, arguments, execute, forward
from meshkit.parallel.pipeline._flow import Flow
from meshkit.parallel.pipeline._p2p import P2P
from meshkit.parallel.pipeline._produced import Produced
from meshkit.parallel.pipeline._reading import Guard, Reading
from meshkit.parallel.pipeline._record import Recording
from meshkit.parallel.pipeline._skips import refuse_skips, why_not_skip
from meshkit.parallel.pipeline._split_backward import split_linears
from meshkit.parallel.pipeline._staged_model import StagedModel
from meshkit.parallel.pipeline._table import Message, Row, Schedule, Task, messages, need_of
from meshkit.plan.match import listed, match_blocks
from meshkit.program import without_values
from meshkit.strategy import PipelinePolicy

_KEY = "_meshkit_pipeline"


@dataclass(eq=False)
class Pipeline:
    """Runs one rank's stages. Made by `pipeline_parallel`.

    reading: tells what crosses the cuts for a batch. produced: what of it has a gradient.
    """

    staged: StagedModel
    reading: Reading
    axis: DeviceMesh
    cut: Cut
    channels: GroupChannels
    produced: Produced
    _tables: dict[int, Checked] = field(default_factory=dict)
    _recording: Recording | None = None

    @property
    def rank(self) -> int:
        return self.axis.get_local_rank()

    @property
    def modules(self) -> list[str]:
        """Names of the modules that this rank holds."""
        return [name for stage in self.staged.local_stages for name in self.staged.stages.modules_of(stage)]

    def schedule(self, microbatches: int) -> Schedule:
        return self._checked(microbatches).schedule

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Inside, steps record the start and end of each task; see `Recording.gather`. A collective on the axis."""
        self._recording = Recording(self.axis.get_group(), self.rank, next(self.staged.model.parameters()).device)
        try:
            yield self._recording
        finally:
            self._recording = None

    def forward_backward(
        self, microbatches: Sequence[tuple[Any, float]], loss: Loss, scale: Tensor
    ) -> tuple[Tensor, list[tuple[Collected, float]]]:
        """`backward`, with the sum of the losses of all ranks of the axis on each of them.

        Wire: an all-reduce of two numbers over the axis.
        Raises: StepError as `Produced.settle` does.
        """
        total, reports = self.backward(microbatches, loss, scale)
        numbers = torch.stack([total, torch.full_like(total, float(self.produced.odd))])
        dist.all_reduce(numbers, group=self.axis.get_group())
        total, odd = numbers.unbind()
        self.produced.settle(odd)
        return total, reports

    def backward(
        self,
        microbatches: Sequence[tuple[Any, float]],
        loss: Loss,
        scale: Tensor,
        around: Around | None = None,
    ) -> tuple[Tensor, list[tuple[Collected, float]]]:
        """Add the gradients of all microbatches to the parameters.

        microbatches: (microbatch, weight of its loss). Returns the sum of their losses, fp64, which is zero but on the rank
        of the last stage, and for each forward of this rank (report of its routers, weight). The caller sums `produced.odd`
        over the ranks, for `produced.settle`. around: see `execute`.
        """
        model = self.staged.model
        checked = self._checked(len(microbatches))
        # Before anything is sent or gathered: a model that cannot run in these stages is refused here.
        flows = []
        for index, (microbatch, _) in enumerate(microbatches):
            try:
                flows.append(self._flow(microbatch, loss))
            except Exception as error:
                stage = self.staged.local_stages[0]
                error.add_note(
                    f"pipeline {checked.schedule.name!r}: pp rank {self.rank}, stage {stage}, F of microbatch {index}"
                )
                raise
        self._open(checked.schedule, flows)
        # With its path: on another one a value may have no gradient, since who would have made it is skipped.
        kinds = [self.reading.kind(model, microbatch, loss) for microbatch, _ in microbatches]
        self.produced.begin_step(list(zip(kinds, checked.schedule.paths, strict=True)))
        tied = self._tied()
        earlier = [param.grad for param in tied]  # of other calls, which are summed over the copies already
        for param in tied:
            param.grad = None
        # FSDP gathers parameters once for all microbatches, and reduces gradients once after them.
        before_pipeline(model)
        p2p = self._p2p(checked.messages, flows)
        losses, reports = execute(
            checked.schedule,
            self.rank,
            self.staged,
            p2p,
            microbatches,
            flows,
            loss,
            scale,
            self.produced,
            self._recording,
            around,
        )
        # First FSDP's reduction over data ranks, then tied copies over stages: shards of both ends have the same layout.
        after_pipeline(model)
        self._sum_tied_gradients(tied)
        for param, before in zip(tied, earlier, strict=True):
            if before is not None:
                param.grad = before if param.grad is None else param.grad.add_(before)
        self.produced.end_step()
        # In fp64: the loss that is reported must not depend on the number of microbatches that it is summed over.
        total = torch.zeros((), dtype=torch.float64, device=scale.device)
        for value in losses:
            total += value.detach()
        return total, reports

    @torch.no_grad()
    def infer(self, microbatch: Any, function: Loss) -> Tensor | None:
        """function(model, microbatch) without gradients: its result on the rank of the last stage, None on the others."""
        # FSDP's root looks for its units at its first forward, and must not do so while modules are swapped for stand-ins.
        find_units(self.staged.model)
        schedule, flow = self._forwards, self._flow(microbatch, function)
        p2p = self._p2p(list(messages(schedule)), [flow])
        result = None
        for index, row in enumerate(schedule.ranks[self.rank]):
            # No row ahead, unlike a step: with one microbatch no rank computes while its next input travels.
            p2p.expect(index)
            (task,) = row.tasks
            need = need_of(task, schedule)
            received = [] if need is None else p2p.receive(need)
            value, handed, _ = forward(self.staged, task.stage, flow, received, microbatch, function)
            if task.stage + 1 < schedule.stages:
                p2p.send(task, handed)
            else:
                result = value
        p2p.finish()
        return result

    def _open(self, schedule: Schedule, flows: Iterable[Flow]) -> None:
        """Before the first step of a table that skips stages: the channels that were not known when the stages were cut."""
        if not schedule.skips:
            return
        for flow in dict.fromkeys(flows):
            refuse_skips(schedule, why_not_skip(flow))
        missing = schedule.ways - self.channels.ways
        if missing:
            more = open_channels(self.axis.get_group(), in_rounds(missing), self.staged.device)
            self.channels = self.channels.with_more(more)

    def _tied(self) -> list[nn.Parameter]:
        """This rank's copies of tied parameters, on the ranks of the first and the last stage."""
        if not self.cut.copied or self.rank not in self.cut.ends:
            return []
        params = dict(self.staged.model.named_parameters(remove_duplicate=False))
        first = self.rank == self.cut.ends[0]
        return [params[head if first else tail] for head, tail in self.cut.copied]

    def _sum_tied_gradients(self, both: Sequence[nn.Parameter]) -> None:
        """Sum this step's gradients of each tied parameter over its two copies."""
        if not both:
            return
        first = self.rank == self.cut.ends[0]
        peer = self.cut.ends[1] if first else self.cut.ends[0]
        trained = [param for param in both if param.requires_grad]
        has_grad = {number: param.grad is not None for number, param in enumerate(both) if param.requires_grad}
        made = self.produced.tied(has_grad, first=first)
        gradients = []
        for param in trained:
            if param.grad is None:  # this end has not used it
                param.grad = torch.zeros_like(param)
            gradients.append(local_tensor(param.grad))
        received = [torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in gradients]
        sent = [grad.contiguous() for grad in gradients]
        works = self.channels.send(sent, peer) + self.channels.receive(received, peer)
        with waiting(f"gradients of tied parameters of pp rank {peer}"):
            for work in works:
                work.wait()
        for grad, other in zip(gradients, received, strict=True):
            grad += other
        for param, has in zip(trained, made, strict=True):
            if not has:
                param.grad = None

    def _checked(self, microbatches: int) -> Checked:
        if microbatches not in self._tables:
            table = self.cut.generate(self.axis.size(), microbatches)
            if table.placement != self.cut.placement:
                raise PlanError(
                    f"pipeline: the table {table.name!r} for {microbatches} microbatches puts its stages on ranks "
                    f"{table.placement}, but the model is cut for {self.cut.placement}. Use one placement for all numbers of "
                    "microbatches."
                )
            refuse_skips(table, self.cut.no_skips)
            # Checked once for each number of microbatches; every step then runs the same table.
            self._tables[microbatches] = check(table)
        return self._tables[microbatches]

    @cached_property
    def _forwards(self) -> Schedule:
        """One microbatch through all stages."""
        ranks = tuple(
            tuple(Row(rank, stage, "F", 0) for stage in self.cut.stages_of(rank)) for rank in range(self.axis.size())
        )
        return Schedule("forwards", 1, self.cut.placement, ranks)

    def _flow(self, microbatch: Any, loss: Loss) -> Flow:
        model = self.staged.model
        try:
            flow = self.reading.flow(model, microbatch, loss, lambda: arguments(model, microbatch, loss))
            if flow.beside and not of_this_library(loss):  # whose losses read the output alone
                raise PlanError(flow.beside)
            return flow
        except PlanError as error:
            if not self.cut.read:
                error.add_note(
                    "When the stages were planned, nothing told in which order the model calls its modules, so those that it "
                    "registers before its blocks are on the first stage and the others on the last. "
                    "parallelize(..., example=...) tells."
                )
            raise

    def _p2p(self, messages: Sequence[Message], flows: Sequence[Flow]) -> P2P:
        # All ranks of pp read the same microbatches, so a receiver knows each shape from its own, and none is sent ahead.
        def layout(output: Task) -> list[tuple[tuple[int, ...], torch.dtype]]:
            flow = flows[output.microbatch]
            if output.op == "F":
                refs = flow.crossing(output.stage)
            else:
                # Alike at all cuts where stages are skipped, so that of the stage before in the model tells them too.
                refs = [ref for ref in flow.crossing(output.stage - 1) if ref.dtype.is_floating_point]
            return [(ref.shape, ref.dtype) for ref in refs]

        return P2P(messages, self.rank, layout, self.staged.device, self.channels)


def pipeline_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Iterable[str],
    policy: PipelinePolicy | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Keep only this rank's stages of the module, in place; parameters keep their names.

    blocks: patterns of the repeated modules that are shared among stages, in order. policy: the schedule, 1F1B by
    default, and how many blocks each stage has. dtype: what the module computes in; default: that of its parameters.
    The module then runs by `pipeline_of(module).forward_backward(microbatches, loss, scale)`.
    Wire: for each microbatch, what later stages need of earlier ones (the hidden state) once forward and its gradient once
    backward between stages on different ranks, of those that it passes; with a tied embedding and head on different ranks,
    their gradient once a step.
    Raises: PlanError for a module that cannot be cut so.
    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B); Qi et al. 2023 (zero bubble).
    """
    require("pipeline_parallel", "module", module, nn.Module)
    require("pipeline_parallel", "mesh", mesh, DeviceMesh)
    require("pipeline_parallel", "policy", policy, PipelinePolicy, NoneType)
    blocks = listed(blocks, where="pipeline_parallel", argument="blocks")
    if mesh.ndim != 1:
        raise PlanError(f"pipeline_parallel needs one mesh axis, but got {mesh.mesh_dim_names}. Pass mesh['pp'].")
    if pipeline_of(module) is not None:
        raise PlanError("pipeline_parallel: this module has the stages of one rank already. Give the whole one, once.")
    policy = policy or PipelinePolicy()
    # Splitting linears comes after the plan, which looks at the unchanged model, and before stages are cut.
    names = match_blocks(blocks, dict(module.named_modules()))
    cut = plan_pipeline(module, mesh.size(), blocks=names, schedule=policy.schedule, split=policy.stages)
    full = without_values(module)
    if cut.splits_backward:
        split_linears(module)
    device = next(module.parameters()).device
    return cut_stages(module, mesh, cut, full=full, on_rank=full, device=device, dtype=dtype)


def cut_stages(
    module: nn.Module,
    mesh: DeviceMesh,
    cut: Cut,
    *,
    full: nn.Module,
    on_rank: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None = None,
    closed: Iterable[str] = (),
    guards: Sequence[Guard] = (),
    called_twice: Set[tuple[bool, ...]] = frozenset(),
    data: DeviceMesh | None = None,
    asked: AskedOnce | None = None,
    place: int = 0,
) -> nn.Module:
    """`pipeline_parallel` by a cut that `plan_pipeline` made from the unchanged module.

    full: the unchanged module, without values. on_rank: as `full`, but as it computes on this rank of other axes; changed by
    this. device: of batches. dtype: what it computes in, if that is not the dtype of its parameters. closed: modules whose
    forward reads values. guards, called_twice, asked, place:
    see `Reading`. data: the ranks with other rows.
    """
    rank, group = mesh.get_local_rank(), mesh.get_group()
    staged = StagedModel(module, full, cut.stages, cut.stages_of(rank), device)
    if dtype is not None:
        for param in on_rank.parameters():
            if type(param.data) is Tensor and param.is_floating_point():
                param.data = param.data.to(dtype)
    reading = Reading(on_rank, cut.stages, dict.fromkeys(closed, "experts"), guards, called_twice, asked, place)
    # Names, shapes and owners of all stages' tensors: checkpoints and gradient norms need those of other ranks too.
    set_full_model(
        module, FullModel(cut.tensors, {tail: head for head, tail in cut.tied}, cut.owners, cut.copies(rank), group)
    )
    channels = open_channels(group, in_rounds(ways_of(cut.placement, tied=bool(cut.copied)) | cut.ways), device)
    module.__dict__[_KEY] = Pipeline(staged, reading, mesh, cut, channels, Produced(mesh, data))
    return module


def pipeline_of(module: nn.Module) -> Pipeline | None:
    """The `Pipeline` of a module that went through `pipeline_parallel`; None for another."""
    pipeline: Pipeline | None = module.__dict__.get(_KEY)
    return pipeline
