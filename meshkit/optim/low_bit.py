"""Low-bit AdamW: moments in 8 or 4 bits or fp8, and bf16 parameters without master weights by stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.rng import indexed_parts, random_bits, stream_of
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import PlanError
from meshkit.optim._low_bit_state import SMALLEST_BLOCK, LowBitState, block_of
from meshkit.optim.fused import loss_of, paired_states
from meshkit.strategy import OptimizerPolicy, States

SMALLEST = 4096  # elements of a whole matrix whose moments are worth few bits (as bitsandbytes has it)
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether it has a sign


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW in fp32 arithmetic, moments stored as `states` (see `_low_bit_state`); in fp32 for norms, biases, small matrices.

    params: as any optimizer takes them; give (name, parameter) pairs, for the draws of stochastic rounding.
    stochastic_rounding: bf16 parameters are rounded at random, by bits that depend on seed, name, step and the element's
    index alone. So replicas draw the same, every mesh trains the same model, and a resumed run needs no random state.
    An update goes over a parameter in chunks of rows, so no fp32 copy of a full shard ever exists.
    Memory for each element: 2 moments of the table's bytes beside the parameter and its gradient.
    Wire: nothing.
    Raises: PlanError for parameters on meta, for stochastic rounding without bf16 parameters, and for rows that are cut
    where no block of at least 16 elements ends.
    Source: Dettmers et al. 2022; Li et al. 2023 (4 bits); stochastic rounding as in torchao.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        states: States = "8bit",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.states, self.stochastic_rounding, self.seed = states, stochastic_rounding, seed
        self._names: dict[Tensor, str] = {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            self._names |= dict(zip(group["params"], names, strict=True))
            group["state_kind"] = states if states != "fp32" else "fp32 moments"
        dtypes = {name: param.dtype for param, name in self._names.items()}
        OptimizerPolicy(stochastic_rounding=stochastic_rounding).refuse_misfit(dtypes)
        self._codecs = {param: self._codecs_of(param) for param in self._names}
        for param in self._names:
            self.state[param] = self._zeros(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its dtype."""
        for param, saved in paired_states(self, state_dict):
            self.state[param] = {
                key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in saved.items()
            }

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        if not self.state[param]:  # forgotten by a load
            self.state[param] = self._zeros(param)
        state = self.state[param]
        state["step"] += 1
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        # The step is counted from 1 for the corrections of bias, and the stream is another at each step: with the
        # same bits an element would always be rounded the same way.
        values, grads = local_tensor(param), local_tensor(param.grad)  # type: ignore[arg-type]  # it has one
        stream = stream_of(self.seed, self._names[param], int(step))
        rounds = self.stochastic_rounding and param.dtype == torch.bfloat16
        # Chunks of rows bound the fp32 copies. index: of each element in the full tensor, so draws do not depend on sharding.
        for rows, index in indexed_parts(param):
            chunk: Any = rows if param.ndim else ...
            grad = grads[chunk].float()
            mean = self._read(param, "exp_avg", chunk, grad.shape).lerp_(grad, 1 - beta1)
            square = self._read(param, "exp_avg_sq", chunk, grad.shape).lerp_(grad * grad, 1 - beta2)
            # Decoupled decay (Loshchilov and Hutter 2019), before the update as in torch.
            new = values[chunk].float() * (1 - lr * group["weight_decay"])
            width = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
            new.addcdiv_(mean, width, value=-lr / (1 - beta1**step))
            values[chunk] = round_stochastically(new, random_bits(index, stream, 16)) if rounds else new.to(param.dtype)
            self._write(param, "exp_avg", chunk, mean)
            self._write(param, "exp_avg_sq", chunk, square)

    def _read(self, param: Tensor, key: str, chunk: Any, shape: torch.Size) -> Tensor:
        """Some rows of a moment as a new fp32 tensor."""
        state, codec = self.state[param], self._codecs[param].get(key)
        if codec is None:
            # A copy: the caller updates it in place and `_write` puts it back.
            return local_tensor(state[key])[chunk].clone()
        codes, scale = (local_tensor(state[f"{key}_{what}"])[chunk] for what in ("codes", "scale"))
        return codec.decode(codes, scale, shape[-1])

    def _write(self, param: Tensor, key: str, chunk: Any, values: Tensor) -> None:
        state, codec = self.state[param], self._codecs[param].get(key)
        if codec is None:
            local_tensor(state[key])[chunk] = values
            return
        for what, value in zip(("codes", "scale"), codec.encode(values), strict=True):
            local_tensor(state[f"{key}_{what}"])[chunk] = value

    def _codecs_of(self, param: Tensor) -> dict[str, LowBitState]:
        if param.is_meta:
            raise PlanError("LowBitAdamW: a parameter is on meta. Build the optimizer after parallelize().")
        if self.states == "fp32" or param.ndim < 2 or param.numel() < SMALLEST:
            return {}
        block = block_of(self.states, columns=param.shape[-1], row_parts=_row_parts(param))
        if block is None:
            raise PlanError(
                f"states={self.states!r}: the rows of {self._names[param]!r}, {param.shape[-1]} elements, are cut in "
                f"{_row_parts(param)} parts, and no block of at least {SMALLEST_BLOCK} elements ends at the cuts. Use a tp "
                "whose parts are a multiple of 16, or states='fp32'."
            )
        return {key: LowBitState(states=self.states, signed=signed, block=block) for key, signed in MOMENTS.items()}

    def _zeros(self, param: Tensor) -> dict[str, Any]:
        # torch.tensor has its value in an estimate too, which the update reads.
        state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32)}
        local, codecs = local_tensor(param), self._codecs[param]
        for key in MOMENTS:
            if key not in codecs:
                state[key] = _placed(param, torch.zeros_like(local, dtype=torch.float32), param.shape[-1:])
                continue
            codec = codecs[key]
            for what, columns, dtype in (
                ("codes", codec.code_columns, torch.uint8),
                ("scale", codec.scale_columns, torch.float32),
            ):
                stored = local.new_zeros((*local.shape[:-1], columns(local.shape[-1])), dtype=dtype)
                state[f"{key}_{what}"] = _placed(param, stored, (columns(param.shape[-1]),))
        return state


