from __future__ import annotations

import re

import pytest

from tests.recipes.launch import run

SCRIPT = "examples/bring_your_own_model.py"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("mlp", ["--mesh", "tp=2"]), ("transformer", ["--mesh", "tp=2", "--sequence"]), ("transformers", [])],
)
def test_every_kind_trains_the_same_on_two_meshes(kind: str, flags: list[str]) -> None:
    losses = []
    for ranks, mesh in ((1, []), (2, flags)):
        status, output = run(ranks, SCRIPT, "--kind", kind, *mesh)
        assert status == 0, output
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", output)])
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # 20 fp32 Adam steps apart
