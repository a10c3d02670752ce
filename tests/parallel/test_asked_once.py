"""In a first step one rank reads the forward for all that call it alike, and what it refuses all refuse."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import meshkit as mk
from meshkit.core import asked_once
from meshkit.program import trace
from tests.laws.parity.cases import mesh_for
from tests.tiny import TINY
from tests.world import pool


def readings(spec: str, rows: int, differ: str = "", patience_s: float = 0.1) -> int:
    """Of this rank, in a first step. differ: what data ranks have of their own, "rows" or "settings". patience_s: for the
    first rank to ask first, on a busy machine too."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    model = mk.models.Llama(TINY)
    model.layers[0].own = mesh.rank if differ == "settings" else 0  # type: ignore[union-attr, assignment]  # a Module has any attribute
    run = mk.parallelize(model, mesh)
    made = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return trace(*args, **kwargs)

    # In each file that has it by name; `trace` itself cannot be told from outside.
    files = [
        each for name, each in sys.modules.items() if name.startswith("meshkit.") and vars(each).get("trace") is trace
    ]
    own = rows + (mesh.data_rank if differ == "rows" else 0)
    ids = torch.randint(0, TINY.vocab_size, (own, 17), generator=torch.Generator().manual_seed(mesh.data_rank))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(asked_once, "FIRST_S", patience_s))
        for file in files:
            stack.enter_context(mock.patch.object(file, "trace", counting))
        run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    return made


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_shard=2 tp=2", "cp=2 tp=2", "pp=2 tp=2"])
def test_one_rank_reads_for_all(spec: str) -> None:
    ranks = mk.MeshSpec.parse(spec).world_size
    first, *others = pool(ranks).run(readings, spec, 3, "", 3.0 if spec == "pp=2 tp=2" else 30.0)
    assert 0 < first <= 4
    # Of stages, ranks of another place on tp read parts of other sizes.
    assert sum(others) <= (1 if spec == "pp=2 tp=2" else 0)


@pytest.mark.parametrize("differ", ["rows", "settings"])
def test_ranks_that_differ_read_for_themselves(differ: str) -> None:
    first, other = pool(2).run(readings, "dp_shard=2", 3, differ)
    assert first and other
