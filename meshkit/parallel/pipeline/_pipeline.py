"""A model on the ranks of `pp`: its stages, and the schedule by which their microbatches run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshkit.errors import PlanError
from meshkit.parallel.data import after_pipeline, before_pipeline, find_units
from meshkit.parallel.pipeline._check import check
from meshkit.parallel.pipeline._execute import Loss, execute, forward
from meshkit.parallel.pipeline._split_backward import split_linears
from meshkit.parallel.pipeline._stages import StagedModel, Stages, plan_stages
from meshkit.parallel.pipeline._table import Row, Schedule
from meshkit.parallel.pipeline._transfer import Mail, Message
from meshkit.parallel.pipeline.schedules import named
from meshkit.sharding import local_tensor

Generator = Callable[[int, int], Schedule]


@dataclass(eq=False)
class Pipeline:
    """Runs one rank's part of a pipeline. Made by `pipeline_parallel`.

    width: of the hidden state; parts: ranks that share a sequence between blocks (tp, with sequence parallelism).
    """

    staged: StagedModel
    axis: DeviceMesh
    generate: Generator
    dtype: torch.dtype
    width: int
    parts: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    ends: tuple[int, int]  # ranks of the first and the last stage
    tied: tuple[tuple[str, str], ...]  # parameters that both of them hold, by their names there
    _tables: dict[int, Schedule] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.axis.get_local_rank()

    @property
    def modules(self) -> list[str]:
        """Names of the modules that this rank holds."""
        return [name for stage in self.staged.own for name in self.staged.stages.modules_of(stage)]

    @property
    def copies(self) -> dict[str, str]:
        """Parameters of this rank that are another rank's too, which counts them: name here -> name there."""
        return {tail: head for head, tail in self.tied} if self.rank == self.ends[1] else {}

    def schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._tables:
            table = self.generate(self.axis.size(), microbatches)
            check(table)
            self._tables[microbatches] = table
        return self._tables[microbatches]

    def forward_backward(self, parts: Sequence[tuple[Any, float]], loss: Loss, scale: Tensor) -> Tensor:
        """The gradients of all microbatches; returns the sum of their losses, the same on every rank of the axis."""
        model = self.staged.model
        schedule = self.schedule(len(parts))
        before_pipeline(model)
        losses = execute(schedule, self.rank, self.staged, self._mail(schedule, parts), parts, loss, scale)
        after_pipeline(model)
        self._add_tied_gradients()
        return self.total(losses, scale.device)

    @torch.no_grad()
    def infer(self, part: Any, function: Loss) -> Tensor | None:
        """function(model, part) without gradients, on the ranks of the last stage; None on the others."""
        find_units(self.staged.model)
        schedule = forwards(self.schedule(1))
        mail = self._mail(schedule, [(part, 1.0)])
        result = None
        for row in schedule.ranks[self.rank]:
            stage = row.stage
            hidden = mail.receive(schedule.placement[stage - 1], Message("F", stage, 0)) if stage > 0 else None
            value = forward(self.staged, stage, hidden, part, function)
            if stage + 1 < schedule.stages:
                mail.send(schedule.placement[stage + 1], Message("F", stage + 1, 0), value)
            else:
                result = value
        mail.finish()
        return result

    def total(self, losses: Sequence[Tensor], device: torch.device) -> Tensor:
        """The sum of the losses of the ranks of the axis, on all of them."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for value in losses:
            total += value.detach()
        dist.all_reduce(total, group=self.axis.get_group())
        return total

    def _add_tied_gradients(self) -> None:
        """A parameter that the first and the last stage hold gets the sum of both gradients on both."""
        if self.rank not in self.ends:
            return
        first = self.rank == self.ends[0]
        params = dict(self.staged.model.named_parameters())
        for head, tail in self.tied:
            whole = params[head if first else tail].grad
            assert whole is not None, "both ends used the parameter"
            grad = local_tensor(whole)
            other = torch.empty_like(grad)
            peer = self.ends[1] if first else self.ends[0]
            there, back = (self.up, self.down) if self.rank < peer else (self.down, self.up)
            sent = dist.isend(grad.contiguous(), group=there, group_dst=peer)
            dist.recv(other, group=back, group_src=peer)
            assert sent is not None
            sent.wait()
            grad += other

    def _mail(self, schedule: Schedule, parts: Sequence[tuple[Any, float]]) -> Mail:
        shapes = {index: self._hidden_shape(part) for index, (part, _) in enumerate(parts)}
        return Mail(schedule, self.rank, shapes, self.dtype, part_device(parts[0][0]), self.up, self.down)

    def _hidden_shape(self, part: Any) -> torch.Size:
        rows, tokens = _tokens(part).shape[:2]
        return torch.Size((rows, tokens // self.parts, self.width))


def _tokens(part: Any) -> Tensor:
    found = part.get("input_ids")
    return found if found is not None else next(value for value in part.values() if isinstance(value, Tensor))


def part_device(part: Any) -> torch.device:
    return _tokens(part).device


@lru_cache(maxsize=64)
def forwards(schedule: Schedule) -> Schedule:
    """The same stages, forwards only: microbatch by microbatch, stage by stage."""
    ranks = tuple(
        tuple(
            Row(rank, stage, "F", microbatch)
            for microbatch in range(schedule.microbatches)
            for stage in schedule.stages_of(rank)
        )
        for rank in range(schedule.world)
    )
    return Schedule(f"{schedule.name}, forwards", schedule.microbatches, schedule.placement, ranks)


@lru_cache
def _directions(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two groups of the same ranks, made once."""
    ranks = dist.get_process_group_ranks(group)
    up, down = (dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))
    assert isinstance(up, dist.ProcessGroup) and isinstance(down, dist.ProcessGroup)
    return up, down


