"""Hand-written decoders of two kinds of blocks, which the forward tells apart by their class."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.decoders import LAYERS, Block, Plain


class Scaled(Block):
    """What it returns is for the forward to scale."""


class ByInstance(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() if layer % 2 else Block() for layer in range(LAYERS))

    def scales(self, layer: nn.Module) -> bool:
        return isinstance(layer, Scaled)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (0.5 if self.scales(layer) else 1)
        return x


class ByName(ByInstance):
    def scales(self, layer: nn.Module) -> bool:
        return type(layer).__name__ == "Scaled"


class ByExactClass(ByInstance):
    def scales(self, layer: nn.Module) -> bool:
        return type(layer) is Scaled
