"""AdamW whose masters and moments live on the host: gradients go there during backward, updated shards come back.

| a parameter that is      | has on the device        | and on the host                                        |
|--------------------------|--------------------------|--------------------------------------------------------|
| offloaded                | its shard                | fp32 master, exp_avg, exp_avg_sq, gradient: 16 bytes   |
| resident                 | its shard, state, gradient | nothing                                              |

Source: Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshkit.core import _torch
from meshkit.core.gradient import set_gradient_reader
from meshkit.core.host_accounting import estimate_under_way, made_on_host
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError, StepError
from meshkit.optim._host_copies import Carrier, host_tensors
from meshkit.optim.fused import loss_of, paired_states, placed
from meshkit.strategy import OptimizerOffload

# Updated at a time: the copy back of one part runs beside the update of the next, and finds its masters in the cache.
UPDATE_ELEMENTS = 1 << 20
STAGED = 2  # gradients of further microbatches on their way at a time
_OWNER = "_meshkit_offload"

Options = dict[str, Any]
Work = list[tuple[Options, list["Held"]]]


class _AtOnce:
    """In place of a thread where tensors have no values, and counting them knows one thread."""

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        function(*args)
        future.set_result(None)
        return future


class OffloadedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with its state on the host; the same parameters, bit for bit, as its fused form on the host.

    params: parameters on their final device, sharded or not, in groups as any optimizer takes them. resident: the share of
    elements whose state stays on the device. stream: gradients leave during backward; False: when they are first asked
    for, after the last backward of the step (a pipeline's, whose stages still exchange theirs).
    delayed: `step()` n returns at once, and a thread computes its update while forward and backward of step n+1 run, with
    the parameters of step n-1; `step()` n+1 applies it. So theta_n = AdamW(theta_{n-1}, g_n), where g_n is the gradient at
    theta_{n-2}, and g_1, g_2 those at theta_0. `finish()` applies what is pending: a checkpoint does, and a run that goes on
    after a save is the run that resumes from it, but not quite one that never saved.

    Masters follow parameters that something else changes in place (first values, pretrained weights, a checkpoint): an
    element is taken over if it is no longer its master rounded. Writes through `param.data` are not seen.
    `step()` uses the gradients up; `zero_grad()` drops them. module.zero_grad() does not know of them.
    All memory is allocated here, before the first collective of training: pinning later can deadlock with NCCL.
    Memory: see the table above; a bf16 parameter's gradient travels and is summed in fp32.
    Wire: nothing. Each step, 4 bytes an element to the host and the parameter's own back.
    Raises: PlanError for parameters on meta, and for resident with delayed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        resident: float = 0.0,
        delayed: bool = False,
        stream: bool = True,
    ) -> None:
        OptimizerOffload(resident=resident, delayed=delayed)  # refuses what does not go together
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.delayed = delayed
        self._complete = True
        self._retired = False
        self._moving = False  # some gradient may not have arrived
        self._current = 0  # which gradient buffer backward fills
        self._pending: tuple[Future[None], list[Held]] | None = None
        self._thread: _AtOnce | ThreadPoolExecutor | None = None
        if delayed:
            beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer")
            self._thread = beside if estimate_under_way() is None else _AtOnce()
        held = [param for group in self.param_groups for param in group["params"]]
        for param in held:
            if param.is_meta:
                raise PlanError("OffloadedAdamW: a parameter is on meta. Build the optimizer after parallelize().")
        self._device = next((local_tensor(param).device for param in held), torch.device("cpu"))
        self._carrier = Carrier(self._device)
        self._held = self._allocate(held, choose_resident([param.numel() for param in held], resident))
        self._staging = [
            torch.empty(self._largest(), dtype=torch.float32, pin_memory=True) if not self._carrier.on_host else None
            for _ in range(STAGED)
        ]
        self._staged: list[
            tuple[Any, Tensor, Tensor]
        ] = []  # (mark, staged, gradient it is to be added to), oldest first
        for param, each in self._held.items():
            self.state[param] = self._state_of(each)
            if not each.resident:
                self._take_over(param, stream)
        for group in self.param_groups:
            if any(narrow(param) for param in group["params"]):
                group["state_kind"] = "fp32 masters"  # a checkpoint says so

    # ------------------------------------------------------------------------------------------ gradients come in

    def gradient(self, param: Tensor) -> Tensor | None:
        """The gradient, complete, on the host: a DTensor where the parameter is one; None if there is none yet."""
        if self._moving or param.grad is not None:
            self._sweep()
        held = self._held[param]
        return placed(param, held.gradients[self._current]) if held.has_gradient else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._drain()
        for held in self._held.values():
            held.has_gradient = False
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def _receive(self, param: Tensor) -> None:
        """Move param.grad to the host, or add it to what is there. On the stream that made it."""
        if param.grad is None:
            return
        held, grad = self._held[param], param.grad
        if isinstance(grad, DTensor):
            assert isinstance(param, DTensor) and grad.placements == param.placements, grad.placements
        local, target = local_tensor(grad), self._held[param].gradients[self._current]
        param.grad, self._moving = None, True
        if not held.has_gradient:
            held.has_gradient = True
            self._carrier.copy(target, local)
        elif self._carrier.on_host:
            target.add_(local)
        else:
            self._stage(target, local)

    def _stage(self, target: Tensor, local: Tensor) -> None:
        while len(self._staged) >= STAGED:
            self._add_oldest()
        busy = {address(staged) for _, staged, _ in self._staged}
        free = next(slot for slot in self._staging if slot is not None and address(slot) not in busy)
        staged = free.view(torch.uint8)[: target.numel() * target.element_size()].view(target.dtype).view(target.shape)
        self._carrier.copy(staged, local)
        self._staged.append((self._carrier.mark(), staged, target))

    def _add_oldest(self) -> None:
        mark, staged, target = self._staged.pop(0)
        mark.synchronize()  # copies run in order: the first microbatch's is done too
        target.add_(staged)

    def _drain(self) -> None:
        while self._staged:
            self._add_oldest()
        self._carrier.wait()
        self._moving = False

    def _sweep(self) -> None:
        """Take what no hook has taken, and wait until all of it is here."""
        for param, held in self._held.items():
            if not held.resident and param.grad is not None:
                self._receive(param)
        self._drain()

    # ------------------------------------------------------------------------------------------------ the update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and use the gradient up.

        Raises: StepError once another optimizer has taken over the gradients.
        """
        loss = loss_of(closure)
        if self._retired:
            raise StepError("OffloadedAdamW.step(): a newer optimizer takes these parameters' gradients. Use that one.")
        self._sweep()
        self.finish()
        work: Work = []
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            self._update_resident(options, [held for held in self._of(group) if held.resident])
            ready = [held for held in self._of(group) if not held.resident and held.has_gradient]
            for held in ready:
                held.has_gradient = False
                self._adopt(held)
            work.extend((options, part) for part in _parts(ready))
        if self._thread is not None:
            self._carrier.wait()  # the thread writes masters, which may still be on their way to the device
            self._pending = (
                self._thread.submit(self._update_all, work, self._current),
                [held for _, part in work for held in part],
            )
            self._current = 1 - self._current
            return loss
        for options, part in work:
            self._update(options, part, self._current)
            for held in part:
                self._send(held, self._current)
        self._carrier.before_compute()
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """Apply the update that is pending, if any. Call it before parameters are read or written from outside."""
        if self._pending is None:
            return
        (future, held), self._pending = self._pending, None
        future.result()
        for each in held:
            self._send(each, 1 - self._current)
        self._carrier.before_compute()

    @torch.no_grad()  # of this thread: grad mode is each thread's own
    def _update_all(self, work: Work, which: int) -> None:
        for options, part in work:
            self._update(options, part, which)

    def _update(self, options: Options, part: list[Held], which: int) -> None:
        masters = [held.master for held in part if held.master is not None]
        _fused_adamw(self, options, part, masters, [held.gradients[which] for held in part])
        for held, master in zip(part, masters, strict=True):
            if narrow(held.param):
                self._rounded(held, which).copy_(master)

    def _update_resident(self, options: Options, resident: list[Held]) -> None:
        part = [held for held in resident if held.param.grad is not None]
        if not part:
            return
        for held in part:
            self._adopt(held)
        masters = [local_tensor(held.param) if held.master is None else held.master for held in part]
        grads = [local_tensor(held.param.grad).to(held.dtype) for held in part]  # type: ignore[arg-type]  # not None
        _fused_adamw(self, options, part, masters, grads)
        for held, master in zip(part, masters, strict=True):
            held.param.grad = None
            if held.master is not None:
                local = local_tensor(held.param)
                local.copy_(master)
                held.seen = stamp(held.param)

    def _send(self, held: Held, which: int) -> None:
        """The new values to the device."""
        assert held.master is not None
        local = local_tensor(held.param)
        if stamp(held.param) != held.seen:
            raise StepError(
                "OffloadedAdamW: a parameter was changed while an update was pending. Call optimizer.finish() before."
            )
        self._carrier.copy(local, self._rounded(held, which) if narrow(held.param) else held.master)
        held.seen = stamp(held.param)

    def _rounded(self, held: Held, which: int) -> Tensor:
        """Room for the master in the parameter's dtype: in the gradient, which is used up and already pinned."""
        return (
            held.gradients[which]
            .flatten()
            .view(held.param.dtype)[: held.gradients[which].numel()]
            .view(held.gradients[which].shape)
        )

    # -------------------------------------------------------------------------------------- what is kept, and where

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its dtype and place."""
        self.finish()
        for param, saved in paired_states(self, state_dict):
            self.state[param] = dict(saved)
            self._adopt(self._held[param])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_complete", False):
            raise PlanError("OffloadedAdamW: memory is allocated once, so give all parameters when it is built.")
        super().add_param_group(param_group)

    def _state_of(self, held: Held) -> dict[str, Any]:
        """As torch.optim.AdamW has it, and for a parameter narrower than its master the master."""
        device = held.moments["exp_avg"].device

        def zero() -> Tensor:
            return torch.zeros((), dtype=torch.float32, device=device)

        step = zero() if held.resident else made_on_host(zero)
        kept = {key: placed(held.param, moment) for key, moment in held.moments.items()}
        master = {"master": placed(held.param, held.master)} if narrow(held.param) and held.master is not None else {}
        return {"step": step, **kept, **master}

    def _adopt(self, held: Held) -> None:
        """Make state that was loaded ours, and masters follow parameters that were changed."""
        state = self.state[held.param]
        own = {**held.moments, **({"master": held.master} if narrow(held.param) and held.master is not None else {})}
        for key, tensor in own.items():
            found = state.get(key)
            if isinstance(found, Tensor) and address(local_tensor(found)) == address(tensor):
                continue
            if isinstance(found, Tensor):
                tensor.copy_(local_tensor(found))
            elif key != "master":  # forgotten by a load
                tensor.zero_()
            state[key] = placed(held.param, tensor)
        if not isinstance(state.get("step"), Tensor):
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] = state["step"].to(held.moments["exp_avg"].device)
        self._follow(held)

    def _follow(self, held: Held) -> None:
        local = local_tensor(held.param)
        if held.master is None or stamp(held.param) == held.seen:
            return
        values = local.to(held.master.device)
        if narrow(held.param):
            same = held.master.to(values.dtype) == values
            held.master.copy_(torch.where(same, held.master, values.to(held.dtype)))
        else:
            held.master.copy_(values)
        held.seen = stamp(held.param)

    def _of(self, group: Options) -> list[Held]:
        return [self._held[param] for param in group["params"]]

    def _largest(self) -> int:
        return max(
            (grad.numel() * grad.element_size() // 4 for held in self._held.values() for grad in held.gradients[:1]),
            default=0,
        )

    def _allocate(self, params: list[Tensor], stays: list[bool]) -> dict[Tensor, Held]:
        """Slabs on the host for what leaves, tensors on the device for what stays."""
        gradients = 2 if self.delayed else 1
        shapes = [
            (local_tensor(param).shape, master_dtype(param))
            for param, resident in zip(params, stays, strict=True)
            if not resident
            for _ in range(3 + gradients)
        ]
        host = iter(host_tensors(shapes, pinned=not self._carrier.on_host))
        held = {}
        for param, resident in zip(params, stays, strict=True):
            tensors = host
            if resident:
                like = torch.zeros_like(local_tensor(param), dtype=master_dtype(param))
                tensors = (like.clone() for _ in range(3))
            held[param] = Held(param, tensors, 0 if resident else gradients, resident=resident)
        return held

    def _take_over(self, param: Tensor, stream: bool) -> None:
        """Let backward hand this parameter's gradient over; an older optimizer gets none any more."""
        older: tuple[weakref.ref[OffloadedAdamW], Any] | None = getattr(param, _OWNER, None)
        if older is not None:
            if older[1] is not None:
                older[1].remove()
            if (other := older[0]()) is not None:
                other._retired = True
        own = weakref.ref(self)  # the hook must not keep the host's memory when the optimizer is gone

        def hand_over(given: Tensor) -> None:
            if (optimizer := own()) is not None:
                optimizer._receive(given)

        def read() -> Tensor | None:
            optimizer = own()
            return param.grad if optimizer is None else optimizer.gradient(param)

        handle = param.register_post_accumulate_grad_hook(hand_over) if stream else None
        setattr(param, _OWNER, (own, handle))
        set_gradient_reader(param, read)


