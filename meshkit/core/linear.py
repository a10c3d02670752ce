"""Linear layers, whichever way round they keep their weight: nn.Linear, and transformers' Conv1D, of which GPT-2 is made."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LinearShape:
    """in_dim, out_dim: the dims of the weight that are the input and output features."""

    in_features: int
    out_features: int
    in_dim: int = 1
    out_dim: int = 0

    @property
    def transposed(self) -> bool:
        return self.out_dim == 1


def linear_shape(module: nn.Module) -> LinearShape | None:
    """The shape of a linear layer; None of another module, also of one that has more parameters than a weight and a bias."""
    if more_parameters(module):
        return None
    if isinstance(module, nn.Linear):
        return LinearShape(module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        wide, narrow = module.nf, module.nx
        assert isinstance(wide, int) and isinstance(narrow, int)
        return LinearShape(narrow, wide, in_dim=0, out_dim=1)
    return None


def more_parameters(module: nn.Module) -> list[str]:
    """Its own, beside a weight and a bias."""
    named = module._parameters.items()
    return [key for key, param in named if param is not None and key not in ("weight", "bias")]


def is_linear(module: nn.Module | None) -> bool:
    return module is not None and linear_shape(module) is not None
