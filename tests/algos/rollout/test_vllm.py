"""vLLM, where it is installed, writes what `generate` writes, with the weights of now, on any mesh."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import meshkit as mk
from meshkit.algos.rollout import VllmEngine
from meshkit.errors import PlanError
from meshkit.models import LLAMA_PLAN, Llama
from tests.algos.rollout.vllm_ranks import CONFIG
from tests.recipes.launch import finish, start
from tests.world import pool

RANKS = "tests/algos/rollout/vllm_ranks.py"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (it pins a torch of its own)")
@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2", "tp=2", "pp=2"])
def test_answers_are_those_of_generate(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    ranks = mk.MeshSpec.parse(mesh).world_size
    status, output = finish(start(ranks, RANKS, mesh), timeout_s=280)
    assert status == 0, output
    assert output.count("equal\n") == ranks, output


def refused() -> list[str]:
    found = []
    for dtype, adapted in ((torch.float32, False), (torch.float64, False), (torch.float32, True)):
        model = Llama(CONFIG).to(dtype)
        plan = mk.lora.attach(model, LLAMA_PLAN, rank=2) if adapted else LLAMA_PLAN
        run = mk.parallelize(model, mk.init_mesh("tp=1"), plan=plan)
        try:
            VllmEngine(run)
            found.append("started")
        except PlanError as error:
            found.append(str(error))
    return found


def test_what_it_cannot_do_is_refused() -> None:
    ((plain, double, adapters),) = pool(1).run(refused)
    assert ("not installed. `pip install vllm`" in plain) == (find_spec("vllm") is None)
    assert "float32, bfloat16, float16, not in torch.float64. Use generate()" in double
    assert "is not a plain model" in adapters and "mk.lora.merge" in adapters
