"""OuterOptimizer: local updates of the replicas of a run, which meet over dp_replicate every so many steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from meshkit.core.arguments import require
from meshkit.core.model_state import full_model_of, model_tensors
from meshkit.core.optimizer_state import finish_update, parameter_names
from meshkit.core.sharding import local_tensor
from meshkit.errors import AgreementError, PlanError, StepError
from meshkit.mesh import Mesh
from meshkit.optim.outer._exchange import Exchange, Layout
from meshkit.optim.outer._fragments import fragment_of
from meshkit.optim.outer._policy import (
    CO2,
    DiLoCo,
    LocalSGD,
    Policy,
    delay_of,
    feeds_back,
    fragments_of,
    period_at,
    wire_of,
)
from meshkit.optim.outer._state import Entry, JoinedState, flat
from meshkit.optim.outer._update import outer_step
from meshkit.parallel.data import after_inference
from meshkit.step import Run

AXIS = "dp_replicate"


@dataclass
class _Flight:
    """A fragment under way. sent: after which step. exchange: None once its means are in the entries, or where this rank has
    nothing of the fragment."""

    fragment: int
    sent: int
    exchange: Exchange | None


class OuterOptimizer:
    """Local updates on the axis dp_replicate: the replicas of a run step alone, and meet as a policy says.

    run: on `replica_mesh(mesh)`, with the same values on every replica. optimizer: the inner one, of the run's parameters.
    mesh: with all replicas. policy: `LocalSGD`, `DiLoCo` or `CO2`. Call `step()` once after each step of the inner
    optimizer, also where it was skipped; at the end, or before an export, `meet()`.
    Where a checkpoint takes an optimizer, give it this: outer parameters, momentum, what is in flight, rounding errors and the
    place in the period are saved beside the inner state, and a run goes on in the middle of a period bit for bit. Each replica
    has its own folder, and all save after the same steps. In flight at a save is waited for then, and lands when it would have.
    Averaged are the parameters of the optimizer, and with them floating-point buffers that a checkpoint has.
    Holds per optimized parameter, in fp32 at least: nothing with LocalSGD; else outer parameter and momentum; with error
    feedback one more; and what travels while it does.
    Wire: over the whole mesh once a digest of what each rank has. Of each fragment on dp_replicate an all-to-all of a replica's
    changes and an all-gather of their mean, `period_traffic` says how many bytes; over the replica's mesh an all-reduce of a
    few numbers, in which its ranks learn whether the mean is finite.
    Raises: PlanError for a run on the whole mesh, and for replicas that begin with different values; AgreementError on all
    ranks for replicas with another policy, or after other numbers of steps; StepError, on all ranks, naming the replica, for a
    mean that is not finite.
    """

    def __init__(self, run: Run, optimizer: Optimizer, mesh: Mesh, policy: Policy) -> None:
        require("OuterOptimizer", "run", run, Run)
        require("OuterOptimizer", "mesh", mesh, Mesh)
        require("OuterOptimizer", "policy", policy, LocalSGD, DiLoCo, CO2)
        self.run, self.mesh, self.policy, self.inner = run, mesh, policy, optimizer
        _refuse(run, mesh, policy)
        mesh.agreement.meet("OuterOptimizer", facts={"policy": policy})
        self._run_mesh = run.mesh
        self._axis = mesh[AXIS]
        self._delay, self._fragments = delay_of(policy), fragments_of(policy)
        fragments = fragments_by_name(run, self._fragments)
        tensors = model_tensors(run.model)  # first for its side effect: FSDP puts its shards back
        names = parameter_names(run.model)
        held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        self.entries = {
            param: Entry(name=names[id(param)], param=param, fragment=fragments[names[id(param)]]) for param in held
        }
        self._buffers = _float_buffers(run, tensors)
        if self._buffers and self._delay:
            raise PlanError(
                f"{type(policy).__name__} with a delay: {next(iter(self._buffers))!r} is a buffer that replicas write, and it "
                "would be averaged late. Use LocalSGD, or DiLoCo without a delay."
            )
        self._refuse_different_values(tensors)
        self._step = 0
        self._next = self._period() // self._fragments
        self._flight: _Flight | None = None
        self._tokens = [
            torch.zeros((), dtype=torch.float64, device=mesh.device) for _ in range(self._fragments)
        ]  # of this replica since the fragment was sent
        for entry in self.entries.values():
            self._begin(entry)

    @property
    def steps(self) -> int:
        """Made since the start."""
        return self._step

    @property
    def next_meeting(self) -> int:
        """After which step the replicas next send."""
        return self._next

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> JoinedState:
        """Of both optimizers; call `finish` before."""
        return JoinedState(self.inner, self.entries, self._numbers, self._restore)

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of this replica, and send, receive or meet where the policy does after it."""
        if self.run.mesh is not self._run_mesh:
            raise PlanError("OuterOptimizer.step: the run has moved to another mesh. Save, and resume on the new one.")
        self._step += 1
        if self.policy.weights == "tokens":
            if self.run.valid_tokens is None:
                raise PlanError(
                    "OuterOptimizer.step: no forward_backward has counted tokens, by which replicas are weighted. Call it "
                    'before, or give the policy weights="equal".'
                )
            for tokens in self._tokens:
                tokens += self.run.valid_tokens
        flight = self._flight
        if flight is not None and flight.exchange is not None and self._step >= flight.sent + (self._delay + 1) // 2:
            flight.exchange.turn()
        if isinstance(self.policy, CO2):
            if self._step == self._next:
                self._meet_late()
        else:
            if flight is not None and self._step >= flight.sent + self._delay:
                self._land()
            if self._step == self._next:
                self._send(self._due())
                if not self._delay:
                    self._land()
        if self._step == self._next:
            self._next += self._period() // self._fragments

    @torch.no_grad()
    def meet(self) -> None:
        """Meet now with all of the model, whatever the period: all replicas have the same parameters after it.

        What is in flight lands first. The meetings that are due come when they would have. Every rank of the mesh calls it.
        """
        if isinstance(self.policy, CO2):
            self._meet_late()
            self._land()
            self._write(0, keep=0.0)
            return
        if self._flight is not None:
            self._land()
        for fragment in range(self._fragments):
            self._send(fragment)
            self._land(keep=0.0)

    def finish(self) -> None:
        """Wait for what is in flight, so that `state` has all of it; it lands when it would have. Also of the inner optimizer.

        Every rank of the mesh calls it after the same step, as a save does.
        """
        finish_update(self.inner)
        flight = self._flight
        if flight is None or flight.exchange is None:
            return
        with torch.no_grad():
            means = flight.exchange.finish()
            self._refuse_other_steps(flight)
            for entry, mean in zip(self._of(flight.fragment), means, strict=True):
                entry.average = entry.like(mean.dtype)
                flat(entry.average).copy_(mean)
        flight.exchange = None

    # ------------------------------------------------------------------------------------------------- a fragment's way

    def _send(self, fragment: int) -> None:
        """The changes of a fragment since its outer parameters were set, or with LocalSGD its values."""
        self._shards_back()
        self._launch(fragment, [self._payload(entry) for entry in self._of(fragment)])

    def _payload(self, entry: Entry) -> Tensor:
        values = local_tensor(entry.param).reshape(-1)
        return values if isinstance(self.policy, LocalSGD) else flat(entry.parameter) - values

    def _launch(self, fragment: int, payloads: list[Tensor]) -> None:
        entries = self._of(fragment)
        payloads = payloads + [buffer.reshape(-1) for buffer in self._buffers_of(fragment)]
        layout = self._layout(payloads)
        exchange = None
        if layout is not None:
            tokens = self._tokens[fragment]
            exchange = Exchange(
                self._axis.get_group(),
                layout,
                payloads,
                weight=torch.ones_like(tokens) if self.policy.weights == "equal" else tokens,
                step=self._step,
                errors=[flat(entry.error) for entry in entries] if feeds_back(self.policy) else None,
            )
        self._tokens[fragment].zero_()
        self._flight = _Flight(fragment, self._step, exchange)

    def _land(self, *, keep: float | None = None) -> None:
        """The means move the outer parameters, and those the replica's. keep: the share of its own; default, the policy's."""
        flight = self._flight
        assert flight is not None
        self._flight = None
        entries = self._of(flight.fragment)
        if flight.exchange is not None:
            means = flight.exchange.finish()
            self._refuse_other_steps(flight)
        else:
            means = [flat(entry.average) for entry in entries if entry.average is not None]
        self._refuse_not_finite(means)
        if not means:
            return
        if isinstance(self.policy, LocalSGD):
            for entry, mean in zip(entries, means, strict=False):
                local = local_tensor(entry.param)
                local.copy_(mean.view(local.shape))
            self._written(entries)
        else:
            for entry, mean in zip(entries, means, strict=False):
                outer_step(self.policy, flat(entry.parameter), flat(entry.momentum), mean)
                entry.average = None
            if isinstance(self.policy, DiLoCo):
                self._write(flight.fragment, keep=self.policy.mixing if keep is None else keep)
        for buffer, mean in zip(self._buffers_of(flight.fragment), means[len(entries) :], strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _meet_late(self) -> None:
        """A meeting of CO2: what was sent at the last one moves the outer parameters, and this period's changes are sent."""
        self._shards_back()
        payloads = [self._payload(entry) for entry in self._of(0)]  # before the outer parameters move
        if self._flight is not None:
            self._land()
        self._write(0, keep=0.0)
        self._launch(0, payloads)

    def _write(self, fragment: int, *, keep: float) -> None:
        """Parameters are what the outer ones are, but for the share that they keep of their own."""
        self._shards_back()
        entries = self._of(fragment)
        for entry in entries:
            local = local_tensor(entry.param)
            outer = flat(entry.parameter).view(local.shape)
            # In the wider dtype of the two: a bf16 parameter is rounded once.
            local.copy_(outer if not keep else torch.lerp(outer, local.to(outer.dtype), keep))
        self._written(entries)

    def _written(self, entries: list[Entry]) -> None:
        # A DTensor has a version counter of its own, by which those who keep a copy of it learn that it was written.
        torch.autograd.graph.increment_version([entry.param for entry in entries])

    def _shards_back(self) -> None:
        """An optimizer offloaded to the host may still be writing, and an evaluation leaves parameters gathered."""
        finish_update(self.inner)
        after_inference(self.run.model)

    # --------------------------------------------------------------------------------------------------- what it consists of

    def _of(self, fragment: int) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.fragment == fragment]

    def _buffers_of(self, fragment: int) -> list[Tensor]:
        return [local_tensor(buffer) for buffer in self._buffers.values()] if fragment == self._fragments - 1 else []

    def _layout(self, payloads: list[Tensor]) -> Layout | None:
        """None where this rank has nothing of the fragment, as on a stage without its blocks."""
        sizes = tuple(payload.numel() for payload in payloads)
        if not sum(sizes):
            return None
        return Layout(sizes, self._axis.size(), wire_of(self.policy), self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return outer_dtype(entry.param.dtype for entry in self.entries.values())

    def _period(self) -> int:
        lr = self.inner.param_groups[0]["lr"]
        return period_at(self.policy, self._step, float(lr))

    def _due(self) -> int:
        """The fragment of the meeting after this step: they take turns, from the first."""
        return (self._step * self._fragments // self._period() - 1) % self._fragments if self._fragments > 1 else 0

    def _begin(self, entry: Entry) -> None:
        """The outer state of a parameter at the start: its value, and zeros."""
        entry.parameter = entry.momentum = entry.error = entry.average = None
        if not isinstance(self.policy, LocalSGD):
            entry.parameter, entry.momentum = entry.like(self._dtype), entry.like(self._dtype)
            local_tensor(entry.parameter).copy_(local_tensor(entry.param))
        if feeds_back(self.policy):
            entry.error = entry.like(self._dtype)

    def _numbers(self, fragment: int) -> dict[str, Any]:
        in_flight = self._flight is not None and self._flight.fragment == fragment
        return {
            "steps": self._step,
            "next": self._next,
            "sent": self._flight.sent if in_flight and self._flight is not None else 0,
            "tokens": self._tokens[fragment],
        }

    def _restore(self, entry: Entry, values: dict[str, Any]) -> None:
        """values: of a checkpoint; none, where it is of a run without an outer optimizer: then it begins here."""
        if not values:
            self._begin(entry)
            self._step, self._flight = 0, None
            self._next = self._period() // self._fragments
            self._tokens[entry.fragment].zero_()
            return
        for name in ("parameter", "momentum", "error", "average"):
            setattr(entry, name, values.get(name))
        self._step, self._next = int(values["steps"]), int(values["next"])
        self._tokens[entry.fragment].copy_(values["tokens"])
        if values["sent"]:
            self._flight = _Flight(entry.fragment, int(values["sent"]), None)
        elif self._flight is not None and self._flight.fragment == entry.fragment:
            self._flight = None

    # ------------------------------------------------------------------------------------------------------- refusals

    def _refuse_other_steps(self, flight: _Flight) -> None:
        """Replicas that count otherwise send what does not belong together; all of them see it."""
        assert flight.exchange is not None
        if any(step != flight.sent for step in flight.exchange.steps):
            counted = ", ".join(f"{step} on replica {index}" for index, step in enumerate(flight.exchange.steps))
            raise AgreementError(
                f"replicas meet after different numbers of steps: {counted}. Call OuterOptimizer.step() once after each "
                "step on every replica, also where the inner step was skipped."
            )

    def _refuse_not_finite(self, means: list[Tensor]) -> None:
        bad = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for mean in means:
            bad += (~mean.isfinite().all()).double()
        (count,) = self.run.mesh.agreement.meet("a meeting of replicas", bad, facts={"step": self._step})
        if not float(count):
            return
        own = all(bool(local_tensor(entry.param).isfinite().all()) for entry in self.entries.values())
        told: list[Any] = [None] * self.mesh.spec.world_size
        dist.all_gather_object(told, (self._axis.get_local_rank(), own), group=self.mesh.group)
        replicas = sorted({replica for replica, finite in told if not finite})
        where = f"Those of replica {', '.join(map(str, replicas))} are not. " if replicas else ""
        raise StepError(
            f"after step {self._step} the mean of the replicas' parameters is not finite. {where}Go on from a checkpoint before, "
            "and let a NonFiniteGuard skip such steps."
        )

    def _refuse_different_values(self, tensors: dict[str, Tensor]) -> None:
        if self.mesh.agreement.alone:
            return
        digest, finite = hashlib.sha256(), True
        for name, tensor in tensors.items():
            local = local_tensor(tensor)
            finite = finite and (not local.is_floating_point() or bool(local.isfinite().all()))
            digest.update(name.encode() + local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        told: list[Any] = [None] * self.mesh.spec.world_size
        dist.all_gather_object(told, (self.run.mesh.rank, digest.hexdigest(), finite), group=self.mesh.group)
        if not all(finite for *_, finite in told):
            raise PlanError(
                "OuterOptimizer: parameters are not finite, as before init_weights or load_pretrained. Give them values first."
            )
        first = {rank: text for rank, text, _ in reversed(told)}
        if any(text != first[rank] for rank, text, _ in told):
            raise PlanError(
                "OuterOptimizer: replicas begin with different values. Initialise them from one seed, or load one "
                "checkpoint on all."
            )


def outer_dtype(dtypes: Any) -> torch.dtype:
    """Of outer parameters and sums: the widest of the parameters, and fp32 at least."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def fragments_by_name(run: Run, fragments: int) -> dict[str, int]:
    """Parameter -> fragment, of the whole model, also of other stages."""
    full = full_model_of(run.model)
    tensors = full.tensors if full is not None else model_tensors(run.model)
    return fragment_of({name: tensor.numel() for name, tensor in tensors.items()}, run.resolved.blocks, fragments)


def _float_buffers(run: Run, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = {id(buffer) for buffer in run.model.buffers()}
    return {name: each for name, each in tensors.items() if id(each) in buffers and each.is_floating_point()}


def _refuse(run: Run, mesh: Mesh, policy: Policy) -> None:
    name = type(policy).__name__
    if run.mesh.spec.dp_replicate > 1:
        raise PlanError(
            f"{name}: the run is on a mesh with dp_replicate={run.mesh.spec.dp_replicate}, over which it sums its gradients in "
            "each step. Parallelize on replica_mesh(mesh), and give the whole mesh here."
        )
    if run.mesh.spec.world_size * mesh.spec.dp_replicate != mesh.spec.world_size or run.mesh.rank != _place(mesh):
        raise PlanError(
            f"{name}: the run is on {run.mesh.spec.world_size} ranks, and the mesh has {mesh.spec.world_size} with "
            f"dp_replicate={mesh.spec.dp_replicate}. Parallelize on replica_mesh(mesh)."
        )


def _place(mesh: Mesh) -> int:
    """This rank's rank in its replica's mesh."""
    place = 0
    for axis in ("pp", "dp_shard", "cp", "tp"):
        place = place * mesh[axis].size() + mesh[axis].get_local_rank()
    return place
