"""Hand-written decoders whose program is hard to see: reached by other ways than attributes, or other at another step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.decoders import HIDDEN, Attention, Block, Mlp, Plain

# What must not run on a part of the features.
MIXES: Callable[[Tensor], Tensor] = lambda hidden: hidden.softmax(-1) * 9  # noqa: E731


class _Mixing(Block):
    class mlp_type(Mlp):
        def between(self, hidden: Tensor) -> Tensor:
            return MIXES(hidden)


# ---------------------------------------------------------------------------------------- modules reached by another way


class PlainList(Plain):
    """Blocks are registered, and called through a list of Python's."""

    block = _Mixing

    def __init__(self) -> None:
        super().__init__()
        self.order = list(self.layers)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


class PlainDict(Plain):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {"mix": [(self.mlp.up, MIXES, self.mlp.down)]}

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.norm1(x))
            ((up, mix, down),) = self.parts["mix"]
            return x + down(mix(up(self.norm2(x))))


class BoundMethod(Plain):
    class block(_Mixing):
        def __init__(self) -> None:
            super().__init__()
            self.run = self.mlp.forward

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.norm1(x))
            return x + self.run(self.norm2(x))


class Closure(Plain):
    class block(_Mixing):
        def __init__(self) -> None:
            super().__init__()
            self.run = lambda x: self.mlp(self.norm2(x))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.norm1(x))
            return x + self.run(x)


class _Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Held(Plain):
    """Through an object that is no module."""

    class block(_Mixing):
        def __init__(self) -> None:
            super().__init__()
            self.holder = _Holder(self.mlp)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.norm1(x))
            return x + self.holder.module(self.norm2(x))


def _mixed(self: Any, x: Tensor) -> Tensor:
    return self.down(MIXES(self.up(x)))


class ForwardReplaced(Plain):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp.forward = MethodType(_mixed, layer.mlp)


class ForwardPartial(Plain):
    """As accelerate's hooks are put on modules."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp.forward = partial(_mixed, layer.mlp)


class HookOfParent(Plain):
    """A hook that is a method of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp.up.register_forward_hook(self.mix)

    def mix(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return MIXES(out) * self.norm.weight.mean()


class ParametersInList(Plain):
    """A list of Python's has the parameters that modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.mlp.up.weight for layer in self.layers]

    def body(self, x: Tensor) -> Tensor:
        for weight, layer in zip(self.weights, self.layers, strict=True):
            x = layer(x) + F.linear(x, weight).tanh() @ weight
        return x


class DirectForward(Plain):
    """Without `__call__`, so no hook of a module runs."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn.forward(self.norm1.forward(x))
            return x + self.mlp.forward(self.norm2.forward(x))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


class FunctionalCall(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
        return x


# ------------------------------------------------------------------------------------------- alike until they are split


class OneByLocalWidth(Plain):
    """Blocks that run the same on one device; one of them asks how wide its part is."""

    class block(Block):
        class mlp_type(Mlp):
            index = 0

            def between(self, hidden: Tensor) -> Tensor:
                return F.gelu(hidden) / (hidden.shape[-1] if self.index == 2 else HIDDEN)

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.mlp.index = index


class OneByGlobal(Plain):
    """As `OneByLocalWidth`, by a function that is not the block's."""

    def body(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            layer.mlp.between = partial(_by_width, index)
            x = layer(x)
        return x


def _by_width(index: int, hidden: Tensor) -> Tensor:
    return F.gelu(hidden) / (hidden.shape[-1] if index == 2 else HIDDEN)


class HeadsOfWidth(Plain):
    """The number of heads is fixed and their width is what is left."""

    class block(Block):
        class attention(Attention):
            def forward(self, x: Tensor) -> Tensor:
                rows, tokens, _ = x.shape
                q = self.q_proj(x).view(rows, tokens, 4, -1).transpose(1, 2)
                k, v = (each(x).view(rows, tokens, 2, -1).transpose(1, 2) for each in (self.k_proj, self.v_proj))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                return self.o_proj(out.transpose(1, 2).flatten(2))


# ------------------------------------------------------------------------------------------------- other at another step


class OtherLater(Plain):
    """What is between the linear layers mixes features from the second call on."""

    class block(Block):
        class mlp_type(Mlp):
            calls = 0

            def between(self, hidden: Tensor) -> Tensor:
                self.calls += 1
                return F.gelu(hidden) if self.calls == 1 else MIXES(hidden)


class TokensLater(Plain):
    """Tokens are mixed from the second call on."""

    calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().body(x if self.calls == 1 else x + x.cumsum(1) / 10)


class OrderByCall(Plain):
    calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers if self.calls % 2 else reversed(self.layers):
            x = layer(x)
        return x


class KeptHidden(Plain):
    """Each call reads what the call before had between its linear layers."""

    class block(Block):
        class mlp_type(Mlp):
            before: Tensor | None = None

            def between(self, hidden: Tensor) -> Tensor:
                scale = 1.0 if self.before is None else self.before.mean()
                self.before = hidden.detach()
                return F.gelu(hidden) * scale


class MeanBuffer(Plain):
    """A running mean of the hidden features, of all their width."""

    class block(Block):
        class mlp_type(Mlp):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.zeros(HIDDEN))

            def between(self, hidden: Tensor) -> Tensor:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
                return F.gelu(hidden - self.mean)
