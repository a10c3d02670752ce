"""Search over offload of activations: bounds cut nothing, it is found where nothing else fits, and its answer says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshkit as mk
from meshkit.errors import ClusterError, PlanError
from meshkit.preflight.search._host import fits_host, node_bytes
from meshkit.preflight.search._pricing import Pricing
from meshkit.preflight.search._space import Group
from meshkit.preflight.search._world import Level, World
from meshkit.preflight.search.command import Search, _space, command
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.step import next_token_loss
from meshkit.strategy import ActivationOffload, DataPolicy
from tests.preflight.search.test_search import BATCH, CLUSTER, EXPERTS, RECIPE, SMALL, dense, moe

HOST, DISK = ActivationOffload(), ActivationOffload(to="disk")
# A slow link, so that what is seen of copies decides.
SLOW = CLUSTER.changed(**{"host.bytes_per_s": 1e9})
SPACE = mk.Space(
    data=(DataPolicy(),),
    pp=(1, 2),
    tp=(1,),
    dp_replicate=(1,),
    microbatches=(4,),
    schedule=("1f1b", "zb-h1"),
    zero=(None,),
    sequence=(True,),
    recompute=("none", "full"),
    activations=(None, HOST),
    balance=False,
)
ONE = replace(SPACE, pp=(1,), schedule=("1f1b",))
SHORT = SMALL | {"num_hidden_layers": 5}


def away(each: object) -> bool:
    return each.strategy.memory.offload is not None  # type: ignore[attr-defined]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("make", "fixed", "space", "ranks"),
    [
        (lambda: dense(**SHORT), mk.Strategy(), SPACE, 4),
        (lambda: dense(**SHORT), mk.Strategy(), replace(ONE, cp=(2,), scheme=("ulysses",), recompute=("none",)), 4),
        (moe, EXPERTS, replace(ONE, ep=(2,), recompute=("none",)), 4),
    ],
    ids=["stages", "cp", "experts"],
)
def test_bounds_cut_nothing_that_exhaustive_would_choose(make, fixed, space, ranks):  # type: ignore[no-untyped-def]
    model = make()
    every = mk.search(model, SLOW, BATCH, world=ranks, space=space, fixed=fixed, exhaustive=True, recheck=False)
    assert sum(map(away, every.tried)) * 2 == len(every.tried) > 0
    world = World(Pricing(model, SLOW, BATCH, next_token_loss, "time"), ranks, 1, exhaustive=False, balance=False)
    world.add([Group(each.strategy, (each.strategy.mesh_for(),)) for each in every.tried])
    for each in every.tried:
        assert each.memory.source == "composed"
        assert 0 < world.mean_s(each.strategy, Level.WHOLE) <= each.seconds
        for level in (Level.SENT, Level.TABLED, Level.TRACED, Level.OWN):
            assert 0 < world.least_s(each.strategy, level) <= each.seconds, level
        for level in (Level.WHOLE, Level.SENT, Level.OWN):
            assert 0 < world.least_bytes(each.strategy, level) <= each.peak_bytes, level
    peaks = sorted(each.peak_bytes for each in every.tried)
    for memory in (None, peaks[len(peaks) // 3]):
        best = min(each.seconds for each in every.tried if each.fits(memory))
        found = mk.search(
            model, SLOW, BATCH, world=ranks, space=space, fixed=fixed, device_memory=memory, recheck=False
        )
        assert found.winner is not None and found.winner.fits(memory)
        assert found.winner.seconds == best
        assert len(found.tried) <= len(every.tried)


def test_activations_on_the_host_are_the_answer_where_nothing_else_fits(tmp_path):  # type: ignore[no-untyped-def]
    model, space = dense(**SHORT), replace(ONE, recompute=("none",))
    every = mk.search(model, SLOW, BATCH, world=2, space=space, exhaustive=True, recheck=False)
    on_host = min((each for each in every.tried if away(each)), key=lambda each: each.peak_bytes)
    resident = min((each for each in every.tried if not away(each)), key=lambda each: each.peak_bytes)
    assert on_host.peak_bytes < resident.peak_bytes and resident.seconds < on_host.seconds
    without = replace(space, activations=(None,))
    memory = resident.peak_bytes - 1
    nothing = mk.search(model, SLOW, BATCH, world=2, space=without, device_memory=memory, recheck=False)
    assert nothing.best is None
    found = mk.search(model, SLOW, BATCH, world=2, space=space, device_memory=memory)  # also by the traced estimate
    assert found.best is not None and found.best.memory.offload == HOST
    assert "--offload host" in found.flags
    assert "of activations are offloaded" in str(found) and "offload" in found.winner.forecast.ledger
    why = next(each.why for each in found.neighbours if each.change == "activations on the device")
    assert why.startswith("does not fit")
    found.write(tmp_path / "strategy.toml")
    assert mk.Strategy.read(tmp_path / "strategy.toml").memory.offload == HOST
    room = mk.search(model, SLOW, BATCH, world=2, space=space, recheck=False)
    assert room.best is not None and room.best.memory.offload is None
    why = next(each.why for each in room.neighbours if each.change == "activations on the host")
    assert "worse" in why and "offload 0 →" in why


def test_a_policy_that_is_fixed_stays_and_the_default_space_moves_nothing():  # type: ignore[no-untyped-def]
    assert mk.Space().activations == (None,)
    early = ActivationOffload(ahead=2)
    fixed = mk.Strategy(memory=mk.MemoryPolicy(offload=early))
    space = replace(ONE, recompute=("full",), activations=(None,))
    found = mk.search(dense(**SHORT), SLOW, BATCH, world=2, space=space, fixed=fixed, exhaustive=True, recheck=False)
    assert {each.strategy.memory.offload for each in found.tried} == {early}
    assert "--offload host (ahead 2)" in found.flags


def test_what_resolve_refuses_is_refused_with_its_words_and_nothing_else_is():  # type: ignore[no-untyped-def]
    """A policy that keeps all blocks; one that does not, on the same meshes."""
    model, idle = dense(**SHORT), ActivationOffload(keep_last=5)
    space = replace(ONE, recompute=("none",), activations=(None, HOST, idle))
    found = mk.search(model, CLUSTER, BATCH, world=4, space=space, exhaustive=True, recheck=False)
    program, legal = read_program(model), set()
    strategies = list(space.strategies(BATCH, 4, mk.Strategy(), node=8, experts=0))
    for strategy in strategies:
        try:
            resolve(program, strategy, strategy.mesh_for(), device_type="cuda").refuse_tokens(BATCH.seq_len)
        except PlanError:
            continue
        legal.add(repr(strategy))
    assert {repr(each.strategy) for each in found.tried} == legal
    assert any("keep_last=5) keeps all of the 5 blocks" in text for text in found.refused)
    assert sum(found.refused.values()) == len(strategies) - len(legal) == len(strategies) // 3


def test_mixtures_of_recompute_are_found_beside_offload():  # type: ignore[no-untyped-def]
    model, space = dense(**SHORT), replace(ONE, mix=True, activations=(HOST,))
    peaks = sorted(
        each.peak_bytes
        for each in mk.search(model, SLOW, BATCH, world=2, space=space, exhaustive=True, recheck=False).tried
    )
    memory = (peaks[0] + peaks[-1]) // 2
    every, found = (
        mk.search(model, SLOW, BATCH, world=2, space=space, device_memory=memory, exhaustive=exhaustive, recheck=False)
        for exhaustive in (True, False)
    )
    assert found.winner.seconds == min(each.seconds for each in every.tried if each.fits(memory))


@pytest.mark.parametrize("mesh", ["dp_shard=4", "pp=2 dp_shard=2"])
def test_what_a_node_has_on_its_host_is_the_sum_of_its_ranks(mesh):  # type: ignore[no-untyped-def]
    node = replace(SLOW, tiers=(replace(SLOW.tiers[0], ranks=2), replace(SLOW.tiers[1], ranks=64)))
    pricing = Pricing(dense(**SHORT), node, BATCH, next_token_loss, "time")
    strategy = mk.Strategy(mesh=mesh, microbatches=4, memory=mk.MemoryPolicy(offload=HOST))
    peak = pricing.peak(strategy)
    assert node_bytes(peak, node) == 2 * max(rank.host_bytes for rank in peak.ranks) > 0
    together = replace(node, tiers=(replace(SLOW.tiers[0], ranks=4), SLOW.tiers[1]))
    each = 4 // len(peak.ranks)
    assert node_bytes(peak, together) == each * sum(rank.host_bytes for rank in peak.ranks)
    if len(peak.ranks) == 2:  # more microbatches of the first stage are in flight, and the last block stays
        assert peak.ranks[0].host_bytes > peak.ranks[1].host_bytes
        placed = replace(peak, spec=replace(peak.spec, placement=(0, 2, 1, 3)))
        assert node_bytes(placed, node) == sum(rank.host_bytes for rank in peak.ranks)
    for room, fits in ((0, True), (node_bytes(peak, node), True), (node_bytes(peak, node) - 1, False)):
        assert fits_host(peak, node.changed(**{"host.memory_bytes": float(room)})) == fits


def test_a_host_that_has_no_room_is_why_it_does_not_fit():  # type: ignore[no-untyped-def]
    model, space = dense(**SHORT), replace(ONE, recompute=("none",))
    small = SLOW.changed(**{"host.memory_bytes": 4096.0})
    found = mk.search(model, small, BATCH, world=2, space=space, recheck=False)
    assert found.best is not None and found.best.memory.offload is None
    assert any(
        each.change == "activations on the host" and "on the host of a node" in each.why for each in found.neighbours
    )
    only = mk.search(model, small, BATCH, world=2, space=replace(space, activations=(HOST,)), recheck=False)
    assert only.best is None and only.unfit


def test_a_disk_without_a_rate_is_refused_and_one_with_it_is_slower():  # type: ignore[no-untyped-def]
    space = replace(ONE, recompute=("none",), activations=(None, HOST, DISK))
    with pytest.raises(ClusterError, match=r"activations on 'disk' cannot be compared"):
        mk.search(dense(**SHORT), SLOW, BATCH, world=2, space=space)
    cluster = SLOW.changed(**{"host.disk_bytes_per_s": 1e8})
    found = mk.search(dense(**SHORT), cluster, BATCH, world=2, space=space, exhaustive=True, recheck=False)
    seconds = {each.strategy.memory.offload: each.seconds for each in found.tried}
    assert seconds[None] < seconds[HOST] < seconds[DISK]


def test_the_flag_of_the_command(capsys):  # type: ignore[no-untyped-def]
    asked = _space(Search(script=RECIPE, world=2, activations=("device", "host")), mk.Strategy(), set(), "")
    assert asked == mk.Space(activations=(None, HOST))
    args = [str(RECIPE), "--world", "2", "--recompute", "full", "--microbatches", "1", "--schedules", "1f1b"]
    command([*args, "--global-batch", "4", "--seq-len", "64", "--activations", "host", "--mesh", "dp_shard=2"])
    said = capsys.readouterr().out
    assert "--offload host" in said and "of activations are offloaded" in said
