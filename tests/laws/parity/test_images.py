"""Parity of a model of images and text: encoder, projector and decoder on dp x tp x cp, with ranks that have no images."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.sharding import full_tensor
from tests.depth import thin
from tests.laws.parity.cases import mesh_for
from tests.laws.parity.images_and_text import PLAN, ImagesAndText, batch_of, loss
from tests.world import RankError, pool

TOL_FP64_SUM = 1e-10  # only summation order differs
IMAGES = [2, 1, 0, 0]  # of each row: the second rank of dp_shard=2 has none
WHOLE = mk.strategy.ContextPolicy(whole=("images",))


def build(kind: type[ImagesAndText] = ImagesAndText) -> nn.Module:
    torch.manual_seed(7)
    return kind().double()


def whole_batch() -> dict[str, Tensor]:
    batch = batch_of(IMAGES, torch.Generator().manual_seed(11))
    return {**batch, "images": batch["images"].double()}


def rows_of(mesh: mk.Mesh, *, padded: bool) -> dict[str, Tensor]:
    """padded: a rank without images has images that no token reads; else it has none."""
    rows = {name: tensor.chunk(mesh.data_ranks)[mesh.data_rank] for name, tensor in whole_batch().items()}
    if not padded and not rows["image_tokens"].any():
        rows["images"] = rows["images"][:, :0]
    return rows


def errors(spec: str, padded: bool, choices: dict[str, Any]) -> dict[str, float]:
    """How far the loss and every gradient are from one device's, relative to the largest of each."""
    model, mesh, batch = build(), mesh_for(spec), whole_batch()
    expected = loss(model, batch) / (batch["labels"] != -100).sum()
    expected.backward()
    example = None
    if "plan" not in choices:
        example = mk.Example(kwargs={name: batch[name] for name in ("input_ids", "images", "image_tokens")})
    run = mk.parallelize(build(), mesh, example=example, context=WHOLE, **choices)
    value = run.forward_backward(rows_of(mesh, padded=padded), loss=loss)
    found = {"loss": float((value - expected.detach()).abs())}
    wanted = {name: param.grad for name, param in model.named_parameters()}
    for name, param in run.named_parameters():
        gradient, want = gradient_of(param), wanted.pop(name)
        assert gradient is not None and want is not None
        found[name] = float((full_tensor(gradient) - want).abs().max() / want.abs().max())
    assert not wanted
    return found


@pytest.mark.parametrize(
    ("padded", "spec"), thin(list(product((False, True), ("dp_shard=2", "dp_shard=2 tp=2", "dp_shard=2 cp=2"))), 2)
)
def test_loss_and_every_gradient_equal_one_device(padded: bool, spec: str) -> None:
    ranks = mk.MeshSpec.parse(spec).world_size
    for found in pool(ranks).run(errors, spec, padded, {"plan": PLAN}):
        assert max(found.values()) < TOL_FP64_SUM, found


def test_all_three_axes_together() -> None:
    for found in pool(8).run(errors, "dp_shard=2 cp=2 tp=2", False, {"plan": PLAN}):
        assert max(found.values()) < TOL_FP64_SUM, found


def test_two_microbatches_and_a_derived_plan() -> None:
    for found in pool(4).run(errors, "dp_shard=2 tp=2", False, {"microbatches": 2}):
        assert max(found.values()) < TOL_FP64_SUM, found


class Skips(ImagesAndText):
    """Runs its encoder only where there are images."""

    def forward(
        self,
        input_ids: Tensor,
        images: Tensor,
        image_tokens: Tensor,
        position_ids: Tensor | None = None,
        mask: Any = None,
    ) -> Tensor:
        if images.numel():
            return super().forward(input_ids, images, image_tokens, position_ids, mask)
        positions = torch.arange(input_ids.shape[1])
        nothing = torch.zeros(*input_ids.shape, self.decoder.norm.normalized_shape[0])
        return self.decoder(input_ids, nothing, image_tokens > 0, positions, mask)


def train_a_skipping_model(spec: str) -> None:
    mesh = mesh_for(spec)
    run = mk.parallelize(build(Skips), mesh, plan=PLAN)
    run.forward_backward(rows_of(mesh, padded=False), loss=loss)


def test_an_encoder_that_is_skipped_on_some_ranks_is_refused() -> None:
    with pytest.raises(RankError, match="(?s)data ranks run different modules.*run it on every rank"):
        pool(2).run(train_a_skipping_model, "dp_shard=2")


def split(spec: str, whole: tuple[str, ...], change: str) -> None:
    mesh = mesh_for(spec)
    run = mk.parallelize(build(), mesh, plan=PLAN, context=mk.strategy.ContextPolicy(whole=whole))
    batch, masks = rows_of(mesh, padded=True), None
    if change == "masks":
        tokens = batch["input_ids"].shape[1]
        masks = [mk.Mask.documents([tokens - row, row]) for row in range(1, 1 + len(batch["input_ids"]))]
    if change == "short":
        batch["images"] = batch["images"].new_zeros(4, 12, 3, 8, 8)
    run.forward_backward(batch, loss=loss, mask=masks)


@pytest.mark.parametrize(
    ("whole", "change", "text"),
    [
        ((), "", r"whole=\('images',\)"),
        (("images",), "masks", "'images'.*end to end"),
        (("images",), "short", "'images'.*12"),
        (("pictures",), "", r"'images'.*whole="),
    ],
    ids=["not named", "rows end to end", "like a rank's tokens", "no such name"],
)
def test_what_is_whole_is_named_and_fits(whole: tuple[str, ...], change: str, text: str) -> None:
    with pytest.raises(RankError, match=f"(?s){text}"):
        pool(2).run(split, "cp=2", whole, change)
