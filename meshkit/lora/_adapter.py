"""One adapted linear layer: y = x W' + b + s (x A') B', with W and b frozen, A [r, in] and B [out, r].

Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1; s = alpha / sqrt(r): Kalajdzievski 2023 (arXiv 2312.03732).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.counter import stream_of
from meshkit.lora._dropout import drop
from meshkit.memory.few_bit_weights import BlockCodes
from meshkit.plan import Init
from meshkit.swap import swap_class

_KEY = "_meshkit_lora"
A, B = "lora_A", "lora_B"  # PEFT's names, so that its files have those of the model


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of a model. targets: names of its adapted linear layers; saved: of the modules that train whole.

    dropout: probability that a feature of an adapter's input is zeroed in training; seed: of its masks.
    base: how frozen weights are written, None as they were; packed: of the layers whose weights are, name -> in_features.
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
    """A or B. `first_value` is what `init_weights` starts it with."""

    def __init__(self, weight: Tensor, inputs: int, outputs: int, first_value: Init, dtype: torch.dtype) -> None:
        """On the device of `weight`."""
        super().__init__(inputs, outputs, bias=False, device=weight.device, dtype=dtype)
        self.first_value = first_value

    def reset_parameters(self) -> None:
        """Leaves values, and torch's generator, as they are: `lora` draws them."""


def adapt(linear: nn.Linear, lora: Lora, dtype: torch.dtype, *, name: str) -> None:
    """Give the layer its A and B, in place; their values are yet to be set."""
    weight, inputs, outputs = linear.weight, linear.in_features, linear.out_features
    # As PEFT: kaiming_uniform with a = sqrt(5), so that with B = 0 the model begins as it was.
    linear.add_module(A, AdapterLinear(weight, inputs, lora.rank, Init("uniform", inputs**-0.5), dtype))
    linear.add_module(B, AdapterLinear(weight, lora.rank, outputs, Init("constant", 0.0), dtype))
    scaling, frozen, dropout = lora.scaling, type(linear).forward, lora.dropout

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        out = frozen(self, input)
        if A not in self._modules or not self._adapter_on:
            return out
        down, up = self._modules[A], self._modules[B]
        assert isinstance(down, nn.Linear) and isinstance(up, nn.Linear)
        read = input.to(down.weight.dtype)
        if dropout and self.training:
            own = down.__dict__.get("own_columns")
            read = drop(read, probability=dropout, stream=self.__dict__["_lora_stream"], own_columns=own)
        added: Tensor = up(down(read)) * scaling
        return out + added.to(out.dtype)

    linear.__dict__["_lora_stream"] = stream_of(name)
    swap_class(linear, forward=forward, _adapter_on=True)


def lora_of(model: nn.Module) -> Lora | None:
    """The adapters of the model, None without."""
    found: Lora | None = model.__dict__.get(_KEY)
    return found


def set_lora(model: nn.Module, lora: Lora | None) -> None:
    model.__dict__[_KEY] = lora


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an A or a B."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, linear layer) of those that have adapters, of this rank's stages with pp."""
    for name, child in model.named_modules():
        if A in child._modules and B in child._modules:
            yield name, child


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, forwards are those of the frozen model: the reference of DPO and RL without a second copy.

    Modules that train whole stay as they are. Not for a forward whose backward comes after: what runs again there would run
    with adapters.
    """
    layers = [layer for _, layer in adapted(model)]
    for layer in layers:
        layer._adapter_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer._adapter_on = True
