"""Folding: blocks that are alike are read once, and one that is not like the others is never left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.parallel.tensor.layout import tensor_layout
from meshkit.parallel.tensor.proof import prove_layout
from meshkit.plan import column, replicate, row
from meshkit.program import Example, Unproved, fold, read_program

WIDTH, HIDDEN, VOCABULARY, DEPTH = 6, 12, 10, 6
Between = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, number: int, between: Between) -> None:
        super().__init__()
        self.number, self.between = number, between
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Deep(nn.Module):
    def __init__(self, betweens: list[Between]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block(number, between) for number, between in enumerate(betweens))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skips(Deep):
    """A later block is given an earlier one's output too."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        outputs = []
        for layer in self.layers:
            if len(outputs) > DEPTH // 2:
                x = x + outputs[DEPTH - len(outputs)]
            x = layer(x)
            outputs.append(x)
        return self.head(x)


PLAN = {
    "layers.*.up": column(),
    "layers.*.down": row(),
    "embed": replicate(),
    "head": replicate(),
}
EXAMPLE = Example((torch.zeros(2, 8, dtype=torch.int64),))


def left_out(model: nn.Module) -> list[str]:
    program = read_program(model)
    blocks = [f"layers.{number}" for number in range(DEPTH)]
    return sorted(fold(program.read(EXAMPLE, {}), program.modules, blocks, lambda block: None).left_out)


def prove(model: nn.Module) -> None:
    layout = tensor_layout(model, PLAN, size=2, sequence=False)
    prove_layout(read_program(model), layout, EXAMPLE, blocks=[f"layers.{number}" for number in range(DEPTH)])


def test_of_blocks_that_are_alike_the_first_two_are_kept() -> None:
    assert left_out(Deep([F.gelu] * DEPTH)) == [f"layers.{number}" for number in range(2, DEPTH)]
    prove(Deep([F.gelu] * DEPTH))


def test_blocks_of_two_kinds_are_kept_of_each() -> None:
    assert left_out(Deep([F.gelu, F.silu] * (DEPTH // 2))) == ["layers.3", "layers.4", "layers.5"]


ONE = {
    "another operator": lambda x: x.softmax(-1),
    # The same numbers on one device, and others on a rank, which has half of the features.
    "the width, read from the tensor": lambda x: x / x.shape[-1],
}


@pytest.mark.parametrize("number", range(DEPTH))
@pytest.mark.parametrize("name", ONE)
def test_one_block_that_is_not_like_the_others_is_followed(name: str, number: int) -> None:
    betweens: list[Between] = [lambda x: x / HIDDEN] * DEPTH
    prove(Deep(betweens))
    betweens[number] = ONE[name]
    assert f"layers.{number}" not in left_out(Deep(betweens))
    with pytest.raises(Unproved):
        prove(Deep(betweens))


def test_a_function_that_is_told_the_number_of_its_block_is_followed() -> None:
    def by_default(x: torch.Tensor, number: int) -> torch.Tensor:
        return x / (x.shape[-1] if number == 3 else HIDDEN)

    for betweens in (
        [lambda x, number=number: by_default(x, number) for number in range(DEPTH)],
        [lambda x, *, number=number: by_default(x, number) for number in range(DEPTH)],
    ):
        with pytest.raises(Unproved):
            prove(Deep(betweens))


class Numbered(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(hidden / (hidden.shape[-1] if self.number == 3 else HIDDEN))


def test_a_block_that_asks_for_its_number_is_followed() -> None:
    model = Deep([F.gelu] * DEPTH)
    model.layers = nn.ModuleList(Numbered(number, F.gelu) for number in range(DEPTH))
    with pytest.raises(Unproved):
        prove(model)


def test_an_attribute_of_one_block_keeps_it() -> None:
    model = Deep([F.gelu] * DEPTH)
    model.layers[4].rate = 0.5
    assert "layers.4" not in left_out(model)
    model.layers[3].number = 7
    assert "layers.3" not in left_out(model)


def test_blocks_that_are_called_twice_or_by_a_hook_are_followed() -> None:
    model = Deep([F.gelu] * DEPTH)
    model.layers[3].register_forward_hook(lambda module, args, output: output * 1.0)
    assert "layers.3" not in left_out(model)
    model.layers.append(model.layers[4])
    assert "layers.4" not in left_out(model)


def test_skips_between_blocks() -> None:
    prove(Skips([F.gelu] * DEPTH))
    betweens: list[Between] = [F.gelu] * DEPTH
    betweens[5] = lambda x: x.softmax(-1)
    with pytest.raises(Unproved):
        prove(Skips(betweens))
