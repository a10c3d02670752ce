"""On the device `late` memory is pinned between steps: before the first, and after it, when the device is idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

import meshkit as mk
from meshkit.strategy._memory import DEFAULT_STAGING
from tests.device.world import run
from tests.laws.gate import laws
from tests.laws.gate.cell import Cell
from tests.laws.parity.cases import own_rows

pytestmark = pytest.mark.gate


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes of each tensor made in pinned memory, on any thread. Batches are not: their blocks are torch's to keep."""
    found: list[int] = []

    def counted(make: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            if kwargs.get("pin_memory"):
                found.append(made.nbytes)
            return made

        return inner

    with patch.object(torch, "empty", counted(torch.empty)), patch.object(torch, "zeros", counted(torch.zeros)):
        yield found


def pinned_by_part(cell: Cell) -> dict[str, list[int]]:
    """Bytes pinned when the run and its optimizer are made; in each of three steps, and of each at its end."""
    with counting() as found:
        run_ = laws.start(cell)
        optimizer = mk.adamw(run_, lr=laws.LR)
        parts = {"made": list(found)}
        assert run_.offload is not None
        end_step = run_.offload.end_step
        for step, batch in enumerate(laws.batches(cell)):
            found.clear()

            def ending(step: int = step) -> None:
                parts[f"in step {step}"] = list(found)
                found.clear()
                end_step()
                parts[f"after step {step}"] = list(found)
                found.clear()

            with patch.object(run_.offload, "end_step", ending):
                run_.forward_backward(own_rows(batch, run_.mesh), microbatches=cell.microbatches)
            mk.clip_grad_norm(run_, laws.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            parts[f"in the update of step {step}"] = list(found)
    return parts


@pytest.mark.parametrize(("offload", "mesh"), list(product(("host", "disk"), ("dp_shard=1", "dp_shard=2"))))
def test_no_step_pins_memory_and_what_the_first_has_taken_is_pinned_once(offload: str, mesh: str) -> None:
    cell = Cell(mesh=mesh, offload=offload, optimizer="host", microbatches=2)
    for parts, races in run(cell.spec.world_size, pinned_by_part, cell):
        assert races == []
        made = parts.pop("made")
        assert len(made) > 1 and (offload == "host" or max(made) >= DEFAULT_STAGING)
        if offload == "host":
            assert len(parts.pop("after step 0")) == 1
        assert not any(parts.values()), parts