def _parts(held: list[Held]) -> Iterator[list[Held]]:
    """In order, in parts of about `UPDATE_ELEMENTS`."""
    part: list[Held] = []
    for each in held:
        part.append(each)
        if sum(other.gradients[0].numel() for other in part) >= UPDATE_ELEMENTS:
            yield part
            part = []
    if part:
        yield part


def _fused_adamw(
    optimizer: OffloadedAdamW, options: Options, part: list[Held], masters: list[Tensor], grads: list[Tensor]
) -> None:
    states = [optimizer.state[held.param] for held in part]
    adamw(
        masters,
        grads,
        [held.moments["exp_avg"] for held in part],
        [held.moments["exp_avg_sq"] for held in part],
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
    )


# Which share of the optimizer's state stays on the device.

STATE_BYTES = 12  # of a parameter: fp32 master and two moments; an fp32 parameter is its own master, and that makes 8


def choose_resident(sizes: Sequence[int], share: float) -> list[bool]:
    """Which tensors stay on the device, so that they hold about `share` of all elements; the same on every rank.

    sizes: elements of the whole tensors, in the model's order. Largest first, each that still fits; then the smallest one
    left, if that comes nearer. The share is missed by at most half of the smallest tensor left.
    """
    target = share * sum(sizes)
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    stays = [False] * len(sizes)
    held = 0
    for index in order:
        if held + sizes[index] <= target:
            stays[index], held = True, held + sizes[index]
    left = [index for index in order if not stays[index]]
    if left and held + sizes[left[-1]] - target < target - held:
        stays[left[-1]] = True
    return stays


