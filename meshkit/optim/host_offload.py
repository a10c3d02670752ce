"""Optimizer offload (ZeRO-Offload): AdamW with master weights and moments on the host.

Gradients are copied to the host during backward, and updated shards are copied back.

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
from meshkit.core.gradient import is_summed_later, set_gradient_reader
from meshkit.core.host_accounting import estimate_under_way, made_on_host
from meshkit.core.host_threads import using_threads
from meshkit.core.sharding import local_tensor, placed
from meshkit.errors import PlanError, StepError
from meshkit.optim._host_copies import Carrier, host_tensors
from meshkit.optim.fused import loss_of, paired_states
from meshkit.strategy import OptimizerOffload

# Elements updated at a time. The copy back of one chunk overlaps the update of the next, and reads masters from the cache.
UPDATE_ELEMENTS = 1 << 20
STAGED = 2  # copies under way of gradients that are added to those of earlier microbatches (gradient accumulation)
_OWNER = "_meshkit_offload"

Options = dict[str, Any]
Work = list[tuple[Options, list["ParamBuffers"]]]


class _AtOnce:
    """Runs a job at once, in place of the thread, in an estimate: the modes that count tensors see only their own thread."""

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        function(*args)
        future.set_result(None)
        return future


class OffloadedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with its state on the host; the same parameters, bit for bit, as its fused form on the host.

    params: parameters on their final device, sharded or not, in groups as for any optimizer. resident: the share of elements
    whose state stays on the device. stream: copy gradients to the host during backward; False: when they are first read,
    after the last backward of the step (for a pipeline, whose stages still exchange gradients of tied weights).
    threads: of the host for an update, and for that alone; None is as many as the process uses, which is one under torchrun.
    delayed: `step()` n returns at once, and a thread computes its update while forward and backward of step n+1 run, with
    the parameters of step n-1; `step()` n+1 applies it. So theta_n = AdamW(theta_{n-1}, g_n), where g_n is the gradient at
    theta_{n-2}, and g_1, g_2 those at theta_0. `finish()` applies a pending update. A checkpoint calls it, so a run that goes
    on after a save equals the run that resumes from it, but differs slightly from one that never saved.

    Masters follow parameters that other code changes in place (initial values, pretrained weights, a checkpoint): an
    element that no longer equals its rounded master is copied into it. Writes through `param.data` are not noticed.
    `step()` consumes the gradients; `zero_grad()` drops them. module.zero_grad() does not reach those on the host.
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
        threads: int | None = None,
    ) -> None:
        OptimizerOffload(resident=resident, delayed=delayed)  # refuses what does not go together
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.delayed, self.threads, self._streams = delayed, threads, stream
        self._complete = True
        self._retired = False
        self._moving = False  # copies of gradients may be under way
        self._current = 0  # the gradient buffer that backward fills; the delayed update reads the other
        self._pending: tuple[Future[None], list[ParamBuffers]] | None = None
        self._thread: _AtOnce | ThreadPoolExecutor | None = None
        if delayed:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer")
            self._thread = thread if estimate_under_way() is None else _AtOnce()
        all_params = [param for group in self.param_groups for param in group["params"]]
        for param in all_params:
            if param.is_meta:
                raise PlanError("OffloadedAdamW: a parameter is on meta. Build the optimizer after parallelize().")
        self._device = next((local_tensor(param).device for param in all_params), torch.device("cpu"))
        self._carrier = Carrier(self._device)
        self._buffers = self._allocate(all_params, choose_resident([param.numel() for param in all_params], resident))
        self._staging = [
            torch.empty(self._largest(), dtype=torch.float32, pin_memory=True) if not self._carrier.on_host else None
            for _ in range(STAGED)
        ]
        self._staged: list[
            tuple[Any, Tensor, Tensor]
        ] = []  # (event after the copy, its target, the gradient to add it to), oldest first
        for param, buffers in self._buffers.items():
            self.state[param] = self._state_of(buffers)
        self.take_over()
        for group in self.param_groups:
            if any(narrow(param) for param in group["params"]):
                group["state_kind"] = "fp32 masters"  # a checkpoint says so

    # ------------------------------------------------------------------------------------------ gradients come in

    def take_over(self) -> None:
        """Receive the gradients of its parameters from backward, in place of whoever has received them."""
        for param, buffers in self._buffers.items():
            if not buffers.resident:
                self._take_over(param)

    def gradient(self, param: Tensor) -> Tensor | None:
        """The complete gradient on the host, a DTensor if the parameter is one; None if there is none yet. The host waits."""
        if self._moving or param.grad is not None:
            self._sweep()
        buffers = self._buffers[param]
        return placed(param, buffers.gradients[self._current]) if buffers.has_gradient else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        # Copies under way would otherwise write into gradients that count as dropped.
        self._drain()
        for buffers in self._buffers.values():
            buffers.has_gradient = False
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def _receive(self, param: Tensor) -> None:
        """Copy param.grad to the host, or add it to the gradient there. Called on the stream that computed it."""
        if param.grad is None:
            return
        buffers, grad = self._buffers[param], param.grad
        if isinstance(grad, DTensor):
            assert isinstance(param, DTensor) and grad.placements == param.placements, grad.placements
        local, target = local_tensor(grad), self._buffers[param].gradients[self._current]
        # Freed on the device at once: the carrier's `record_stream` keeps the memory until the copy is done.
        param.grad, self._moving = None, True
        if not buffers.has_gradient:
            buffers.has_gradient = True
            self._carrier.copy(target, local)
        elif self._carrier.on_host:
            target.add_(local)
        else:
            self._stage(target, local)

    def _stage(self, target: Tensor, local: Tensor) -> None:
        # At most as many copies are under way as there are staging buffers; the oldest is the likeliest to be done.
        while len(self._staged) >= STAGED:
            self._add_oldest()
        busy = {address(staged) for _, staged, _ in self._staged}
        free = next(slot for slot in self._staging if slot is not None and address(slot) not in busy)
        staged = free.view(torch.uint8)[: target.numel() * target.element_size()].view(target.dtype).view(target.shape)
        self._carrier.copy(staged, local)
        self._staged.append((self._carrier.mark(), staged, target))

    def _add_oldest(self) -> None:
        mark, staged, target = self._staged.pop(0)
        mark.synchronize()  # copies run in order, so that of the first microbatch into `target` is done too
        target.add_(staged)

    def _drain(self) -> None:
        while self._staged:
            self._add_oldest()
        self._carrier.wait()
        self._moving = False

    def _sweep(self) -> None:
        """Receive gradients that no hook has received, and wait until all are on the host."""
        for param, buffers in self._buffers.items():
            if not buffers.resident and param.grad is not None:
                self._receive(param)
        self._drain()

    # ------------------------------------------------------------------------------------------------ the update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and consume the gradient.

        Raises: StepError once another optimizer has taken over the gradients.
        """
        loss = loss_of(closure)
        if self._retired:
            raise StepError("OffloadedAdamW.step(): a newer optimizer takes these parameters' gradients. Use that one.")
        # With stream=False no gradient has left yet, and a tied weight's is complete only after the last backward.
        self._sweep()
        self.finish()
        work: Work = []
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            group_buffers = self._of(group)
            self._update_resident(options, [buffers for buffers in group_buffers if buffers.resident])
            ready = [buffers for buffers in group_buffers if not buffers.resident and buffers.has_gradient]
            for buffers in ready:
                buffers.has_gradient = False
                self._adopt(buffers)
            work.extend((options, chunk) for chunk in _chunks(ready))
        if self._thread is not None:
            self._carrier.wait()  # the thread writes masters, and copies of them to the device may still be under way
            self._pending = (
                self._thread.submit(self._update_all, work, self._current),
                [buffers for _, chunk in work for buffers in chunk],
            )
            # The thread reads the buffer that backward just filled; the next backward fills the other one.
            self._current = 1 - self._current
            return loss
        for options, chunk in work:
            self._update(options, chunk, self._current)
            # Asynchronous: this chunk's copies run beside the update of the next.
            for buffers in chunk:
                self._send(buffers, self._current)
        self._carrier.before_compute()
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """Apply the update that is pending, if any. Call it before parameters are read or written from outside."""
        if self._pending is None:
            return
        (future, updated), self._pending = self._pending, None
        # Raises here what the thread raised.
        future.result()
        for buffers in updated:
            self._send(buffers, 1 - self._current)
        self._carrier.before_compute()

    @torch.no_grad()  # of this thread: grad mode is each thread's own
    def _update_all(self, work: Work, which: int) -> None:
        for options, chunk in work:
            self._update(options, chunk, which)

    def _update(self, options: Options, chunk: list[ParamBuffers], which: int) -> None:
        masters = [buffers.master for buffers in chunk if buffers.master is not None]
        with using_threads(self.threads):
            _fused_adamw(self, options, chunk, masters, [buffers.gradients[which] for buffers in chunk])
            for buffers, master in zip(chunk, masters, strict=True):
                if narrow(buffers.param):
                    self._rounded(buffers, which).copy_(master)

    def _update_resident(self, options: Options, resident: list[ParamBuffers]) -> None:
        updated = [buffers for buffers in resident if buffers.param.grad is not None]
        if not updated:
            return
        for buffers in updated:
            self._adopt(buffers)
        masters = [local_tensor(buffers.param) if buffers.master is None else buffers.master for buffers in updated]
        grads = [local_tensor(buffers.param.grad).to(buffers.dtype) for buffers in updated]  # type: ignore[arg-type]  # not None
        _fused_adamw(self, options, updated, masters, grads)
        for buffers, master in zip(updated, masters, strict=True):
            buffers.param.grad = None
            if buffers.master is not None:
                local = local_tensor(buffers.param)
                local.copy_(master)
                buffers.seen = stamp(buffers.param)

    def _send(self, buffers: ParamBuffers, which: int) -> None:
        """Start copying the new values to the device."""
        assert buffers.master is not None
        local = local_tensor(buffers.param)
        if stamp(buffers.param) != buffers.seen:
            raise StepError(
                "OffloadedAdamW: a parameter was changed while an update was pending. Call optimizer.finish() before."
            )
        self._carrier.copy(local, self._rounded(buffers, which) if narrow(buffers.param) else buffers.master)
        buffers.seen = stamp(buffers.param)

    def _rounded(self, buffers: ParamBuffers, which: int) -> Tensor:
        """Memory for the master in the parameter's dtype: that of the gradient, which is consumed and already pinned."""
        gradient = buffers.gradients[which]
        # Reinterprets bytes, a fp32 gradient as twice as many bf16 elements: views and not einops.
        return gradient.flatten().view(buffers.param.dtype)[: gradient.numel()].view(gradient.shape)

    # ------------------------------------------------------------------------------------- optimizer state

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its dtype and its device."""
        self.finish()
        for param, saved in paired_states(self, state_dict):
            self.state[param] = dict(saved)
            self._adopt(self._buffers[param])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_complete", False):
            raise PlanError("OffloadedAdamW: memory is allocated once, so give all parameters when it is built.")
        super().add_param_group(param_group)

    def _state_of(self, buffers: ParamBuffers) -> dict[str, Any]:
        """The state of torch.optim.AdamW; for a parameter narrower than its master, the master too."""
        device = buffers.moments["exp_avg"].device

        def zero() -> Tensor:
            return torch.zeros((), dtype=torch.float32, device=device)

        step = zero() if buffers.resident else made_on_host(zero)
        moments = {key: placed(buffers.param, moment) for key, moment in buffers.moments.items()}
        master = (
            {"master": placed(buffers.param, buffers.master)}
            if narrow(buffers.param) and buffers.master is not None
            else {}
        )
        return {"step": step, **moments, **master}

    def _adopt(self, buffers: ParamBuffers) -> None:
        """Copy loaded state into the allocated memory, and changed parameters into their masters."""
        state = self.state[buffers.param]
        tensors = {
            **buffers.moments,
            **({"master": buffers.master} if narrow(buffers.param) and buffers.master is not None else {}),
        }
        for key, tensor in tensors.items():
            loaded = state.get(key)
            if isinstance(loaded, Tensor) and address(local_tensor(loaded)) == address(tensor):
                continue
            if isinstance(loaded, Tensor):
                tensor.copy_(local_tensor(loaded))
            elif key != "master":  # forgotten by a load
                tensor.zero_()
            state[key] = placed(buffers.param, tensor)
        if not isinstance(state.get("step"), Tensor):
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] = state["step"].to(buffers.moments["exp_avg"].device)
        self._follow(buffers)

    def _follow(self, buffers: ParamBuffers) -> None:
        local = local_tensor(buffers.param)
        if buffers.master is None or stamp(buffers.param) == buffers.seen:
            return
        values = local.to(buffers.master.device)
        if narrow(buffers.param):
            # Elements that still are their master's rounding keep its lower bits: a write to some rows, or a load of
            # the same values, must not round all masters to bf16.
            same = buffers.master.to(values.dtype) == values
            buffers.master.copy_(torch.where(same, buffers.master, values.to(buffers.dtype)))
        else:
            buffers.master.copy_(values)
        buffers.seen = stamp(buffers.param)

    def _of(self, group: Options) -> list[ParamBuffers]:
        return [self._buffers[param] for param in group["params"]]

    def _largest(self) -> int:
        return max(
            (
                grad.numel() * grad.element_size() // 4
                for buffers in self._buffers.values()
                for grad in buffers.gradients[:1]
            ),
            default=0,
        )

    def _allocate(self, params: list[Tensor], residents: list[bool]) -> dict[Tensor, ParamBuffers]:
        """Allocate the buffers of all parameters: in slabs on the host, or on the device for resident ones."""
        gradients = 2 if self.delayed else 1
        shapes = [
            (local_tensor(param).shape, master_dtype(param))
            for param, resident in zip(params, residents, strict=True)
            if not resident
            # Master and two moments.
            for _ in range(3 + gradients)
        ]
        host = iter(host_tensors(shapes, pinned=not self._carrier.on_host))
        buffers = {}
        for param, resident in zip(params, residents, strict=True):
            tensors = host
            if resident:
                like = torch.zeros_like(local_tensor(param), dtype=master_dtype(param))
                tensors = (like.clone() for _ in range(3))
            buffers[param] = ParamBuffers(param, tensors, 0 if resident else gradients, resident=resident)
        return buffers

    def _take_over(self, param: Tensor) -> None:
        """Receive this parameter's gradients from backward; an older optimizer of it is retired."""
        older: tuple[weakref.ref[OffloadedAdamW], Any] | None = getattr(param, _OWNER, None)
        if older is not None:
            if older[1] is not None:
                older[1].remove()
            if (other := older[0]()) is not None:
                other._retired = True
        optimizer_ref = weakref.ref(self)  # weak: the parameter's hook must not keep the optimizer's host memory alive

        def hand_over(updated_param: Tensor) -> None:
            if (optimizer := optimizer_ref()) is not None:
                optimizer._receive(updated_param)

        def read() -> Tensor | None:
            optimizer = optimizer_ref()
            return param.grad if optimizer is None else optimizer.gradient(param)

        streams = self._streams and not is_summed_later(param)
        handle = param.register_post_accumulate_grad_hook(hand_over) if streams else None
        setattr(param, _OWNER, (optimizer_ref, handle))
        set_gradient_reader(param, read)