def _row_parts(param: Tensor) -> int:
    """The number of shards of the last dim."""
    parts = 1
    if isinstance(param, DTensor):
        for axis, placement in enumerate(param.placements):
            if placement.is_shard(param.ndim - 1):
                parts *= param.device_mesh.size(axis)
    return parts


def _placed(param: Tensor, local: Tensor, last: tuple[int, ...]) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    placed = _torch.dtensor_like(param, local, (*param.shape[:-1], *last))
    shape = tuple(rows.stop - rows.start for rows in local_slices(placed))
    if shape != tuple(local.shape):
        raise PlanError(
            f"few-bit states: a part of shape {tuple(local_tensor(param).shape)} of a parameter {tuple(param.shape)} needs "
            f"codes of shape {tuple(local.shape)}, but the mesh would lay out {shape}. Use a tp that divides the rows evenly."
        )
    return placed


# Stochastic rounding: bf16 parameters are rounded up or down at random, so that small updates survive on average.

_UPPER_HALF = -0x10000


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """values: fp32; random: integers in [0, 2^16), same shape. Returns bf16 whose mean over `random` is the value.

    Away from zero with probability (lower 16 bits) / 2^16: adding the random bits carries into the upper half that often.
    """
    # bf16 is the upper half of fp32, sign and exponent included, so rounding is integer arithmetic on the bits.
    bits = values.contiguous().view(torch.int32) + random.to(torch.int32)
    return (bits & _UPPER_HALF).view(torch.float32).to(torch.bfloat16)