def resident_share(
    *,
    parameters: int,
    device_bytes: float,
    host_s_per_parameter: float,
    link_bytes_per_s: float,
    hidden_s: float = 0.0,
    state_bytes: int = STATE_BYTES,
    sent_bytes: int = 8,
) -> float:
    """The smallest share of the states to keep on the device so that the host's update costs no time, or what fits.

    parameters: of this rank's shards. device_bytes: free beside everything else. host_s_per_parameter: of the host's AdamW,
    as `benchmarks/optimizer.py` prints it. sent_bytes: gradient down and parameter up.
    hidden_s: what runs beside the update: with delayed=True a step's forward and backward, else 0.
    The slower of host and link sets the pace, since an update and its copy overlap.
    Source: the reading of ZeRO-Offload (Ren et al. 2021, section 4) as T >= parameters × pace, solved for the share.
    """
    if parameters < 1 or device_bytes < 0 or state_bytes < 1:
        raise PlanError(
            f"resident_share(parameters={parameters}, device_bytes={device_bytes}, state_bytes={state_bytes}): give at least "
            "one parameter, one byte of state for it, and no negative room."
        )
    pace_s = max(host_s_per_parameter, sent_bytes / link_bytes_per_s)
    needed = 1 - hidden_s / (parameters * pace_s) if pace_s else 0.0
    fits = device_bytes / (parameters * state_bytes)
    return max(0.0, min(1.0, needed, fits))