def _chunks(params: list[ParamBuffers]) -> Iterator[list[ParamBuffers]]:
    """In order, in chunks of about `UPDATE_ELEMENTS`."""
    chunk: list[ParamBuffers] = []
    for buffers in params:
        chunk.append(buffers)
        if sum(other.gradients[0].numel() for other in chunk) >= UPDATE_ELEMENTS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _fused_adamw(
    optimizer: OffloadedAdamW, options: Options, params: list[ParamBuffers], masters: list[Tensor], grads: list[Tensor]
) -> None:
    states = [optimizer.state[buffers.param] for buffers in params]
    adamw(
        masters,
        grads,
        [buffers.moments["exp_avg"] for buffers in params],
        [buffers.moments["exp_avg_sq"] for buffers in params],
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


# How much of the optimizer state stays on the device.

STATE_BYTES = 12  # per element: fp32 master and two moments; 8 for an fp32 parameter, which is its own master


def choose_resident(sizes: Sequence[int], share: float) -> list[bool]:
    """For each tensor, whether it stays on the device, so that about `share` of all elements do; the same on every rank.

    sizes: elements of the whole tensors, in the model's order. Largest first, each that still fits; then the smallest one
    left, if that comes nearer. The share is missed by at most half of the smallest tensor left.
    """
    target = share * sum(sizes)
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    resident = [False] * len(sizes)
    resident_elements = 0
    for index in order:
        if resident_elements + sizes[index] <= target:
            resident[index], resident_elements = True, resident_elements + sizes[index]
    left = [index for index in order if not resident[index]]
    if left and resident_elements + sizes[left[-1]] - target < target - resident_elements:
        resident[left[-1]] = True
    return resident


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
    # (1 - share) × parameters × pace <= hidden time.
    needed = 1 - hidden_s / (parameters * pace_s) if pace_s else 0.0
    fits = device_bytes / (parameters * state_bytes)
    return max(0.0, min(1.0, needed, fits))


# One parameter with its buffers, and whether other code has written it.


class ParamBuffers:
    """One parameter with its master, moments and gradient buffers, in the shape of this rank's shard.

    master: in fp32, or the parameter's dtype if that is wider; None where a resident parameter is its own master.
    gradients: none if resident; two with a delayed update, which reads one while backward fills the other.
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
    """Whether the parameter is narrower than its master (bf16 and fp32)."""
    return param.dtype != master_dtype(param)


def stamp(param: Tensor) -> tuple[int, int, int, int]:
    """A value that changes with every in-place write, to the shard or through its DTensor, and when the shard is moved."""
    local = local_tensor(param)
    return *address(local), local._version, param._version


def address(tensor: Tensor) -> tuple[int, int]:
    """(storage, offset) of its first element. Not data_ptr: an estimate's tensors have storages, but no addresses."""
    return _torch.storage_key(tensor), int(tensor.storage_offset())
