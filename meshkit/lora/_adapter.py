"""A linear layer with a LoRA adapter: y = x W' + b + s (x A') B', with W and b frozen, A [r, in] and B [out, r].

Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1; s = alpha / sqrt(r): Kalajdzievski 2023 (arXiv 2312.03732).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.noting import being_read
from meshkit.core.patch_class import patch_class
from meshkit.core.quantized_weight import BlockCodes, product
from meshkit.core.rng import keys_in_use, random_bits, stream_of, token_keys
from meshkit.core.to_device import to_device
from meshkit.errors import PlanError
from meshkit.plan import Init

_KEY = "_meshkit_lora"
A, B = "lora_A", "lora_B"  # PEFT's names, so that its files have those of the model


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The LoRA adapters of a model. targets: names of the adapted linear layers. saved: names of modules trained in full.

    dropout: probability that a feature of an adapter's input is zeroed in training. seed: of the dropout masks.
    base: the quantization of frozen weights, None for none. packed: layers with quantized weights, name -> in_features.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    saved: tuple[str, ...] = ()
    dropout: float = 0.0
    seed: int = 0
    base: BlockCodes | None = None
    packed: Mapping[str, int] = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class AdapterLinear(nn.Linear):
    """The linear layer A or B of an adapter. first_value: its initialisation, for `init_weights`."""

    def __init__(self, weight: Tensor, inputs: int, outputs: int, first_value: Init, dtype: torch.dtype) -> None:
        """On the device of `weight`."""
        super().__init__(inputs, outputs, bias=False, device=weight.device, dtype=dtype)
        self.first_value = first_value

    def reset_parameters(self) -> None:
        """Does nothing, so that torch's generator is not advanced: `init` sets the values, the same on every mesh."""


def adapt(linear: nn.Linear, lora: Lora, dtype: torch.dtype, *, name: str) -> None:
    """Add A and B to the layer, in place; `init` sets their values."""
    weight, inputs, outputs = linear.weight, linear.in_features, linear.out_features
    # As PEFT: kaiming_uniform with a = sqrt(5), so that with B = 0 the model begins as it was.
    linear.add_module(A, AdapterLinear(weight, inputs, lora.rank, Init("uniform", inputs**-0.5), dtype))
    linear.add_module(B, AdapterLinear(weight, lora.rank, outputs, Init("constant", 0.0), dtype))
    # The layer's forward of now: the class may be patched again later, and those patches call the new forward below.
    scaling, frozen, dropout = lora.scaling, type(linear).forward, lora.dropout

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if A not in self._modules or not self._adapter_on:
            return frozen(self, input)
        down, up = self._modules[A], self._modules[B]
        assert isinstance(down, nn.Linear) and isinstance(up, nn.Linear)
        # Adapters compute in their own dtype, which may be wider than that of the frozen weight.
        x = input.to(down.weight.dtype)
        # A mask is a function of token and feature, whatever rank has them, so a reading of the program need not see it.
        if dropout and self.training and not being_read():
            local_columns = down.__dict__.get("own_columns")  # a row() layer sees some columns: their masks, not others
            stream = self.__dict__["_lora_stream"]
            x = drop(x, probability=dropout, stream=stream, own_columns=local_columns)
        # A reading finds the bias last, where a row() layer has it, which adds it to the sum over the ranks.
        last = self.bias if being_read() else None
        out = frozen(self, input) if last is None else product(self, input)
        added: Tensor = up(down(x)) * scaling
        out = out + added.to(out.dtype)
        return out if last is None else out + last

    linear.__dict__["_lora_stream"] = stream_of(name)
    patch_class(linear, forward=forward, _adapter_on=True)


def lora_of(model: nn.Module) -> Lora | None:
    """The LoRA configuration of the model; None without adapters."""
    lora: Lora | None = model.__dict__.get(_KEY)
    return lora


def set_lora(model: nn.Module, lora: Lora | None) -> None:
    model.__dict__[_KEY] = lora


