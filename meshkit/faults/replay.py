"""Replay: a microbatch runs again now and then, and what its modules give and get is compared with the first run."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.core._torch import is_fake, tree_leaves, without_modes
from meshkit.core.collectives import seeing_what_is_sent
from meshkit.core.gradient import has_gradient_reader
from meshkit.core.sharding import local_tensor
from meshkit.core.word_sum import word_sum
from meshkit.errors import MeshkitError
from meshkit.mesh.ranges import ranges_in_words
from meshkit.parallel.pipeline import Schedule
from meshkit.step import Run

# [Note: where a wrong number is seen first]
# Each rank compares the sums of its own two runs. One wrong number spoils all that follows, on other ranks too, so the place
# that is named is the first along the microbatch: forwards by stage, then backwards. What a rank gives to a collective is a
# place of its own: the sum that comes out is wrong on all ranks, what went in on one. Gradients of parameters come last, for
# nothing follows from them.
# A schedule may order a single microbatch in another way than many, and split its backward or not: so events are compared by
# their place, and gradients of parameters by name.

GRADIENTS = 1 << 30  # the place of parameters' gradients


@dataclass
class _Recording:
    """events: by place, (module, what was seen of it). digests: of each, int64 []. rng, buffers: at the begin of a place."""

    events: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    digests: dict[int, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    rng: dict[int, list[Tensor]] = field(default_factory=dict)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class _Difference:
    """Ordered along the microbatch."""

    place: int
    index: int
    module: str
    what: str


class Replay:
    """every_steps: of which the last runs one of its microbatches again, 0 for never. seed: draws which, alike on all ranks.

    Gradients, buffers and random numbers are afterwards what they were. On pp the schedule runs with that microbatch alone.
    Wire: what one microbatch sends.
    Raises: MeshkitError for a run whose second run would not be the first, or could not be seen.
    """

    def __init__(self, run: Run, *, every_steps: int, seed: int = 0) -> None:
        self._run, self._every, self._seed = run, every_steps, seed
        self._steps = 0
        self._chosen: int | None = None
        self._first = self._second = _Recording()
        self._open: tuple[_Recording, int] | None = None  # where events go now, and their place
        self._module = ""  # that was entered last
        self._hooks = ExitStack()
        self._hooked: dict[int, Tensor] = {}
        self.has_run = False  # since the last look
        if every_steps:
            _refuse(run)

    def begin(self, microbatches: int) -> int | None:
        """Which microbatch of the step that begins runs again."""
        self._stop()
        self._steps += 1
        self._chosen = None
        if self._every and self._steps % self._every == 0:
            if self._run.pipeline is not None:
                _refuse_skips(self._run.pipeline.schedule(microbatches))
            # Each rank draws alike: ranks make the same calls, with the same number of microbatches.
            self._chosen = random.Random(f"{self._seed} {self._steps}").randrange(microbatches)
            self._first = _Recording()
            self._watch()
        return self._chosen

    def end(self) -> None:
        """The first run has ended."""
        self._stop()

    @contextmanager
    def around(self, microbatch: int, place: int, *, second: bool) -> Iterator[None]:
        if not second and microbatch != self._chosen:
            yield
            return
        recording = self._second if second else self._first
        if second and place in self._first.rng:
            _set_rng(self._first.rng[place], self._run.mesh.device)
            _set_buffers(self._run.model, self._first.buffers[place])
        elif not second:
            recording.rng[place] = _rng(self._run.mesh.device)
            recording.buffers[place] = _buffers(self._run.model)
        self._open = recording, place
        try:
            yield
        finally:
            self._open = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run."""
        self._watch()
        model, device = self._run.model, self._run.mesh.device
        grads = [(param, param.grad) for param in self._run.parameters()]
        rng, buffers = _rng(device), _buffers(model)
        for param, _ in grads:
            param.grad = None
        self._second = _Recording()
        try:
            yield
            self.has_run = True
        finally:
            for param, grad in grads:
                param.grad = grad
            _set_rng(rng, device)
            _set_buffers(model, buffers)
            self._stop()

    def count(self) -> Tensor:
        """How much differs on this rank, int64 []."""
        none = torch.zeros((), dtype=torch.int64, device=self._run.mesh.device)
        if not self.has_run:
            return none
        if self._order() is not None:
            return none + 1
        pairs = self._pairs()
        if not pairs:
            return none
        mine = torch.stack([each.to(none.device) for _, each, _ in pairs])
        again = torch.stack([each.to(none.device) for _, _, each in pairs])
        return (mine != again).sum()

    def found(self) -> tuple[list[int], str] | None:
        """(ranks, what is wrong), the same on every rank; None where the runs are alike on all. A collective."""
        if not self.has_run:
            return None
        mine = self._difference()
        told: list[tuple[str, _Difference | None]] = [(socket.gethostname(), mine)]
        mesh = self._run.mesh
        if mesh.spec.world_size > 1:
            told = told * mesh.spec.world_size
            dist.all_gather_object(told, (socket.gethostname(), mine), group=mesh.group)
        first = min((each for _, each in told if each is not None), default=None)
        if first is None:
            return None
        same = [(rank, host) for rank, (host, each) in zip(mesh.ranks, told, strict=True) if each == first]
        ranks, on = [rank for rank, _ in same], ", ".join(dict.fromkeys(host for _, host in same))
        return ranks, f"{first.what} {first.module} on {ranges_in_words(ranks)} when a microbatch ran again (on {on})."

    def forget(self) -> None:
        """The two runs were looked at."""
        self.has_run = False
        self._first = self._second = _Recording()

    def close(self) -> None:
        self._stop()
        self.forget()
        self._every = 0

    # ------------------------------------------------------------------------------------------------ what is compared

    def _order(self) -> _Difference | None:
        """The first place at which the second run came to something else."""
        for place in sorted({*self._first.events, *self._second.events}):
            mine, again = self._first.events.get(place, []), self._second.events.get(place, [])
            for index, event in enumerate(mine):
                if again[index : index + 1] != [event]:
                    return _Difference(place, index, event[0], "the model came to something else than")
        return None

    def _pairs(self) -> list[tuple[_Difference, Tensor, Tensor]]:
        """(what differs if they do, of the first run, of the second), along the microbatch."""
        first, second = self._first, self._second
        pairs = [
            (_Difference(place, index, module, f"another number {what}"), mine, again)
            for place in sorted(first.events)
            for index, ((module, what), mine, again) in enumerate(
                zip(first.events[place], first.digests[place], second.digests.get(place, []), strict=False)
            )
        ]
        for index, name in enumerate(first.gradients):
            what = _Difference(GRADIENTS, index, name, "another number was the gradient of")
            both = zip(first.gradients[name], second.gradients.get(name, []), strict=False)
            pairs += [(what, mine, again) for mine, again in both]
        return pairs

    def _difference(self) -> _Difference | None:
        found = (what for what, mine, again in self._pairs() if not torch.equal(mine, again))
        return min((each for each in (self._order(), next(found, None)) if each is not None), default=None)

    # ------------------------------------------------------------------------------------------------------ the hooks

    def _watch(self) -> None:
        for name, module in self._run.model.named_modules():
            name = name or "the model"
            before = module.register_forward_pre_hook(partial(self._enter, name))
            after = module.register_forward_hook(partial(self._leave, name))
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        self._hooks.enter_context(seeing_what_is_sent(self._sent))

    def _stop(self) -> None:
        self._hooks.close()
        self._hooked.clear()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._module = name
        # Also those that a loss reads without a call of their module, as a head's; FSDP has gathered a unit's by now.
        for parameter, param in module.named_parameters(recurse=module is self._run.model):
            if param.requires_grad and id(param) not in self._hooked:
                self._hooked[id(param)] = param
                full = parameter if module is self._run.model else f"{name}.{parameter}"
                self._hooks.callback(param.register_hook(partial(self._gradient, full)).remove)

    def _leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if self._open is None:
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not is_fake(leaf):
                self._see(name, "was given by", leaf)
                if leaf.requires_grad:
                    leaf.register_hook(partial(self._got, name))

    def _got(self, name: str, grad: Tensor) -> None:
        self._module = name
        self._see(name, "came back to", grad)

    def _sent(self, tensor: Tensor) -> None:
        self._see(self._module, "was sent by", tensor)

    def _gradient(self, name: str, grad: Tensor) -> None:
        if self._open is not None:
            self._open[0].gradients.setdefault(name, []).append(_digest(grad))

    def _see(self, name: str, what: str, tensor: Tensor) -> None:
        if self._open is not None and tensor.numel():
            recording, place = self._open
            recording.events.setdefault(place, []).append((name, what))
            recording.digests.setdefault(place, []).append(_digest(tensor))


