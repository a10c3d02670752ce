"""What explain, estimate, check and the page are asked is refused alike where no rank could do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.errors import DataError, MeshError, PlanError
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.strategy import Strategy
from tests.tiny import tiny_config
from tests.world import pool

SAID: dict[str, Any] = {"rows": 2, "seq_len": 8}


def model() -> Llama:
    torch.manual_seed(0)
    return Llama(tiny_config())


def explain(spec: str, **said: Any) -> Any:
    return mk.explain(model(), spec, plan=LLAMA_PLAN, device="cpu", **said)


def estimate(spec: str, **said: Any) -> Any:
    return mk.estimate(model(), spec, plan=LLAMA_PLAN, kernels="cpu", **said)


def page(spec: str, **said: Any) -> Any:
    return mk.preflight.page.explain_page(model(), spec, plan=LLAMA_PLAN, kernels="cpu", memory_bars=False, **said)


SIZES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rows": -1}, DataError, "rows=-1: .* at least 0"),
    ({"rows": 2.0}, DataError, "rows=2.0: .* a whole number"),
    ({"seq_len": 0}, DataError, "seq_len=0: .* at least 1"),
    ({"seq_len": -3}, DataError, "seq_len=-3: .* at least 1"),
    ({"seq_len": "8"}, DataError, "seq_len='8'"),
    ({"seq_len": 7, "sequence": True}, PlanError, "the 2 ranks of tp cannot share 7 tokens evenly"),
]
PLACES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"coordinate": {"tp": 5}}, PlanError, "coordinate tp=5, but tp has the places 0 to 1"),
    ({"coordinate": {"tp": -1}}, PlanError, "coordinate tp=-1, but"),
    ({"coordinate": {"pp": 1}}, PlanError, "coordinate pp=1, but pp has the places 0 to 0"),
    ({"coordinate": {"tp": "1"}}, PlanError, "coordinate tp='1'"),
    ({"coordinate": {"tq": 0}}, PlanError, "coordinate tq=0: there is no such dense axis. Did you mean 'tp'"),
    ({"coordinate": {"ep": 0}}, PlanError, "indices on ep and etp follow from them"),
    ({"coordinate": 3}, PlanError, "coordinate=3: give the index on each axis"),
]


@pytest.mark.parametrize(("asked", "kind", "error"), SIZES)
@pytest.mark.parametrize("verb", [explain, estimate, page])
def test_a_step_that_no_rank_could_run_is_refused(verb: Any, asked: Any, kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=error):
        verb("tp=2", **{**SAID, **asked})


@pytest.mark.parametrize(("asked", "kind", "error"), PLACES)
@pytest.mark.parametrize("verb", [explain, estimate])
def test_a_rank_that_the_mesh_has_not_is_refused(verb: Any, asked: Any, kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=error):
        verb("tp=2", **SAID, **asked)


@pytest.mark.parametrize("verb", [explain, estimate, page])
def test_a_mesh_that_is_none_is_refused(verb: Any) -> None:
    with pytest.raises(MeshError, match=r"spec=2: give a MeshSpec"):
        verb(2, **SAID)


def meshes_that_are_none() -> list[str]:
    said = []
    for mesh in ("dp_shard=1", None, mk.MeshSpec()):
        try:
            mk.parallelize(model(), mesh)  # type: ignore[arg-type]
        except PlanError as error:
            said.append(str(error))
    return said


def test_parallelize_takes_a_mesh_and_a_module() -> None:
    (said,) = pool(1).run(meshes_that_are_none)
    assert len(said) == 3 and said[0] == "parallelize(mesh='dp_shard=1'): give Mesh. Make one by mk.init_mesh."
    for verb in (mk.explain, mk.estimate, mk.preflight.page.explain_page):
        with pytest.raises(PlanError, match=r"parallelize\(model=3\): give Module"):
            verb(3, "dp_shard=2", **SAID)  # type: ignore[operator]


def test_a_rank_without_rows_is_explained() -> None:
    assert "dp_shard" in str(explain("dp_shard=2", rows=0, seq_len=8))


def test_check_takes_the_mesh_of_its_strategy() -> None:
    ids = torch.arange(32).reshape(4, 8) % 64
    batch = {"input_ids": ids, "labels": ids}
    report = mk.check(model, strategy=Strategy(mesh="dp_shard=2", plan=LLAMA_PLAN), batch=batch)
    assert report.spec == mk.MeshSpec(dp_shard=2) and not report.findings
    with pytest.raises(MeshError, match="there is no mesh to check on"):
        mk.check(model, batch=batch, plan=LLAMA_PLAN)
    with pytest.raises(PlanError, match="the strategy is for the mesh dp_shard=2, but this one is tp=2"):
        mk.check(model, "tp=2", Strategy(mesh="dp_shard=2", plan=LLAMA_PLAN), batch=batch)
