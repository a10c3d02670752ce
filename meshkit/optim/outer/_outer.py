"""OuterOptimizer: local updates of the replicas of a run, which meet over dp_replicate every so many steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshkit.core.arguments import require
from meshkit.core.model_state import model_tensors, refuse_displaced
from meshkit.core.optimizer_state import finish_update
from meshkit.core.sharding import local_tensor
from meshkit.errors import MeetingError, PlanError
from meshkit.mesh import Mesh
from meshkit.optim.outer._fragments import fragments_of_model
from meshkit.optim.outer._hand_on import HasState, Snapshot
from meshkit.optim.outer._meets import CameLate, Meeting, MeshAxis, Replicas, Sent
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
from meshkit.optim.outer._refusals import refuse_not_finite, refuse_other_steps
from meshkit.optim.outer._saved_policy import policy_text, refuse_other_policy
from meshkit.optim.outer._state import PREFIX, Entry, JoinedState, flat
from meshkit.optim.outer._traffic import PeriodTraffic, period_traffic
from meshkit.optim.outer._update import outer_step
from meshkit.optim.outer._whole_state import WholeState
from meshkit.optim.outer.place import MeetingPlace
from meshkit.parallel.data import after_inference
from meshkit.step import Run


@dataclass
class _Flight:
    """A fragment under way. sent: after which step. exchange: None once its means are in the entries, or where this rank has
    nothing of the fragment. tokens: by which it is weighted."""

    fragment: int
    sent: int
    exchange: Meeting | None
    tokens: Tensor | None = None


class OuterOptimizer:
    """Local updates on the axis dp_replicate: the replicas of a run step alone, and meet as a policy says.

    run: on `replica_mesh(mesh)`, with the same values on every replica. optimizer: the inner one, of the run's parameters.
    mesh: with all replicas; or a `MeetingPlace`, where each replica is a job of its own, and comes and goes: then `run` is on
    that job's mesh, and `join` comes before the first step. policy: `LocalSGD`, `DiLoCo` or `CO2`.
    follow: what else moves to where a replica's state is when this one takes it, with `state_dict` and `load_state_dict`, as
    the scheduler and the loader.
    Call `step()` once after each step of the inner optimizer, also where a guard skipped it; at the end `meet()`.
    Where a checkpoint takes an optimizer, give it this one. Outer parameters, momentum, rounding errors, the place in the
    period and what is in flight are then saved beside the inner state, and a run goes on within a period bit for bit.
    Each replica saves in a folder of its own, all after the same step. A save waits for what is in flight, which still lands
    when it would have.
    Averaged are the parameters of the optimizer, and floating-point buffers that a checkpoint has.
    Holds, in fp32 at least, for each of these parameters: nothing with LocalSGD; else the outer parameter and momentum; with
    error feedback the error; and with a delay what is in flight.
    Wire: once a digest of each rank's values over the mesh. For each fragment on dp_replicate an all-to-all of the replicas'
    changes and an all-gather of their mean (`period_traffic`); over the replica's mesh an all-reduce of a few numbers, in
    which its ranks learn whether the mean is finite.
    Raises: PlanError for a run on another mesh, for replicas that begin with different values, and for a meeting while
    `move_experts` has experts elsewhere, see `experts_at_home`; on all ranks,
    AgreementError for replicas with other policies or after other numbers of steps, StepError for a mean that is not finite,
    which names the replica. At a meeting place MeetingError where this replica cannot meet the others any more; its values
    are then those after its last step.
    """

    def __init__(
        self,
        run: Run,
        optimizer: Optimizer,
        mesh: Mesh | MeetingPlace,
        policy: Policy,
        *,
        follow: Sequence[HasState] = (),
    ) -> None:
        require("OuterOptimizer", "run", run, Run)
        require("OuterOptimizer", "mesh", mesh, Mesh, MeetingPlace)
        require("OuterOptimizer", "policy", policy, LocalSGD, DiLoCo, CO2)
        self.run, self.policy, self.inner = run, policy, optimizer
        self.mesh = mesh if isinstance(mesh, Mesh) else run.mesh
        self.replicas: Replicas = MeshAxis(mesh) if isinstance(mesh, Mesh) else mesh
        self.replicas.check(run, policy)
        self._run_mesh = run.mesh
        self._delay, self._fragments = delay_of(policy), fragments_of(policy)
        fragments = fragments_of_model(run.resolved, self._fragments)
        self._whole = WholeState.of(run, optimizer, follow)
        self.entries = {
            param: Entry(name=name, param=param, fragment=fragments[name])
            for name, param in self._whole.params.items()
            if param.requires_grad
        }
        self._buffers = {name: each for name, each in self._whole.buffers.items() if each.is_floating_point()}
        if self._buffers and self._delay:
            raise PlanError(
                f"{type(policy).__name__} with a delay: {next(iter(self._buffers))!r} is a buffer that replicas write, and "
                "its mean would come late. Use LocalSGD, or DiLoCo without a delay."
            )
        trained = {entry.name for entry in self.entries.values()}
        self.replicas.compare(run, model_tensors(run.model), trained, self._whole.facts)
        self._step = 0
        self._next = self._period() // self._fragments
        self._flight: _Flight | None = None
        self._tokens = [
            torch.zeros((), dtype=torch.float64, device=self.mesh.device) for _ in range(self._fragments)
        ]  # of this replica since the fragment was sent
        self._seen = run.tokens_seen
        self._taken_at = -1  # the step at which it took the others' state
        self._is_end = False  # and that is what `meet` had made
        self._looked = not self.replicas.hands_on  # at what the inner optimizer keeps, which its first step makes
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
    def scalars(self) -> dict[str, float]:
        """For the log, of the meeting after this step: how many replicas it had, and how long this one stood still for it.
        Empty where there was none, and on a mesh, where all meet always."""
        met = self.replicas.last
        if met is None or met.step != self._step:
            return {}
        return {"replicas": len(met.replicas), "meeting_s": met.stood_s}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> JoinedState:
        """Of both optimizers; call `finish` before."""
        return JoinedState(self.inner, self.entries, self._numbers, self._restore)

    @property
    def period(self) -> PeriodTraffic:
        """What a period sends; `print` shows it."""
        sizes = {entry.name: local_tensor(entry.param).numel() for entry in self.entries.values()}
        fragments = {entry.name: entry.fragment for entry in self.entries.values()}
        buffers = [buffer.numel() for buffer in self._buffers_of(self._fragments - 1)]
        replicas, dtype = self.replicas.most, self._dtype
        return period_traffic(self.policy, sizes, fragments, buffers=buffers, replicas=replicas, dtype=dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """The outer state that this rank holds, beside what is in flight."""
        return [tensor for entry in self.entries.values() for tensor in entry.tensors.values()]

    @torch.no_grad()
    def join(self) -> int:
        """Before the first step: return, with the steps made, once this replica counts among the others.

        At a meeting place a replica gets the newest state: outer parameters, which its own become, momentum and the inner
        optimizer's state from a replica that counts, whose `follow` its own follows; errors are zero. One whose own state is
        the newest keeps it, and the others get that. On a mesh nothing happens, since there all begin together.
        Raises: MeetingError, without a quorum for one.
        """
        self._come()
        if self._step == self._next:  # of a replica that ended before it met
            self._advance_or_join()
        return self._step

    def _come(self) -> None:
        self._shards_back()
        self._looked = self._looked or self._whole.refuse_parts()
        joined = self.replicas.join((self._next, self._step), can_go_back=not isinstance(self.policy, LocalSGD))
        if joined.snapshot is not None:
            self._take(joined.snapshot)
        elif joined.goes_back:
            self._go_back()
        self.replicas.hand_on(self._snapshot)

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of this replica, and send, receive or meet where the policy does after it."""
        if self.run.mesh is not self._run_mesh:
            raise PlanError("OuterOptimizer.step: the run has moved to another mesh. Save, and resume on the new one.")
        if self._flight is not None or self._step + 1 == self._next:
            refuse_displaced(self.run.model)  # here, where nothing is counted yet
        self._step += 1
        self._looked = self._looked or self._whole.refuse_parts()
        if self.policy.weights == "tokens":
            if self.run.valid_tokens is None:
                raise PlanError(
                    "OuterOptimizer.step: no forward_backward has counted tokens, by which replicas are weighted. Call it "
                    'before, or give the policy weights="equal".'
                )
            for tokens in self._tokens:
                tokens += self.run.tokens_seen - self._seen  # of all calls of this step
            self._seen = self.run.tokens_seen
        self._advance_or_join()

    def _advance_or_join(self) -> None:
        meets = True
        while meets:
            try:
                self._advance()
                meets = False
            except CameLate:
                self._come()
                meets = self._step == self._next
        if self._flight is None:  # else whoever has come is given all once that has landed
            self.replicas.hand_on(self._snapshot)

    def _advance(self) -> None:
        """Send, receive or meet where the policy does after this step."""
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
        """Make all replicas alike, whatever the period: outer parameters move by the plain mean of what has changed since.

        What is in flight lands first. Without momentum, so that right after a meeting nothing changes. The meetings that are
        due come when they would have. Every rank of the mesh calls it.
        """
        if self._is_end and self._taken_at == self._step:
            return  # the state that it took was made by this meeting
        try:
            self._meet()
        except CameLate:
            self.join()
        else:
            self.replicas.hand_on(partial(self._snapshot, is_end=True))

    def _meet(self) -> None:
        self._shards_back()
        # With CO2 before what is in flight lands, since this period began from the outer parameters as they are.
        late = [self._payload(entry) for entry in self._of(0)] if isinstance(self.policy, CO2) else None
        if self._flight is not None:
            self._land()
        for fragment in range(self._fragments):
            self._launch(fragment, late or [self._payload(entry) for entry in self._of(fragment)], plain=True)
            self._land(plain=True)

    def finish(self) -> None:
        """Wait for what is in flight, so that `state` has it; it lands when it would have. Also of the inner optimizer.

        Every rank of the mesh calls it after the same step; a save does.
        """
        finish_update(self.inner)
        flight = self._flight
        if flight is None or flight.exchange is None:
            return
        with torch.no_grad():
            try:
                means = flight.exchange.finish()
            except (CameLate, MeetingError):
                return  # what is saved has nothing of it, and it comes out when it would have landed
            refuse_other_steps(flight.exchange.steps, flight.sent)
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

    def _launch(self, fragment: int, payloads: list[Tensor], *, plain: bool = False) -> None:
        entries, tokens = self._of(fragment), self._tokens[fragment].clone()
        buffers = [buffer.reshape(-1) for buffer in self._buffers_of(fragment)]
        weight = tokens
        if self.policy.weights == "equal":  # but of one that has made no step since it came
            weight = torch.full_like(tokens, float(self._step != self._taken_at))
        meeting = self.replicas.begin(
            Sent(
                payloads=payloads + buffers,
                weight=weight,
                errors=[flat(entry.error) for entry in entries] if feeds_back(self.policy) else None,
                step=self._step,
                wire=wire_of(self.policy),
                dtype=self._dtype,
                key=f"step {self._step}, fragment {fragment}{', the end' * plain}",
                last=not plain or fragment == self._fragments - 1,
                whole=len(buffers),
            )
        )
        self._flight = _Flight(fragment, self._step, meeting, tokens)
        self._tokens[fragment].zero_()

    def _land(self, *, plain: bool = False) -> None:
        """The means move the outer parameters, and those the replica's. plain: by themselves, without the outer optimizer."""
        flight = self._flight
        assert flight is not None
        self._flight = None
        entries = self._of(flight.fragment)
        if flight.exchange is not None:
            try:
                means = flight.exchange.finish()
            except (CameLate, MeetingError):  # what was counted has not been sent
                assert flight.tokens is not None
                self._tokens[flight.fragment] += flight.tokens
                raise
            refuse_other_steps(flight.exchange.steps, flight.sent)
        else:
            means = [flat(entry.average) for entry in entries if entry.average is not None]
        finite = None if flight.exchange is None else flight.exchange.finite
        refuse_not_finite(self.run, self.mesh, means, finite, step=self._step)
        if not means:
            return
        if isinstance(self.policy, LocalSGD):
            for entry, mean in zip(entries, means[: len(entries)], strict=True):
                local = local_tensor(entry.param)
                local.copy_(mean.view(local.shape))
            self._written(entries)
        else:
            for entry, mean in zip(entries, means[: len(entries)], strict=True):
                if plain:
                    flat(entry.parameter).sub_(mean)
                else:
                    outer_step(self.policy, flat(entry.parameter), flat(entry.momentum), mean)
                entry.average = None
            if plain or isinstance(self.policy, DiLoCo):
                self._write(
                    flight.fragment, keep=self.policy.mixing if isinstance(self.policy, DiLoCo) and not plain else 0
                )
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
        """An optimizer offloaded to the host may still be writing, and an evaluation leaves parameters gathered.

        Replicas meet slice by slice: an expert must lie in the same one on all of them."""
        refuse_displaced(self.run.model)
        finish_update(self.inner)
        after_inference(self.run.model)

    # --------------------------------------------------------------------------------------------------- what it consists of

    def _of(self, fragment: int) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.fragment == fragment]

    def _buffers_of(self, fragment: int) -> list[Tensor]:
        return [local_tensor(buffer) for buffer in self._buffers.values()] if fragment == self._fragments - 1 else []

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

    # ------------------------------------------------------------------------------------------------- from one to another

    def _snapshot(self, *, is_end: bool = False) -> Snapshot:
        self._shards_back()
        return self._whole.read(self.state, self.entries, is_end=is_end)

    def _take(self, snapshot: Snapshot) -> None:
        self._flight = None
        self._is_end = self._whole.write(self.state, self.entries, snapshot, self.mesh.device)
        self._written(list(self.entries.values()))
        self._taken_at = self._step

    def _go_back(self) -> None:
        """To the outer parameters of the last meetings, with an inner optimizer that begins anew: no replica is finite."""
        self._flight = None
        for entry in self.entries.values():
            self.inner.state.pop(entry.param, None)
            entry.average = None
            if entry.error is not None:
                entry.error.zero_()
        for fragment in range(self._fragments):
            self._write(fragment, keep=0.0)
            self._tokens[fragment].zero_()
        if self._step == self._next:  # nothing has changed since the last one
            self._next += self._period() // self._fragments
        self._taken_at, self._is_end = self._step, False

    def _numbers(self, fragment: int) -> dict[str, Any]:
        flight = self._flight or _Flight(0, 0, None)
        return {
            "steps": self._step,
            "next": self._next,
            "sent": flight.sent,  # of all parameters: a stage may have none of the fragment in flight
            "flying": flight.fragment,
            "tokens": self._tokens[fragment].clone(),  # a load reads into it, and may begin anew before it sets it
            "policy": policy_text(self.policy),
        }

    def refuse_saved(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Raises: CheckpointError for what another policy has saved. values: of each parameter; before a load."""
        refuse_other_policy(values, self.policy, prefix=PREFIX)

    def _restore(self, entry: Entry, values: dict[str, Any]) -> None:
        """values: of a checkpoint; none, where it is of a run without an outer optimizer: then it begins here."""
        self._flight = None
        if not values:
            self._begin(entry)
            self._step = 0
            self._next = self._period() // self._fragments
            self._tokens[entry.fragment].zero_()
            return
        for name in ("parameter", "momentum", "error", "average"):
            setattr(entry, name, values.get(name))
        self._step, self._next = int(values["steps"]), int(values["next"])
        self._tokens[entry.fragment].copy_(values["tokens"])
        if values["sent"]:
            self._flight = _Flight(int(values["flying"]), int(values["sent"]), None)


def outer_dtype(dtypes: Any) -> torch.dtype:
    """Of outer parameters and sums: the widest of the parameters, and fp32 at least."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest
