"""Laws 1 to 3 with experts: every folding of the expert view into the dense one trains as one device does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.mesh import MeshSpec
from tests.parity.cases import Cell, Moe
from tests.parity.test_parity import check, draws

FOLDINGS = [
    (ranks, f"{dense} {folded}")
    for ranks, dense, foldings in [
        (2, "dp_shard=2", ["", "ep=2", "etp=2"]),
        (2, "dp_replicate=2", [""]),
        (2, "cp=2", ["", "ep=2"]),
        (2, "tp=2", ["", "ep=2", "etp=2"]),
        (2, "pp=2", [""]),
        (4, "dp_shard=4", ["ep=2", "ep=4", "ep=2 etp=2"]),
        (4, "dp_shard=2 tp=2", ["", "ep=2", "ep=4", "etp=2", "ep=2 etp=2"]),
        (4, "dp_replicate=2 dp_shard=2", ["ep=2"]),
        (4, "dp_shard=2 cp=2", ["ep=2", "ep=4"]),
        (4, "cp=2 tp=2", ["ep=4", "ep=2 etp=2"]),
        (4, "tp=4", ["ep=2", "ep=4", "etp=4"]),
        (4, "pp=2 dp_shard=2", ["ep=2", "etp=2"]),
        (4, "pp=2 tp=2", ["", "ep=2"]),
        (8, "dp_shard=2 cp=2 tp=2", ["ep=8", "ep=4 etp=2"]),
        (8, "pp=2 dp_shard=2 tp=2", ["ep=4"]),
        (8, "dp_replicate=2 dp_shard=2 tp=2", ["ep=2 etp=2"]),
    ]
    for folded in foldings
]

routers = st.fixed_dictionaries(
    {
        "chosen": st.integers(1, 3),
        "shared": st.sampled_from([None, 24]),
        "score": st.sampled_from(["softmax", "softmax_of_chosen", "sigmoid"]),
        "normalise": st.booleans(),
        "bias": st.booleans(),
        "z": st.sampled_from([0.0, 0.01]),
    }
)


@pytest.mark.parametrize(("ranks", "mesh"), FOLDINGS)
@draws(3)
@given(router=routers, data=st.data())
def test_every_folding_equals_one_device(ranks: int, mesh: str, router: dict, data: st.DataObject) -> None:
    spec = MeshSpec.parse(mesh)
    per = data.draw(st.sampled_from(["batch", "global"] if spec.cp > 1 else ["sequence", "batch", "global"]))
    experts = data.draw(st.sampled_from({1: [5], 2: [8, 9], 4: [8, 11], 8: [8, 15]}[spec.ep]))
    moe = Moe(experts=experts, **router, per=per, balance=data.draw(st.sampled_from([0.0, 0.5])))
    # The loss of a batch is that of its microbatches, and rows of zeros count in it.
    alone = moe.balance and per == "batch"
    cell = Cell(
        mesh=mesh,
        layers=3,
        moe=moe,
        microbatches=1 if alone else data.draw(st.integers(1, 3)),
        sequence=data.draw(st.booleans()),
        zero=data.draw(st.sampled_from([1, 2, 3])),
        recompute=data.draw(st.sampled_from(["none", "full", "selective"])),
        schedule=data.draw(st.sampled_from(["1f1b", "zb-h1"])),
    )
    check(ranks, cell)