def _refuse(run: Run) -> None:
    asked = "CorruptionGuard(replay_every=...)"
    if run.strategy.compile:
        raise MeshkitError(
            f"{asked}: compiled blocks run no hooks, so nobody sees what modules give. Leave compile away, or the replay."
        )
    if any(has_gradient_reader(param) for param in run.parameters()):
        raise MeshkitError(
            f"{asked}: an optimizer on the host takes gradients during backward, and would take those of the second run. "
            "Keep the optimizer on the device, or leave the replay away."
        )
    if run.mesh.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        raise MeshkitError(
            f"{asked}: kernels on {run.mesh.device.type} may add in another order when they run again, and nothing would "
            "tell that from a wrong number. Call torch.use_deterministic_algorithms(True) before, or leave the replay away."
        )


def _refuse_skips(table: Schedule) -> None:
    if table.skips:
        raise MeshkitError(
            f"CorruptionGuard(replay_every=...): a microbatch of the schedule {table.name!r} skips stages, and passes others "
            "when it runs again alone. Use a schedule that passes all stages, or leave the replay away."
        )


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    # Outside of modes: selective recompute counts the operators of a block.
    with without_modes():
        return word_sum(local_tensor(tensor))


def _rng(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device.type).get_rng_state(device)]


def _set_rng(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device.type).set_rng_state(state, device)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies."""
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if not is_fake(buffer) and buffer.device.type != "meta"
    }


@torch.no_grad()
def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name not in values:
            continue
        if buffer.shape != values[name].shape:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, values[name].clone())
        elif not torch.equal(buffer, values[name]):  # a write where there is none to undo would disturb a backward
            buffer.copy_(values[name])
