"""Low-bit AdamW: moments in 8 or 4 bits or fp8, and bf16 parameters without master weights by stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshkit.core import _torch, rng
from meshkit.core.rng import index_of_rows, random_bits, row_chunks, stream_of
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
    An update goes over rows in chunks, so no fp32 copy of a full shard ever exists, and over many small parameters at once:
    see [Note: one update for rows of many parameters].
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
            alike: dict[Any, list[_Rows]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    self._collect(param, alike)
            for (codecs, step, *_), rows in alike.items():
                for batch in _batches(rows):
                    self._update(batch, dict(codecs), step, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its dtype."""
        for param, saved in paired_states(self, state_dict):
            self.state[param] = {
                key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in saved.items()
            }

    def _collect(self, param: Tensor, alike: dict[Any, list[_Rows]]) -> None:
        """Count the step, and add the parameter's rows, in chunks, to those that one update may have together with them."""
        if not self.state[param]:  # forgotten by a load
            self.state[param] = self._zeros(param)
        state = self.state[param]
        state["step"] += 1
        step = float(state["step"])
        values, grads = local_tensor(param), local_tensor(param.grad)  # type: ignore[arg-type]  # it has one
        if not values.numel():
            return
        codecs = self._codecs[param]
        moments = {key: local_tensor(state[key]) for key in state if key != "step"}
        columns = values.shape[-1] if codecs else 1
        # The step is counted from 1 for the corrections of bias, and the stream is another at each step: with the
        # same bits an element would always be rounded the same way.
        stream = stream_of(self.seed, self._names[param], int(step))
        key = (tuple(codecs.items()), step, columns, values.dtype, grads.dtype, values.device)
        rounds = self.stochastic_rounding and param.dtype == torch.bfloat16
        for rows in row_chunks(param):
            chunk: Any = rows if param.ndim else ...
            parts = {name: moment[chunk] for name, moment in moments.items()}
            random = partial(_random, param, rows, stream) if rounds else None
            alike.setdefault(key, []).append(_Rows(values[chunk], grads[chunk], parts, columns, random))

    def _update(self, batch: list[_Rows], codecs: dict[str, LowBitState], step: float, group: dict[str, Any]) -> None:
        """AdamW of rows of one length, of any number of parameters, as those of one: by each operator once."""
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        grad = _joined([rows.grad for rows in batch], batch[0].columns).float()
        mean = _read(batch, "exp_avg", codecs, grad.shape[-1]).lerp_(grad, 1 - beta1)
        square = _read(batch, "exp_avg_sq", codecs, grad.shape[-1]).lerp_(grad * grad, 1 - beta2)
        # Decoupled decay (Loshchilov and Hutter 2019), before the update as in torch.
        new = _joined([rows.values for rows in batch], batch[0].columns).float() * (1 - lr * group["weight_decay"])
        width = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        new.addcdiv_(mean, width, value=-lr / (1 - beta1**step))
        random = [rows.random() for rows in batch if rows.random is not None]
        if random:
            new = round_stochastically(new, _joined(random, batch[0].columns))
        _split_into([rows.values for rows in batch], new)
        _write(batch, "exp_avg", codecs, mean)
        _write(batch, "exp_avg_sq", codecs, square)

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


# [Note: one update for rows of many parameters]
# An update takes 35 to 75 kernels, and a model has hundreds of parameters, most of them small. Rows of one length, of
# parameters of one dtype and one kind of state, are therefore joined, at most CHUNK elements at a time, updated at once and
# written back. Arithmetic is by element, and blocks end with their rows, so no bit depends on what is joined.


@dataclass(frozen=True)
class _Rows:
    """Some rows of a parameter, of its gradient and of its moments' tensors, as views. columns: their length, 1 where state
    is fp32 and rows do not matter. random: draws 16 bits for each element, where values are rounded by them."""

    values: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    columns: int
    random: Callable[[], Tensor] | None


def _random(param: Tensor, rows: slice, stream: int) -> Tensor:
    # By each element's index in the full tensor, so that draws do not depend on sharding.
    return random_bits(index_of_rows(param, rows), stream, 16)


def _batches(rows: list[_Rows]) -> Iterator[list[_Rows]]:
    """In order, at most CHUNK elements in each but where one has more."""
    batch, elements = list[_Rows](), 0
    for each in rows:
        if batch and elements + each.values.numel() > rng.CHUNK:
            yield batch
            batch, elements = [], 0
        batch.append(each)
        elements += each.values.numel()
    if batch:
        yield batch


def _joined(tensors: list[Tensor], columns: int) -> Tensor:
    """[R, columns], to be read alone: one tensor is not copied."""
    rows = [tensor.reshape(-1, columns) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _split_into(targets: list[Tensor], joined: Tensor) -> None:
    pieces = joined.split([target.numel() // joined.shape[-1] for target in targets])
    _torch.foreach_copy_(targets, [piece.view(target.shape) for piece, target in zip(pieces, targets, strict=True)])


def _read(batch: list[_Rows], key: str, codecs: dict[str, LowBitState], columns: int) -> Tensor:
    """A moment of the batch as a new fp32 tensor, [R, columns]."""
    codec = codecs.get(key)
    if codec is None:
        return torch.cat([rows.moments[key].reshape(-1, columns) for rows in batch])
    widths = {"codes": codec.code_columns(columns), "scale": codec.scale_columns(columns)}
    codes, scale = (_joined([rows.moments[f"{key}_{what}"] for rows in batch], width) for what, width in widths.items())
    return codec.decode(codes, scale, columns)


def _write(batch: list[_Rows], key: str, codecs: dict[str, LowBitState], values: Tensor) -> None:
    codec = codecs.get(key)
    if codec is None:
        _split_into([rows.moments[key] for rows in batch], values)
        return
    for what, value in zip(("codes", "scale"), codec.encode(values), strict=True):
        _split_into([rows.moments[f"{key}_{what}"] for rows in batch], value)


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
