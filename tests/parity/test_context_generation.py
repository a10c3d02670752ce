"""`generate` on a mesh whose ranks hold a part of the tokens each."""

from __future__ import annotations

import pytest
import torch

from meshkit.algos.generation import generate
from tests.parity.cases import Cell, build, start
from tests.world import pool

PROMPT, NEW_TOKENS, CONTEXT = [5, 17, 3], 14, 11  # the text outgrows the context, which no cp here divides
CELLS = [
    (2, Cell(mesh="cp=2", vocab=61)),
    (3, Cell(mesh="cp=3", vocab=61)),
    (4, Cell(mesh="cp=4", vocab=61)),
    (4, Cell(mesh="dp_shard=2 cp=2", vocab=61)),
    (4, Cell(mesh="cp=2 tp=2", vocab=61)),
    (4, Cell(mesh="cp=2 tp=2", vocab=61, sequence=True)),
]


def greedy(cell: Cell) -> list[int]:
    return generate(start(cell), PROMPT, new_tokens=NEW_TOKENS, context=CONTEXT, temperature=0)


@torch.no_grad()
def greedy_on_one_device(cell: Cell) -> list[int]:
    model, ids = build(cell), list(PROMPT)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    return ids


@pytest.mark.parametrize(
    ("world", "cell"), CELLS, ids=lambda value: getattr(value, "mesh", str(value)).replace(" ", ",")
)
def test_greedy_text_is_that_of_one_device(world: int, cell: Cell) -> None:
    expected = greedy_on_one_device(cell)
    assert len(set(expected[len(PROMPT) :])) > 3  # a text that repeats one id would prove little
    assert pool(world).run(greedy, cell) == [expected] * world