# One parameter of an optimizer on the host: what is kept for it, and whether somebody else has written it.


class Held:
    """One parameter and what is kept for it. Tensors have the shape of this rank's shard.

    master: in fp32, or the parameter's dtype if that is wider; None where a resident parameter is its own master.
    gradients: empty where it is resident; two with a delayed update, which reads one while backward fills the other.
    """

    def __init__(self, param: Tensor, tensors: Iterator[Tensor], gradients: int, *, resident: bool) -> None:
        local = local_tensor(param)
        self.param, self.resident = param, resident
        self.dtype = master_dtype(param)
        self.moments = {"exp_avg": next(tensors), "exp_avg_sq": next(tensors)}
        self.master = None if resident and self.dtype == param.dtype else next(tensors)
        self.gradients = [next(tensors) for _ in range(gradients)]
        self.has_gradient = False
        self.seen = (-1, -1, -1, -1)
        if self.master is not None:
            self.master.copy_(local)
            self.seen = stamp(param)


def master_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def narrow(param: Tensor) -> bool:
    """Whether the master has bits that the parameter has not."""
    return param.dtype != master_dtype(param)


def stamp(param: Tensor) -> tuple[int, int, int, int]:
    """Changes with every write in place, to the shard or through its DTensor, and when the shard moves."""
    local = local_tensor(param)
    return *address(local), local._version, param._version


def address(tensor: Tensor) -> tuple[int, int]:
    """Where its first element lies; an estimate's tensors have a storage, but no address in memory."""
    return _torch.storage_key(tensor), int(tensor.storage_offset())