def refuse_peft(model: nn.Module, verb: str) -> None:
    """Raises: PlanError for a model that PEFT has wrapped: its layers and their parameters have other names."""
    if isinstance(getattr(model, "peft_config", None), Mapping):
        raise PlanError(
            f"{verb}: the {type(model).__name__} has adapters of PEFT, under names of its own. Give the model without "
            "them, and use mk.lora.attach and PEFT's folders; or train it as it is, and keep it by mk.Checkpointer."
        )


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an A or a B."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, linear layer) of each layer with an adapter; with pp, of this rank's stages."""
    for name, child in model.named_modules():
        if A in child._modules and B in child._modules:
            yield name, child


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, adapters are off: the frozen model is the reference model of DPO and RL, without a second copy.

    Modules trained in full keep their trained values. Do not use it for a forward whose backward comes later: recompute would
    run with adapters.
    """
    layers = [layer for _, layer in adapted(model)]
    for layer in layers:
        layer._adapter_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer._adapter_on = True


# [Note: dropout masks are functions]
# A mask depends on seed, step, the text up to the token, layer and feature, and on nothing else. So it is the same on every
# mesh, for every split of the batch, after a resume, and when recompute or backward draws it again.
# Source: Hu et al. 2021, as PEFT's `lora_dropout`.

LANES, LANE_BITS = 4, 15  # one 63-bit draw serves 4 features with 15 bits each


def dropout_keys(batch: dict[str, Tensor], *, seed: int, step: int | None) -> Tensor:
    """Random keys [B, T], one for each token of one step's batch."""
    if step is None:
        raise PlanError(
            "forward_backward: the adapters have dropout, whose masks depend on the number of the step. Give it as step=..., "
            "so that a run that continues draws what it would have drawn."
        )
    if "input_ids" not in batch:
        raise PlanError(
            "forward_backward: dropout on adapters needs input_ids [B, T] in the batch, from which masks come."
        )
    return token_keys(batch["input_ids"], batch.get("position_ids"), "lora_dropout", seed, step)


def drop(x: Tensor, *, probability: float, stream: int, own_columns: Tensor | None) -> Tensor:
    """Dropout: x [..., C] with features zeroed at random and the others scaled up to keep the mean.

    own_columns: the columns of the full input that this rank's C are; None for all. Backward saves only the tokens' keys and
    draws the mask again. See [Note: dropout masks are functions].
    Raises: PlanError outside of `Run.forward_backward`, and where x is not of the batch's tokens.
    """
    keys = keys_in_use()
    if keys is None:
        raise PlanError(
            "lora(dropout=...): a forward in training mode outside of Run.forward_backward has no step to draw masks of. "
            "Call model.eval() first, or Run.evaluate."
        )
    if keys.numel() != x.shape[:-1].numel():
        raise PlanError(
            f"lora(dropout=...): a layer was called on tokens {tuple(x.shape[:-1])}, but the batch has {tuple(keys.shape)}. "
            "Let the loss call the model once on input_ids as they are, or leave dropout away."
        )
    out: Tensor = _Drop.apply(x, keys.reshape(x.shape[:-1]), probability, stream, own_columns)
    return out


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, probability: float, stream: int, own: Tensor | None) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.arguments = probability, stream, own
        return _masked(x, keys, probability, stream, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (keys,) = ctx.saved_tensors
        return _masked(grad, keys, *ctx.arguments), None, None, None, None


def _masked(x: Tensor, keys: Tensor, probability: float, stream: int, own: Tensor | None) -> Tensor:
    # In steps of 2^-15. The scale is that of the rounded probability, so that the mean is kept exactly.
    threshold = round(probability * 2**LANE_BITS)
    dropped = _lanes(x, keys, stream, own) < threshold
    out: Tensor = x.masked_fill(dropped, 0.0) * (1 / (1 - threshold / 2**LANE_BITS))
    return out


def _lanes(x: Tensor, keys: Tensor, stream: int, own: Tensor | None) -> Tensor:
    """Random numbers [..., C] int16, uniform in [0, 2^15), for each token and feature of x."""
    columns = x.shape[-1]
    # Lanes are cut from groups of four features of the full input: a rank draws the groups that its columns touch and
    # picks its own, so the mask is the single-device one.
    first, last = (0, columns) if own is None or not columns else (int(own.min()), int(own.max()) + 1)
    groups = x.new_zeros((), dtype=torch.int64)  # from x, so that draws for a fake tensor are fake
    groups = groups + torch.arange(first // LANES, -(-last // LANES), device=x.device)
    drawn = random_bits(groups, random_bits(keys, stream, 63).unsqueeze(-1), 63)
    lanes: Tensor = drawn.view(torch.int16) & (2**LANE_BITS - 1)
    if own is None or not columns:
        return lanes[..., :columns]
    return lanes.index_select(-1, to_device(own - first // LANES * LANES, keys.device))
