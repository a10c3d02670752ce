"""Hand-written decoders that mix tokens, take another path at times, have experts, hooks or a second loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.step import Batch
from tests.zoo.decoders import WIDTH, Block, Mlp, Plain

# -------------------------------------------------------------------------------------------------------- along the tokens


def decoder_that(mixes: Any) -> type[Plain]:
    """A decoder with this function of [rows, tokens, features] before its blocks."""
    return type("Mixes", (Plain,), {"body": lambda self, x: Plain.body(self, mixes(x))})


CumulativeSum = decoder_that(lambda x: x + x.cumsum(1) / 10)
TokenShift = decoder_that(lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1])
MeanOfTokens = decoder_that(lambda x: x - x.mean(1, keepdim=True))
FlippedTokens = decoder_that(lambda x: x + x.flip(1))
SoftmaxOfTokens = decoder_that(lambda x: x * x.softmax(1))
EveryOther = decoder_that(lambda x: x + x[:, ::2].repeat_interleave(2, 1))
FirstToken = decoder_that(lambda x: x + x[:, :1])
MeanOfRows = decoder_that(lambda x: x - x.mean(0, keepdim=True))
PositionByCount = decoder_that(lambda x: x + torch.arange(x.shape[1]).sin()[:, None])
Chunked = decoder_that(lambda x: torch.cat([part.tanh() for part in x.split(3, 1)], 1))


class TokenConvolution(Plain):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.conv(F.pad(x.mT, (2, 0))).mT)


class Recurrent(Plain):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            state, states = torch.zeros_like(x[:, 0]), []
            for token in x.unbind(1):
                state = state * self.decay.sigmoid() + token
                states.append(state)
            return super().forward(x + torch.stack(states, 1) / 4)


class TokenMixer(Plain):
    """A linear layer over the tokens, as MLP-Mixer has it."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.fc2(F.gelu(self.fc1(x.mT))).mT)


# ------------------------------------------------------------------------------------------------------------ another path


class LayerDrop(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = layer(x)
        return x


class OnValue(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x[..., 0].mean() > 0 else x + 0.5 * layer(-x)
        return x


class OnFirstToken(Plain):
    """Which blocks run depends on the row: some are unused on some ranks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for index, layer in enumerate(self.layers):
            if index % 2 == int(input_ids[0, 0]) % 2:
                x = layer(x)
        return self.lm_head(self.norm(x))


class OnRowCount(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x if x.shape[0] > 3 else x * 2)


class OnTokenCount(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x if x.shape[1] > 10 else x * 2)


class OnTraining(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x * 2 if self.training else x)


class OnCount(Plain):
    """Another block is left out at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            if index != self.calls % 4:
                x = layer(x)
        return x


# ------------------------------------------------------------------------------------------------------------------ experts


class ExpertList(Plain):
    class block(Block):
        class mlp_type(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Linear(WIDTH, 4, bias=False)
                self.experts = nn.ModuleList(Mlp() for _ in range(4))

            def forward(self, x: Tensor) -> Tensor:
                weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
                out = torch.zeros_like(x)
                for index, expert in enumerate(self.experts):
                    row, token, choice = torch.where(chosen == index)
                    if len(row):
                        out[row, token] += weights[row, token, choice, None] * expert(x[row, token])
                return out


class ExpertStack(Plain):
    """All experts see all tokens: two stacked weights and two einsums."""

    class block(Block):
        class mlp_type(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Linear(WIDTH, 4)
                self.experts_up = nn.Parameter(torch.rand(4, WIDTH, 24))
                self.experts_down = nn.Parameter(torch.rand(4, 24, WIDTH))

            def forward(self, x: Tensor) -> Tensor:
                hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.experts_up))
                out = torch.einsum("bteh,ehd->bted", hidden, self.experts_down)
                return torch.einsum("bted,bte->btd", out, self.gate(x).softmax(-1))


# -------------------------------------------------------------------------------------------------------- hooks and losses


class OutputHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, args, out: out * 2)


class InputHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].mlp.up.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


class HookBetween(Plain):
    """What the hook does to a column's output needs all of it."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp.up.register_forward_hook(lambda module, args, out: out - out.mean(-1, keepdim=True))


class HookOnHead(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.register_forward_hook(lambda module, args, out: out.tanh())


class BackwardHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))


class AuxiliaryLoss(Plain):
    """The loss reads what the forward left behind in the middle of the model."""

    def body(self, x: Tensor) -> Tensor:
        self.middle = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](self.middle))

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        logits, valid = model(batch["input_ids"]), batch["labels"] != -100
        summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        return summed + 0.1 * (model.middle.square().mean(-1) * valid).sum()


class AuxiliaryBetween(Plain):
    """An auxiliary loss on the features between two linear layers."""

    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                self.kept = F.gelu(hidden)
                return self.kept

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        logits, valid = model(batch["input_ids"]), batch["labels"] != -100
        summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        return summed + sum((layer.mlp.kept.abs().mean(-1) * valid).sum() for layer in model.layers)


class WholeLogitsLoss(Plain):
    """A loss of the user's own, with the entropy of all logits."""

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        logs = model(batch["input_ids"]).log_softmax(-1)
        picked = logs.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
        return -((picked + 0.1 * (logs.exp() * logs).sum(-1)) * (batch["labels"] != -100)).sum()
