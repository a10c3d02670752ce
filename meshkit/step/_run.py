"""A run: training steps on any mesh (gradient accumulation, loss normalised over the whole step), evaluation, inference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshkit.core.code import code_of, is_ours
from meshkit.core.evaluating import evaluating
from meshkit.core.reshard import ReallocationPlan
from meshkit.core.rng import KEYS, using_keys
from meshkit.core.sharding import plain_value
from meshkit.core.to_device import HOST, to_device
from meshkit.errors import DataError, PlanError
from meshkit.lora import dropout_keys, lora_of
from meshkit.loss import LossWatch
from meshkit.mask import Mask
from meshkit.memory import shared_scales
from meshkit.memory.budget.choose import Choice
from meshkit.memory.offload import Offload
from meshkit.mesh import Mesh
from meshkit.moe.aux_loss import Collected, collect
from meshkit.moe.real_tokens import no_real_tokens
from meshkit.parallel.data import (
    abandoned_on_error,
    after_inference,
    before_microbatch,
    normalises_by_rows,
    reduce_whole,
    restored_on_error,
)
from meshkit.parallel.expert import (
    begin_step,
    end_step,
    place_copies,
    refuse_overflow,
    step_counts,
    step_dropped,
    step_losses,
    update_biases,
)
from meshkit.parallel.later import LaterChanges
from meshkit.parallel.old_parameters import OldParameters
from meshkit.parallel.parameter_hooks import ParameterHooks, run_hooks, set_aside
from meshkit.parallel.pipeline import Pipeline
from meshkit.parallel.rows import RowsGuard
from meshkit.parallel.same_units import SameUnits
from meshkit.parallel.state_writes import StateGuard, StateWatch
from meshkit.plan import Plan
from meshkit.program import without_values
from meshkit.resolve import Resolved
from meshkit.step._documents import PackedRows
from meshkit.step._explained import explained
from meshkit.step._loss import Batch, Count, Loss, count_labels, next_token_loss, refuse_plain_count
from meshkit.step._microbatches import split, split_step
from meshkit.step._new_losses import NewLosses
from meshkit.step._new_values import OfTokens, refuse_mixing
from meshkit.step._watch import StepWatch
from meshkit.strategy import Strategy

if TYPE_CHECKING:
    from meshkit.step._export import Encoder


class Movable(Protocol):
    """A data loader that can be told its part of the batch on another mesh, as those of meshkit.data."""

    def move(self, mesh: Mesh) -> None: ...


class Mover(Protocol):
    """What `Run.move` does; it is in a room above."""

    def __call__(
        self, run: Run, strategy: Strategy, *, optimizer: Optimizer | None, loader: Movable | None
    ) -> ReallocationPlan: ...


@dataclass(eq=False)
class Run:
    """A model on a mesh: `parallelize` makes it, and it runs training steps, evaluation and inference."""

    model: nn.Module
    mesh: Mesh
    resolved: Resolved  # the strategy, and all that follows from it
    pipeline: Pipeline | None = None  # this rank's stages, with pp
    offload: Offload | None = None  # of activations: `offload.last_step` and `offload.report()` say how much was moved
    # Of the last step:
    auxiliary: dict[str, Tensor] = field(default_factory=dict)  # losses per token, by kind
    expert_counts: dict[str, Tensor] = field(default_factory=dict)  # tokens per expert, by router of this rank
    dropped_share: Tensor | None = None  # of the (token, choice) pairs, where experts have a capacity
    valid_tokens: Tensor | None = None  # of all ranks of the mesh
    tokens_seen: Tensor | float = 0.0  # the same, of all calls of `forward_backward` so far; a new tensor after each
    local_loss: float | Tensor = 0.0  # this rank's sum: the NaN guard reads it to name the rank that fails
    # (batch, microbatches, loss, mask): the NaN guard runs them again to find the module that fails.
    last_call: tuple[Batch, int, Loss, Mask | Sequence[Mask] | None] | None = None
    hooks: ParameterHooks = field(default_factory=lambda: ParameterHooks({}, {}))  # the user's, on parameters
    units: SameUnits | None = None  # of data ranks on what the model runs and writes
    state: StateGuard | StateWatch | None = None  # of what recompute and microbatches would write more than once
    later: LaterChanges | None = None  # of the model, since it was split
    old: OldParameters | None = None  # that something beside the model still holds
    rows: RowsGuard | None = None  # of what mixes the rows of a batch
    watcher: StepWatch | None = None  # of microbatches and gradients
    mover: Mover | None = None
    trusts_losses: bool = False  # where nothing has values: that a loss is a sum over its parts is not looked at

    @property
    def strategy(self) -> Strategy:
        """The choices of the run; `explain`, `estimate` and `check` take it too."""
        return self.resolved.strategy

    @cached_property
    def _losses(self) -> NewLosses:
        return NewLosses(
            self.resolved.program.model,
            self.model,
            self.mesh,
            multiple=self.resolved.sequence_multiple,
            by_length=self.strategy.context.groups != "fixed",
        )

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    @property
    def full_model(self) -> nn.Module:
        """The single-device model with the layers of all stages, without values, a copy in each call; `explain` takes it."""
        return without_values(self.resolved.program.model)

    @property
    def blocks(self) -> list[str]:
        """Names of this rank's blocks."""
        return self.resolved.blocks_of(self.mesh["pp"].get_local_rank())

    @property
    def recompute_choice(self) -> Choice | None:
        """What a `Budget` chose for this rank's blocks; `print` shows a table."""
        return self.resolved.choice_of(self.mesh["pp"].get_local_rank())

    @cached_property
    def _packed(self) -> PackedRows:
        return PackedRows(self.resolved.program.model)

    @property
    def keeps_documents(self) -> bool:
        """Whether its model may have packed rows: by a trial on random values, which runs once (docs/data.md). True, with a
        warning, of a model that is too large to be tried."""
        return self._packed.mixing() == "no"

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def forward_backward(
        self,
        batch: Batch,
        *,
        microbatches: int | None = None,
        loss: Loss = next_token_loss,
        count: Count = count_labels,
        mask: Mask | Sequence[Mask] | None = None,
        step: int | None = None,
    ) -> Tensor:
        """Gradients of the mean loss over the valid tokens of the whole step; returns that mean, same on every rank.

        batch: this rank's rows of the step, the same on ranks that differ only in tp, cp or pp; the first dim of every tensor
        is the row, and a rank may have none. microbatches: gradient accumulation, the number of parts of nearly equal size
        that the rows are processed in, the same on every rank; default: the strategy's, or 1. loss(model, part) is the
        **sum** over the part's valid tokens; count(batch) is their number, of the batch where it lies. The result does not
        depend on how the step's rows are split over ranks and microbatches; a part without valid tokens is harmless. With
        cp > 1 the loss gets this rank's tokens, by `split_batch`. mask: the attention mask, one for all rows or one for each;
        default: the model derives it from position_ids. step: the step's number, from which dropout on adapters draws its
        masks; nothing else needs it.
        Auxiliary losses of routers are part of the gradients, and not of the result: they are in `auxiliary`.
        Raises: AgreementError, on every rank, where they are given other rows, microbatches or losses, or make other calls;
        PlanError, on every rank, after the first step of a loss that is seen to be a mean already, or to mix rows, or on cp
        tokens; StepError
        where `ExpertPolicy.max_rows` was too few.
        Wire: two all-reduces of a few numbers over the mesh, of which the first compares what ranks do, and on what; with
        routers one more of their counts and losses, one of the gradients of scalar parameters, a gather of gradients with
        hooks, and what the blocks send.
        """
        microbatches = (self.strategy.microbatches or 1) if microbatches is None else microbatches
        _refuse_no_batch("forward_backward", batch)
        watch = (
            None
            if self.trusts_losses
            else self._losses.watch("forward_backward", batch, microbatches, loss, count, mask)
        )
        self.valid_tokens = self._begin("forward_backward", batch, loss, count, mask, microbatches, watch, step=step)
        tokens = self.valid_tokens.clamp(min=1)
        adapters = lora_of(self.model)
        if adapters is not None and adapters.dropout:
            batch = {**batch, KEYS: dropout_keys(batch, seed=adapters.seed, step=step)}
        self.last_call = (batch, microbatches, loss, mask)
        loss = watch or loss
        if self.old is not None:
            self.old.begin_step()
        if self.rows is not None:
            self.rows.begin_step(microbatches)
        if self.state is not None:
            self.state.begin_step(self.model, microbatches)
        if self.units is not None:
            self.units.begin_step()
        if self.strategy.experts.follows_load:
            begin_step(self.model)
        unhooked = set_aside(self.hooks, self.model)
        total = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        means = torch.zeros_like(total) if watch is None else watch.means
        reports: list[tuple[Collected, float]] = []  # of routers, with the weight of each microbatch
        to_repeat = self.watcher.begin(microbatches) if self.watcher is not None else None
        repeated: tuple[dict[str, Any], float] | None = None
        device, pace = self.mesh.device, self.resolved.pace
        parts = split_step(self.model, batch, microbatches, mask, device=device, pace=pace)
        whole = [param for name, param in self.named_parameters() if name in self.resolved.whole]
        earlier = [param.grad for param in whole]
        for param in whole:
            param.grad = None
        kept = restored_on_error(whole, earlier)
        if self.pipeline is not None:
            all_parts = list(parts)
            with abandoned_on_error(self.model), kept, self._explained():
                around = self.watcher.around if self.watcher is not None else None
                total, reports = self.pipeline.backward(all_parts, loss, tokens, around)
            repeated = None if to_repeat is None else all_parts[to_repeat]
        else:
            scales = shared_scales(self.model) if self.resolved.fp8 else nullcontext()
            with abandoned_on_error(self.model), kept, scales:
                for index, (part, weight) in enumerate(parts):
                    with self.watcher.around(index, 0) if self.watcher is not None else nullcontext():
                        last = index == microbatches - 1
                        part_loss, collected = self._backward(part, weight, tokens, loss, first=not index, last=last)
                    total += part_loss * weight
                    reports.append((collected, weight))
                    repeated = (part, weight) if index == to_repeat else repeated
        summed, means = self._end(total, means, self._lost(watch, batch))
        if (max_rows := self.strategy.experts.max_rows) is not None:
            refuse_overflow([report for report, _ in reports], self.mesh, max_rows)
        if whole:
            reduce_whole(whole, earlier, self.mesh.tokens)
        if self.hooks:
            run_hooks(self.hooks, self.model, unhooked)
        if self.offload is not None:
            self.offload.end_step()
        self.local_loss = total
        self.tokens_seen = self.tokens_seen + self.valid_tokens
        self.expert_counts = step_counts(self.model, reports, self.mesh, sequence=self.resolved.sequence)
        if self.strategy.experts.follows_load:
            end_step(self.model)
        self.dropped_share = step_dropped(reports, self.mesh) if self.strategy.experts.capacity is not None else None
        self.auxiliary = step_losses(reports, self.mesh, tokens, sequence=self.resolved.sequence)
        if watch is not None:
            self._losses.settle(watch, means, tokens, microbatches=microbatches)
        if self.watcher is not None:
            self.watcher.reduced()
            if repeated is not None and watch is None:  # the watch of a new loss runs it in another way
                with self.watcher.again():
                    self._repeat(*repeated, tokens, loss)
        if self.strategy.experts.follows_load:
            place_copies(self.model)  # now, since the microbatch that ran again had the copies that it had at first
        return summed / tokens

    def _backward(
        self, part: dict[str, Any], weight: float, tokens: Tensor, loss: Loss, *, first: bool, last: bool
    ) -> tuple[Tensor, Collected]:
        """Forward and backward of one microbatch: its loss, and what its routers report."""
        before_microbatch(self.model, row=self.resolved.shardings, first=first, last=last)
        with using_keys(part.get(KEYS)):
            with collect() as collected, nullcontext() if weight else no_real_tokens(), self._forward():
                part_loss = plain_value(loss(self.model, part))
            # Divided by the tokens of the whole step, not of the microbatch: gradients of microbatches add up to that of the
            # step's mean, however its tokens are split.
            with self._explained():
                ((part_loss + collected.total()) * weight / tokens).backward()
        # Detached: the graph ends here, and with it what the loss made for this part.
        return part_loss.detach(), collected

    def _repeat(self, part: dict[str, Any], weight: float, tokens: Tensor, loss: Loss) -> None:
        """Run a microbatch of this step again; its gradients are added, and whoever asked for it takes them away."""
        assert self.watcher is not None
        around = self.watcher.around
        if self.units is not None:
            self.units.begin_step()
        if self.pipeline is not None:
            with self._explained():
                self.pipeline.backward([(part, weight)], loss, tokens, around)
        else:
            with shared_scales(self.model) if self.resolved.fp8 else nullcontext(), around(0, 0):
                self._backward(part, weight, tokens, loss, first=True, last=True)
        if self.offload is not None:
            last_step = self.offload.last_step
            self.offload.end_step()
            self.offload.last_step = last_step

    def _begin(
        self,
        what: str,
        batch: Batch,
        loss: Loss,
        count: Count,
        mask: Mask | Sequence[Mask] | None,
        microbatches: int | None = None,
        watch: LossWatch | None = None,
        **facts: object,
    ) -> Tensor:
        """The valid tokens of the step over all ranks, which agree here on what they do with which rows.

        microbatches: None in an evaluation. watch: of a new loss. Raises: PlanError, on every rank, if one has seen that the
        loss is no sum over its parts.
        """
        # Counted where the batch lies: it moves to the device once, part by part, and here it would only be dropped again.
        counted = to_device(refuse_plain_count(what, count(batch)), self.mesh.device)
        # Ranks that differ in pp, cp or tp have the same rows: the first of them counts.
        first = self.mesh.is_first("pp", "cp", "tp")
        # A change on one stage alone is a difference of ranks, which all of them learn in this message.
        changed = "" if self.later is None else self.later.refusal(microbatches)
        unlike = normalised = ""
        if isinstance(microbatches, int) and microbatches > 0:
            normalised = self._normalised_refusal(microbatches)
            if self.rows is not None:
                mine_of = (value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim)
                unlike = self.rows.refusal(next(mine_of, 0), microbatches)
        named = {"loss": _name(loss), "count": _name(count), "training": self.model.training}
        facts |= {"microbatches": microbatches, "changes after parallelize": changed or "none", **named}
        facts |= {"numbers of rows": unlike or "none", "rows that are normalised": normalised or "none"}
        packed = self._packed.refusal(what, batch) if mask is None and is_ours(loss) else ""
        facts |= {"packed rows": packed or "none"}
        rows = {**batch, "mask": _masks(mask)}
        mine = counted if first else torch.zeros_like(counted)
        verdict = torch.tensor(0.0 if watch is None else watch.verdict, dtype=torch.float64)
        # An evaluation may count several things: they do not fit into the message.
        numbers = [to_device(verdict, self.mesh.device), *([] if mine.ndim else [mine])]
        summed = self.mesh.agreement.meet(what, *numbers, facts=facts, rows=rows)
        if refusal := changed or unlike or normalised or packed:
            raise PlanError(refusal)
        if watch is not None:
            watch.refuse(summed[0])
        elif summed[0].device == HOST:  # new on another rank; a device's host does not wait for that in each step
            LossWatch.refuse_of(what, loss, summed[0])
        return self._sum_over_mesh(mine) if mine.ndim else summed[1].to(counted.dtype)

    def _sum_over_mesh(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        if self.mesh.spec.world_size > 1:
            dist.all_reduce(value, group=self.mesh.group)
        return value

    def _lost(self, watch: LossWatch | None, batch: Batch) -> str:
        """The refusal, where a gradient of this step went to something that is no parameter of the run; else empty."""
        old = "" if self.old is None else self.old.refusal()
        if old or watch is None or self.mesh.tokens.size() == 1:
            return old
        return watch.trained_beside(self.model, batch, parameters=self.pipeline is not None)

    def _end(self, total: Tensor, means: Tensor, lost: str) -> tuple[Tensor, Tensor]:
        """Both over all ranks, and in the same message on how many of them gradients are missing that others may have.

        Raises: PlanError for gradients that are lost; on pp, where the last stage alone has the loss, AgreementError.
        """
        pipeline = self.pipeline.produced if self.pipeline is not None else None
        missing = self.units.filled if self.units is not None else pipeline is not None and pipeline.odd
        numbers = [total, means, torch.full_like(total, float(missing))]
        if not self.mesh.is_first("tp"):  # ranks of tp have the same loss; of the stages the last alone has one
            numbers = [torch.zeros_like(value) for value in numbers]
        facts = {"lost gradients": lost or "none"}
        summed, means, count = self.mesh.agreement.meet("the end of forward_backward", *numbers, facts=facts)
        if lost:
            raise PlanError(lost)
        if self.units is not None:
            self.units.settle(count)
        if pipeline is not None:
            pipeline.settle(count)
        return summed, means

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Around each forward of a training step with its loss. Raises: PlanError for what only a running model shows."""
        watch = self.state.forward() if isinstance(self.state, StateWatch) else nullcontext()
        # Data ranks agree first: then all of them refuse what they write.
        with self._explained(), watch, self.units.forward() if self.units is not None else nullcontext():
            yield

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.model, self.resolved.program.model, self.mesh["tp"].size())

    def _normalised_refusal(self, microbatches: int) -> str:
        """Of BatchNorm, or empty: `resolve` refuses it too, but a model may be put into training mode later."""
        ranks = self.mesh.tokens.size() > 1
        for name, module in self._batch_norms:
            if (ranks and normalises_by_rows(module)) or (microbatches > 1 and normalises_by_rows(module, synced=True)):
                some = "rank" if ranks and microbatches == 1 else "microbatch" if not ranks else "rank and microbatch"
                return (
                    f"{name!r} is a {type(module).__name__}, and in training mode it normalises by the rows of one {some}. "
                    f"Call run.model.get_submodule({name!r}).eval() before the step."
                )
        return ""

    @cached_property
    def _batch_norms(self) -> list[tuple[str, nn.Module]]:
        named = self.model.named_modules()
        return [(name, module) for name, module in named if isinstance(module, nn.modules.batchnorm._BatchNorm)]

    def balance_experts(self, *, speed: float = 1e-3) -> None:
        """Load balancing by bias, after an optimizer step: raise it for experts with few tokens, lower it for others.

        For routers with a bias; see `meshkit.moe.aux_loss.update_bias`. Wire: nothing.
        """
        update_biases(self.model, self.expert_counts, speed=speed)

    def move(
        self,
        strategy: Strategy | None = None,
        *,
        optimizer: Optimizer | None = None,
        loader: Movable | None = None,
        **choices: Any,
    ) -> ReallocationPlan:
        """Go on under another strategy on the same ranks, in place, between two steps; returns what was sent, to print.

            run.move(mk.Strategy(mesh="dp_shard=2 tp=2", zero=2), optimizer=optimizer, loader=loader)
            run.move(mesh="tp=4", optimizer=optimizer, loader=loader)  # all else as it is

        What goes on is bit for bit what saving by `Checkpointer` and loading into a run of the other strategy gives:
        parameters, persistent buffers, the optimizer's state and options, and each rank's random numbers; besides, which
        parameters are trained and which modules are in training.
        strategy: every choice, as `parallelize` takes it; or the run's own, with `choices` in it. A mesh of None is the
        run's.
        optimizer: the one of these parameters; None where there is none. It stays the same object with the same groups, so
        schedules go on, and becomes the kind that the strategy's memory.optimizer selects if it is one of meshkit's.
        loader: with `move(mesh)`, as those of meshkit.data; any other must be given the new `run.mesh.data_rank` by you.
        Afterwards `run` is the new run: `run.model`, `run.mesh` and the parameters are other objects, the old ones are empty.
        Layout: batches of 64 MiB or of one tensor, in the model's order, then the optimizer's; the old shards of a batch are
        freed when the new ones are there. So a rank holds at most its old or its new state, whichever is larger on the way,
        and besides one batch, messages of two more, and whatever is allocated at once: new shards of uneven parts, new
        moments of few bits, and on the host a new optimizer's slabs.
        Wire: an all-reduce in which ranks agree on the call; what `parallelize` sends, and groups that no earlier mesh had;
        gathers of what ranks hold; then over the mesh the bytes of the plan, each once to each receiver that has it not yet.
        Raises: PlanError and MeshError as `parallelize`, and PlanError for gradients that are still there, an optimizer that
        keeps parameters in attributes of its own or its state in another way than the new strategy, and for changes of the
        model since `parallelize` that are refused in a step: on every rank, with nothing changed. AgreementError where ranks
        ask for different strategies.
        Source: Miao et al. 2022 (Galvatron), for runtime adaptation; Mei et al. 2024 (ReaL), for the plan.
        """
        assert self.mover is not None
        given = {name: choice for name, choice in choices.items() if choice is not None}
        chosen = Strategy.of(strategy, given)
        if strategy is None:
            chosen = replace(self.strategy, **given)
        if chosen.mesh is None:
            chosen = replace(chosen, mesh=self.mesh.spec)
        return self.mover(self, chosen, optimizer=optimizer, loader=loader)

    def export(
        self,
        folder: str | os.PathLike[str],
        tokenizer: Encoder | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write a folder that transformers' `AutoModel`s, `AutoTokenizer` and `pipeline` read. Every rank must call it.

        It holds weights, config.json, the tokenizer's files, the chat template, and generation_config.json, which ends
        answers at the tokenizer's eos, at what the tokenizer's folder says, and at what the template writes after an
        answer. Of a model with adapters it is a folder that PEFT reads; of a `RewardModel` transformers'
        ...ForSequenceClassification, whose `pipeline` gives plain scores.
        tokenizer: a `Tokenizer`, a `Chat`, or a folder with one; one that was read from a folder is copied from there file by
        file. None: weights and config.json alone. base: of adapters, the folder of the frozen model.
        The folder must not exist or be empty. It appears under its name when it is complete; files have a new file's mode.
        Wire, memory: as `mk.models.save_pretrained`. Raises: CheckpointError, on every rank, if the folder is not empty;
        PlanError for a model without a config.
        """
        from meshkit.step._export import export  # here: `import meshkit` stays without tokenizers

        export(self, folder, tokenizer, base)

    def routing_of_stages(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(`expert_counts`, `auxiliary`) of the routers of all stages, the same on every rank. A collective of all ranks.

        Wire: with pp, an all-gather of them over it as objects; without, nothing.
        """
        if self.pipeline is None:
            return self.expert_counts, self.auxiliary
        # On the host: tensors of several devices would arrive as tensors on devices that this rank does not use.
        local = [
            {name: value.cpu() for name, value in values.items()} for values in (self.expert_counts, self.auxiliary)
        ]
        stages: list[Any] = [None] * self.mesh["pp"].size()
        dist.all_gather_object(stages, local, group=self.mesh["pp"].get_group())
        counts = {name: value for stage_counts, _ in stages for name, value in stage_counts.items()}
        kinds = dict.fromkeys(kind for _, losses in stages for kind in losses)
        losses = {kind: torch.stack([losses[kind] for _, losses in stages if kind in losses]).sum() for kind in kinds}
        return {name: counts[name] for name, _ in self.resolved.program.model.named_modules() if name in counts}, losses

    @torch.no_grad()
    def evaluate(
        self,
        batch: Batch,
        *,
        loss: Loss = next_token_loss,
        count: Count = count_labels,
        mask: Mask | Sequence[Mask] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(summed loss, valid tokens) of the batch over all ranks, without gradients; same on every rank.

        loss(model, batch) is a sum, and count(batch) what it is over, as in `forward_backward`; both may be several.
        Raises: AgreementError, on every rank, where they are given other rows or losses; PlanError, on every rank, in the
        first evaluation by a loss that is seen to be a mean already, or to mix rows, or on cp tokens.
        Wire: two all-reduces of a few numbers over the mesh, and what the forward sends.
        """
        _refuse_no_batch("evaluate", batch)
        watch = self._losses.watch("evaluate", batch, 1, loss, count, mask)
        counted = self._begin("evaluate", batch, loss, count, mask, watch=watch)
        ((part, weight),) = self.parts(batch, 1, mask)
        max_rows = self.strategy.experts.max_rows
        collecting = nullcontext(Collected()) if max_rows is None else collect()
        with evaluating(self.model), collecting as collected:
            total = self.infer(part, loss)
        after_inference(self.model)
        if max_rows is not None:
            refuse_overflow([collected], self.mesh, max_rows)
        local = torch.zeros((), device=self.mesh.device) if total is None else total.double() * weight
        if local.ndim and self.pipeline is not None:
            raise PlanError(
                f"evaluate: the loss is a tensor of shape {tuple(local.shape)}, and with pp the other stages do not know of "
                "it. Return a scalar, or use a mesh without pp."
            )
        local = local if self.mesh.is_first("tp") else torch.zeros_like(local)
        means = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        if watch is not None and self.mesh.is_first("tp", "pp"):
            watch.look_without_graph()
            means = watch.means
        if local.ndim:
            summed, means = self._sum_over_mesh(local), means if watch is None else self._sum_over_mesh(means)
        else:
            summed, means = self.mesh.agreement.meet("the end of evaluate", local, means)
        if watch is not None:
            self._losses.settle(watch, means, counted, microbatches=1)
        return summed, counted

    @torch.no_grad()
    def infer(self, part: dict[str, Any], function: Loss) -> Tensor | None:
        """function(model, part) for one of `parts`; with pp the result is on ranks of the last stage, and None elsewhere.

        Parameters stay gathered: call `meshkit.parallel.data.after_inference` after the last of several calls.
        """
        return plain_value(function(self.model, part)) if self.pipeline is None else self.pipeline.infer(part, function)

    def refuse_mixing(self, what: str, batch: Batch, function: OfTokens, *, index: str, microbatches: int = 1) -> None:
        """Before `infer` with a function of each token: see `step/_new_values`. Every rank must call it."""
        if is_ours(function):
            self._packed.refuse(what, batch, self.mesh)
        refuse_mixing(self._losses, what, batch, microbatches, function, index=index)

    def parts(
        self, batch: Batch, microbatches: int, mask: Mask | Sequence[Mask] | None = None
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """(microbatch with this rank's tokens on its device, weight of its loss) for each microbatch.

        A microbatch without rows becomes one row with weight 0, see [Note: microbatches without rows] in step/_microbatches.
        """
        return split(self.model, batch, microbatches, mask, device=self.mesh.device)


def _name(function: Any) -> str:
    """Of its code, for other ranks: not where it lies."""
    code = code_of(function)
    line = getattr(code, "co_firstlineno", None)
    name: str = getattr(code, "co_qualname", getattr(code, "__qualname__", str(code)))
    return name if line is None else f"{name} of line {line}"


def _masks(mask: Mask | Sequence[Mask] | None) -> str:
    """As little of it as tells it from others."""
    if mask is None:
        return "none"
    masks = [mask] if isinstance(mask, Mask) else list(mask)
    return f"{len(masks)} of {sum(each.tokens for each in masks)} tokens, {hash(tuple(masks)):x}"


def _refuse_no_batch(verb: str, batch: object) -> None:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"{verb}(batch=a {type(batch).__name__}): give a dict of tensors whose first dim is the row, as "
            "{'input_ids': ..., 'labels': ...}."
        )
