"""Compiled blocks with recurrent mixers equal one device: what messages a mixer needs is counted outside of graphs."""

from __future__ import annotations

import warnings

import pytest
import torch

import meshkit as mk
from meshkit.models import GatedDeltaConfig, Hybrid, HybridConfig, LlamaConfig, Mamba2Config, hybrid_plan
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool

TOL_FP64 = 1e-10
DECODER = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
MIXERS = {
    "delta": GatedDeltaConfig(key_heads=2, value_heads=4, key_size=8, value_size=8),
    "mamba2": Mamba2Config(heads=4, head_size=8, groups=2, state_size=8),
}


def trained(mixer: str, mesh: str, compiled: bool) -> list[float]:
    """(loss, norm of the gradients) of two steps, of documents that end inside of a rank."""
    warnings.simplefilter("ignore")  # dynamo's
    config = HybridConfig(decoder=DECODER, mixer=MIXERS[mixer], attention_every=2)
    with torch.device("meta"):
        model = Hybrid(config).double()
    run = mk.parallelize(model, mesh_for(mesh), plan=hybrid_plan(config), compile="aot_eager" if compiled else False)
    mk.init_weights(run.model, seed=0)
    generator, found = torch.Generator().manual_seed(0), []
    for first in (21, 13):  # another place of the second document, and another layout
        ids = torch.randint(0, 64, (2, 33), generator=generator)
        positions = torch.cat([torch.arange(first), torch.arange(32 - first)]).expand(2, -1)
        batch = own_rows({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions}, run.mesh)
        found.append(float(run.forward_backward(batch).detach()))
        found.append(float(mk.clip_grad_norm(run, 1e9)))
        for param in run.parameters():
            param.grad = None
    return found


@pytest.mark.parametrize("mesh", ["cp=2", "tp=2", "dp_shard=2"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_compiled_blocks_with_mixers_equal_one_device(mixer: str, mesh: str) -> None:
    (alone,) = pool(1).run(trained, mixer, "tp=1", False)
    for found in pool(2).run(trained, mixer, mesh, True):
        assert found == pytest.approx(alone, abs=TOL_FP64)
