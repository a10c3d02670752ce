"""The oracle of mixers: their recurrence token by token, as the papers write it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """S = a S + k v', or with the delta rule S = a S + beta k (v - a S' k)'; S' q. lengths: of documents."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outs, token = [], 0
    for length in lengths:
        state = v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3])
        for _ in range(length):
            state = state * log_decay[:, token].exp()[..., None, None]
            value = v[:, token]
            if beta is not None:
                value = (value - torch.einsum("bhkv,bhk->bhv", state, k[:, token])) * beta[:, token, :, None]
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], value)
            outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]))
            token += 1
    return torch.stack(outs, 1)


def convolution(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """torch's own, of each document by itself."""
    width, channels = weight.shape[1], weight.shape[0]
    padded = [F.pad(part, (0, 0, width - 1, 0)).mT for part in x.split(list(lengths), 1)]
    return torch.cat([F.conv1d(part, weight.unsqueeze(1), groups=channels).mT for part in padded], 1)


def scan_inputs(rows: int, tokens: int, *, delta: bool) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, log_decay and with `delta` beta, a gradient of the output): 2 key heads, 4 heads; decays from 0.5 to 1."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(2, 5), dim=-1) for _ in range(2))
    inputs = [q, k, draw(4, 3), -0.7 * draw(4).sigmoid()]
    return inputs + ([draw(4).sigmoid()] if delta else []), draw(4, 3)
