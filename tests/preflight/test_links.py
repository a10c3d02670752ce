"""Flat or hierarchical by predicted time, never slower than flat in the model; warnings for axes that cross nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.cluster import Cluster, collective_s, hierarchical_s, place_of
from meshkit.mesh import MeshSpec
from meshkit.preflight.explain import Explanation, choose_collectives
from meshkit.strategy import DataPolicy
from tests.tiny import tiny_config

RAILS = Cluster.read("h100")
ONE_CARD = replace(RAILS, name="one card", tiers=(RAILS.tiers[0], replace(RAILS.tiers[1], per="group")))
LARGE = tiny_config(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=32
)


def said(spec: str, **choices: Any) -> Explanation:
    with torch.device("meta"):
        model = mk.models.Llama(LARGE)
    return mk.explain(model, spec, plan=mk.models.LLAMA_PLAN, rows=2, seq_len=128, **choices)


def test_a_pipeline_of_chunks_takes_its_slower_hop_and_one_of_the_other() -> None:
    spec = MeshSpec(dp_shard=16, dp_intra=8)
    inside, across = place_of(ONE_CARD, spec, "dp_intra"), place_of(ONE_CARD, spec, "dp_inter")
    size = 16 * 2**20
    rate = ONE_CARD.device.memory_bytes_per_s * ONE_CARD.device.efficiency.memory
    across_s = 9e-6 + size / 8 / 4 / 2 / (50e9 * 0.85 / 8)
    inside_s = 7 * 4e-6 + 7 / 8 * size / 4 / (450e9 * 0.77) + 2 * size / 4 / rate
    found = hierarchical_s(ONE_CARD, "all_gather", size, inside=inside, across=across, chunk_bytes=2**18)
    assert across_s > inside_s
    assert found == pytest.approx(4 * across_s + inside_s)


def test_one_card_a_node_and_two_nodes_gain_nearly_what_the_bytes_do() -> None:
    """A flat ring takes 15/16 of the bytes over the card, two hops 1/2: 1.875 times at the most."""
    choice = choose_collectives(said("dp_shard=16"), ONE_CARD)
    assert choice is not None and choice.is_hierarchical
    assert 1.5 < choice.flat_s / choice.hierarchical_s < 15 / 8
    assert str(choice).startswith("dp_shard=2x8 on one card: gathers and reductions of a step take ")
    assert f"collectives='hierarchical', chunk_bytes={choice.chunk_bytes}) is faster" in str(choice)


@pytest.mark.parametrize(
    ("cluster", "spec"), [(RAILS, "dp_shard=16"), (ONE_CARD, "dp_shard=256")], ids=["rails", "many"]
)
def test_flat_is_kept_where_it_is_faster(cluster: Cluster, spec: str) -> None:
    choice = choose_collectives(said(spec), cluster)
    assert choice is not None and not choice.is_hierarchical
    assert choice.seconds == choice.flat_s <= choice.hierarchical_s
    assert str(choice).endswith("flat is faster")


@pytest.mark.parametrize("spec", ["dp_shard=8", "dp_shard=2 tp=8", "tp=8"])
def test_where_nothing_spans_nodes_with_several_ranks_there_is_no_choice(spec: str) -> None:
    assert choose_collectives(said(spec), ONE_CARD) is None


def test_a_choice_is_the_same_whichever_way_the_run_goes() -> None:
    flat = choose_collectives(said("dp_shard=2x8"), ONE_CARD)
    assert flat is not None
    chosen = DataPolicy(collectives="hierarchical", chunk_bytes=flat.chunk_bytes)
    assert choose_collectives(said("dp_shard=2x8", data=chosen), ONE_CARD) == flat


def test_a_price_of_the_run_is_that_of_the_choice() -> None:
    """`forecast` prices chunks of both hops as one pipeline."""
    spec, policy = MeshSpec(dp_shard=16, dp_intra=8), DataPolicy(collectives="hierarchical", chunk_bytes=2**20)
    inside, across = place_of(ONE_CARD, spec, "dp_intra"), place_of(ONE_CARD, spec, "dp_inter")
    with torch.device("meta"):
        model = mk.models.Llama(LARGE)
    strategy = mk.Strategy(mesh="dp_shard=2x8", plan=mk.models.LLAMA_PLAN, data=policy, microbatches=2)
    found = mk.forecast(model, strategy, ONE_CARD, mk.Batch(sequences=32, seq_len=128))
    calls = [call for part in found.profile.stages[0] for call in part.data]
    assert calls and all(call.hierarchical is not None for call in calls)
    flat = mk.forecast(model, replace(strategy, data=DataPolicy()), ONE_CARD, mk.Batch(sequences=32, seq_len=128))
    as_flat = [call for part in flat.profile.stages[0] for call in part.data]
    assert [(call.op, call.size, call.phase, call.count) for call in calls] == [
        (call.op, call.size, call.phase, call.count) for call in as_flat
    ]
    call = max(calls, key=lambda each: each.size)
    one_s = hierarchical_s(ONE_CARD, call.op, call.size, inside=inside, across=across, chunk_bytes=2**20)
    assert one_s < collective_s(ONE_CARD, call.op, call.size, place_of(ONE_CARD, spec, "dp_shard"))
    assert found.seconds < flat.seconds


def test_a_heavy_axis_across_nodes_gets_a_warning_with_the_size_that_stays_inside() -> None:
    found = said("dp_shard=2 tp=16", cluster=ONE_CARD)
    (line,) = [note for note in found.notes if note.startswith("warning")]
    assert line.startswith("warning: tp=16 crosses nodes of 8 ranks on one card, ")
    assert "over rail: tp=8 stays inside, with what is left on pp, which sends 0 bytes here" in line
    assert not [note for note in said("dp_shard=4 tp=8", cluster="h100").notes if note.startswith("warning")]
