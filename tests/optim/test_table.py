"""The table of docs/optimizers.md: which optimizers on shards are those of one device, as they are run here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.model_state import copies_of
from tests.compare_shards import computed_once, difference
from tests.laws.parity.cases import Cell, batches, build, own_rows, start
from tests.world import pool

PAGE = Path(__file__).parents[2] / "docs/optimizers.md"
LR, TOL = 1e-3, 1e-9
MESHES = ("dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2 tp=2", "pp=2 dp_shard=2", "cp=2")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def galore(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Of rank 4, projected anew in every second step."""
    return pytorch_optimizer.GaLore(
        [{"params": params, "rank": 4, "update_proj_gap": 2, "scale": 0.25, "projection_type": "std"}], lr=LR
    )


def schedule_free(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = schedulefree.AdamWScheduleFree(params, lr=LR)
    optimizer.train()
    return optimizer


def lamb(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The page's own."""
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class Lamb" in block
    )
    names: dict[str, Any] = {}
    exec(code, names)
    made: torch.optim.Optimizer = names["Lamb"](params, lr=LR, weight_decay=0.1)
    return made


MAKE: dict[str, Make] = {
    f"`torch.optim.{name}`": partial(getattr(torch.optim, name), lr=LR)
    for name in ("SGD", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "Rprop", "Adafactor")
} | {
    "`torch.optim.SGD`, Nesterov": partial(torch.optim.SGD, lr=LR, momentum=0.9, nesterov=True),
    **{
        f"`pytorch_optimizer.{name}`": partial(getattr(pytorch_optimizer, name), lr=LR) for name in ("Lion", "AdEMAMix")
    },
    "`pytorch_optimizer.GaLore`": galore,
    "`Lamb` below": lamb,
    "`schedulefree.AdamWScheduleFree`": schedule_free,
}


@lru_cache(maxsize=2)
def reference(name: str, cell: Cell) -> dict[str, Tensor]:
    model = build(cell)
    optimizer = MAKE[name](list(model.parameters()))
    for batch in batches(cell):
        logits = model(batch["input_ids"])
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100).backward()
        optimizer.step()
        model.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def verdict(name: str, mesh: str) -> str:
    cell = Cell(mesh=mesh, layers=4)
    wanted = computed_once(reference, name, cell)
    run = start(cell)
    try:
        optimizer = MAKE[name](list(run.parameters()))
        for batch in batches(cell):
            run.forward_backward(own_rows(batch, run.mesh))
            optimizer.step()
            run.model.zero_grad()
    except mk.MeshkitError:
        return "refused"
    copies = copies_of(run.model)
    worst = max(difference(param, wanted[copies.get(own, own)]) for own, param in run.named_parameters())
    return "exact" if worst <= TOL else f"off by {worst:.0e}"


@pytest.mark.parametrize("name", MAKE)
def test_the_page_says_what_happens(name: str) -> None:
    found = []
    for mesh in MESHES:
        verdicts = set(pool(mk.MeshSpec.parse(mesh).world_size).run(verdict, name, mesh))
        assert len(verdicts) == 1, (mesh, verdicts)
        found.append(verdicts.pop())
    assert f"| {name} | {' | '.join(found)} |" in PAGE.read_text().splitlines(), found