@dataclass(frozen=True)
class Cut:
    """How a whole model will be cut. tied: (name in the head, name in the tail) of each parameter that both hold."""

    stages: Stages
    generate: Generator
    width: int
    tied: tuple[tuple[str, str], ...]


def plan_pipeline(
    model: nn.Module,
    axis: DeviceMesh,
    *,
    blocks: Sequence[str],
    schedule: Generator | Schedule | str,
    split: Sequence[int] | None = None,
    put_off_weights: bool = True,
) -> Cut:
    """Share the model's blocks among stages, before any other change to it.

    schedule: a name, a function of (ranks, microbatches), or a table. split: blocks of each stage; default: by parameters.
    put_off_weights: where the schedule computes weight gradients apart, let linear layers do so; else they come with I.
    Raises: PlanError for a model that cannot be cut so, and for a table that is wrong.
    """
    generate = generator_of(schedule, axis.size())
    stages = plan_stages(model, blocks, generate(axis.size(), 1).stages, split=split)
    if put_off_weights and generate(axis.size(), 2).splits_backward:
        split_linears(model)
    return Cut(stages, generate, _hidden_width(model, stages), _tied(model, stages))


def generator_of(schedule: Generator | Schedule | str, ranks: int) -> Generator:
    """Tables for any number of microbatches, or the one that was given."""
    if isinstance(schedule, str):
        return named(schedule)
    if not isinstance(schedule, Schedule):
        return schedule

    def given(ranks: int, microbatches: int) -> Schedule:
        if schedule.world != ranks or (microbatches > 2 and schedule.microbatches != microbatches):
            raise PlanError(
                f"pipeline: the table {schedule.name!r} is for {schedule.world} ranks and {schedule.microbatches} "
                f"microbatches, but the run has {ranks} and {microbatches}. Give a table for those, or a function that "
                "makes it."
            )
        return schedule

    return given


def pipeline_parallel(model: nn.Module, axis: DeviceMesh, cut: Cut, *, dtype: torch.dtype, parts: int = 1) -> Pipeline:
    """Keep the stages of this rank, in place; parameters keep their names.

    Each block takes and returns the hidden state [B, T, C] first. dtype: of the hidden state. parts: ranks that share the
    sequence between blocks.
    Wire: each microbatch's hidden state once forward and its gradient once backward between stages on different ranks; with a
    tied embedding and head on different ranks, their gradient once a step.
    """
    placement = cut.generate(axis.size(), 1).placement
    own = [stage for stage, rank in enumerate(placement) if rank == axis.get_local_rank()]
    staged = StagedModel(model, cut.stages, own, dtype)
    up, down = _directions(axis.get_group())
    tied = cut.tied if placement[0] != placement[-1] else ()
    made = Pipeline(staged, axis, cut.generate, dtype, cut.width, parts, up, down, (placement[0], placement[-1]), tied)
    model.__dict__["_names_elsewhere"] = made.copies
    return made


def _tied(model: nn.Module, stages: Stages) -> tuple[tuple[str, str], ...]:
    def parameters(modules: tuple[str, ...]) -> dict[int, str]:
        return {
            id(param): f"{name}.{key}"
            for name in modules
            for key, param in model.get_submodule(name).named_parameters()
        }

    head, tail = parameters(stages.head), parameters(stages.tail)
    return tuple((head[key], tail[key]) for key in head if key in tail)


def _hidden_width(model: nn.Module, stages: Stages) -> int:
    for name in reversed(stages.head):
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            return module.embedding_dim
        if isinstance(module, nn.Linear):
            return module.out_features
    raise PlanError(
        "pipeline: no embedding or linear layer before the blocks tells the width of the hidden state. Put one there."
    )
