from __future__ import annotations

import pytest
import torch

from meshkit.metrics import load_picture, load_scalars

COUNTS = {"layers.0.mlp.gate": torch.tensor([1, 1, 1, 1]), "layers.1.mlp.gate": torch.tensor([0, 2, 0, 6])}


def test_scalars_are_means_and_the_worst_of_the_layers() -> None:
    found = load_scalars(COUNTS)
    assert found == {
        "load/max_over_mean": pytest.approx((1 + 3) / 2),
        "load/max_over_mean_worst_layer": pytest.approx(3),
        "load/entropy": pytest.approx((1 + 0.8112781 / 2) / 2),  # that of a quarter is 0.811 bits, of which 2 are even
        "load/unused_experts": 2,
        "load_by_layer/layers.0.mlp.gate": 1,
        "load_by_layer/layers.1.mlp.gate": 3,
    }
    assert load_scalars({}) == {}


def test_a_picture_has_a_row_for_each_layer_white_where_even() -> None:
    picture = load_picture(COUNTS)
    assert picture.dtype == torch.uint8
    cells = picture.unflatten(1, (2, -1)).unflatten(3, (4, -1))
    assert (cells == cells[:, :, :1, :, :1]).all()  # one colour in each cell
    (even, odd) = cells[:, :, 0, :, 0].movedim(0, -1).int()
    assert (even == 255).all()
    red, _, blue = odd.unbind(-1)
    assert (blue[[0, 2]] > red[[0, 2]]).all() and (odd[1] == 255).all() and red[3] > blue[3]
