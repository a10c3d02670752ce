"""Hand-written decoders that call modules with other tensors in place of their parameters (torch.func.functional_call)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.zoo.decoders import HIDDEN, WIDTH, Block, Mlp, Plain


def halved(module: nn.Module) -> dict[str, Tensor]:
    return {name: param / 2 for name, param in module.named_parameters()}


class BlockHalved(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional_call(layer, halved(layer), (x,))
        return x


class BlockDetached(Plain):
    """One block twice, the second time without gradients for it."""

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        last = self.layers[-1]
        return functional_call(last, {name: param.detach() for name, param in last.named_parameters()}, (x,))


class BlockOfAnother(Plain):
    """The code of one block with the parameters of the others."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional_call(self.layers[0], dict(layer.named_parameters()), (x,))
        return x


class BlockPartly(Plain):
    """One parameter of each."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional_call(layer, {"mlp.up.bias": self.norm.bias.repeat(2)[:HIDDEN]}, (x,))
        return x


class BlockConstant(Plain):
    """The same numbers on every call and rank."""

    def __init__(self) -> None:
        super().__init__()
        self.other = {
            name: torch.linspace(-0.2, 0.3, param.numel()).view(param.shape)
            for name, param in self.layers[0].named_parameters()
        }

    def body(self, x: Tensor) -> Tensor:
        other = {name: tensor.to(x.dtype) for name, tensor in self.other.items()}
        return functional_call(self.layers[0], other, (super().body(x),))


class BlockGenerated(Plain):
    """A vector of each layer makes a bias of it, of the width of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        made = self.make(self.code)[0]
        for layer in self.layers:
            x = functional_call(layer, {"norm1.bias": made}, (x,))
        return x


class MlpHalved(Plain):
    """Inside of a block."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.norm1(x))
            return x + functional_call(self.mlp, halved(self.mlp), (self.norm2(x),))


class LinearHalved(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                hidden = self.between(functional_call(self.up, halved(self.up), (x,)))
                return functional_call(self.down, halved(self.down), (hidden,))


class LinearOwn(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                hidden = self.between(functional_call(self.up, dict(self.up.named_parameters()), (x,)))
                return functional_call(self.down, dict(self.down.named_parameters()), (hidden,))


class LinearGenerated(Plain):
    """A weight that another layer's parameters make."""

    class block(Block):
        class mlp_type(Mlp):
            def __init__(self) -> None:
                super().__init__()
                self.factor = nn.Parameter(torch.randn(HIDDEN, 1))

            def forward(self, x: Tensor) -> Tensor:
                weight = self.factor * self.down.weight.mean(0)[:WIDTH]
                return self.down(self.between(functional_call(self.up, {"weight": weight}, (x,))))


class NormHalved(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        x = self.body(self.embed_tokens(input_ids))
        return self.lm_head(functional_call(self.norm, halved(self.norm), (x,)))


class HeadHalved(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        x = self.norm(self.body(self.embed_tokens(input_ids)))
        return functional_call(self.lm_head, halved(self.lm_head), (x,))


class HeadOfTable(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        x = self.norm(self.body(self.embed_tokens(input_ids)))
        return functional_call(self.lm_head, {"weight": self.embed_tokens.weight}, (x,))


class BuffersSwapped(Plain):
    """Only a buffer is given."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def body(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = functional_call(layer, {"scale": torch.full_like(layer.scale, 1 - number / 8)}, (x,))
        return x


class Ensemble(Plain):
    """Several heads as one, over a skeleton without values."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.__dict__["skeleton"] = copy.deepcopy(self.ups[0]).to("meta")

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        stacked = {
            name: torch.stack([dict(up.named_parameters())[name] for up in self.ups]) for name in ("weight", "bias")
        }
        outs = torch.vmap(lambda params, x: functional_call(self.skeleton, params, (x,)), (0, None))(stacked, x)
        return x + F.gelu(outs).mean(0)


class LayersStacked(Plain):
    """Skeleton that is one of the blocks themselves."""

    def body(self, x: Tensor) -> Tensor:
        params = [dict(layer.named_parameters()) for layer in self.layers]
        stacked = {name: torch.stack([each[name] for each in params]) for name in params[0]}
        for number in range(len(self.layers)):
            x = functional_call(self.layers[0], {name: each[number] for name, each in stacked.items()}, (x,))
        return x
