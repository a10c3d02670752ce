"""A model of images and text (omni-modal, vision-language): encoder, projector and decoder, with a plan for each part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import meshkit as mk

VOCAB, WIDTH, HEAD, PATCH, SIDE, TOKENS = 61, 32, 8, 4, 8, 24
PATCHES = (SIDE // PATCH) ** 2  # of an image


class Block(nn.Module):
    """Attention and a feed-forward; it counts heads by the width it gets, which tp divides."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: mk.Mask | None = None) -> Tensor:
        h = self.norm1(x)
        q, k, v = (proj(h).unflatten(-1, (-1, HEAD)) for proj in (self.q, self.k, self.v))
        if mask is not None:  # of cp: attention over the tokens of all ranks
            out = mask.attend(q, k, v)
        else:
            heads_first = (each.transpose(1, 2) for each in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=self.causal).transpose(1, 2)
        x = x + self.o(out.flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """Images [images, 3, SIDE, SIDE] -> features of their patches [images, PATCHES, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.place = nn.Embedding(PATCHES, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        patches = rearrange(images, "n c (h p) (w q) -> n (h w) (c p q)", p=PATCH, q=PATCH)
        x = self.patch(patches) + self.place(torch.arange(PATCHES, device=images.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, ids: Tensor, seen: Tensor, is_image: Tensor, positions: Tensor, mask: mk.Mask | None = None
    ) -> Tensor:
        """seen: what stands in place of the embedding where a token is of an image."""
        x = torch.where(is_image[..., None], seen, self.embed(ids)) + self.place(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class ImagesAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.projector = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.decoder = Decoder()

    def forward(
        self,
        input_ids: Tensor,
        images: Tensor,
        image_tokens: Tensor,
        position_ids: Tensor | None = None,
        mask: mk.Mask | None = None,
    ) -> Tensor:
        """images: [rows, images, 3, SIDE, SIDE], maybe none. image_tokens: [rows, tokens], for each token which patch of its
        row's images it stands for, from 1; 0: it is text."""
        rows, count = images.shape[:2]
        # Without images too, on none of them: so every rank runs the same messages, and gets gradients of zeros.
        features = self.projector(self.encoder(images.flatten(0, 1)))
        features = features.unflatten(0, (rows, count)).flatten(1, 2)
        features = F.pad(features, (0, 0, 1, 0))  # a row of zeros for text
        seen = features[torch.arange(rows, device=images.device)[:, None], image_tokens]
        positions = torch.arange(input_ids.shape[1], device=images.device) if position_ids is None else position_ids
        return self.decoder(input_ids, seen, image_tokens > 0, positions, mask)


BLOCK = {
    "blocks.*.norm{1,2}": mk.plan.sequence(),
    "blocks.*.{q,k,v}": mk.plan.column(),
    "blocks.*.o": mk.plan.row(),
    "blocks.*.fc1": mk.plan.column(),
    "blocks.*.fc2": mk.plan.row(),
    "norm": mk.plan.sequence(),
    "place": mk.plan.replicate(),
}
PLAN = mk.Plan.of_parts(
    encoder=mk.Plan(tensor={"patch": mk.plan.replicate(), **BLOCK}, blocks=("blocks.*",)),
    projector=mk.Plan(tensor={"0": mk.plan.column(), "2": mk.plan.row()}),
    decoder=mk.Plan(tensor={"embed": mk.plan.vocab(), "head": mk.plan.vocab(), **BLOCK}, blocks=("blocks.*",)),
)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    extra = {name: batch[name] for name in ("position_ids", "mask") if name in batch}
    logits = model(batch["input_ids"], batch["images"], batch["image_tokens"], **extra)
    return mk.cross_entropy(logits, batch["labels"])


def batch_of(images: list[int], generator: torch.Generator) -> dict[str, Tensor]:
    """Rows with these numbers of images, each row's at its beginning. images: what a rank's rows need, at most."""
    ids = torch.randint(0, VOCAB, (len(images), TOKENS + 1), generator=generator)
    pixels = torch.randn(len(images), max(images, default=0), 3, SIDE, SIDE, generator=generator)
    of_images = torch.tensor(images)[:, None] * PATCHES
    place = torch.arange(1, TOKENS + 1)
    labels = torch.where(torch.arange(TOKENS) < of_images, -100, ids[:, 1:])
    return {
        "input_ids": ids[:, :-1],
        "labels": labels,
        "images": pixels,
        "image_tokens": place.where(place <= of_images, 0),
    }
